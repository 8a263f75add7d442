/* Attention over keys and values in a cache, in segments of keys that are read once for many tokens and heads. */

#include "kernels.h"
#include "simd.h"

#define KEYS LANES  /* whose products are added up together */
#define SEGMENT 128 /* keys of a part of the softmax, as in attention.py */
#define TOGETHER 64 /* queries for which a segment is read once */
#define FETCHED 32  /* keys or values that are asked for before they are needed, a multiple of KEYS */
#define TURNING 8   /* queries that are worth turning the keys */
#define FEW 2       /* segments that are not worth a division among threads */
#define ITEMS 4     /* items for each thread that divide the work well enough */

#define PART 2      /* registers of a value whose sums stay in registers */
#define QUERIES (sizeof(piece) == 32 ? 4 : 8) /* with the same keys, whose sums stay in registers */
#define SIDE (sizeof(piece) == 32 ? 2 : 4)    /* the same with keys that were turned */

/* Reads a value once for all queries. Left alone, GCC 12 reads it again for each. */
#if defined(__x86_64__)
#define IN_REGISTER(value) __asm__("" : "+v"(value))
#else
#define IN_REGISTER(value) (void)0
#endif

static inline piece piece_at(const float *x) {
    piece v;
    memcpy(&v, x, sizeof v);
    return v;
}

/* The products of q with KEYS keys: those of every 16th number, and then these as `sum` adds up. */
#ifdef __AVX512F__
#define JOIN(shuffle, a, b) _mm512_add_ps(shuffle(a, b, 0x88), shuffle(a, b, 0xdd))

static inline lanes sums_of(const lanes v[KEYS]) {
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    __m512 x[KEYS];
    for (int i = 0; i < 8; i++) x[i] = JOIN(_mm512_shuffle_f32x4, (__m512)v[i], (__m512)v[i + 8]);
    for (int i = 0; i < 4; i++) x[i] = JOIN(_mm512_shuffle_f32x4, x[i], x[i + 4]);
    for (int i = 0; i < 2; i++) x[i] = JOIN(_mm512_shuffle_ps, x[i], x[i + 2]);
    return (lanes)_mm512_permutexvar_ps(order, JOIN(_mm512_shuffle_ps, x[0], x[1]));
}

INLINED lanes products(const float *q, const float *k, int64_t stride, int64_t dim) {
    lanes sums[KEYS] = {0};
    for (int j = 0; j < KEYS; j++, k += stride) {
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) sums[j] += load(q + i) * load(k + i);
        if (i < dim) sums[j] += load_some(q + i, dim - i) * load_some(k + i, dim - i);
    }
    return sums_of(sums);
}
#else
#define SUMS 4 /* keys whose sums stay in registers */

INLINED void few_products(const float *q, const float *k, int64_t stride, int64_t dim, float *found) {
    piece sums[SUMS][LANES / SIZE] = {0};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES)
        for (int b = 0; b < LANES / SIZE; b++)
            for (int j = 0; j < SUMS; j++)
                sums[j][b] += piece_at(q + i + b * SIZE) * piece_at(k + j * stride + i + b * SIZE);
    for (int j = 0; j < SUMS; j++) {
        lanes all;
        memcpy(&all, sums[j], sizeof all);
        if (i < dim) all += load_some(q + i, dim - i) * load_some(k + j * stride + i, dim - i);
        found[j] = sum(all);
    }
}

INLINED lanes products(const float *q, const float *k, int64_t stride, int64_t dim) {
    float found[KEYS];
    for (int j = 0; j < KEYS; j += SUMS) few_products(q, k + j * stride, stride, dim, found + j);
    return load(found);
}
#endif

/* q times each of KEYS keys, `stride` apart. */
static inline lanes product(const float *q, const float *k, int64_t stride, int64_t dim) {
    return dim == 64    ? products(q, k, stride, 64) /* sizes that are known are unrolled */
           : dim == 128 ? products(q, k, stride, 128)
                        : products(q, k, stride, dim);
}

