/* The product with a weight of few bits whose inputs are rounded to integers of 8 or 16 bits, with a scale for every
   chunk of at most CHUNK inputs. Within a chunk it sums products of integers, which are exact: so all processors, and
   all numbers of rows, give the same bits. */

#include "groups.h"

#ifdef WIDTH

/* A chunk of inputs: their scale, their sum, `shift`, and their integers: of 16 bits all last bytes come before the
   others. `shift` is the weight's zero times the sum of the integers. Rows are rounded in tiles: a tile's chunks follow
   each other, each with all its rows. */
typedef struct {
    float scale, sum;
    int32_t shift, unused;
    int8_t integers[];
} chunk_t;

static int64_t chunk_of(const product_t *by) {
    for (int64_t chunk = CHUNK;; chunk /= 2)
        if (by->group % chunk == 0) return chunk;
}

/* Rows of a tile: as many in all tiles, or fewer in the last. Inputs of 16 bits have twice the sums. */
static int64_t tile_of(int64_t rows, int64_t parts) {
    const int64_t most = parts == 1 ? ROWS : 6, tiles = (rows + most - 1) / most;
    return (rows + tiles - 1) / tiles;
}

INLINED void round_chunk(const float *x, int64_t size, int64_t parts, int64_t zero, chunk_t *to) {
    const float levels = parts == 1 ? 127.0f : 32639.0f; /* 127 * 256 + 127 */
    int32_t most = 0, total = 0, rounded[CHUNK]; /* the order of sizes is that of their bits; NaN is the largest */
    for (int64_t i = 0; i < size; i++) {
        const int32_t magnitude = bits_of(x[i]) & INT32_MAX;
        most = magnitude > most ? magnitude : most;
    }
    const float largest = float_of(most), factor = levels / largest, by = factor < INFINITY ? factor : 0.0f;
    for (int64_t i = 0; i < size; i++) rounded[i] = (int32_t)rintf(x[i] * by);
    for (int64_t i = 0; i < size; i++) total += rounded[i];
    for (int64_t i = 0; i < size; i++) to->integers[i] = (int8_t)rounded[i];
    if (parts == 2)
        for (int64_t i = 0; i < size; i++) to->integers[size + i] = (int8_t)((rounded[i] + 128) >> 8);
    to->scale = largest / levels;
    to->shift = (int32_t)zero * total;
    to->sum = to->scale * (float)total;
}

static void round_tile(const void *arguments, int64_t item) {
    const multiply_t *of = arguments;
    const int64_t chunk = chunk_of(of->by), chunks = of->by->inputs / chunk, tile = tile_of(of->rows, of->by->parts);
    const int64_t size = sizeof(chunk_t) + of->by->parts * chunk, first = item * tile;
    const int64_t stop = first + tile < of->rows ? first + tile : of->rows;
    char *to = of->rounded + first * chunks * size;
    for (int64_t i = 0; i < chunks; i++)
        for (int64_t row = first; row < stop; row++, to += size) {
            const float *from = of->x + row * of->stride + i * chunk;
            if (chunk == CHUNK) round_chunk(from, CHUNK, of->by->parts, of->by->zero, (chunk_t *)to);
            else round_chunk(from, chunk, of->by->parts, of->by->zero, (chunk_t *)to);
        }
}

void round_rows(const multiply_t *of) {
    const int64_t tile = tile_of(of->rows, of->by->parts);
    share((of->rows + tile - 1) / tile, round_tile, of);
}

/* A pair's codes as `dot4` takes them: one of the planes of CODE_BITS bits that they consist of. */
INLINED void plane_of(const char *weight, int64_t i, int pair, int bits, bytes table, int plane, bytes codes[2]) {
    codes_of(weight, i, pair, bits, table, codes);
    if (bits > CODE_BITS) EACH_HALF codes[half] = plane ? codes[half] >> 4 : codes[half] & 15;
}

