/* The product with a weight of few bits in float32. Its numbers are made float32 again in registers, so the bits are
   those of `float_product` with the dequantised weight. */

#include <stdlib.h>

#include "groups.h"

#ifdef WIDTH

/* `head_of` with the zero in the offsets. */
INLINED void float_head(const product_t *by, const char *weight, int pair, const units_t *units, floats step[2],
                        floats offset[2]) {
    head_of(by, weight, pair, units, step, offset);
    EACH_HALF if (!by->offsets) offset[half] = step[half] * (float)-by->zero;
}

/* The numbers of the channels for the `i`-th of the four inputs of `codes`, each with one rounding. */
INLINED void numbers_of(const bytes codes[2], int i, const floats step[2], const floats offset[2], floats numbers[2]) {
    EACH_HALF {
        const ints code = (ints)((ints)codes[half] >> 8 * i) & 255;
        numbers[half] = fused(step[half], __builtin_convertvector(code, floats), offset[half]);
    }
}

/* Adds the products with a group's inputs. */
INLINED void group_pair(const product_t *by, const float *x, int64_t stride, const char *weight, int pair,
                        const units_t *units, int bits, bytes table, int rows, pair_t *sums) {
    pair_t own = *sums;
    floats step[2], offset[2], numbers[2];
    bytes codes[2];
    float_head(by, weight, pair, units, step, offset);
    weight += head_bytes(by);
#pragma GCC unroll 2
    for (int64_t k = 0; k < by->group; k += 4) {
        codes_of(weight, k, pair, bits, table, codes);
        for (int i = 0; i < 4; i++) {
            numbers_of(codes, i, step, offset, numbers);
            EACH_ROW {
                const floats own_x = alike(x[r * stride + k + i]);
                EACH_HALF own.of[r][half] = fused(own_x, numbers[half], own.of[r][half]);
            }
        }
    }
    *sums = own;
}

INLINED void group_block(const product_t *by, const float *x, int64_t stride, const char *weight, float *y,
                         int64_t channel, int bits, int rows) {
    pair_t sums[PAIRS] = {0};
    units_t units = {.next = 0};
    const bytes table = table_of(by);
    for (int64_t k = 0; k < by->inputs; k += by->group, weight += group_bytes(by)) {
        weight = group_at(by, weight, k, &units);
        prefetch(weight, group_bytes(by));
        EACH_PAIR group_pair(by, x + k, stride, weight, pair, &units, bits, table, rows, sums + pair);
    }
    finish(sums, by, y, channel, rows);
}

/* A block in float32, [inputs, CHANNELS]. */
static void unpack(const product_t *by, const char *weight, int bits, float *to) {
    floats step[2], offset[2], numbers[2];
    bytes codes[2];
    const bytes table = table_of(by);
    units_t units = {.next = 0};
    for (int64_t k = 0; k < by->inputs; k += by->group, weight += group_bytes(by), to += by->group * CHANNELS) {
        weight = group_at(by, weight, k, &units);
        EACH_PAIR {
            const char *from = weight + head_bytes(by);
            float_head(by, weight, pair, &units, step, offset);
            for (int64_t i = 0; i < by->group; i += 4) {
                codes_of(from, i, pair, bits, table, codes);
                for (int j = 0; j < 4; j++) {
                    numbers_of(codes, j, step, offset, numbers);
                    float *at = to + (i + j) * CHANNELS + pair * WIDTH;
                    EACH_HALF memcpy(at + half * HALF, numbers + half, sizeof *numbers);
                }
            }
        }
    }
}

/* Rows from which on a block is made float32 once, and not once for every ROWS rows. */
#define MANY (3 * ROWS + 1)

void grouped_product(const void *arguments, int64_t block) {
    const multiply_t *of = arguments;
    const product_t *by = of->by;
    const int64_t channel = block * CHANNELS, rows = of->rows;
    const char *weight = by->weight + block * block_bytes(by);
    float *stored = rows >= MANY ? malloc(by->inputs * CHANNELS * sizeof *stored) : NULL;
    if (stored) {
        unpack(by, weight, bits_read(by), stored);
        float_rows(by, of->x, of->stride, (const char *)stored, FLOATS, of->y, rows, channel);
        free(stored);
        return;
    }
    for (int64_t row = 0; row < rows; row += ROWS) {
        const float *from = of->x + row * of->stride;
        float *to = of->y + row * by->columns;
        if (by->named) UNROLLED(rows - row, group_block, by, from, of->stride, weight, to, channel, NAMED)
        else if (by->bits == 4) UNROLLED(rows - row, group_block, by, from, of->stride, weight, to, channel, 4)
        else if (by->bits == 6) UNROLLED(rows - row, group_block, by, from, of->stride, weight, to, channel, 6)
        else UNROLLED(rows - row, group_block, by, from, of->stride, weight, to, channel, 8)
    }
}

#else

void grouped_product(const void *arguments, int64_t block) {}

#endif
