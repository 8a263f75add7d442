/* Attention of single tokens over keys and values in a cache. */

#include "kernels.h"

#include <omp.h>

#define BLOCK 4 /* keys whose products are added up together; vectors of values that stay in registers */

static inline void products(const float *q, const float *const *k, float *out, int64_t count, int64_t dim) {
    quarter folds[BLOCK];
    float rest[BLOCK] = {0};
    for (int64_t j = 0; j < count; j++) {
        lanes acc = {0};
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) acc += load(q + i) * load(k[j] + i);
        for (; i < dim; i++) rest[j] += q[i] * k[j][i];
        folds[j] = folded(acc);
    }
    for (int64_t j = 0; j < count; j++) out[j] = (folds[j][0] + folds[j][1]) + (folds[j][2] + folds[j][3]) + rest[j];
}

/* scores[j] = q . key j, the keys lying in `slots` of a store of rows. */
static void score(const float *q, const float *keys, int64_t stride, const int64_t *slots, int64_t count, int64_t dim,
                  float *scores) {
    int64_t j = 0;
    for (; j + BLOCK <= count; j += BLOCK) {
        const float *k[BLOCK];
        for (int64_t b = 0; b < BLOCK; b++) k[b] = keys + slots[j + b] * stride;
        if (dim == 64)
            products(q, k, scores + j, BLOCK, 64); /* sizes that are known are unrolled */
        else if (dim == 128)
            products(q, k, scores + j, BLOCK, 128);
        else
            products(q, k, scores + j, BLOCK, dim);
    }
    for (; j < count; j++) {
        const float *k = keys + slots[j] * stride;
        products(q, &k, scores + j, 1, dim);
    }
}

void dots(const float *x, int64_t size, const float *table, const int64_t *places, int64_t count, float *y,
          int64_t rows) {
    for (int64_t row = 0; row < rows; row++) score(x + row * size, table, size, places, count, size, y + row * count);
}

/* out += sum of weights[j] * value j. */
static void weigh(const float *weights, const float *values, int64_t stride, const int64_t *slots, int64_t count,
                  int64_t dim, float *out) {
    int64_t i = 0;
    for (; i + BLOCK * LANES <= dim; i += BLOCK * LANES) {
        lanes acc[BLOCK];
        for (int b = 0; b < BLOCK; b++) acc[b] = load(out + i + b * LANES);
        for (int64_t j = 0; j < count; j++) {
            const float *v = values + slots[j] * stride + i;
            for (int b = 0; b < BLOCK; b++) acc[b] += weights[j] * load(v + b * LANES);
        }
        for (int b = 0; b < BLOCK; b++) store(out + i + b * LANES, acc[b]);
    }
    for (; i < dim; i++)
        for (int64_t j = 0; j < count; j++) out[i] += weights[j] * values[slots[j] * stride + i];
}

void expand(const int64_t *pages, int64_t count, int64_t size, int64_t *slots) {
    for (int64_t page = 0; page < count; page++)
        for (int64_t i = 0; i < size; i++) *slots++ = pages[page] * size + i;
}

void put(const store_t *to, int64_t layer, const float *k, int64_t k_stride, const float *v, int64_t v_stride,
         int64_t tokens, int64_t row) {
    for (int64_t t = 0; t < tokens; t++) {
        const int64_t place = layer * to->layer_size + to->slots[to->begin[t] + to->count[t] - 1] * row;
        memcpy(to->keys + place, k + t * k_stride, row * sizeof *k);
        memcpy(to->values + place, v + t * v_stride, row * sizeof *v);
    }
}

/* Turns scores into weights e^(score - the largest); returns their sum. */
static float weights(float *scores, int64_t count, float scale, float cap) {
    for (int64_t j = 0; j < count; j++) scores[j] *= scale;
    if (cap > 0.0f)
        for (int64_t j = 0; j < count; j++) scores[j] = tanhf(scores[j] / cap) * cap;
    const float most = largest(scores, count);
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) store(scores + j, exponential(load(scores + j) - most));
    if (j < count) store_some(scores + j, exponential(load_some(scores + j, count - j) - most), count - j);
    return total(scores, count);
}

/* `scores` holds those of one token for each thread. */
void attend(const store_t *shared, const store_t *own, int64_t layer, const float *q, int64_t q_stride, float *out,
            int64_t from, int64_t to, int64_t heads, int64_t kv_heads, int64_t dim, float scale, float cap,
            int64_t window, float *scores) {
    const int64_t row = kv_heads * dim, most = shared->longest + (own ? own->longest : 0);
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t t = from; t < to; t++)
        for (int64_t head = 0; head < heads; head++) {
            /* A token's own keys follow the shared ones. Of both together it sees the last `window`. */
            int64_t first = shared->count[t], second = own ? own->count[t] : 0;
            const int64_t *where = shared->slots + shared->begin[t], *own_where = own ? own->slots + own->begin[t] : NULL;
            const int64_t hidden = first + second > window ? first + second - window : 0;
            const int64_t skipped = hidden < first ? hidden : first;
            where += skipped, first -= skipped;
            own_where += hidden - skipped, second -= hidden - skipped;

            float *mine = scores + omp_get_thread_num() * most, *result = out + (t * heads + head) * dim;
            const float *query = q + t * q_stride + head * dim;
            const int64_t at = layer * shared->layer_size + head / (heads / kv_heads) * dim;
            const int64_t own_at = own ? layer * own->layer_size + head / (heads / kv_heads) * dim : 0;
            score(query, shared->keys + at, row, where, first, dim, mine);
            if (second) score(query, own->keys + own_at, row, own_where, second, dim, mine + first);
            const float share = 1.0f / weights(mine, first + second, scale, cap);
            memset(result, 0, dim * sizeof *result);
            weigh(mine, shared->values + at, row, where, first, dim, result);
            if (second) weigh(mine + first, own->values + own_at, row, own_where, second, dim, result);
            for (int64_t i = 0; i < dim; i++) result[i] *= share;
        }
}