/* KEYS keys, `stride` apart -> [dim, KEYS]. */
static void turn(const float *k, int64_t stride, int64_t dim, float *to) {
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + LANES <= dim; i += LANES) {
        __m512 x[KEYS], y[KEYS];
        for (int j = 0; j < KEYS; j++) x[j] = _mm512_loadu_ps(k + j * stride + i);
        for (int j = 0; j < KEYS; j += 2) {
            y[j] = _mm512_unpacklo_ps(x[j], x[j + 1]);
            y[j + 1] = _mm512_unpackhi_ps(x[j], x[j + 1]);
        }
        for (int j = 0; j < KEYS; j += 4) {
            x[j] = _mm512_shuffle_ps(y[j], y[j + 2], 0x44);
            x[j + 1] = _mm512_shuffle_ps(y[j], y[j + 2], 0xee);
            x[j + 2] = _mm512_shuffle_ps(y[j + 1], y[j + 3], 0x44);
            x[j + 3] = _mm512_shuffle_ps(y[j + 1], y[j + 3], 0xee);
        }
        for (int j = 0; j < 4; j++) {
            y[j] = _mm512_shuffle_f32x4(x[j], x[j + 4], 0x88), y[j + 4] = _mm512_shuffle_f32x4(x[j], x[j + 4], 0xdd);
            y[j + 8] = _mm512_shuffle_f32x4(x[j + 8], x[j + 12], 0x88);
            y[j + 12] = _mm512_shuffle_f32x4(x[j + 8], x[j + 12], 0xdd);
        }
        for (int j = 0; j < 8; j++) {
            _mm512_storeu_ps(to + (i + j % 4 + j / 4 * 4) * KEYS, _mm512_shuffle_f32x4(y[j], y[j + 8], 0x88));
            _mm512_storeu_ps(to + (i + j % 4 + j / 4 * 4 + 8) * KEYS, _mm512_shuffle_f32x4(y[j], y[j + 8], 0xdd));
        }
    }
#endif
#if defined(__x86_64__) && defined(WIDTH)
    for (; i + 4 <= dim; i += 4)
        for (int j = 0; j < KEYS; j += 4) {
            __m128 x[4];
            for (int r = 0; r < 4; r++) x[r] = _mm_loadu_ps(k + (j + r) * stride + i);
            _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
            for (int r = 0; r < 4; r++) _mm_storeu_ps(to + (i + r) * KEYS + j, x[r]);
        }
#endif
    for (; i < dim; i++)
        for (int j = 0; j < KEYS; j++) to[i * KEYS + j] = k[j * stride + i];
}

/* The products of a few queries with a piece of the keys that were turned, bit for bit those of `product`. */
INLINED void turned_products(const float *const *q, const float *turned, int64_t dim, int queries, piece *found) {
    piece sums[4][SIDE];
    for (int first = 0; first < 4; first++) {
        piece own[SIDE][4] = {0};
        for (int64_t i = first; i < dim; i += LANES)
            for (int quarter = 0; quarter < 4 && i + 4 * quarter < dim; quarter++) {
                piece k = piece_at(turned + (i + 4 * quarter) * KEYS);
                IN_REGISTER(k);
                for (int r = 0; r < queries; r++) own[r][quarter] += q[r][i + 4 * quarter] * k;
            }
        for (int r = 0; r < queries; r++) sums[first][r] = (own[r][0] + own[r][1]) + (own[r][2] + own[r][3]);
    }
    for (int r = 0; r < queries; r++) found[r] = (sums[0][r] + sums[1][r]) + (sums[2][r] + sums[3][r]);
}

/* A cell of codes: the largest number has the code 127 or -127. A number that is not finite spoils its whole cell. */
static void encode(const float *x, int64_t dim, char *cell) {
    lanes sizes = {0}, spoilt = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        const lanes part = load_some(x + i, dim - i < LANES ? dim - i : LANES);
        const lanes size = (lanes)((places)part & INT32_MAX);
        sizes = pick(greater(size, sizes), size, sizes), spoilt += part * 0.0f;
    }
    const float step = largest((const float *)&sizes, LANES) / 127.0f + sum(spoilt);
    const float inverse = step > 1e-38f ? 1.0f / step : 0.0f;
    for (int64_t i = 0; i < dim; i++) cell[i] = (char)(bits_of(x[i] * inverse + UNITS) - bits_of(UNITS));
    memcpy(cell + dim, &step, sizeof step);
}

