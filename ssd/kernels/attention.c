/* Attention of single tokens over keys and values in a cache. */

#include "kernels.h"

#include <omp.h>

#define KEYS LANES /* whose products are added up together */
#define QUERIES 4  /* of one token, with the same keys, that are computed together */

/* The vector of one register, and how many of a value's stay in registers. */
#if defined(__AVX512F__)
typedef lanes piece;
#define PART 4
#elif defined(__AVX__)
typedef float piece __attribute__((vector_size(32)));
#define PART 2
#else
typedef float piece __attribute__((vector_size(16)));
#define PART 2
#endif
#define SIZE (int64_t)(sizeof(piece) / sizeof(float))

static inline piece piece_at(const float *x) {
    piece v;
    memcpy(&v, x, sizeof v);
    return v;
}

/* The products of q with KEYS keys: those of every 16th number, then their sums, are added up in the same order. */
#ifdef __AVX512F__
#include <immintrin.h>

#define JOIN(shuffle, low, high, a, b) _mm512_add_ps(shuffle(a, b, low), shuffle(a, b, high))

static inline lanes sums_of(const lanes v[KEYS]) {
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    __m512 x[KEYS];
    for (int i = 0; i < 8; i++) x[i] = JOIN(_mm512_shuffle_f32x4, 0x44, 0xee, (__m512)v[i], (__m512)v[i + 8]);
    for (int i = 0; i < 4; i++) x[i] = JOIN(_mm512_shuffle_f32x4, 0x88, 0xdd, x[i], x[i + 4]);
    for (int i = 0; i < 2; i++) x[i] = JOIN(_mm512_shuffle_ps, 0x44, 0xee, x[i], x[i + 2]);
    return (lanes)_mm512_permutexvar_ps(order, JOIN(_mm512_shuffle_ps, 0x88, 0xdd, x[0], x[1]));
}

static inline __attribute__((always_inline)) lanes products(const float *q, const float *const k[KEYS], int64_t dim) {
    lanes sums[KEYS] = {0};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES)
        for (int j = 0; j < KEYS; j++) sums[j] += load(q + i) * load(k[j] + i);
    if (i < dim)
        for (int j = 0; j < KEYS; j++) sums[j] += load_some(q + i, dim - i) * load_some(k[j] + i, dim - i);
    return sums_of(sums);
}
#else
#define FEW 4 /* keys whose sums stay in registers */

static inline __attribute__((always_inline)) void few_products(const float *q, const float *const k[FEW], int64_t dim,
                                                               float *found) {
    piece sums[FEW][LANES / SIZE] = {0};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES)
        for (int b = 0; b < LANES / SIZE; b++)
            for (int j = 0; j < FEW; j++) sums[j][b] += piece_at(q + i + b * SIZE) * piece_at(k[j] + i + b * SIZE);
    for (int j = 0; j < FEW; j++) {
        lanes all;
        memcpy(&all, sums[j], sizeof all);
        if (i < dim) all += load_some(q + i, dim - i) * load_some(k[j] + i, dim - i);
        found[j] = sum(all);
    }
}

static inline __attribute__((always_inline)) lanes products(const float *q, const float *const k[KEYS], int64_t dim) {
    float found[KEYS];
    for (int j = 0; j < KEYS; j += FEW) few_products(q, k + j, dim, found + j);
    return load(found);
}
#endif

/* scores[r][j] = q[r] . key j for `queries` rows of q [.., dim] and of scores [.., most]; the keys lie in `slots` of a
   store of rows. */
static void score(const float *q, int64_t queries, const float *keys, int64_t stride, const int64_t *slots,
                  int64_t count, int64_t dim, float *scores, int64_t most) {
    for (int64_t j = 0; j < count; j += KEYS) {
        const int64_t some = count - j < KEYS ? count - j : KEYS;
        const float *k[KEYS];
        for (int64_t i = 0; i < KEYS; i++) k[i] = keys + slots[j + (i < some ? i : 0)] * stride;
        for (int64_t r = 0; r < queries; r++) {
            const float *own = q + r * dim;
            const lanes found = dim == 64    ? products(own, k, 64) /* sizes that are known are unrolled */
                                : dim == 128 ? products(own, k, 128)
                                             : products(own, k, dim);
            store_some(scores + r * most + j, found, some);
        }
    }
}

