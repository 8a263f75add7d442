/* Weights of few bits: how they are found and packed. */

#include "groups.h"

#ifdef WIDTH

static void pack_head(float number, int64_t bytes, int64_t wide, char *to) {
    const uint16_t half = to_half(number);
    const int8_t integer = wide == POWERS ? (int8_t)(bits_of(number) >> 23) : (int8_t)number;
    if (bytes == 4) memcpy(to, &number, sizeof number);
    else if (bytes == 2) memcpy(to, &half, sizeof half);
    else memcpy(to, &integer, sizeof integer);
}

static float read_head(const char *from, int64_t bytes, int64_t wide) {
    float number;
    uint16_t half;
    if (wide == POWERS) return float_of((uint8_t)*from << 23);
    if (bytes == 1) return (float)(int8_t)*from;
    if (bytes == 4) memcpy(&number, from, sizeof number);
    else memcpy(&half, from, sizeof half), number = from_half(half);
    return number;
}

/* Adds a channel's code of input `i` to the codes of its group, which begin at `to`; `own` is its place in the block. */
static void pack_code(uint8_t code, int64_t i, int64_t own, int64_t bits, char *to) {
    const int64_t half = own / HALF, lane = own % HALF * 4 + i % 4, line = 4 * HALF, eight = i / 8 * 3;
    if (bits == 8) to[(i / 4 * 2 + half) * line + lane] = (char)code;
    else if (bits == 4) to[i / 4 * line + lane] |= (char)(code << 4 * half);
    else {
        to[(eight + i / 4 % 2) * line + lane] |= (char)((code & 15) << 4 * half);
        to[(eight + 2) * line + lane] |= (char)(code >> 4 << (i / 4 % 2 * 4 + half * 2));
    }
}

static int read_code(const char *from, int64_t i, int64_t own, int64_t bits) {
    const int64_t half = own / HALF, lane = own % HALF * 4 + i % 4, line = 4 * HALF, eight = i / 8 * 3;
    const uint8_t *codes = (const uint8_t *)from;
    if (bits == 8) return codes[(i / 4 * 2 + half) * line + lane];
    if (bits == 4) return codes[i / 4 * line + lane] >> 4 * half & 15;
    return (codes[(eight + i / 4 % 2) * line + lane] >> 4 * half & 15) |
           (codes[(eight + 2) * line + lane] >> (i / 4 % 2 * 4 + half * 2) & 3) << 4;
}

/* Packs codes [outputs, inputs], steps and offsets [outputs, groups] into `packed`, which must be zero. With a span steps
   and offsets are multiples of `units`, [outputs, spans] of the steps, and then of the offsets. */
void pack_groups(const product_t *by, const uint8_t *codes, const float *steps, const float *offsets,
                 const float *units, char *packed) {
    const int64_t groups = by->inputs / by->group, bytes = number_bytes(by), spans = by->span ? by->inputs / by->span : 0;
    uint8_t names[256];
    for (int i = 0; i < 256; i++) names[i] = (uint8_t)i;
    for (int i = 0; i < 16 && by->named; i++) names[by->table[i]] = (uint8_t)i;
    /* A chunk is a block: its channels share bytes, in which two threads would lose bits of each other. */
#pragma omp parallel for schedule(static, CHANNELS)
    for (int64_t channel = 0; channel < by->outputs; channel++) {
        char *to = packed + channel / CHANNELS * block_bytes(by);
        const int64_t own = channel % CHANNELS;
        for (int64_t group = 0; group < groups; group++, to += group_bytes(by)) {
            if (by->span && group * by->group % by->span == 0) {
                const float *unit = units + channel * spans + group * by->group / by->span;
                for (int64_t head = 0; head < heads_of(by); head++, unit += by->outputs * spans)
                    pack_head(*unit, 2, 0, to + 2 * (head * CHANNELS + own));
                to += unit_bytes(by);
            }
            const uint8_t *from = codes + channel * by->inputs + group * by->group;
            pack_head(steps[channel * groups + group], bytes, by->wide, to + bytes * own);
            if (offsets) pack_head(offsets[channel * groups + group], bytes, by->wide, to + bytes * (CHANNELS + own));
            for (int64_t i = 0; i < by->group; i++) pack_code(names[from[i]], i, own, by->bits, to + head_bytes(by));
        }
    }
}

/* One channel of a packed weight in float32, each number with one rounding. */
void group_row(const product_t *by, int64_t channel, float *y) {
    const int64_t bytes = number_bytes(by), own = channel % CHANNELS;
    const char *from = by->weight + channel / CHANNELS * block_bytes(by);
    float units[2] = {1.0f, 1.0f};
    for (int64_t k = 0; k < by->inputs; k += by->group, from += group_bytes(by), y += by->group) {
        if (by->span && k % by->span == 0) {
            for (int head = 0; head < heads_of(by); head++)
                units[head] = read_head(from + 2 * (head * CHANNELS + own), 2, 0);
            from += unit_bytes(by);
        }
        const float step = units[0] * read_head(from + bytes * own, bytes, by->wide);
        const float lowest = by->offsets ? read_head(from + bytes * (CHANNELS + own), bytes, by->wide) : 0.0f;
        const float offset = units[1] * lowest;
        for (int64_t i = 0; i < by->group; i++) {
            const int stored = read_code(from + head_bytes(by), i, own, by->bits);
            const float code = (float)((by->named ? by->table[stored] : stored) - (int)by->zero);
            y[i] = by->offsets ? fmaf(step, code, offset) : step * code;
        }
    }
}

