/* Weights of few bits: how they are found and packed. */

#include "groups.h"

#ifdef WIDTH

static void pack_head(float number, int wide, char *to) {
    const uint16_t half = to_half(number);
    if (wide) memcpy(to, &number, sizeof number);
    else memcpy(to, &half, sizeof half);
}

static float read_head(const char *from, int wide) {
    float number;
    uint16_t half;
    if (wide) memcpy(&number, from, sizeof number);
    else memcpy(&half, from, sizeof half), number = from_half(half);
    return number;
}

/* Packs codes [outputs, inputs], steps and offsets [outputs, groups] into `packed`, which must be zero. */
void pack_groups(const product_t *by, const uint8_t *codes, const float *steps, const float *offsets, char *packed) {
    const int64_t groups = by->inputs / by->group, bytes = by->wide ? 4 : 2;
#pragma omp parallel for schedule(static)
    for (int64_t channel = 0; channel < by->outputs; channel++) {
        char *to = packed + channel / CHANNELS * groups * group_bytes(by);
        const int64_t own = channel % CHANNELS, half = own / HALF, lane = own % HALF;
        for (int64_t group = 0; group < groups; group++, to += group_bytes(by)) {
            const uint8_t *from = codes + channel * by->inputs + group * by->group;
            char *code = to + head_bytes(by) + 4 * lane;
            pack_head(steps[channel * groups + group], by->wide, to + bytes * own);
            if (offsets) pack_head(offsets[channel * groups + group], by->wide, to + bytes * (CHANNELS + own));
            for (int64_t i = 0; i < by->group; i++)
                if (by->bits == 8) code[(i / 4 * CHANNELS + half * HALF) * 4 + i % 4] = (char)from[i];
                else code[i / 4 * HALF * 4 + i % 4] |= (char)(from[i] << 4 * half);
        }
    }
}

/* One channel of a packed weight in float32, each number with one rounding. */
void group_row(const product_t *by, int64_t channel, float *y) {
    const int64_t groups = by->inputs / by->group, bytes = by->wide ? 4 : 2, half = CHANNELS / 2;
    const int64_t own = channel % CHANNELS, lane = by->bits == 8 ? own : own % half, line = CHANNELS * by->bits / 2;
    const int shift = by->bits == 8 ? 0 : own < half ? 0 : 4, mask = by->bits == 8 ? 255 : 15;
    const char *from = by->weight + channel / CHANNELS * groups * group_bytes(by);
    for (int64_t group = 0; group < groups; group++, from += group_bytes(by), y += by->group) {
        const float step = read_head(from + bytes * own, by->wide);
        const float offset = by->offsets ? read_head(from + bytes * (CHANNELS + own), by->wide) : 0.0f;
        const char *codes = from + head_bytes(by) + 4 * lane;
        for (int64_t i = 0; i < by->group; i += 4, codes += line)
            for (int j = 0; j < 4; j++) {
                const float code = (float)(((uint8_t)codes[j] >> shift & mask) - (int)by->zero);
                y[i + j] = by->offsets ? fmaf(step, code, offset) : step * code;
            }
    }
}

/* Finds one group of one channel to be offset + step * code; returns 0 if its numbers are not of that form. */
static int find_as(const float *weight, int64_t bits, float step, float offset, uint8_t *codes, float *found) {
    const float least = bits == 4 ? 0.0f : -127.0f, most = bits == 4 ? 15.0f : 127.0f;
    found[0] = step = from_half(to_half(step)), found[1] = offset = from_half(to_half(offset));
    for (int64_t i = 0; i < CHUNK; i++) {
        const float number = step != 0.0f ? rintf((weight[i] - offset) / step) : 0.0f;
        if (!(number >= least && number <= most) || step * number + offset != weight[i]) return 0;
        codes[i] = (uint8_t)((int32_t)number + (bits == 4 ? 0 : 128));
    }
    return 1;
}

static int find_group(const float *weight, int64_t bits, uint8_t *codes, float *found) {
    float low = weight[0], high = weight[0];
    for (int64_t i = 1; i < CHUNK; i++) {
        low = weight[i] < low ? weight[i] : low;
        high = weight[i] > high ? weight[i] : high;
    }
    const float largest = -low > high ? low : high;
    if (bits == 8) return find_as(weight, bits, largest / 127.0f, 0.0f, codes, found);      /* Q8_0 */
    return find_as(weight, bits, (high - low) / 15.0f, low, codes, found) ||                /* Q4_1 */
           find_as(weight, bits, largest / -8.0f, largest, codes, found);                   /* Q4_0 */
}

/* Finds the codes [outputs, inputs], and steps and offsets [outputs, inputs / CHUNK], of a weight that was dequantised
   from GGUF's Q4_0 or Q4_1 (4 bits, zero 0) or Q8_0 (8 bits, zero 128); returns 0 for any other weight. */
int find_groups(const float *weight, int64_t outputs, int64_t inputs, int64_t bits, uint8_t *codes, float *steps,
                float *offsets) {
    const int64_t groups = inputs / CHUNK;
    int sound = 1;
#pragma omp parallel for schedule(static) reduction(&& : sound)
    for (int64_t channel = 0; channel < outputs; channel++)
        for (int64_t group = 0; group < groups && sound; group++) {
            const int64_t at = channel * groups + group;
            float found[2];
            sound = find_group(weight + at * CHUNK, bits, codes + at * CHUNK, found);
            steps[at] = found[0], offsets[at] = found[1];
        }
    return sound;
}

#else

void pack_groups(const product_t *by, const uint8_t *codes, const float *steps, const float *offsets, char *packed) {}
void group_row(const product_t *by, int64_t channel, float *y) {}
int find_groups(const float *weight, int64_t outputs, int64_t inputs, int64_t bits, uint8_t *codes, float *steps,
                float *offsets) {
    return 0;
}

#endif
