/* Shared by the products: the product of a few rows with one block of output channels, whose weights are read once.
   Beside each other run two vectors of channels, `pair` and `pair` + PAIRS of a block's: their codes of 4 bits lie in
   the same bytes. */

#pragma once

#include "kernels.h"
#include "simd.h"

#define CHANNELS 32 /* output channels side by side in a packed weight */
#define ROWS (WIDTH == 16 ? 8 : 6) /* rows whose sums stay in registers */
#define SET 64     /* rows that a product rounds and multiplies together: they stay in the second cache */
#define AHEAD 8192 /* bytes of a weight that a cache is asked for before they are needed */

/* Numbers of rows that the compiler knows are unrolled. */
#define UNROLLED(rows, function, ...)                                                                                  \
    switch (rows) {                                                                                                    \
    case 1: function(__VA_ARGS__, 1); break;                                                                           \
    case 2: function(__VA_ARGS__, 2); break;                                                                           \
    case 3: function(__VA_ARGS__, 3); break;                                                                           \
    case 4: function(__VA_ARGS__, 4); break;                                                                           \
    case 5: function(__VA_ARGS__, 5); break;                                                                           \
    case 6: function(__VA_ARGS__, 6); break;                                                                           \
    case 7: function(__VA_ARGS__, WIDTH == 16 ? 7 : 6); break;                                                         \
    default: function(__VA_ARGS__, ROWS);                                                                              \
    }
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
#define EACH_PART _Pragma("GCC unroll 2") for (int part = 0; part < parts; part++)
#define EACH_HALF _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++)

#ifdef WIDTH

#define HALF (CHANNELS / 2)
#define PAIRS (HALF / WIDTH)
#define EACH_PAIR for (int pair = 0; pair < PAIRS; pair++)

/* The sums of some rows for a pair. Functions copy them to a local variable, so that they stay in registers. */
typedef struct {
    floats of[ROWS][2];
} pair_t;

/* Writes sums to rows of y, `columns` apart. */
INLINED void finish(const pair_t sums[PAIRS], const product_t *by, float *y, int64_t channel, int rows) {
    EACH_PAIR EACH_ROW EACH_HALF {
        const int64_t to = channel + half * HALF + pair * WIDTH, left = by->outputs - to;
        floats result = sums[pair].of[r][half];
        if (left <= 0) continue;
        if (by->bias) result += floats_at((const char *)(by->bias + to));
        memcpy(y + r * by->columns + to, &result, sizeof(float) * (left < WIDTH ? left : WIDTH));
    }
}

/* Numbers of a weight: how many bytes each has is the first digit. */
#define FLOATS 40
#define BFLOATS 20
#define HALVES 21

INLINED floats numbers_at(const char *weight, int kind) {
    return kind == FLOATS ? floats_at(weight) : kind == HALVES ? halves_at(weight) : bfloats_at(weight);
}

/* Adds the products with `inputs` inputs of a weight in numbers of a `kind`, [inputs, CHANNELS]. */
INLINED void float_pair(const float *x, int64_t stride, const char *weight, int kind, int64_t inputs, int rows,
                        pair_t *sums) {
    const int bytes = kind / 10;
    pair_t own = *sums;
    for (int64_t k = 0; k < inputs; k++, weight += CHANNELS * bytes) {
        const floats first = numbers_at(weight, kind), second = numbers_at(weight + HALF * bytes, kind);
        __builtin_prefetch(weight + AHEAD, 0, 2);
        if (bytes == 4 && WIDTH == 16) __builtin_prefetch(weight + AHEAD + 64, 0, 2);
        EACH_ROW {
            own.of[r][0] = fused(alike(x[r * stride + k]), first, own.of[r][0]);
            own.of[r][1] = fused(alike(x[r * stride + k]), second, own.of[r][1]);
        }
    }
    *sums = own;
}

/* Inputs that all pairs take in turn: their weights stay in the nearest cache. */
#define STRIP (PAIRS == 1 ? INT64_MAX : 64)

INLINED void float_block(const product_t *by, const float *x, int64_t stride, const char *weight, int kind, float *y,
                         int64_t channel, int rows) {
    const int64_t inputs = by->inputs, bytes = kind / 10;
    pair_t sums[PAIRS] = {0};
    for (int64_t k = 0, some; k < inputs; k += some, weight += some * CHANNELS * bytes) {
        some = inputs - k < STRIP ? inputs - k : STRIP;
        EACH_PAIR float_pair(x + k, stride, weight + pair * WIDTH * bytes, kind, some, rows, sums + pair);
    }
    finish(sums, by, y, channel, rows);
}

/* All rows of the block that begins at `channel`, whose numbers are at `weight`. */
INLINED void float_rows(const product_t *by, const float *x, int64_t stride, const char *weight, int kind, float *y,
                        int64_t rows, int64_t channel) {
    for (int64_t row = 0; row < rows; row += ROWS)
        UNROLLED(rows - row, float_block, by, x + row * stride, stride, weight, kind, y + row * by->columns, channel)
}

#endif
