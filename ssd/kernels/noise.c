/* The noise of `ssd.speculation.noise`, in one pass: a hash for every token id, and two logarithms of it. */

#include "kernels.h"

/* MurmurHash3's 32-bit finaliser (Appleby, public domain). */
static inline words mixed(words x) {
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    return x ^ x >> 16;
}

/* -ln E with E = -ln(1 - u), which keeps its resolution near 0: for y = 1 - u as it is rounded, ln y / (1 - y) hardly
   differs from E / u (W. Kahan's). Small u are their own E. */
static inline lanes gumbels(words hash) {
    const lanes drawn = (__builtin_convertvector(hash & 0x7FFFFFFFu, lanes) + 0.5f) * 0x1p-31f;
    const lanes most = drawn * 0.0f + (1.0f - 0x1p-24f), u = pick(greater(drawn, most), most, drawn), y = 1.0f - u;
    const lanes e = pick(equal(y, (lanes){0} + 1.0f), u, -logarithm(y) * (u / (1.0f - y)));
    return -logarithm(e);
}

static inline words words_of(const int64_t *ids, int64_t count) {
    words found = {0};
    for (int64_t lane = 0; lane < count; lane++) found[lane] = (uint32_t)ids[lane];
    return found;
}

void gumbel(const int32_t *keys, int32_t first, const int64_t *ids, float *y, int64_t rows, int64_t size) {
    words in_order;
    for (int lane = 0; lane < LANES; lane++) in_order[lane] = first + lane;
    for (int64_t row = 0; row < rows; row++, keys += 2, y += size) {
        const uint32_t low = keys[0], high = keys[1];
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t count = size - i < LANES ? size - i : LANES;
            const words id = ids ? words_of(ids + i, count) : in_order + (uint32_t)i;
            const lanes noise = gumbels(mixed(mixed(id * 0x9E3779B1u + low) ^ high));
            if (count == LANES) store(y + i, noise);
            else store_some(y + i, noise, count);
        }
    }
}