/* Sets used[code] for each of the codes; used [256] must be zero. */
void codes_used(const uint8_t *codes, int64_t count, uint8_t *used) {
#pragma omp parallel for schedule(static) reduction(| : used[:256])
    for (int64_t i = 0; i < count; i++) used[codes[i]] |= 1;
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

/* The codes of 4 bits that are nearest to the numbers of a group on the line `line[1] + line[0] * code`. */
static void nearest(const float *x, const float *line, float *codes) {
    const float by = line[0] != 0.0f ? 1.0f / line[0] : 0.0f;
    for (int64_t i = 0; i < CHUNK; i++) {
        const float code = rintf((x[i] - line[1]) * by), positive = code > 0.0f ? code : 0.0f;
        codes[i] = positive < 15.0f ? positive : 15.0f;
    }
}

/* The line through a group's extremes, then twice that of least squares through the nearest codes. */
static void fit_group(const float *x, float *line) {
    float low = x[0], high = x[0], mean = 0.0f;
#pragma omp simd reduction(min : low) reduction(max : high) reduction(+ : mean)
    for (int64_t i = 0; i < CHUNK; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        mean += x[i] / CHUNK;
    }
    line[0] = (high - low) / 15.0f, line[1] = low;
    for (int again = 0; again < 2; again++) {
        float codes[CHUNK], middle = 0.0f, squares = 0.0f, products = 0.0f;
        nearest(x, line, codes);
#pragma omp simd reduction(+ : middle)
        for (int64_t i = 0; i < CHUNK; i++) middle += codes[i] / CHUNK;
#pragma omp simd reduction(+ : squares, products)
        for (int64_t i = 0; i < CHUNK; i++) {
            squares += (codes[i] - middle) * (codes[i] - middle);
            products += (codes[i] - middle) * (x[i] - mean);
        }
        if (!(squares > 0.0f)) return;
        line[0] = products / squares, line[1] = mean - line[0] * middle;
    }
}

/* Rounds `count` numbers to whole multiples, -127 to 127, of a unit in float16, which it returns. */
static float round_heads(float *heads, int64_t count) {
    float most = 0.0f;
    for (int64_t i = 0; i < count; i++) most = fabsf(heads[i]) > most ? fabsf(heads[i]) : most;
    const float unit = from_half(to_half(most / 127.0f));
    for (int64_t i = 0; i < count; i++) {
        const float multiple = unit > 0.0f ? rintf(heads[i] / unit) : 0.0f;
        heads[i] = unit * (multiple > 127.0f ? 127.0f : multiple < -127.0f ? -127.0f : multiple);
    }
    return unit;
}

/* Rounds a weight to codes of 4 bits in groups of CHUNK, whose steps and offsets [outputs, 2, groups] are whole
   multiples, -127 to 127, of `units`, numbers of float16 [outputs, 2]. */
void round_groups(const float *weight, int64_t outputs, int64_t inputs, uint8_t *codes, float *lines, float *units) {
    const int64_t groups = inputs / CHUNK;
#pragma omp parallel for schedule(static)
    for (int64_t channel = 0; channel < outputs; channel++) {
        const float *from = weight + channel * inputs;
        float *steps = lines + channel * 2 * groups, *offsets = steps + groups, line[2], found[CHUNK];
        for (int64_t group = 0; group < groups; group++) {
            fit_group(from + group * CHUNK, line);
            steps[group] = line[0], offsets[group] = line[1];
        }
        units[channel * 2] = round_heads(steps, groups), units[channel * 2 + 1] = round_heads(offsets, groups);
        for (int64_t group = 0; group < groups; group++) {
            line[0] = steps[group], line[1] = offsets[group];
            nearest(from + group * CHUNK, line, found);
            for (int64_t i = 0; i < CHUNK; i++) codes[channel * inputs + group * CHUNK + i] = (uint8_t)found[i];
        }
    }
}

#else

void pack_groups(const product_t *by, const uint8_t *codes, const float *steps, const float *offsets,
                 const float *units, char *packed) {}
void group_row(const product_t *by, int64_t channel, float *y) {}
void codes_used(const uint8_t *codes, int64_t count, uint8_t *used) {}
int find_groups(const float *weight, int64_t outputs, int64_t inputs, int64_t bits, uint8_t *codes, float *steps,
                float *offsets) {
    return 0;
}
void round_groups(const float *weight, int64_t outputs, int64_t inputs, uint8_t *codes, float *lines, float *units) {}

#endif
