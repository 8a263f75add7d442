/* What products.c and groups.c share: the product of a few rows with one block of output channels, whose weights are
   read once. */

#pragma once

#include "kernels.h"

#define CHANNELS 32 /* output channels side by side in a packed weight */
#define ROWS 6      /* rows whose sums stay in registers */
#define AHEAD 2048  /* bytes of a weight that are asked for before they are needed */

/* Numbers of rows that the compiler knows are unrolled. */
#define UNROLLED(rows, function, ...)                                                                                  \
    switch (rows) {                                                                                                    \
    case 1: function(__VA_ARGS__, 1); break;                                                                           \
    case 2: function(__VA_ARGS__, 2); break;                                                                           \
    case 3: function(__VA_ARGS__, 3); break;                                                                           \
    case 4: function(__VA_ARGS__, 4); break;                                                                           \
    case 5: function(__VA_ARGS__, 5); break;                                                                           \
    default: function(__VA_ARGS__, ROWS);                                                                              \
    }

static inline void finish(lanes result, const float *bias, float *y, int64_t channel, int64_t outputs) {
    if (channel >= outputs) return;
    if (bias) result += load(bias + channel);
    memcpy(y + channel, &result, sizeof(float) * (outputs - channel < LANES ? outputs - channel : LANES));
}

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

/* LANES numbers of a weight in `bytes` each, 4 or 2: the first half of a float32 is a bfloat16. */
static inline lanes numbers(const char *weight, int bytes) {
    if (bytes == 4) return load((const float *)weight);
    halves half;
    memcpy(&half, weight, sizeof half);
    return (lanes)(__builtin_convertvector(half, words) << 16);
}

static inline __attribute__((always_inline)) void float_block(const float *x, int64_t stride, const char *weight,
                                                              int bytes, const float *bias, float *y, int64_t inputs,
                                                              int64_t outputs, int64_t channel, int rows) {
    lanes sums[ROWS][2] = {0};
    for (int64_t k = 0; k < inputs; k++, weight += CHANNELS * bytes) {
        const lanes first = numbers(weight, bytes), second = numbers(weight + LANES * bytes, bytes);
        __builtin_prefetch(weight + AHEAD);
        if (bytes == 4) __builtin_prefetch(weight + AHEAD + 64);
        for (int r = 0; r < rows; r++) {
            sums[r][0] += x[r * stride + k] * first;
            sums[r][1] += x[r * stride + k] * second;
        }
    }
    for (int r = 0; r < rows; r++) {
        finish(sums[r][0], bias, y + r * outputs, channel, outputs);
        finish(sums[r][1], bias, y + r * outputs, channel + LANES, outputs);
    }
}

static inline __attribute__((always_inline)) void float_rows(const float *x, int64_t stride, const char *weight,
                                                             int bytes, const float *bias, float *y, int64_t rows,
                                                             int64_t inputs, int64_t outputs, int64_t channel) {
    for (int64_t row = 0; row < rows; row += ROWS)
        UNROLLED(rows - row, float_block, x + row * stride, stride, weight, bytes, bias, y + row * outputs, inputs,
                 outputs, channel)
}
