/* Weights that were dequantised from GGUF's Q4_0, Q4_1 or Q8_0: in groups of GROUP inputs of a channel every number is
   offset + step * q, with q of 4 or 8 bits. They are stored in that form, a sixth or a quarter of the bytes, and made
   float32 again in registers. The numbers are the same, and so are the bits of the products (`float_product`). */

#include <stdlib.h>

#include "tile.h"

#define GROUP 32

/* A packed block, group by group: the steps of the channels and with 4 bits their offsets, in float16; then, input by
   input, the channels' q: of 4 bits two of them in a byte, LANES apart. */
static int64_t group_bytes(int64_t bits) { return CHANNELS * (bits == 4 ? 4 + GROUP / 2 : 2 + GROUP); }

#ifdef __AVX512F__
#include <immintrin.h>

static inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
static inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
static inline lanes halves_at(const char *x) { return (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)x)); }

/* Packs one group of one channel as offset + step * q; returns 0 if its numbers are not of that form. */
static int pack_as(const float *weight, int64_t channel, int64_t bits, float step, float offset, char *packed) {
    const uint16_t halves[2] = {to_half(step), to_half(offset)};
    const float least = bits == 4 ? 0.0f : -127.0f, most = bits == 4 ? 15.0f : 127.0f;
    int32_t q[GROUP];
    step = from_half(halves[0]), offset = from_half(halves[1]);
    for (int64_t i = 0; i < GROUP; i++) {
        const float number = step != 0.0f ? rintf((weight[i] - offset) / step) : 0.0f;
        if (!(number >= least && number <= most) || step * number + offset != weight[i]) return 0;
        q[i] = (int32_t)number;
    }
    for (int64_t part = 0; part < (bits == 4 ? 2 : 1); part++, packed += 2 * CHANNELS)
        memcpy(packed + 2 * channel, halves + part, sizeof *halves);
    for (int64_t i = 0; i < GROUP; i++)
        if (bits == 8) packed[i * CHANNELS + channel] = (char)q[i];
        else packed[i * LANES + channel % LANES] |= (char)(q[i] << (channel < LANES ? 0 : 4));
    return 1;
}

static int pack_group(const float *weight, int64_t channel, int64_t bits, char *packed) {
    float low = weight[0], high = weight[0];
    for (int64_t i = 1; i < GROUP; i++) {
        low = weight[i] < low ? weight[i] : low;
        high = weight[i] > high ? weight[i] : high;
    }
    const float largest = -low > high ? low : high;
    if (bits == 8) return pack_as(weight, channel, bits, largest / 127.0f, 0.0f, packed);
    return pack_as(weight, channel, bits, (high - low) / 15.0f, low, packed) || /* Q4_1 */
           pack_as(weight, channel, bits, largest / -8.0f, largest, packed);    /* Q4_0 */
}

/* Packs weight [outputs, inputs] into `packed`, which must be zero; returns 0 if its numbers are not of that form. */
int pack_groups(const float *weight, int64_t outputs, int64_t inputs, int64_t bits, char *packed) {
    const int64_t size = group_bytes(bits), groups = inputs / GROUP;
    int sound = 1;
#pragma omp parallel for schedule(static) reduction(&& : sound)
    for (int64_t channel = 0; channel < outputs; channel++)
        for (int64_t group = 0; group < groups && sound; group++)
            sound = pack_group(weight + channel * inputs + group * GROUP, channel % CHANNELS, bits,
                               packed + (channel / CHANNELS * groups + group) * size);
    return sound;
}

/* The steps and offsets of a group; returns where its q begin. */
static inline const char *group_head(const char *weight, int bits, lanes step[2], lanes offset[2]) {
    for (int half = 0; half < 2; half++) {
        step[half] = halves_at(weight + 2 * LANES * half);
        if (bits == 4) offset[half] = halves_at(weight + 2 * CHANNELS + 2 * LANES * half);
    }
    return weight + (bits == 4 ? 4 : 2) * CHANNELS;
}

