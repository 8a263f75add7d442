/* Weights of few bits: of a channel, every `group` inputs have a step and an offset, and a number of the weight is
   step * (code - zero) + offset, with a code of 4 or 8 bits. There are two products with them. `grouped_product`
   makes the numbers float32 again in registers: its bits are those of `float_product`. `rounded_product` rounds the
   inputs to integers of 8 or 16 bits, a scale for every chunk of at most CHUNK inputs, and sums products of integers,
   which are exact, within a chunk. */

#include <stdlib.h>

#include "tile.h"

#define CHUNK 32

/* A packed block, group by group: the steps of the channels, their offsets if there are any, both in float16 or if `wide`
   in float32; then the codes of four inputs and all channels after those of the four before. Of 8 bits: those of the
   first LANES channels, four bytes each, then of the others. Of 4 bits: one byte has the codes of channels LANES apart. */
static int64_t head_bytes(const product_t *by) { return CHANNELS * (by->wide ? 4 : 2) * (by->offsets ? 2 : 1); }
static int64_t group_bytes(const product_t *by) { return head_bytes(by) + CHANNELS * by->group * by->bits / 8; }

#ifdef __AVX512F__
#include <immintrin.h>

static inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
static inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

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
        const int64_t own = channel % CHANNELS, half = own / LANES, lane = own % LANES;
        for (int64_t group = 0; group < groups; group++, to += group_bytes(by)) {
            const uint8_t *from = codes + channel * by->inputs + group * by->group;
            char *code = to + head_bytes(by) + 4 * lane;
            pack_head(steps[channel * groups + group], by->wide, to + bytes * own);
            if (offsets) pack_head(offsets[channel * groups + group], by->wide, to + bytes * (CHANNELS + own));
            for (int64_t i = 0; i < by->group; i++)
                if (by->bits == 8) code[i / 4 * 128 + half * 64 + i % 4] = (char)from[i];
                else code[i / 4 * 64 + i % 4] |= (char)(from[i] << 4 * half);
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

static inline lanes every(float x) { return (lanes)_mm512_set1_ps(x); }
static inline lanes fused(lanes a, lanes b, lanes c) { return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

static inline lanes head_at(const char *x, int wide) {
    return wide ? load((const float *)x) : (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)x));
}

/* The steps and offsets of a group; returns where its codes begin. */
static inline const char *group_head(const product_t *by, const char *weight, lanes step[2], lanes offset[2]) {
    const int64_t line = by->wide ? 64 : 32;
    for (int half = 0; half < 2; half++) {
        step[half] = head_at(weight + half * line, by->wide);
        if (by->offsets) offset[half] = head_at(weight + (2 + half) * line, by->wide);
    }
    return weight + head_bytes(by);
}

static inline void prefetch_group(const char *weight, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(weight + AHEAD + line);
}

/* The codes of four inputs for both halves of the channels, a byte each. */
static inline const char *codes_at(const char *weight, int bits, __m512i codes[2]) {
    const __m512i first = _mm512_loadu_si512(weight), low = _mm512_set1_epi8(15);
    codes[0] = bits == 8 ? first : _mm512_and_si512(first, low);
    codes[1] = bits == 8 ? _mm512_loadu_si512(weight + 64) : _mm512_and_si512(_mm512_srli_epi16(first, 4), low);
    return weight + 16 * bits;
}

/* -- in float32 ------------------------------------------------------------------------------------------------------ */

/* The numbers of the channels for the `i`-th of the four inputs of `codes`, each with one rounding. */
static inline void numbers_of(const __m512i codes[2], int i, const lanes step[2], const lanes offset[2],
                              lanes numbers[2]) {
    for (int half = 0; half < 2; half++) {
        const __m512i code = _mm512_and_si512(_mm512_srli_epi32(codes[half], 8 * i), _mm512_set1_epi32(255));
        numbers[half] = fused(step[half], (lanes)_mm512_cvtepi32_ps(code), offset[half]);
    }
}

/* As `group_head`, with the zero in the offsets. */
static inline const char *float_head(const product_t *by, const char *weight, lanes step[2], lanes offset[2]) {
    const char *codes = group_head(by, weight, step, offset);
    for (int half = 0; half < 2 && !by->offsets; half++) offset[half] = step[half] * (float)-by->zero;
    return codes;
}

