/* Weights of few bits: of a channel, every `group` inputs have a step and an offset, and a number of the weight is
   step * (code - zero) + offset, with a code of 4, 6 or 8 bits.

   A packed block, group by group: the steps of the channels, their offsets if there are any, both in float16 or if
   `wide` in float32; then the codes. If `wide` is POWERS there are no offsets, and steps are powers of two, by their
   exponents in bytes. With a `span` steps and offsets are integers of 8 bits, multiples of units that all groups of
   `span` inputs share: those come first, of the steps and of the offsets, in float16.

   The codes of four inputs and all channels follow those of the four before. Of 8 bits: those of the first half of the
   channels, four bytes each, then of the others. Of 4 bits: one byte has the codes of channels HALF apart. Of 6 bits:
   their last four bits in that way for eight inputs, then a line of the others: a byte has two bits of the first four
   inputs, in both halves, then of the last four. If `named` codes of 4 bits name codes of 8: functions that know the
   `bits` are called with NAMED. */

#pragma once

#include "tile.h"

#define POWERS 2
#define NAMED 5
#define STORED(bits) ((bits) == NAMED ? 4 : (bits))
#define CHUNK 32 /* inputs that are rounded with one scale, and those of a group of GGUF's Q4_0, Q4_1 and Q8_0 */

#ifdef WIDTH

static inline int64_t number_bytes(const product_t *by) {
    return by->span || by->wide == POWERS ? 1 : by->wide ? 4 : 2;
}
static inline int bits_read(const product_t *by) { return by->named ? NAMED : (int)by->bits; }
static inline bytes table_of(const product_t *by) { return by->named ? repeated(by->table) : (bytes){0}; }
static inline int64_t heads_of(const product_t *by) { return by->offsets ? 2 : 1; }
static inline int64_t unit_bytes(const product_t *by) { return CHANNELS * 2 * heads_of(by); }
static inline int64_t head_bytes(const product_t *by) { return CHANNELS * number_bytes(by) * heads_of(by); }
static inline int64_t group_bytes(const product_t *by) {
    return head_bytes(by) + CHANNELS * by->group * by->bits / 8;
}
static inline int64_t block_bytes(const product_t *by) {
    return by->inputs / by->group * group_bytes(by) + (by->span ? by->inputs / by->span * unit_bytes(by) : 0);
}

/* The units of a pair's steps and offsets, and the input at which the next ones begin. */
typedef struct {
    floats of[PAIRS][2][2];
    int64_t next;
} units_t;

/* Where the group of input `k` begins, if what comes before it ends at `weight`; reads the units there, if any. */
INLINED const char *group_at(const product_t *by, const char *weight, int64_t k, units_t *units) {
    if (!by->span || k < units->next) return weight;
    EACH_PAIR EACH_HALF for (int head = 0; head < heads_of(by); head++)
        units->of[pair][half][head] = halves_at(weight + (head * CHANNELS + half * HALF + pair * WIDTH) * 2);
    units->next = k + by->span;
    return weight + unit_bytes(by);
}

/* A pair's steps and offsets in the group that begins at `weight`. */
INLINED void head_of(const product_t *by, const char *weight, int pair, const units_t *units, floats step[2],
                     floats offset[2]) {
    const int64_t size = number_bytes(by);
    EACH_HALF {
        const char *at = weight + (half * HALF + pair * WIDTH) * size, *second = at + CHANNELS * size;
        if (by->span) {
            step[half] = units->of[pair][half][0] * integers_at(at);
            if (by->offsets) offset[half] = units->of[pair][half][1] * integers_at(second);
        } else {
            step[half] = by->wide == POWERS ? powers_at(at) : by->wide ? floats_at(at) : halves_at(at);
            if (by->offsets) offset[half] = by->wide ? floats_at(second) : halves_at(second);
        }
    }
}

/* A pair's codes of the four inputs from `i` on, four bytes for each channel; `weight` has the codes of input 0. */
INLINED void codes_of(const char *weight, int64_t i, int pair, int bits, bytes table, bytes codes[2]) {
    if (bits == 8) {
        EACH_HALF codes[half] = bytes_at(weight + (i * CHANNELS + 4 * half * HALF) + pair * 4 * WIDTH);
        return;
    }
    const char *at = weight + (bits != 6 ? i / 4 : i / 8 * 3 + i / 4 % 2) * 4 * HALF + pair * 4 * WIDTH;
    const bytes last = bytes_at(at);
    codes[0] = last & 15, codes[1] = last >> 4;
    if (bits == NAMED) EACH_HALF codes[half] = named(table, codes[half]);
    if (bits == 6) {
        const ints first = (ints)bytes_at(weight + (i / 8 * 3 + 2) * 4 * HALF + pair * 4 * WIDTH);
        codes[0] |= (bytes)(i / 4 % 2 ? first : first << 4) & 48;
        codes[1] |= (bytes)(i / 4 % 2 ? (ints)(first >> 2) : first << 2) & 48;
    }
}

/* Asks for the bytes that lie AHEAD of `weight`. Products of rounded inputs call it for a line or two at a time: among
   the work on others that delays least. */
static inline void prefetch(const char *weight, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(weight + AHEAD + line, 0, 3);
}

#endif