/* The numbers of the channels for one input. */
static inline void group_numbers(const char *codes, int bits, const lanes step[2], const lanes offset[2],
                                 lanes numbers[2]) {
    if (bits == 4) {
        const places both = (places)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)codes));
        numbers[0] = step[0] * __builtin_convertvector(both & 15, lanes) + offset[0];
        numbers[1] = step[1] * __builtin_convertvector(both >> 4, lanes) + offset[1];
    } else
        for (int half = 0; half < 2; half++) {
            const __m128i own = _mm_loadu_si128((const void *)(codes + half * LANES));
            numbers[half] = step[half] * __builtin_convertvector((places)_mm512_cvtepi8_epi32(own), lanes);
        }
}

static inline __attribute__((always_inline)) void group_block(const float *x, int64_t stride, const char *weight,
                                                              int bits, const float *bias, float *y, int64_t inputs,
                                                              int64_t outputs, int64_t channel, int rows) {
    lanes sums[ROWS][2] = {0}, step[2], offset[2] = {0};
    for (int64_t k = 0; k < inputs; k += GROUP) {
        for (int64_t line = 0; line < group_bytes(bits); line += 64) __builtin_prefetch(weight + AHEAD + line);
        weight = group_head(weight, bits, step, offset);
        for (int64_t i = k; i < k + GROUP; i++, weight += CHANNELS * bits / 8) {
            lanes numbers[2];
            group_numbers(weight, bits, step, offset, numbers);
            for (int r = 0; r < rows; r++) {
                sums[r][0] += x[r * stride + i] * numbers[0];
                sums[r][1] += x[r * stride + i] * numbers[1];
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        finish(sums[r][0], bias, y + r * outputs, channel, outputs);
        finish(sums[r][1], bias, y + r * outputs, channel + LANES, outputs);
    }
}

/* A block in float32, [inputs, CHANNELS]. */
static void unpack(const char *weight, int bits, int64_t inputs, float *numbers) {
    lanes step[2], offset[2] = {0}, found[2];
    for (int64_t k = 0; k < inputs; k += GROUP) {
        weight = group_head(weight, bits, step, offset);
        for (int64_t i = 0; i < GROUP; i++, weight += CHANNELS * bits / 8, numbers += CHANNELS) {
            group_numbers(weight, bits, step, offset, found);
            store(numbers, found[0]);
            store(numbers + LANES, found[1]);
        }
    }
}

/* From so many rows on, a block is made float32 once, and not once for every ROWS rows. */
#define MANY (3 * ROWS + 1)

void grouped_product(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows) {
    const int64_t inputs = by->inputs, outputs = by->outputs, size = inputs / GROUP * group_bytes(by->bits);
#pragma omp parallel
    {
        float *stored = rows >= MANY ? malloc(inputs * CHANNELS * sizeof *stored) : NULL;
#pragma omp for schedule(static)
        for (int64_t channel = 0; channel < outputs; channel += CHANNELS) {
            const char *block = by->weight + channel / CHANNELS * size;
            if (stored) {
                unpack(block, by->bits, inputs, stored);
                float_rows(x, stride, (const char *)stored, 4, by->bias, y, rows, inputs, outputs, channel);
                continue;
            }
            for (int64_t row = 0; row < rows; row += ROWS) {
                const float *from = x + row * stride;
                float *to = y + row * outputs;
                if (by->bits == 4)
                    UNROLLED(rows - row, group_block, from, stride, block, 4, by->bias, to, inputs, outputs, channel)
                else
                    UNROLLED(rows - row, group_block, from, stride, block, 8, by->bias, to, inputs, outputs, channel)
            }
        }
        free(stored);
    }
}

#else

int pack_groups(const float *weight, int64_t outputs, int64_t inputs, int64_t bits, char *packed) { return 0; }
void grouped_product(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows) {}

#endif
