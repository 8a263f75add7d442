/* Norms, activations and rotations, each in one pass. One call replaces three to ten of torch, whose cost at the few
   rows of decoding is the call itself. */

#include "kernels.h"

/* x, rows `stride` apart -> y, rows side by side; what else a row's work reads. */
typedef struct {
    const float *x, *first, *second;
    float *y;
    int64_t stride, size, dim;
    float eps;
} rows_t;

#define WORTH 8192 /* numbers that take longer than to share them out, some microseconds */

static void each_row(int64_t rows, work_t *work, const rows_t *of) {
    if (rows * of->size >= WORTH) share(rows, work, of);
    else
        for (int64_t row = 0; row < rows; row++) work(of, row);
}

static void norm_row(const void *arguments, int64_t row) {
    const rows_t *of = arguments;
    const float *x = of->x + row * of->stride, *weight = of->first;
    const int64_t size = of->size;
    float *y = of->y + row * size;
    lanes squares = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    const float factor = 1.0f / sqrtf(total / (float)size + of->eps);
    for (i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
}

void rms_norm(const float *x, int64_t stride, const float *weight, float *y, int64_t rows, int64_t size, float eps) {
    each_row(rows, norm_row, &(rows_t){.x = x, .first = weight, .y = y, .stride = stride, .size = size, .eps = eps});
}

static inline lanes silu(lanes x) { return x / (1.0f + exponential(-x)); }

static void silu_row(const void *arguments, int64_t row) {
    const rows_t *of = arguments;
    const int64_t size = of->size;
    const float *gate = of->x + row * of->stride, *up = gate + size;
    float *y = of->y + row * size;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(y + i, silu(load(gate + i)) * load(up + i));
    const int64_t rest = size - i;
    if (rest) store_some(y + i, silu(load_some(gate + i, rest)) * load_some(up + i, rest), rest);
}

void silu_mul(const float *gate_up, float *y, int64_t rows, int64_t size) {
    each_row(rows, silu_row, &(rows_t){.x = gate_up, .y = y, .stride = 2 * size, .size = size});
}

static void sigmoid_row(const void *arguments, int64_t row) {
    const rows_t *of = arguments;
    const int64_t size = of->size;
    const float *gate = of->first + row * size, *x = of->x + row * size;
    float *y = of->y + row * size;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(y + i, load(x + i) / (1.0f + exponential(-load(gate + i))));
    const int64_t rest = size - i;
    if (rest) store_some(y + i, load_some(x + i, rest) / (1.0f + exponential(-load_some(gate + i, rest))), rest);
}

void sigmoid_mul(const float *gate, const float *x, float *y, int64_t rows, int64_t size) {
    each_row(rows, sigmoid_row, &(rows_t){.x = x, .first = gate, .y = y, .size = size});
}

static void rotate_row(const void *arguments, int64_t row) {
    const rows_t *of = arguments;
    const int64_t dim = of->dim, half = dim / 2;
    const float *cos = of->first + row * dim, *sin = of->second + row * dim;
    float *y = of->y + row * of->size;
    for (int64_t head = 0; head < of->size / dim; head++, y += dim) {
        const float *low = of->x + row * of->stride + head * dim, *high = low + half;
        for (int64_t i = 0; i < half; i++) y[i] = low[i] * cos[i] + high[i] * sin[i];
        for (int64_t i = 0; i < half; i++) y[half + i] = high[i] * cos[half + i] + low[i] * sin[half + i];
    }
}

void rotate(const float *x, int64_t stride, const float *cos, const float *sin, float *y, int64_t rows, int64_t heads,
            int64_t dim) {
    each_row(rows, rotate_row, &(rows_t){x, cos, sin, y, stride, heads * dim, dim, 0.0f});
}

/* Copies the rows [size] of a table that `places` names. */
void gather(const float *table, int64_t size, const int64_t *places, float *y, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) memcpy(y + row * size, table + places[row] * size, size * sizeof *y);
}
