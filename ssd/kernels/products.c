/* Products of a few rows with a packed weight, at the speed of memory. */

#include "tile.h"

/* A number of a weight in floats. */
static float read_float(const product_t *by, const char *from) {
    uint16_t half;
    int32_t bits;
    if (by->bytes == 4) memcpy(&bits, from, sizeof bits);
    else memcpy(&half, from, sizeof half), bits = (int32_t)((uint32_t)half << 16); /* a bfloat16: its first half */
#ifdef WIDTH
    if (by->half) return from_half(half);
#endif
    return float_of(bits);
}

#ifdef WIDTH

int has_products(void) { return 1; }

/* The weight is packed as [blocks of CHANNELS, inputs, CHANNELS]. */
static void float_product(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows) {
#pragma omp parallel for schedule(static)
    for (int64_t channel = 0; channel < by->outputs; channel += CHANNELS) {
        const char *block = by->weight + channel * by->inputs * by->bytes;
        if (by->bytes == 4) float_rows(by, x, stride, block, FLOATS, y, rows, channel);
        else if (by->half) float_rows(by, x, stride, block, HALVES, y, rows, channel);
        else float_rows(by, x, stride, block, BFLOATS, y, rows, channel);
    }
}

/* One channel of a weight as `float_product` has it packed. */
static void float_row(const product_t *by, int64_t channel, float *y) {
    const char *from = by->weight + (channel / CHANNELS * by->inputs * CHANNELS + channel % CHANNELS) * by->bytes;
    for (int64_t i = 0; i < by->inputs; i++, from += CHANNELS * by->bytes) y[i] = read_float(by, from);
}

static void packed_row(const product_t *by, int64_t channel, float *y) {
    if (by->bits) group_row(by, channel, y);
    else float_row(by, channel, y);
}

void multiply(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows, void *scratch) {
    for (; by; y += by->outputs, by = by->next)
        if (!by->bits) float_product(by, x, stride, y, rows);
        else if (!by->parts) grouped_product(by, x, stride, y, rows);
        else rounded_product(by, x, stride, y, rows, scratch);
}

#else

int has_products(void) { return 0; }
void multiply(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows, void *scratch) {}
static void packed_row(const product_t *by, int64_t channel, float *y) {}

#endif

/* One output of a weight that is `rowwise`, each number with one rounding. */
static void plain_row(const product_t *by, int64_t output, float *y) {
    const int64_t inputs = by->inputs, groups = by->bits ? inputs / by->group : 0;
    const int64_t heads = groups * (by->offsets ? 2 : 1) * (int64_t)sizeof *y;
    const char *from = by->weight + output * (by->bits ? heads + inputs : inputs * by->bytes);
    const float *steps = (const float *)from;
    const uint8_t *codes = (const uint8_t *)from + heads;
    for (int64_t i = 0; i < inputs && !by->bits; i++) y[i] = read_float(by, from + i * by->bytes);
    for (int64_t group = 0; group < groups; group++, y += by->group, codes += by->group)
        if (by->offsets)
            for (int64_t i = 0; i < by->group; i++) y[i] = fmaf(steps[group], codes[i], steps[groups + group]);
        else
            for (int64_t i = 0; i < by->group; i++) y[i] = steps[group] * (float)(codes[i] - (int)by->zero);
}

void look_up(const product_t *by, const int64_t *places, float *y, int64_t rows) {
    for (int64_t row = 0; row < rows; row++, y += by->inputs)
        if (by->rowwise) plain_row(by, places[row], y);
        else packed_row(by, places[row], y);
}
