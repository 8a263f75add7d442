/* Layers that keep a state in place of keys and values. An item has some channels of it, for all rows in order: so a row
   sees what an earlier one has written. It loads the state of a row once, goes through the row's changes, and stores the
   state where it is wanted; a token's result depends only on the changes before it, not on how they were cut. */

#include "kernels.h"

#define WORTH 8192 /* numbers that take longer than to share them out */

static void each(int64_t items, int64_t numbers, work_t *work, const void *of) {
    if (numbers >= WORTH) share(items, work, of);
    else
        for (int64_t item = 0; item < items; item++) work(of, item);
}

static inline const float *change_at(const changes_t *in, int64_t entry) {
    const int64_t place = in->entries[entry];
    return place >= 0 ? in->kept + place * in->size : in->made - (place + 1) * in->size;
}

static inline lanes load_up_to(const float *x, int64_t count) { return count < LANES ? load_some(x, count) : load(x); }

static inline void store_up_to(float *x, lanes v, int64_t count) {
    if (count < LANES) store_some(x, v, count);
    else store(x, v);
}

/* Calls `keep` for each slot that wants the state after `done` changes of a row. */
#define KEEP(row, done, keep)                                                    \
    do {                                                                         \
        if ((row)->target >= 0 && (done) == (row)->written) keep((row)->target); \
        if ((row)->save >= 0 && (done) == (row)->saved) keep((row)->save);       \
    } while (0)

#define CHANNELS 128 /* of an item of a convolution */

/* `count` channels from `first` on, at most LANES. */
static void convolve_lanes(const convolution_t *of, int64_t first, int64_t count) {
    const changes_t *in = &of->in;
    const int64_t channels = of->channels, before = of->window - 1;
    lanes weights[MAX_WINDOW], past[MAX_WINDOW];
    for (int64_t i = 0; i <= before; i++) weights[i] = load_up_to(of->weight + i * channels + first, count);
    const lanes bias = of->bias ? load_up_to(of->bias + first, count) : (lanes){0};
    int64_t entry = 0;
    float *y = of->y + first;
    for (const state_row_t *row = in->rows; row < in->rows + in->count; row++) {
#define STATE(slot) (of->states + (slot) * before * channels + first)
        for (int64_t i = 0; i < before; i++)
            past[i] = row->source < 0 ? (lanes){0} : load_up_to(STATE(row->source) + i * channels, count);
#define KEEP_PAST(slot) \
    for (int64_t i = 0; i < before; i++) store_up_to(STATE(slot) + i * channels, past[i], count)
        KEEP(row, 0, KEEP_PAST);
        for (int64_t done = 1; done <= row->replayed + row->tokens; done++, entry++) {
            past[before] = load_up_to(change_at(in, entry) + first, count);
            if (done > row->replayed) {
                lanes sum = past[0] * weights[0];
                for (int64_t i = 1; i <= before; i++) sum += past[i] * weights[i];
                sum += bias;
                if (of->silu) sum = sum / (1.0f + exponential(-sum));
                store_up_to(y, sum, count);
                y += channels;
            }
            for (int64_t i = 0; i < before; i++) past[i] = past[i + 1];
            KEEP(row, done, KEEP_PAST);
        }
    }
}

static void convolve_item(const void *arguments, int64_t item) {
    const convolution_t *of = arguments;
    const int64_t end = (item + 1) * CHANNELS < of->channels ? (item + 1) * CHANNELS : of->channels;
    for (int64_t i = item * CHANNELS; i < end; i += LANES)
        convolve_lanes(of, i, end - i < LANES ? end - i : LANES);
}

void convolve(const convolution_t *of) {
    each((of->channels + CHANNELS - 1) / CHANNELS, of->in.total * of->channels, convolve_item, of);
}

/* Divides x [heads, dim] by the length of each head, and multiplies by `scale`. */
static void normalise(const float *x, float *y, int64_t heads, int64_t dim, float scale) {
    for (int64_t head = 0; head < heads; head++, x += dim, y += dim) {
        lanes squares = {0};
        int64_t i = 0;
        for (; i < dim; i += LANES) {
            const lanes part = load_up_to(x + i, dim - i);
            squares += part * part;
        }
        const float factor = scale / sqrtf(sum(squares) + 1e-6f);
        for (i = 0; i < dim; i++) y[i] = x[i] * factor;
    }
}

/* ln(1 + e^x). Where 1 + e^x is rounded, so is what the logarithm is divided by (W. Kahan). */
static inline lanes softplus(lanes x) {
    const lanes power = exponential(x), more = 1.0f + power, rounded = more - 1.0f;
    const places exact = ~greater(rounded, (lanes){0});
    const lanes small = pick(exact, power, logarithm(more) * (power / pick(exact, more, rounded)));
    return pick(greater(x, (lanes){0} + 20.0f), x, small);
}

/* What a token's update needs: its keys and queries of length 1, and for each head e^g and the sigmoid of b. */
static void prepare(const void *arguments, int64_t entry) {
    const delta_t *of = arguments;
    const int64_t keys = of->key_heads * of->key_dim, place = of->in.entries[entry];
    const float *change = change_at(&of->in, entry), *b = change + keys + of->heads * of->value_dim, *a = b + of->heads;
    float *to = of->prepared + entry * (2 * keys + 2 * of->heads), *gates = to + 2 * keys;
    normalise(change, to, of->key_heads, of->key_dim, 1.0f);
    if (place < 0) {
        const float *queries = of->queries - (place + 1) * of->query_stride;
        normalise(queries, to + keys, of->key_heads, of->key_dim, 1.0f / sqrtf((float)of->key_dim));
    }
    for (int64_t i = 0; i < of->heads; i += LANES) {
        const int64_t count = of->heads - i < LANES ? of->heads - i : LANES;
        const lanes step = softplus(load_up_to(a + i, count) + load_up_to(of->dt_bias + i, count));
        store_up_to(gates + i, exponential(load_up_to(of->decay + i, count) * step), count);
        store_up_to(gates + of->heads + i, 1.0f / (1.0f + exponential(-load_up_to(b + i, count))), count);
    }
}