void dots(const product_t *by, const float *x, const int64_t *places, int64_t count, float *y, int64_t rows,
          float *scratch) {
    int64_t order[DOTS];
    for (int64_t j = 0; j < DOTS; j++) order[j] = j;
    for (int64_t j = 0; j < count; j += DOTS) {
        const int64_t some = count - j < DOTS ? count - j : DOTS;
        look_up(by, places + j, scratch, some);
        score(x, rows, scratch, by->inputs, order, some, by->inputs, y + j, count);
    }
}

/* out[r] += sum of weights[r][j] * value j, for rows of weights [.., most] and of out [.., dim]. */
static inline __attribute__((always_inline)) void weigh_some(const float *weights, int64_t most, const float *values,
                                                             int64_t stride, const int64_t *slots, int64_t count,
                                                             int64_t dim, float *out, int queries) {
    int64_t i = 0;
    for (; i + PART * SIZE <= dim; i += PART * SIZE) {
        piece sums[QUERIES][PART];
        for (int r = 0; r < queries; r++)
            for (int b = 0; b < PART; b++) sums[r][b] = piece_at(out + r * dim + i + b * SIZE);
        for (int64_t j = 0; j < count; j++) {
            const float *v = values + slots[j] * stride + i;
            for (int b = 0; b < PART; b++)
                for (int r = 0; r < queries; r++) sums[r][b] += weights[r * most + j] * piece_at(v + b * SIZE);
        }
        for (int r = 0; r < queries; r++) memcpy(out + r * dim + i, sums[r], sizeof sums[r]);
    }
    for (; i < dim; i++)
        for (int r = 0; r < queries; r++)
            for (int64_t j = 0; j < count; j++)
                out[r * dim + i] += weights[r * most + j] * values[slots[j] * stride + i];
}

static void weigh(const float *weights, int64_t most, const float *values, int64_t stride, const int64_t *slots,
                  int64_t count, int64_t dim, float *out, int64_t queries) {
    switch (queries) {
    case 1: weigh_some(weights, most, values, stride, slots, count, dim, out, 1); break;
    case 2: weigh_some(weights, most, values, stride, slots, count, dim, out, 2); break;
    case 3: weigh_some(weights, most, values, stride, slots, count, dim, out, 3); break;
    default: weigh_some(weights, most, values, stride, slots, count, dim, out, QUERIES);
    }
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

/* `scores` holds those of QUERIES queries for each thread. */
void attend(const store_t *shared, const store_t *own, int64_t layer, const float *q, int64_t q_stride, float *out,
            int64_t from, int64_t to, int64_t heads, int64_t kv_heads, int64_t dim, float scale, float cap,
            int64_t window, float *scores) {
    const int64_t row = kv_heads * dim, most = shared->longest + (own ? own->longest : 0);
    const int64_t group = heads / kv_heads, parts = (group + QUERIES - 1) / QUERIES;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t t = from; t < to; t++)
        for (int64_t part = 0; part < kv_heads * parts; part++) {
            const int64_t kv_head = part / parts, begun = part % parts * QUERIES, head = kv_head * group + begun;
            const int64_t queries = group - begun < QUERIES ? group - begun : QUERIES;
            /* A token's own keys follow the shared ones. Of both together it sees the last `window`. */
            int64_t first = shared->count[t], second = own ? own->count[t] : 0;
            const int64_t *where = shared->slots + shared->begin[t], *own_where = own ? own->slots + own->begin[t] : NULL;
            const int64_t hidden = first + second > window ? first + second - window : 0;
            const int64_t skipped = hidden < first ? hidden : first;
            where += skipped, first -= skipped;
            own_where += hidden - skipped, second -= hidden - skipped;

            float *mine = scores + omp_get_thread_num() * QUERIES * most, *result = out + (t * heads + head) * dim;
            const float *query = q + t * q_stride + head * dim;
            const int64_t at = layer * shared->layer_size + kv_head * dim;
            const int64_t own_at = own ? layer * own->layer_size + kv_head * dim : 0;
            score(query, queries, shared->keys + at, row, where, first, dim, mine, most);
            if (second) score(query, queries, own->keys + own_at, row, own_where, second, dim, mine + first, most);
            float shares[QUERIES];
            for (int64_t r = 0; r < queries; r++) shares[r] = 1.0f / weights(mine + r * most, first + second, scale, cap);
            memset(result, 0, queries * dim * sizeof *result);
            weigh(mine, most, shared->values + at, row, where, first, dim, result, queries);
            if (second) weigh(mine + first, most, own->values + own_at, row, own_where, second, dim, result, queries);
            for (int64_t r = 0; r < queries; r++)
                for (int64_t i = 0; i < dim; i++) result[r * dim + i] *= shares[r];
        }
}