static inline __attribute__((always_inline)) void group_block(const product_t *by, const float *x, int64_t stride,
                                                              const char *weight, float *y, int64_t channel, int bits,
                                                              int rows) {
    lanes sums[ROWS][2] = {0}, step[2], offset[2], own[2];
    __m512i codes[2];
    for (int64_t k = 0; k < by->inputs;) {
        prefetch_group(weight, group_bytes(by));
        weight = float_head(by, weight, step, offset);
        for (const int64_t end = k + by->group; k < end; k += 4) {
            weight = codes_at(weight, bits, codes);
            for (int i = 0; i < 4; i++) {
                numbers_of(codes, i, step, offset, own);
                for (int r = 0; r < rows; r++) {
                    sums[r][0] += x[r * stride + k + i] * own[0];
                    sums[r][1] += x[r * stride + k + i] * own[1];
                }
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        finish(sums[r][0], by->bias, y + r * by->outputs, channel, by->outputs);
        finish(sums[r][1], by->bias, y + r * by->outputs, channel + LANES, by->outputs);
    }
}

/* A block in float32, [inputs, CHANNELS]. */
static void unpack(const product_t *by, const char *weight, int bits, float *numbers) {
    lanes step[2], offset[2], own[2];
    __m512i codes[2];
    for (int64_t k = 0; k < by->inputs;) {
        weight = float_head(by, weight, step, offset);
        for (const int64_t end = k + by->group; k < end; k += 4) {
            weight = codes_at(weight, bits, codes);
            for (int i = 0; i < 4; i++, numbers += CHANNELS) {
                numbers_of(codes, i, step, offset, own);
                store(numbers, own[0]);
                store(numbers + LANES, own[1]);
            }
        }
    }
}

/* From so many rows on, a block is made float32 once, and not once for every ROWS rows. */
#define MANY (3 * ROWS + 1)

void grouped_product(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows) {
    const int64_t inputs = by->inputs, outputs = by->outputs, size = inputs / by->group * group_bytes(by);
#pragma omp parallel
    {
        float *stored = rows >= MANY ? malloc(inputs * CHANNELS * sizeof *stored) : NULL;
#pragma omp for schedule(static)
        for (int64_t channel = 0; channel < outputs; channel += CHANNELS) {
            const char *block = by->weight + channel / CHANNELS * size;
            if (stored) {
                unpack(by, block, by->bits, stored);
                float_rows(x, stride, (const char *)stored, 4, by->bias, y, rows, inputs, outputs, channel);
                continue;
            }
            for (int64_t row = 0; row < rows; row += ROWS) {
                const float *from = x + row * stride;
                float *to = y + row * outputs;
                if (by->bits == 4) UNROLLED(rows - row, group_block, by, from, stride, block, to, channel, 4)
                else UNROLLED(rows - row, group_block, by, from, stride, block, to, channel, 8)
            }
        }
        free(stored);
    }
}

#else

void pack_groups(const product_t *by, const uint8_t *codes, const float *steps, const float *offsets, char *packed) {}
void group_row(const product_t *by, int64_t channel, float *y) {}
int find_groups(const float *weight, int64_t outputs, int64_t inputs, int64_t bits, uint8_t *codes, float *steps,
                float *offsets) {
    return 0;
}
void grouped_product(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows) {}

#endif

/* -- with rounded inputs --------------------------------------------------------------------------------------------- */

int has_rounded_product(void) {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

#ifdef __AVX512VNNI__

/* A chunk of inputs: their scale, their sum, the sum of their integers, and the integers; of 16 bits all last bytes come
   before the others. Rows are rounded in tiles: a tile's chunks follow each other, each with all its rows. */
typedef struct {
    float scale, sum;
    int32_t total, unused;
    int8_t integers[];
} chunk_t;

static int64_t chunk_of(const product_t *by) {
    for (int64_t chunk = CHUNK;; chunk /= 2)
        if (by->group % chunk == 0) return chunk;
}

/* Rows of a tile: as many in all tiles, or one less in the last. */
static int64_t tile_of(int64_t rows) {
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    return (rows + tiles - 1) / tiles;
}

static void round_chunk(const float *x, int64_t size, int64_t parts, chunk_t *to) {
    const float levels = parts == 1 ? 127.0f : 32639.0f; /* 127 * 256 + 127 */
    const __mmask16 some = size < LANES ? (1 << size) - 1 : 0xffff;
    const __m512i magnitude = _mm512_set1_epi32(INT32_MAX), half = _mm512_set1_epi32(128);
    __m512i most = _mm512_setzero_si512(), all = most; /* the order of sizes is that of their bits; NaN is the largest */
    for (int64_t i = 0; i < size; i += LANES)
        most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_maskz_loadu_epi32(some, x + i), magnitude));
    const float largest = float_of(_mm512_reduce_max_epi32(most)), factor = levels / largest;
    const __m512 by = _mm512_set1_ps(factor < INFINITY ? factor : 0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(some, x + i), by));
        all = _mm512_add_epi32(all, q);
        _mm512_mask_cvtepi32_storeu_epi8(to->integers + i, some, q);
        if (parts == 1) continue;
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, half), 8);
        _mm512_mask_cvtepi32_storeu_epi8(to->integers + size + i, some, high);
    }
    to->scale = largest / levels;
    to->total = _mm512_reduce_add_epi32(all);
    to->sum = to->scale * (float)to->total;
}

static void round_rows(const product_t *by, const float *x, int64_t stride, int64_t rows, int64_t chunk, char *to) {
    const int64_t chunks = by->inputs / chunk, bytes = sizeof(chunk_t) + by->parts * chunk;
    for (int64_t row = 0, tile = tile_of(rows); row < rows; row += tile) {
        const int64_t some = rows - row < tile ? rows - row : tile;
        for (int64_t i = 0; i < chunks; i++)
            for (int64_t r = 0; r < some; r++, to += bytes)
                round_chunk(x + (row + r) * stride + i * chunk, chunk, by->parts, (chunk_t *)to);
    }
}