static inline void decode(const char *cell, int64_t dim, float *to) {
    float step;
    memcpy(&step, cell + dim, sizeof step);
    int64_t i = 0;
#ifdef WIDTH
    for (; i + WIDTH <= dim; i += WIDTH) {
        const floats numbers = integers_at(cell + i) * step;
        memcpy(to + i, &numbers, sizeof numbers);
    }
#endif
    for (; i < dim; i++) to[i] = (float)(int8_t)cell[i] * step;
}

/* Some heads of keys or values of a layer: `width` bytes in rows `stride` bytes apart, of which `slots` names some. */
typedef struct {
    const char *rows;
    const int64_t *slots;
    int64_t stride, width, cell;
} cells_t;

/* The numbers of one head in the KEYS rows from `begin` on, `stride` apart: where they lie, if they are float32 and their
   slots follow each other, or in `copy`, where zeros stand for what is beyond `end`. */
static inline const float *block_of(const cells_t *of, int64_t head, int64_t begin, int64_t end, int64_t dim,
                                    int64_t *stride, float *copy) {
    const int64_t *slots = of->slots + begin, count = end - begin < KEYS ? end - begin : KEYS;
    const int64_t bytes = dim * (int64_t)sizeof *copy;
    const char *cells = of->rows + head * of->cell;
    int64_t i = 1;
    while (i < count && slots[i] == slots[0] + i) i++;
    if (i == KEYS && of->cell == bytes) {
        *stride = of->stride / (int64_t)sizeof *copy;
        return (const float *)(cells + slots[0] * of->stride);
    }
    for (i = 0; i < count; i++)
        if (of->cell == bytes) memcpy(copy + i * dim, cells + slots[i] * of->stride, bytes);
        else decode(cells + slots[i] * of->stride, dim, copy + i * dim);
    memset(copy + count * dim, 0, (KEYS - count) * bytes);
    *stride = dim;
    return copy;
}

void dots(const product_t *by, const float *x, const int64_t *places, int64_t count, float *y, int64_t rows,
          float *scratch) {
    const int64_t size = by->inputs;
    for (int64_t j = 0; j < count; j += DOTS) {
        const int64_t some = count - j < DOTS ? count - j : DOTS;
        look_up(by, places + j, scratch, some);
        memset(scratch + some * size, 0, (DOTS - some) * size * sizeof *scratch);
        for (int64_t row = 0; row < rows; row++)
            store_some(y + row * count + j, product(x + row * size, scratch, size, size), some);
    }
}

/* out[r] += sum of weights[r][j] * value j for `count` values, `stride` apart, and a few queries. Rows of `weights` are
   SEGMENT apart, those of `out` lie where it says. */
INLINED void weigh_some(const float *weights, float *const *out, const float *values, int64_t stride, int64_t count,
                        int64_t dim, int queries) {
    int64_t i = 0;
    for (; i + PART * SIZE <= dim; i += PART * SIZE) {
        piece sums[QUERIES][PART];
        const float *v = values + i;
        for (int r = 0; r < queries; r++) memcpy(sums[r], out[r] + i, sizeof sums[r]);
        for (int64_t j = 0; j < count; j++, v += stride)
            for (int b = 0; b < PART; b++) {
                piece value = piece_at(v + b * SIZE);
                IN_REGISTER(value);
                for (int r = 0; r < queries; r++) sums[r][b] += weights[r * SEGMENT + j] * value;
            }
        for (int r = 0; r < queries; r++) memcpy(out[r] + i, sums[r], sizeof sums[r]);
    }
    for (; i < dim; i += SIZE) /* in vectors, too, so that a number's bits do not depend on the number of queries */
        for (int r = 0; r < queries; r++) {
            const int64_t bytes = (dim - i < SIZE ? dim - i : SIZE) * (int64_t)sizeof *out[r];
            piece sum = {0}, value = {0};
            memcpy(&sum, out[r] + i, bytes);
            for (int64_t j = 0; j < count; j++) {
                memcpy(&value, values + j * stride + i, bytes);
                sum += weights[r * SEGMENT + j] * value;
            }
            memcpy(out[r] + i, &sum, bytes);
        }
}

/* `weigh_some` for any number of queries. */
static void weigh(const float *weights, float *const *out, int64_t queries, const float *values, int64_t stride,
                  int64_t count, int64_t dim) {
#define WEIGH(some)                                                                                                    \
    for (; queries - r >= some; r += some) weigh_some(weights + r * SEGMENT, out + r, values, stride, count, dim, some);
    int64_t r = 0;
    WEIGH(QUERIES) WEIGH(4) WEIGH(3) WEIGH(2) WEIGH(1)
}

