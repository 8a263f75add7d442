/* Prints a hash of the bits of each kind of product, with made-up weights and inputs: the same on every processor. */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels.h"

enum { OUTPUTS = 70, INPUTS = 192, MOST_ROWS = 8 };

int find_groups(const float *weight, int64_t outputs, int64_t inputs, int64_t bits, uint8_t *codes, float *steps,
                float *offsets);
void pack_groups(const product_t *by, const uint8_t *codes, const float *steps, const float *offsets,
                 const float *units, char *packed);

static uint32_t state = 1;

static uint32_t drawn(void) { return (state = state * 1664525u + 1013904223u) >> 8; }

/* A number that float16 has too, unless it is `wide`. */
static float number(int wide) { return ((float)(drawn() % 2047) - 1023.0f) / (wide ? 3333.0f : 1024.0f); }

static uint64_t hash_of(const float *y, int64_t count) {
    uint64_t hash = 14695981039346656037u;
    for (int64_t i = 0; i < count; i++) hash = (hash ^ (uint32_t)bits_of(y[i])) * 1099511628211u;
    return hash;
}

/* Finds the groups of a weight of GGUF's kind again. */
static void found_of(int bits) {
    static uint8_t codes[OUTPUTS * INPUTS];
    static float weight[OUTPUTS * INPUTS], steps[OUTPUTS * INPUTS / 32], offsets[OUTPUTS * INPUTS / 32];
    float step = 0.0f;
    for (int i = 0; i < OUTPUTS * INPUTS; i++) {
        if (i % 32 == 0) step = number(0);
        const int code = i % 32 < 2 ? i % 32 * (bits == 4 ? 15 : 254) : (int)(drawn() % (1 << bits));
        weight[i] = step * (float)(bits == 4 ? code : code % 255 - 127);
    }
    const int found = find_groups(weight, OUTPUTS, INPUTS, bits, codes, steps, offsets);
    uint64_t hash = hash_of(steps, OUTPUTS * INPUTS / 32) ^ hash_of(offsets, OUTPUTS * INPUTS / 32);
    for (int i = 0; i < OUTPUTS * INPUTS; i++) hash = (hash ^ codes[i]) * 1099511628211u;
    printf("found %d of %d bits: %016" PRIx64 "\n", found, bits, hash);
}

static void products_of(product_t by) {
    static uint8_t codes[OUTPUTS * INPUTS];
    static float units[2 * OUTPUTS * INPUTS], steps[OUTPUTS * INPUTS], offsets[OUTPUTS * INPUTS], x[MOST_ROWS * INPUTS], y[MOST_ROWS * OUTPUTS];
    static char packed[96 * INPUTS * 8], scratch[MOST_ROWS * INPUTS * 8];
    for (int i = 0; i < OUTPUTS * INPUTS; i++) codes[i] = drawn() % (1 << by.bits);
    for (int i = 0; i < OUTPUTS * INPUTS; i++) steps[i] = number((int)by.wide), offsets[i] = number((int)by.wide);
    for (int i = 0; i < OUTPUTS * INPUTS && by.named; i++)
        codes[i] = by.table[codes[i]], steps[i] = by.wide == 2 ? ldexpf(1.0f, (int)(drawn() % 9) - 6) : steps[i];
    for (int i = 0; i < 2 * OUTPUTS * INPUTS; i++) units[i] = number(0);
    for (int i = 0; i < OUTPUTS * INPUTS && by.span; i++)
        steps[i] = (float)((int)(drawn() % 256) - 128), offsets[i] = (float)(drawn() % 128);
    for (int i = 0; i < MOST_ROWS * INPUTS; i++) x[i] = number(1) * (i % 7 ? 1.0f : 100.0f);
    const uint8_t largest = by.named ? by.table[15] : (1 << by.bits) - 1;
    for (int i = 0; i < 32; i++) x[i] = 0.0f, x[32 + i] = i % 3 ? -1.0f : 1.0f, codes[32 + i] = largest;
    memset(packed, 0, sizeof packed);
    pack_groups(&by, codes, steps, by.offsets ? offsets : NULL, units, packed);
    by.weight = packed;
    for (int64_t rows = 1; rows <= MOST_ROWS; rows++) {
        multiply(&by, x, INPUTS, y, rows, scratch);
        printf(" %016" PRIx64, hash_of(y, rows * OUTPUTS));
    }
    putchar('\n');
}

int main(void) {
    for (int bits = 4; bits <= 8; bits += 2)
        for (int group = bits == 6 ? 8 : 4; group <= INPUTS; group = group == 64 ? INPUTS : 2 * group)
            for (int kind = 0; kind < 6; kind++)
                for (int parts = 0; parts < 3; parts++) {
                    const int shifted = kind & 1, wide = kind >> 1 == 1, span = kind < 4 ? 0 : group > 64 ? INPUTS : 64;
                    printf("bits %d group %d offsets %d wide %d span %d parts %d:", bits, group, shifted, wide, span, parts);
                    const int zero = shifted ? 0 : 1 << (bits - 1);
                    products_of((product_t){INPUTS, OUTPUTS, 0, bits, group, zero, shifted, wide, parts, 0, span, OUTPUTS});
                }
    for (int group = 4; group <= 64; group *= 2)
        for (int wide = 0; wide < 3; wide++)
            for (int parts = 0; parts < 3; parts++) {
                product_t by = {INPUTS, OUTPUTS, 0, 4, group, 128, 0, wide, parts, 0, 0, OUTPUTS, .named = 1};
                for (int i = 0; i < 16; i++) by.table[i] = (uint8_t)(i * i + i);
                printf("named group %d wide %d parts %d:", group, wide, parts);
                products_of(by);
            }
    found_of(4);
    found_of(8);
    return 0;
}
