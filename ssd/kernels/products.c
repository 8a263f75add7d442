/* Products of a few rows with a packed weight, at the speed of memory. */

#include "tile.h"

#ifdef WIDTH

int has_products(void) { return 1; }

/* The weight is packed as [blocks of CHANNELS, inputs, CHANNELS]. */
static void float_product(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows) {
#pragma omp parallel for schedule(static)
    for (int64_t channel = 0; channel < by->outputs; channel += CHANNELS) {
        const char *block = by->weight + channel * by->inputs * by->bytes;
        if (by->bytes == 2) float_rows(by, x, stride, block, 2, y, rows, channel);
        else float_rows(by, x, stride, block, 4, y, rows, channel);
    }
}

/* One channel of a weight as `float_product` has it packed. */
static void float_row(const product_t *by, int64_t channel, float *y) {
    const char *from = by->weight + (channel / CHANNELS * by->inputs * CHANNELS + channel % CHANNELS) * by->bytes;
    for (int64_t i = 0; i < by->inputs; i++, from += CHANNELS * by->bytes) {
        uint32_t bits = 0; /* the first half of a float32 is a bfloat16 */
        memcpy((char *)&bits + 4 - by->bytes, from, by->bytes);
        memcpy(y + i, &bits, sizeof bits);
    }
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
    if (!by->bits && by->bytes == 4) memcpy(y, from, inputs * sizeof *y);
    for (int64_t i = 0; i < inputs && !by->bits && by->bytes == 2; i++) /* the first half of a float32 is a bfloat16 */
        y[i] = float_of((int32_t)((uint32_t)((const uint16_t *)from)[i] << 16));
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