void expand(const int64_t *pages, int64_t count, int64_t size, int64_t *slots) {
    for (int64_t page = 0; page < count; page++)
        for (int64_t i = 0; i < size; i++) *slots++ = pages[page] * size + i;
}

void put(const store_t *to, int64_t layer, const float *k, int64_t k_stride, const float *v, int64_t v_stride,
         int64_t tokens, int64_t heads, int64_t dim) {
    const int64_t row = heads * to->cell, floats = heads * dim * (int64_t)sizeof *k;
    for (int64_t t = 0; t < tokens; t++, k += k_stride, v += v_stride) {
        const int64_t place = layer * to->layer_size + to->slots[to->begin[t] + to->count[t] - 1] * row;
        if (row == floats) {
            memcpy(to->keys + place, k, row);
            memcpy(to->values + place, v, row);
            continue;
        }
        for (int64_t head = 0; head < heads; head++) {
            encode(k + head * dim, dim, to->keys + place + head * to->cell);
            encode(v + head * dim, dim, to->values + place + head * to->cell);
        }
    }
}

/* Turns scores into weights e^(score - the largest); returns their sum. */
static float weights(float *scores, int64_t count, float scale, float cap, float *most) {
    for (int64_t j = 0; j < count; j++) scores[j] *= scale;
    if (cap > 0.0f)
        for (int64_t j = 0; j < count; j++) scores[j] = tanhf(scores[j] / cap) * cap;
    *most = largest(scores, count);
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) store(scores + j, exponential(load(scores + j) - *most));
    if (j < count) store_some(scores + j, exponential(load_some(scores + j, count - j) - *most), count - j);
    return total(scores, count);
}

/* Some tokens of an attention. Each token's keys are cut into segments, first `shared` ones and then `own`
   ones; `parts` has for every token, segment and head the weighted sum of the values, the largest score, and the sum of
   the weights. */
typedef struct {
    const attend_t *by;
    int64_t from, to, shared, own;
    float *parts;
} wave_t;

static int64_t part_size(int64_t dim) { return (dim + 2 + LANES - 1) / LANES * LANES; } /* lines are filled up */

static float *part_of(const wave_t *of, int64_t t, int64_t segment, int64_t head) {
    const int64_t place = ((t - of->from) * (of->shared + of->own) + segment) * of->by->heads + head;
    return of->parts + place * part_size(of->by->dim);
}

/* The keys of a segment that a token sees: those among its last `window`. */
typedef struct {
    int64_t from, to;
} range_t;

static range_t seen_by(const wave_t *of, int64_t t, int64_t segment) {
    const attend_t *by = of->by;
    const int64_t shared = by->shared->count[t], own = by->own ? by->own->count[t] : 0;
    const int64_t hidden = shared + own > by->window ? shared + own - by->window : 0;
    const int64_t begin = (segment < of->shared ? segment : segment - of->shared) * SEGMENT;
    int64_t from = (segment < of->shared ? hidden : hidden - shared) - begin;
    int64_t to = (segment < of->shared ? shared : own) - begin;
    from = from < 0 ? 0 : from, to = to > SEGMENT ? SEGMENT : to;
    return from < to ? (range_t){from, to} : (range_t){0, 0};
}

/* Asks the nearest cache for the `part`-th of `parts` of KEYS rows from `begin` on, as far as they lie before `end`. */
INLINED void fetch(const cells_t *of, int64_t begin, int64_t end, int64_t part, int64_t parts) {
    const int64_t last = begin + KEYS * (part + 1) / parts;
    for (int64_t j = begin + KEYS * part / parts; j < last && j < end; j++)
        for (int64_t i = 0; i < of->width; i += 64) __builtin_prefetch(of->rows + of->slots[j] * of->stride + i);
}

