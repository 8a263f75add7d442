/* Products of a few rows with a packed weight, at the speed of memory. */

#include "tile.h"

#ifdef WIDTH

int has_products(void) { return 1; }

/* The weight is packed as [blocks of CHANNELS, inputs, CHANNELS]. */
static void float_product(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows) {
    const int64_t inputs = by->inputs, outputs = by->outputs;
#pragma omp parallel for schedule(static)
    for (int64_t channel = 0; channel < outputs; channel += CHANNELS) {
        const char *block = by->weight + channel * inputs * by->bytes;
        if (by->bytes == 2)
            float_rows(x, stride, block, 2, by->bias, y, rows, inputs, outputs, channel);
        else
            float_rows(x, stride, block, 4, by->bias, y, rows, inputs, outputs, channel);
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

void look_up(const product_t *by, const int64_t *places, float *y, int64_t rows) {
    for (int64_t row = 0; row < rows; row++, y += by->inputs)
        if (by->bits) group_row(by, places[row], y);
        else float_row(by, places[row], y);
}

void multiply(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows, void *scratch) {
    if (!by->bits) float_product(by, x, stride, y, rows);
    else if (!by->parts) grouped_product(by, x, stride, y, rows);
    else rounded_product(by, x, stride, y, rows, scratch);
}

#else

int has_products(void) { return 0; }
void multiply(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows, void *scratch) {}

#endif