#define EACH_ROW _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++)
#define EACH_HALF _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++)

/* sums[r][half]: the integers of one chunk of each row times the codes; returns the codes of the next chunk. */
static inline __attribute__((always_inline)) const char *chunk_sums(const char *x, const char *weight,
                                                                    __m512i sums[ROWS][2], int64_t chunk, int bits,
                                                                    int parts, int rows) {
    const int64_t bytes = sizeof(chunk_t) + parts * chunk;
    __m512i codes[2];
    EACH_ROW sums[r][0] = sums[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int part = parts - 1; part >= 0; part--) {
        const char *from = weight;
#pragma GCC unroll 8
        for (int64_t i = 0; i < chunk; i += 4) {
            from = codes_at(from, bits, codes);
            EACH_ROW {
                int32_t four;
                memcpy(&four, x + r * bytes + sizeof(chunk_t) + part * chunk + i, sizeof four);
                EACH_HALF sums[r][half] = _mm512_dpbusd_epi32(sums[r][half], codes[half], _mm512_set1_epi32(four));
            }
        }
        if (part) EACH_ROW EACH_HALF sums[r][half] = _mm512_slli_epi32(sums[r][half], 8);
    }
    return weight + CHANNELS * chunk * bits / 8;
}

static inline __attribute__((always_inline)) void rounded_block(const product_t *by, const char *x, const char *weight,
                                                                float *y, int64_t channel, int64_t chunk, int bits,
                                                                int parts, int offsets, int rows) {
    const int64_t bytes = sizeof(chunk_t) + parts * chunk, line = group_bytes(by);
    const int32_t zero = (int32_t)by->zero;
    __m512i integers[ROWS][2];
    lanes sums[ROWS][2] = {0}, step[2], offset[2] = {0};
    for (int64_t k = 0; k < by->inputs;) {
        prefetch_group(weight, line);
        weight = group_head(by, weight, step, offset);
        for (const int64_t end = k + by->group; k < end; k += chunk, x += rows * bytes) {
            weight = chunk_sums(x, weight, integers, chunk, bits, parts, rows);
            EACH_ROW {
                const chunk_t *own = (const chunk_t *)(x + r * bytes);
                const __m512i shift = _mm512_set1_epi32(zero * own->total);
                EACH_HALF {
                    const __m512i exact = offsets ? integers[r][half] : _mm512_sub_epi32(integers[r][half], shift);
                    sums[r][half] = fused(step[half] * own->scale, (lanes)_mm512_cvtepi32_ps(exact), sums[r][half]);
                    if (offsets) sums[r][half] = fused(offset[half], every(own->sum), sums[r][half]);
                }
            }
        }
    }
    EACH_ROW EACH_HALF finish(sums[r][half], by->bias, y + r * by->outputs, channel + half * LANES, by->outputs);
}

/* All rows of one block. */
static inline __attribute__((always_inline)) void rounded_rows(const product_t *by, const char *x, const char *weight,
                                                               float *y, int64_t rows, int64_t channel, int64_t chunk,
                                                               int bits, int parts, int offsets) {
    const int64_t bytes = by->inputs / chunk * (sizeof(chunk_t) + parts * chunk);
    for (int64_t row = 0, tile = tile_of(rows); row < rows; row += tile)
        UNROLLED(rows - row < tile ? rows - row : tile, rounded_block, by, x + row * bytes, weight,
                 y + row * by->outputs, channel, chunk, bits, parts, offsets)
}

#define KNOWN(BITS, PARTS, OFFSETS)                                                                                    \
    if (chunk == CHUNK && by->bits == BITS && by->parts == PARTS && by->offsets == OFFSETS) {                           \
        rounded_rows(by, x, weight, y, rows, channel, CHUNK, BITS, PARTS, OFFSETS);                                     \
        return;                                                                                                        \
    }

/* The compiler knows the common kinds. A weight has a zero or offsets, not both. */
static void rounded_channels(const product_t *by, const char *x, const char *weight, float *y, int64_t rows,
                             int64_t channel, int64_t chunk) {
    KNOWN(4, 1, 0)
    KNOWN(4, 1, 1)
    KNOWN(4, 2, 0)
    KNOWN(4, 2, 1)
    KNOWN(8, 1, 0)
    KNOWN(8, 2, 0)
    rounded_rows(by, x, weight, y, rows, channel, chunk, (int)by->bits, (int)by->parts, (int)by->offsets);
}

void rounded_product(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows, void *scratch) {
    const int64_t chunk = chunk_of(by), size = by->inputs / by->group * group_bytes(by);
    round_rows(by, x, stride, rows, chunk, scratch);
#pragma omp parallel for schedule(static)
    for (int64_t channel = 0; channel < by->outputs; channel += CHANNELS)
        rounded_channels(by, scratch, by->weight + channel / CHANNELS * size, y, rows, channel, chunk);
}

#else

void rounded_product(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows, void *scratch) {}

#endif