/* The parts of the tokens from `t` to `stop` - 1, which have the same keys in this segment, for `kv` heads of keys. */
static void attend_some(const wave_t *of, int64_t t, int64_t stop, int64_t segment, int64_t kv_head, int64_t kv) {
    const attend_t *by = of->by;
    const store_t *in = segment < of->shared ? by->shared : by->own;
    const int64_t dim = by->dim, cell = in->cell, row = by->kv_heads * cell, group = by->heads / by->kv_heads;
    const int64_t some = (stop - t) * group, begin = (segment < of->shared ? segment : segment - of->shared) * SEGMENT;
    const int64_t *slots = in->slots + in->begin[t] + begin, place = by->layer * in->layer_size + kv_head * cell;
    const cells_t keys = {in->keys + place, slots, row, kv * cell, cell};
    const cells_t values = {in->values + place, slots, row, kv * cell, cell};
    /* `some` queries of a head of keys follow each other, token after token. */
    _Alignas(64) float scores[kv * some * SEGMENT], copy[KEYS * dim], turned[KEYS * dim];
    const float *q[kv * some];
    float *out[kv * some];
    range_t seen[some], common = {0, SEGMENT};
    int64_t last = 0;
    for (int64_t i = 0; i < some; i++) {
        const range_t own = seen[i] = seen_by(of, t + i / group, segment);
        last = own.to > last ? own.to : last;
        common.from = own.from > common.from ? own.from : common.from;
        common.to = own.to < common.to ? own.to : common.to;
    }
    for (int64_t i = 0; i < kv * some; i++) {
        const int64_t token = t + i % some / group, head = (kv_head + i / some) * group + i % group;
        q[i] = by->q + token * by->q_stride + head * dim;
        out[i] = part_of(of, token, segment, head);
        memset(out[i], 0, dim * sizeof *out[i]);
    }
    for (int64_t j = 0; j < last; j += KEYS)
        for (int64_t head = 0; head < kv; head++) {
            int64_t stride;
            const float *k = block_of(&keys, head, j, last, dim, &stride, copy);
            if (j + FETCHED < last) fetch(&keys, j + FETCHED, last, head, kv);
            else fetch(&values, (j + FETCHED - last) / KEYS * KEYS, last, head, kv);
            float *to = scores + head * some * SEGMENT + j;
            int64_t i = 0;
            if (some >= TURNING) turn(k, stride, dim, turned);
            for (; some >= TURNING && i + SIDE <= some; i += SIDE)
                for (int64_t from = 0; from < KEYS; from += SIZE) {
                    piece found[SIDE];
                    if (dim == 64) turned_products(q + head * some + i, turned + from, 64, SIDE, found);
                    else if (dim == 128) turned_products(q + head * some + i, turned + from, 128, SIDE, found);
                    else turned_products(q + head * some + i, turned + from, dim, SIDE, found);
                    for (int r = 0; r < SIDE; r++) memcpy(to + (i + r) * SEGMENT + from, &found[r], sizeof found[r]);
                }
            for (; i < some; i++) store(to + i * SEGMENT, product(q[head * some + i], k, stride, dim));
        }
    for (int64_t i = 0; i < kv * some; i++) {
        const range_t own = seen[i % some];
        float *mine = scores + i * SEGMENT + own.from;
        out[i][dim + 1] = weights(mine, own.to - own.from, by->scale, by->cap, out[i] + dim);
    }
    for (int64_t j = 0; j < last; j += KEYS)
        for (int64_t head = 0; head < kv; head++) {
            int64_t stride;
            const float *v = block_of(&values, head, j, last, dim, &stride, copy);
            if (j + FETCHED < last) fetch(&values, j + FETCHED, last, head, kv);
            else fetch(&keys, SEGMENT + (j + FETCHED - last) / KEYS * KEYS, in->count[t] - begin, head, kv);
            const float *mine = scores + head * some * SEGMENT;
            const int all = j >= common.from && j + KEYS <= common.to; /* else each token sees what it sees, no more */
            for (int64_t i = 0; i < some; i += all ? some : group) {
                const int64_t from = seen[i].from > j && !all ? seen[i].from : j;
                const int64_t to = seen[i].to < j + KEYS && !all ? seen[i].to : j + KEYS;
                if (from < to)
                    weigh(mine + i * SEGMENT + from, out + head * some + i, all ? some : group, v + (from - j) * stride,
                          stride, to - from, dim);
            }
        }
}

/* `attend_some` for any number of tokens and heads. */
static void attend_segment(const wave_t *of, int64_t t, int64_t stop, int64_t segment, int64_t kv_head, int64_t heads) {
    const int64_t group = of->by->heads / of->by->kv_heads, kv = group * heads > TOGETHER ? 1 : heads;
    const int64_t some = group * kv < TOGETHER ? TOGETHER / (group * kv) : 1;
    for (; t < stop; t += some)
        for (int64_t i = 0; i < heads; i += kv)
            attend_some(of, t, t + some < stop ? t + some : stop, segment, kv_head + i, kv);
}

