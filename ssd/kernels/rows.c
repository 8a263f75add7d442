/* Norms, activations and rotations, each in one pass. One call replaces three to ten of torch, whose cost at the few
   rows of decoding is the call itself. */

#include "kernels.h"

void rms_norm(const float *x, int64_t stride, const float *weight, float *y, int64_t rows, int64_t size, float eps) {
    for (int64_t row = 0; row < rows; row++, x += stride, y += size) {
        lanes squares = {0};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
        float total = sum(squares);
        for (; i < size; i++) total += x[i] * x[i];
        const float factor = 1.0f / sqrtf(total / (float)size + eps);
        for (i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
    }
}

static inline lanes silu(lanes x) { return x / (1.0f + exponential(-x)); }

void silu_mul(const float *gate_up, float *y, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * size, y += size) {
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) store(y + i, silu(load(gate_up + i)) * load(gate_up + size + i));
        const int64_t rest = size - i;
        if (rest) store_some(y + i, silu(load_some(gate_up + i, rest)) * load_some(gate_up + size + i, rest), rest);
    }
}

void rotate(const float *x, int64_t stride, const float *cos, const float *sin, float *y, int64_t rows, int64_t heads,
            int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t row = 0; row < rows; row++, x += stride, cos += dim, sin += dim)
        for (int64_t head = 0; head < heads; head++, y += dim) {
            const float *low = x + head * dim, *high = low + half;
            for (int64_t i = 0; i < half; i++) y[i] = low[i] * cos[i] + high[i] * sin[i];
            for (int64_t i = 0; i < half; i++) y[half + i] = high[i] * cos[half + i] + low[i] * sin[half + i];
        }
}

/* Copies the rows [size] of a table that `places` names. */
void gather(const float *table, int64_t size, const int64_t *places, float *y, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) memcpy(y + row * size, table + places[row] * size, size * sizeof *y);
}