#ifdef DOT8
/* `chunk_sums` for codes of 6 bits, as they are. */
INLINED void sums_of_six(const char *x, const char *weight, int pair, int64_t chunk, int parts, int rows,
                         ints sums[ROWS][2]) {
    const int64_t size = sizeof(chunk_t) + parts * chunk;
    ints own[2][ROWS][2] = {0};
#pragma GCC unroll 4
    for (int64_t i = 0; i < chunk; i += 8) {
        bytes first[2], second[2];
        codes_of(weight, i, pair, 6, (bytes){0}, first);
        codes_of(weight, i + 4, pair, 6, (bytes){0}, second);
        if (!pair) prefetch(weight + i * CHANNELS * 6 / 8, CHANNELS * 6);
        EACH_ROW EACH_PART {
            int32_t fours[2];
            memcpy(fours, x + r * size + sizeof(chunk_t) + part * chunk + i, sizeof fours);
            EACH_HALF own[part][r][half] = dot8(own[part][r][half], first[half], second[half], fours);
        }
    }
    EACH_ROW EACH_HALF sums[r][half] = parts == 2 ? own[0][r][half] + (own[1][r][half] << 8) : own[0][r][half];
}
#endif

/* sums[r][half]: the integers of one chunk of each row times a pair's codes, which are unpacked once for all. */
INLINED void chunk_sums(const char *x, const char *weight, int pair, int64_t chunk, int bits, bytes table, int parts,
                        int rows, ints sums[ROWS][2]) {
    const int64_t size = sizeof(chunk_t) + parts * chunk;
#ifdef DOT8
    if (bits == 6) {
        sums_of_six(x, weight, pair, chunk, parts, rows, sums);
        return;
    }
#endif
    bytes codes[2];
#pragma GCC unroll 2
    for (int plane = bits > CODE_BITS; plane >= 0; plane--) {
        partial own[2][ROWS][2] = {0};
#pragma GCC unroll 8
        for (int64_t i = 0; i < chunk; i += 4) {
            plane_of(weight, i, pair, bits, table, plane, codes);
            if (!pair && !plane) prefetch(weight + i * CHANNELS * STORED(bits) / 8, CHANNELS * STORED(bits) / 2);
            EACH_ROW EACH_PART {
                int32_t four;
                memcpy(&four, x + r * size + sizeof(chunk_t) + part * chunk + i, sizeof four);
                EACH_HALF own[part][r][half] = dot4(own[part][r][half], codes[half], four);
            }
        }
        EACH_ROW EACH_HALF {
            ints found = whole(own[0][r][half]);
            if (parts == 2) found += whole(own[1][r][half]) << 8;
            sums[r][half] = bits > CODE_BITS && !plane ? (sums[r][half] << 4) + found : found;
        }
    }
}

/* Keeps the sums of many rows in memory while registers are short. Left alone, GCC 12 spills within the loop over the
   inputs: four rows of 16-bit inputs take 7 % longer. AVX2 has half as many registers. */
#define LEAVE_REGISTERS(sums) if (parts * rows > (WIDTH == 8 ? 4 : 6)) __asm__ volatile("" : "+m"(sums))

/* Makes the compiler load a chunk's inputs again for the second pair. Left alone, GCC 12 copies them to the stack, number
   by number: five rows take 22 % longer. */
#define READ_AGAIN(x) if (WIDTH == 8) __asm__ volatile("" : "+r"(x))

/* Adds the products with one chunk of each row. */
INLINED void chunk_pair(const product_t *by, const char *x, const char *weight, int pair, int64_t chunk, int bits,
                        bytes table, int parts, int offsets, int rows, const floats step[2], const floats offset[2],
                        pair_t *sums) {
    const int64_t size = sizeof(chunk_t) + parts * chunk;
    ints integers[ROWS][2];
    LEAVE_REGISTERS(*sums);
    READ_AGAIN(x);
    chunk_sums(x, weight, pair, chunk, bits, table, parts, rows, integers);
    LEAVE_REGISTERS(*sums);
    EACH_ROW {
        const chunk_t *own = (const chunk_t *)(x + r * size);
        const ints shift = every(own->shift);
        EACH_HALF {
            const ints exact = offsets ? integers[r][half] : integers[r][half] - shift;
            floats sum = sums->of[r][half];
            sum = fused(step[half] * own->scale, __builtin_convertvector(exact, floats), sum);
            sums->of[r][half] = offsets ? fused(offset[half], alike(own->sum), sum) : sum;
        }
    }
}

