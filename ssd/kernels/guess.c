/* A step of a draft: from tokens to the likeliest next ones, from the kernels of the other files. Bit for bit what
   `ssd.models.families.llama`, `ssd.plugins.drafts` and `ssd.draft` do in single calls. */

#include "kernels.h"

/* A model. `embedding` has a row for every id. `head` has a logit for each of the `ids`, or, if these are missing, for
   the ids from 0 on. `table` has a row for every id; missing if none is wanted.

   `mask` is the embedding of a negative id; missing if there are none. With `first` [ids, rank] and `second` [outputs,
   rank], the logits after a token are the head's, and the token's row of `first` times `second`. */
typedef struct {
    const product_t *embedding;
    const layer_t *layers;
    int64_t count;
    const float *cosines, *sines, *norm;
    float eps;
    product_t head;
    const int64_t *ids;
    const product_t *table;
    const float *mask;
    const product_t *first, *second;
} model_t;

/* A ranking after token `index` of a batch: the best of the first `listed` logits and of the ids `text` [texts], over
   the temperature and with the noise of `key` if there is `noise` (that of the listed ids). `first` reads `before`, or
   the best id of the ranking `after`, an earlier one, if that is not negative. */
typedef struct {
    int64_t index, before, after;
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

static void embed(const model_t *by, const int64_t *tokens, float *y, int64_t rows) {
    const int64_t width = by->embedding->inputs;
    for (int64_t row = 0; row < rows; row++, y += width)
        if (tokens[row] < 0) memcpy(y, by->mask, width * sizeof *y);
        else look_up(by->embedding, tokens + row, y, 1);
}

/* How many of the asks from `from` on read the best ids of none of these. */
static int64_t apart(const ask_t *asks, int64_t from, int64_t asked) {
    int64_t stop = from;
    while (stop < asked && asks[stop].after < from) stop++;
    return stop - from;
}

/* Adds to logits [asked, outputs] what the tokens before say. `ids` [all asks, best] has those of the earlier asks. */
static void add_first(const model_t *by, const ask_t *asks, int64_t asked, const int64_t *ids, int64_t best,
                      float *logits, float *scratch) {
    const int64_t rank = by->first->inputs, count = asked * by->head.outputs;
    float *rows = scratch, *more = rows + asked * rank;
    for (int64_t i = 0; i < asked; i++)
        look_up(by->first, asks[i].after < 0 ? &asks[i].before : ids + asks[i].after * best, rows + i * rank, 1);
    multiply(by->second, rows, rank, more, asked, more + count);
    for (int64_t i = 0; i < count; i++) logits[i] += more[i];
}

/* `tokens` [rows] at `positions` [rows] -> made [rows, width], what the layers make of them; and for each of the `asks`
   its `best` likeliest ids [asked, best] and their scores. `features` are for pairs, a row [width] each, else missing. */
void guess(const model_t *by, const int64_t *tokens, const float *const *features, const int64_t *positions, int64_t rows,
           const view_t *views, int64_t count, const ask_t *asks, int64_t asked, int64_t listed, int64_t best,
           float *made, int64_t *ids, float *scores, float *scratch) {
    const int64_t width = by->head.inputs, outputs = by->head.outputs;
    float *embedded = scratch, *rest = embedded + rows * width;
    embed(by, tokens, embedded, rows);
    if (features)
        for (int64_t row = 0; row < rows; row++) memcpy(made + row * width, features[row], width * sizeof *made);
    decoder(by->layers, 0, by->count, by->cosines, by->sines, positions, features ? made : embedded, embedded, made,
            rows, views, count, rest);
    float *hidden = scratch, *logits = hidden + asked * width;
    rest = logits + asked * outputs;
    for (int64_t i = 0; i < asked; i++)
        rms_norm(made + asks[i].index * width, width, by->norm, hidden + i * width, 1, width, by->eps);
    multiply(&by->head, hidden, width, logits, asked, rest);
    for (int64_t from = 0, stop; from < asked; from = stop) {
        stop = by->first ? from + apart(asks, from, asked) : asked;
        if (by->first) add_first(by, asks + from, stop - from, ids, best, logits + from * outputs, rest);
        for (int64_t i = from; i < stop; i++)
            rank_one(by, asks + i, hidden + i * width, logits + i * outputs, listed, ids + i * best, scores + i * best,
                     best, rest);
    }
}

/* The probability that the best of ids with these `scores`, best first, is right: its softmax among them, calibrated by
   `rates` at the log-odds from -6 to 5, as in `ssd.draft.chances`, but without what the text repeats. */
static float likely(const float *rates, const float *scores, int64_t count) {
    float others = 0;
    for (int64_t i = 1; i < count; i++) others += expf(scores[i] - scores[0]);
    const float above = fminf(fmaxf(6 - logf(others), 0), 11);
    const int64_t point = above < 10 ? (int64_t)above : 10;
    return rates[point] + (above - point) * (rates[point + 1] - rates[point]);
}

/* Does `guess` for the `rows` tokens of one view and their `asks`, and then, for each of `more` asks behind these, for
   the best id of the ask before. The view and `positions` have places for these tokens, too. Returns how many asks it
   did: with `rates` it ends once the probability that all best ids are right is below `least`; that of all ids before
   this call is `reached`. */
int64_t go_on(const model_t *by, const int64_t *tokens, const int64_t *positions, int64_t rows, const view_t *view,
           const ask_t *asks, int64_t asked, int64_t more, int64_t listed, int64_t best, const float *rates,
           float reached, float least, float *made, int64_t *ids, float *scores, float *scratch) {
    store_t shared = *view->shared;
    view_t next = {&shared, NULL, rows};
    guess(by, tokens, NULL, positions, rows, &next, 1, asks, asked, listed, best, made, ids, scores, scratch);
    shared.begin += rows, shared.count += rows, positions += rows, next.tokens = 1;
    for (int64_t i = asked; i < asked + more; i++, shared.begin++, shared.count++, positions++) {
        if (rates && (reached *= likely(rates, scores + (i - 1) * best, best)) < least) return i;
        guess(by, ids + (i - 1) * best, NULL, positions, 1, &next, 1, asks + i, 1, listed, best, made, ids + i * best,
              scores + i * best, scratch);
    }
    return asked + more;
}