#define COLUMNS (2 * LANES) /* of a state at a time, so that a head's are in the first cache */
#define AHEAD 4             /* sums side by side, as each addition waits for the one before */

typedef struct {
    lanes low, high;
} columns_t;

static inline columns_t columns_at(const float *x) { return (columns_t){load(x), load(x + LANES)}; }

static inline columns_t all_of(const columns_t *sums) {
    return (columns_t){(sums[0].low + sums[1].low) + (sums[2].low + sums[3].low),
                       (sums[0].high + sums[1].high) + (sums[2].high + sums[3].high)};
}

/* S^T k of a state [dim, COLUMNS]. */
static inline columns_t seen(const float *state, const float *k, int64_t dim) {
    columns_t sums[AHEAD] = {0};
    for (int64_t i = 0; i < dim; i += AHEAD)
        for (int64_t j = 0; j < AHEAD && i + j < dim; j++) {
            const columns_t row = columns_at(state + (i + j) * COLUMNS);
            sums[j].low += row.low * k[i + j];
            sums[j].high += row.high * k[i + j];
        }
    return all_of(sums);
}

/* S <- decay S + k u^T; returns S^T q, of an earlier token with any q. */
static inline columns_t renewed(float *state, const float *k, const float *q, float decay, columns_t u, int64_t dim) {
    columns_t sums[AHEAD] = {0};
    for (int64_t i = 0; i < dim; i += AHEAD)
        for (int64_t j = 0; j < AHEAD && i + j < dim; j++) {
            float *at = state + (i + j) * COLUMNS;
            columns_t row = columns_at(at);
            row.low = row.low * decay + u.low * k[i + j];
            row.high = row.high * decay + u.high * k[i + j];
            store(at, row.low);
            store(at + LANES, row.high);
            sums[j].low += row.low * q[i + j];
            sums[j].high += row.high * q[i + j];
        }
    return all_of(sums);
}

/* Some columns of a head's states. */
static void delta_item(const void *arguments, int64_t item) {
    const delta_t *of = arguments;
    const changes_t *in = &of->in;
    const int64_t blocks = (of->value_dim + COLUMNS - 1) / COLUMNS, head = item / blocks, dim = of->key_dim;
    const int64_t first = item % blocks * COLUMNS, width = of->value_dim;
    const int64_t keys = of->key_heads * dim, group = of->heads / of->key_heads;
    const int64_t key_head = (of->tiled ? head % of->key_heads : head / group) * dim;
    const int64_t columns = width - first < COLUMNS ? width - first : COLUMNS;
    float memory[dim * COLUMNS + LANES], *state = memory + (-((uintptr_t)memory / sizeof *memory) & (LANES - 1));
    memset(state, 0, dim * COLUMNS * sizeof *state);
    int64_t entry = 0;
    float *y = of->y + head * width + first;
    for (const state_row_t *row = in->rows; row < in->rows + in->count; row++) {
        float *const at = of->states + head * dim * width + first;
        const int64_t slot_size = of->heads * dim * width;
        if (row->source < 0) memset(state, 0, dim * COLUMNS * sizeof *state);
        else
            for (int64_t i = 0; i < dim; i++)
                memcpy(state + i * COLUMNS, at + row->source * slot_size + i * width, columns * sizeof *state);
#define KEEP_STATE(slot)                  \
    for (int64_t i = 0; i < dim; i++)     \
        memcpy(at + (slot) * slot_size + i * width, state + i * COLUMNS, columns * sizeof *state)
        KEEP(row, 0, KEEP_STATE);
        for (int64_t done = 1; done <= row->replayed + row->tokens; done++, entry++) {
            const float *change = change_at(in, entry), *prepared = of->prepared + entry * (2 * keys + 2 * of->heads);
            const float *k = prepared + key_head, *q = done > row->replayed ? k + keys : k;
            const float decay = prepared[2 * keys + head], beta = prepared[2 * keys + of->heads + head];
            float parts[COLUMNS] = {0};
            memcpy(parts, change + keys + head * width + first, columns * sizeof *parts);
            columns_t u = columns_at(parts);
            const columns_t old = seen(state, k, dim);
            u.low = (u.low - old.low * decay) * beta;
            u.high = (u.high - old.high * decay) * beta;
            const columns_t read = renewed(state, k, q, decay, u, dim);
            if (done > row->replayed) {
                store(parts, read.low);
                store(parts + LANES, read.high);
                memcpy(y, parts, columns * sizeof *y);
                y += of->heads * width;
            }
            KEEP(row, done, KEEP_STATE);
        }
    }
}

void gated_delta(const delta_t *of) {
    const int64_t keys = of->key_heads * of->key_dim, blocks = (of->value_dim + COLUMNS - 1) / COLUMNS;
    each(of->in.total, of->in.total * keys, prepare, of);
    share(of->heads * blocks, delta_item, of);
}
