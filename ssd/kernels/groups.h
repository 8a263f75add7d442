/* Weights of few bits: of a channel, every `group` inputs have a step and an offset, and a number of the weight is
   step * (code - zero) + offset, with a code of 4 or 8 bits.

   A packed block, group by group: the steps of the channels, their offsets if there are any, both in float16 or if
   `wide` in float32; then the codes of four inputs and all channels after those of the four before. Of 8 bits: those of
   the first half of the channels, four bytes each, then of the others. Of 4 bits: one byte has the codes of channels
   HALF apart. */

#pragma once

#include "tile.h"

#define CHUNK 32 /* inputs that are rounded with one scale, and those of a group of GGUF's Q4_0, Q4_1 and Q8_0 */

#ifdef WIDTH

static inline int64_t head_bytes(const product_t *by) { return CHANNELS * (by->wide ? 4 : 2) * (by->offsets ? 2 : 1); }
static inline int64_t group_bytes(const product_t *by) {
    return head_bytes(by) + CHANNELS * by->group * by->bits / 8;
}

/* A pair's steps and offsets in the group that begins at `weight`. */
INLINED void head_of(const product_t *by, const char *weight, int pair, floats step[2], floats offset[2]) {
    const int64_t size = by->wide ? 4 : 2;
    EACH_HALF {
        const char *at = weight + (half * HALF + pair * WIDTH) * size;
        step[half] = by->wide ? floats_at(at) : halves_at(at);
        if (by->offsets) offset[half] = by->wide ? floats_at(at + CHANNELS * size) : halves_at(at + CHANNELS * size);
    }
}

/* A pair's codes of four inputs, whose codes begin at `weight`: four bytes for each channel. */
INLINED void codes_of(const char *weight, int pair, int bits, bytes codes[2]) {
    const bytes first = bytes_at(weight + pair * 4 * WIDTH);
    codes[0] = bits == 8 ? first : first & 15;
    codes[1] = bits == 8 ? bytes_at(weight + 4 * HALF + pair * 4 * WIDTH) : first >> 4;
}

static inline void prefetch_group(const char *weight, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(weight + AHEAD + line);
}

#endif
