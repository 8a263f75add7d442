/* Products of a few rows with a packed weight, at the speed of memory. */

#include "tile.h"

int has_float_product(void) {
#ifdef __AVX512F__
    return 1; /* elsewhere there are not registers enough */
#else
    return 0;
#endif
}

int has_int8_product(void) {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

/* -- float32 -------------------------------------------------------------------------------------------------------- */

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

/* -- integers of 8 bits --------------------------------------------------------------------------------------------- */

#ifdef __AVX512VNNI__
#include <immintrin.h>

/* Rows as integers in one or two parts: first the last bytes [inputs], then the ones before them, row after row. */
static void split_bytes(const product_t *by, const float *x, int64_t stride, uint8_t *bytes, float *sizes,
                        int64_t rows) {
    const int64_t inputs = by->inputs;
    for (int64_t row = 0; row < rows; row++, x += stride, bytes += by->parts * inputs) {
        int32_t most = bits_of(by->least); /* the order of sizes is that of their bits, and no number is the largest */
        for (int64_t i = 0; i < inputs; i++) {
            const int32_t bits = bits_of(x[i]) & INT32_MAX;
            most = bits > most ? bits : most;
        }
        sizes[row] = float_of(most);
        const float factor = by->levels / sizes[row], shift = UNITS + by->zero;
        for (int64_t i = 0; i < inputs; i++) bytes[i] = (uint8_t)bits_of(x[i] * factor + shift);
        if (by->parts == 2)
            for (int64_t i = 0; i < inputs; i++) bytes[inputs + i] = (uint8_t)(bits_of(x[i] * factor + shift) >> 8);
    }
}

#define MORE_ROWS (ROWS + 2)

static inline __attribute__((always_inline)) void int8_block(const uint8_t *bytes, const float *sizes,
                                                             const int8_t *weight, const float *scales,
                                                             const int32_t *zeros, const float *bias, float *y,
                                                             int64_t inputs, int64_t outputs, int64_t channel,
                                                             int parts, int rows) {
    __m512i sums[MORE_ROWS][2][2]; /* of either part, for either half of the channels */
    for (int r = 0; r < rows; r++)
        for (int part = 0; part < parts; part++)
            sums[r][part][0] = sums[r][part][1] = _mm512_setzero_si512();
    for (int64_t k = 0; k < inputs; k += 4, weight += 4 * CHANNELS) {
        const __m512i first = _mm512_loadu_si512(weight), second = _mm512_loadu_si512(weight + 64);
        __builtin_prefetch(weight + AHEAD);
        __builtin_prefetch(weight + AHEAD + 64);
        for (int r = 0; r < rows; r++)
            for (int part = 0; part < parts; part++) {
                int32_t four;
                memcpy(&four, bytes + (parts * r + part) * inputs + k, sizeof four);
                const __m512i x = _mm512_set1_epi32(four);
                sums[r][part][0] = _mm512_dpbusd_epi32(sums[r][part][0], x, first);
                sums[r][part][1] = _mm512_dpbusd_epi32(sums[r][part][1], x, second);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            const int64_t at = channel + half * LANES;
            const __m512i zero = _mm512_loadu_si512(zeros + at);
            lanes sum = (lanes)_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][0][half], zero));
            if (parts == 2) sum += 256.0f * (lanes)_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][1][half], zero));
            finish(sum * (load(scales + at) * sizes[r]), bias, y + r * outputs, at, outputs);
        }
}

/* In one part more rows than in two have their sums in registers; 9 to 12 are quicker in two runs. */
static inline __attribute__((always_inline)) void int8_rows(const uint8_t *bytes, int parts, const float *sizes,
                                                            const int8_t *weight, const float *scales,
                                                            const int32_t *zeros, const float *bias, float *y,
                                                            int64_t rows, int64_t inputs, int64_t outputs,
                                                            int64_t channel) {
    for (int64_t row = 0, some; row < rows; row += some) {
        const int64_t left = rows - row;
        some = parts == 1 && left > ROWS && (left <= MORE_ROWS || left > 2 * ROWS) ? MORE_ROWS : ROWS;
        if (some == ROWS)
            UNROLLED(left, int8_block, bytes + parts * row * inputs, sizes + row, weight, scales, zeros, bias,
                     y + row * outputs, inputs, outputs, channel, parts)
        else if (left == ROWS + 1)
            int8_block(bytes + row * inputs, sizes + row, weight, scales, zeros, bias, y + row * outputs, inputs,
                       outputs, channel, 1, ROWS + 1);
        else
            int8_block(bytes + row * inputs, sizes + row, weight, scales, zeros, bias, y + row * outputs, inputs,
                       outputs, channel, 1, MORE_ROWS);
    }
}

/* The weight is packed as [blocks of CHANNELS, inputs / 4, CHANNELS, 4]. */
static void int8_product(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows, void *scratch) {
    float *sizes = scratch;
    uint8_t *bytes = (uint8_t *)(sizes + rows);
    split_bytes(by, x, stride, bytes, sizes, rows);
    const int64_t inputs = by->inputs, outputs = by->outputs;
#pragma omp parallel for schedule(static)
    for (int64_t channel = 0; channel < outputs; channel += CHANNELS) {
        const int8_t *block = (const int8_t *)by->weight + channel * inputs;
        if (by->parts == 1)
            int8_rows(bytes, 1, sizes, block, by->scales, by->zeros, by->bias, y, rows, inputs, outputs, channel);
        else
            int8_rows(bytes, 2, sizes, block, by->scales, by->zeros, by->bias, y, rows, inputs, outputs, channel);
    }
}
#endif

void multiply(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows, void *scratch) {
#ifdef __AVX512VNNI__
    if (by->bytes == 1) {
        int8_product(by, x, stride, y, rows, scratch);
        return;
    }
#endif
    (void)scratch;
    if (by->bits) {
        grouped_product(by, x, stride, y, rows);
        return;
    }
    float_product(by, x, stride, y, rows);
}