INLINED void rounded_block(const product_t *by, const char *x, const char *weight, float *y, int64_t channel,
                           int64_t chunk, int bits, int parts, int offsets, int rows) {
    const int64_t size = sizeof(chunk_t) + parts * chunk, head = head_bytes(by);
    floats step[PAIRS][2], offset[PAIRS][2] = {0};
    pair_t sums[PAIRS] = {0};
    units_t units = {.next = 0};
    const bytes table = table_of(by);
    for (int64_t k = 0; k < by->inputs;) {
        weight = group_at(by, weight, k, &units);
        prefetch(weight, head);
        EACH_PAIR head_of(by, weight, pair, &units, step[pair], offset[pair]);
        weight += head;
        for (const int64_t end = k + by->group; k < end; k += chunk, x += rows * size) {
            EACH_PAIR chunk_pair(by, x, weight, pair, chunk, bits, table, parts, offsets, rows, step[pair],
                                 offset[pair], sums + pair);
            weight += CHANNELS * chunk * STORED(bits) / 8;
        }
    }
    finish(sums, by, y, channel, rows);
}

/* All rows of one block. */
INLINED void rounded_rows(const product_t *by, const char *x, const char *weight, float *y, int64_t rows,
                          int64_t channel, int64_t chunk, int bits, int parts, int offsets) {
    const int64_t bytes = by->inputs / chunk * (sizeof(chunk_t) + parts * chunk);
    for (int64_t row = 0, tile = tile_of(rows, parts); row < rows; row += tile)
        UNROLLED(rows - row < tile ? rows - row : tile, rounded_block, by, x + row * bytes, weight,
                 y + row * by->columns, channel, chunk, bits, parts, offsets)
}

/* Rows of one block with a kind of weight that the compiler knows: those of GGUF's types, but for Q2_K and Q3_K. Each
   takes the compiler half a second. */
#define KINDS(KIND)                                                                                                    \
    KIND(32, 4, 1, 0) KIND(32, 4, 2, 0) KIND(32, 4, 1, 1) KIND(32, 4, 2, 1) KIND(32, 6, 1, 0) KIND(32, 6, 2, 0)        \
    KIND(32, 6, 1, 1) KIND(32, 6, 2, 1) KIND(32, 8, 1, 0) KIND(32, 8, 2, 0) KIND(16, 6, 1, 0) KIND(16, 6, 2, 0)        \
    KIND(32, NAMED, 1, 0) KIND(32, NAMED, 2, 0)
#define KIND_OF(chunk, bits, parts, offsets) ((((chunk) * 16 + (bits)) * 4 + (parts)) * 2 + (offsets))
#define ROWS_OF(CHUNK_, BITS, PARTS, OFFSETS)                                                                          \
    static void rows_##CHUNK_##_##BITS##_##PARTS##_##OFFSETS(const product_t *by, const char *x, const char *weight,   \
                                                             float *y, int64_t rows, int64_t channel) {                \
        rounded_rows(by, x, weight, y, rows, channel, CHUNK_, BITS, PARTS, OFFSETS);                                   \
    }
#define CASE_OF(CHUNK_, BITS, PARTS, OFFSETS)                                                                          \
    case KIND_OF(CHUNK_, BITS, PARTS, OFFSETS):                                                                        \
        rows_##CHUNK_##_##BITS##_##PARTS##_##OFFSETS(by, x, weight, y, rows, channel);                                 \
        break;

KINDS(ROWS_OF)

/* A weight has a zero or offsets, not both. */
static void rounded_channels(const product_t *by, const char *x, const char *weight, float *y, int64_t rows,
                             int64_t channel, int64_t chunk) {
    switch (KIND_OF(chunk, bits_read(by), by->parts, by->offsets)) {
        KINDS(CASE_OF)
    default:
        rounded_rows(by, x, weight, y, rows, channel, chunk, bits_read(by), (int)by->parts, (int)by->offsets);
    }
}

void rounded_product(const void *arguments, int64_t block) {
    const multiply_t *of = arguments;
    const product_t *by = of->by;
    const char *weight = by->weight + block * block_bytes(by);
    rounded_channels(by, of->rounded, weight, of->y, of->rows, block * CHANNELS, chunk_of(by));
}

#else

void rounded_product(const void *arguments, int64_t block) {}
void round_rows(const multiply_t *of) {}

#endif