/* Joins the parts of a token's heads with one head of keys, segment after segment. */
static void join(const wave_t *of, int64_t t, int64_t kv_head) {
    const int64_t dim = of->by->dim, group = of->by->heads / of->by->kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        float *out = of->by->out + (t * of->by->heads + head) * dim, most = 0.0f, sum = 0.0f;
        int begun = 0;
        for (int64_t segment = 0; segment < of->shared + of->own; segment++) {
            const range_t seen = seen_by(of, t, segment);
            const float *part = part_of(of, t, segment, head);
            if (seen.from == seen.to) continue;
            if (!begun++) {
                most = part[dim], sum = part[dim + 1];
                memcpy(out, part, dim * sizeof *out);
                continue;
            }
            const float larger = part[dim] > most ? part[dim] : most;
            const float before = exponential_of(most - larger), here = exponential_of(part[dim] - larger);
            most = larger, sum = sum * before + part[dim + 1] * here;
            for (int64_t i = 0; i < dim; i++) out[i] = out[i] * before + part[i] * here;
        }
        if (of->by->sinks) sum += exponential_of(of->by->sinks[head] - most);
        const float share = 1.0f / sum;
        for (int64_t i = 0; i < dim; i++) out[i] *= share;
    }
}

/* Returns where the run of tokens with the shared keys of `t` ends; 0 if it began before. */
static int64_t run_of(const wave_t *of, int64_t t) {
    const int64_t *begin = of->by->shared->begin;
    int64_t stop = t + 1;
    if (t > of->from && begin[t - 1] == begin[t]) return 0;
    while (stop < of->to && begin[stop] == begin[t]) stop++;
    return stop;
}

/* For `share`: a segment of a run, a token's own keys being a run of one; a head of keys of a token; both of a run. What
   belongs to one token or run lies apart, so that each thread begins with some. */
static void segment_item(const void *arguments, int64_t item) {
    const wave_t *of = arguments;
    const int64_t tokens = of->to - of->from, t = of->from + item % tokens, segment = item / tokens;
    const int64_t stop = segment < of->shared ? run_of(of, t) : t + 1;
    if (stop) attend_segment(of, t, stop, segment, 0, of->by->kv_heads);
}

static void join_item(const void *arguments, int64_t item) {
    const wave_t *of = arguments;
    join(of, of->from + item / of->by->kv_heads, item % of->by->kv_heads);
}

static void whole_item(const void *arguments, int64_t item) {
    const wave_t *of = arguments;
    const int64_t tokens = of->to - of->from, t = of->from + item % tokens, head = item / tokens, stop = run_of(of, t);
    for (int64_t i = 0; i < of->shared && stop; i++) attend_segment(of, t, stop, i, head, 1);
    for (int64_t token = t; token < stop; token++) {
        for (int64_t i = 0; i < of->own; i++) attend_segment(of, token, token + 1, of->shared + i, head, 1);
        join(of, token, head);
    }
}

static int64_t segments_of(const store_t *of) { return of ? (of->longest + SEGMENT - 1) / SEGMENT : 0; }

void attend(const attend_t *by, int64_t from, int64_t to, float *scratch) {
    const int64_t shared = segments_of(by->shared), own = segments_of(by->own);
    const int64_t size = (shared + own) * by->heads * part_size(by->dim);
    const int64_t together = size && size < PARTS ? PARTS / size : 1;
    scratch = (float *)(((uintptr_t)scratch + 63) / 64 * 64);
    for (int64_t t = from, some; t < to; t += some) {
        some = to - t < together ? to - t : together;
        const wave_t of = {by, t, t + some, shared, own, scratch};
        int64_t runs = 0;
        for (int64_t i = t; i < t + some; i++) runs += run_of(&of, i) > 0;
        if (shared <= FEW || runs * by->kv_heads > ITEMS * team()) {
            share(some * by->kv_heads, whole_item, &of);
            continue;
        }
        share(some * (shared + own), segment_item, &of);
        share(some * by->kv_heads, join_item, &of);
    }
}
