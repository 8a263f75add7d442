/* Products of a few rows with a packed weight, at the speed of memory. */

#include "tile.h"

/* A number of a weight in floats. */
static float read_float(const product_t *by, const char *from) {
    uint16_t half;
    int32_t bits;
    if (by->bytes == 4) memcpy(&bits, from, sizeof bits);
    else memcpy(&half, from, sizeof half), bits = (int32_t)((uint32_t)half << 16); /* a bfloat16: its first half */
#ifdef WIDTH
    if (by->half) return from_half(half);
#endif
    return float_of(bits);
}

#ifdef WIDTH

int has_products(void) { return 1; }

/* One block of a weight that is packed as [blocks of CHANNELS, inputs, CHANNELS]. */
static void float_product(const void *arguments, int64_t block) {
    const multiply_t *of = arguments;
    const product_t *by = of->by;
    const int64_t channel = block * CHANNELS;
    const char *from = by->weight + channel * by->inputs * by->bytes;
    if (by->bytes == 4) float_rows(by, of->x, of->stride, from, FLOATS, of->y, of->rows, channel);
    else if (by->half) float_rows(by, of->x, of->stride, from, HALVES, of->y, of->rows, channel);
    else float_rows(by, of->x, of->stride, from, BFLOATS, of->y, of->rows, channel);
}

/* One channel of a weight as `float_product` has it packed. */
static void float_row(const product_t *by, int64_t channel, float *y) {
    const char *from = by->weight + (channel / CHANNELS * by->inputs * CHANNELS + channel % CHANNELS) * by->bytes;
    for (int64_t i = 0; i < by->inputs; i++, from += CHANNELS * by->bytes) y[i] = read_float(by, from);
}

static void packed_row(const product_t *by, int64_t channel, float *y) {
    if (by->bits) group_row(by, channel, y);
    else float_row(by, channel, y);
}

void multiply(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows, void *scratch) {
    for (; by && rows; y += by->outputs, by = by->next)
        for (int64_t row = 0, set = by->parts ? SET : rows; row < rows; row += set) {
            const int64_t some = rows - row < set ? rows - row : set;
            const multiply_t of = {by, x + row * stride, y + row * by->columns, scratch, stride, some};
            if (by->parts) round_rows(&of);
            work_t *block = by->parts ? rounded_product : by->bits ? grouped_product : float_product;
            share((by->outputs + CHANNELS - 1) / CHANNELS, block, &of);
        }
}

#define SAMPLE 1024

void sample_product(int64_t rows, char *memory) {
    const product_t by = {.inputs = SAMPLE, .outputs = SAMPLE, .bits = 4, .group = 32, .zero = 8, .parts = 2,
                          .columns = SAMPLE, .weight = memory};
    float *x = (float *)(memory + SAMPLE * SAMPLE), *y = x + rows * SAMPLE;
    multiply(&by, x, SAMPLE, y, rows, y + rows * SAMPLE);
}

#else

int has_products(void) { return 0; }
void sample_product(int64_t rows, char *memory) {}
void multiply(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows, void *scratch) {}
static void packed_row(const product_t *by, int64_t channel, float *y) {}

#endif

#define READ 65536 /* bytes that a thread reads at a time */

typedef struct {
    const char *from;
    int64_t bytes;
} read_t;

static void read_some(const void *arguments, int64_t item) {
    const read_t *of = arguments;
    const int64_t left = of->bytes - item * READ;
    const char *from = of->from + item * READ, *stop = from + (left < READ ? left : READ);
    words sums[4] = {0};
    for (; stop - from >= (int64_t)sizeof sums; from += sizeof sums)
        for (int i = 0; i < 4; i++) {
            words v;
            memcpy(&v, from + i * sizeof v, sizeof v);
            sums[i] ^= v;
        }
    words all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    __asm__ volatile("" : : "m"(all));
}

void read_only(const char *from, int64_t bytes) {
    share((bytes + READ - 1) / READ, read_some, &(read_t){from, bytes});
}

/* One output of a weight that is `rowwise`, each number with one rounding. */
static void plain_row(const product_t *by, int64_t output, float *y) {
    const int64_t inputs = by->inputs, groups = by->bits ? inputs / by->group : 0;
    const int64_t heads = groups * (by->offsets ? 2 : 1) * (int64_t)sizeof *y;
    const char *from = by->weight + output * (by->bits ? heads + inputs : inputs * by->bytes);
    const float *steps = (const float *)from;
    const uint8_t *codes = (const uint8_t *)from + heads;
    for (int64_t i = 0; i < inputs && !by->bits; i++) y[i] = read_float(by, from + i * by->bytes);
    for (int64_t group = 0; group < groups; group++, y += by->group, codes += by->group)
        if (by->offsets)
            for (int64_t i = 0; i < by->group; i++) y[i] = fmaf(steps[group], codes[i], steps[groups + group]);
        else
            for (int64_t i = 0; i < by->group; i++) y[i] = steps[group] * (float)(codes[i] - (int)by->zero);
}

void look_up(const product_t *by, const int64_t *places, float *y, int64_t rows) {
    for (int64_t row = 0; row < rows; row++, y += by->inputs)
        if (by->rowwise) plain_row(by, places[row], y);
        else packed_row(by, places[row], y);
}
