/* A step of a draft: from tokens to the likeliest next ones, from the kernels of the other files. Bit for bit what
   `ssd.models.families.llama`, `ssd.models.eagle3` and `ssd.draft.drafter` do in single calls. */

#include "kernels.h"

/* A model. `embedding` has a row for every id. `head` has a logit for each of the `ids`, or, if these are missing, for
   the ids from 0 on. `table` has a row for every id; missing if none is wanted. */
typedef struct {
    const product_t *embedding;
    const layer_t *layers;
    int64_t count;
    const float *cosines, *sines, *norm;
    float eps;
    product_t head;
    const int64_t *ids;
    const product_t *table;
} model_t;

/* A ranking after token `index` of a batch: the best of the first `listed` logits and of the ids `text` [texts], over
   the temperature and with the noise of `key` if there is `noise` (that of the listed ids). */
typedef struct {
    int64_t index;
    const int64_t *text;
    int64_t texts;
    const float *noise;
    float temperature;
    int32_t key[2];
} ask_t;

/* hidden [width], logits and `rest` -> the `count` best ids and their scores. */
static void rank_one(const model_t *by, const ask_t *ask, const float *hidden, const float *logits, int64_t listed,
                     int64_t *ids, float *scores, int64_t count, float *rest) {
    float *noise = ask->noise ? rest + ask->texts : NULL;
    int64_t found = add_best(logits, listed, ask->temperature, ask->noise, 0, ids, scores, count, 0);
    if (ask->texts) {
        dots(by->table, hidden, ask->text, ask->texts, rest, 1, rest + 2 * ask->texts);
        if (noise) gumbel(ask->key, 0, ask->text, noise, 1, ask->texts);
        add_best(rest, ask->texts, ask->temperature, noise, listed, ids, scores, count, found);
    }
    for (int64_t i = 0; i < count; i++)
        if (ids[i] >= listed) ids[i] = ask->text[ids[i] - listed];
        else if (by->ids) ids[i] = by->ids[ids[i]];
}

/* `tokens` [rows] at `positions` [rows] -> made [rows, width], what the layers make of them; and for each of the `asks`
   its `best` likeliest ids [asked, best] and their scores. `features` are for pairs, a row [width] each, else missing. */
void guess(const model_t *by, const int64_t *tokens, const float *const *features, const int64_t *positions, int64_t rows,
           const view_t *views, int64_t count, const ask_t *asks, int64_t asked, int64_t listed, int64_t best,
           float *made, int64_t *ids, float *scores, float *scratch) {
    const int64_t width = by->head.inputs, outputs = by->head.outputs;
    float *embedded = scratch, *rest = embedded + rows * width;
    look_up(by->embedding, tokens, embedded, rows);
    if (features)
        for (int64_t row = 0; row < rows; row++) memcpy(made + row * width, features[row], width * sizeof *made);
    decoder(by->layers, 0, by->count, by->cosines, by->sines, positions, features ? made : embedded, embedded, made,
            rows, views, count, rest);
    float *hidden = scratch, *logits = hidden + asked * width;
    rest = logits + asked * outputs;
    for (int64_t i = 0; i < asked; i++)
        rms_norm(made + asks[i].index * width, width, by->norm, hidden + i * width, 1, width, by->eps);
    multiply(&by->head, hidden, width, logits, asked, rest);
    for (int64_t i = 0; i < asked; i++, ids += best, scores += best)
        rank_one(by, asks + i, hidden + i * width, logits + i * outputs, listed, ids, scores, best, rest);
}
