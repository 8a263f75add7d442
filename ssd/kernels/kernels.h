/* Types and functions that each file offers to the others and to `ssd.kernels.cpu`. */

#pragma once

#include "common.h"
#include "team.h"

/* rows.c */
void rms_norm(const float *x, int64_t stride, const float *weight, float *y, int64_t rows, int64_t size, float eps);
void silu_mul(const float *gate_up, float *y, int64_t rows, int64_t size);
/* sigmoid(gate) * x */
void sigmoid_mul(const float *gate, const float *x, float *y, int64_t rows, int64_t size);
void rotate(const float *x, int64_t stride, const float *cos, const float *sin, float *y, int64_t rows, int64_t heads,
            int64_t dim);
void gather(const float *table, int64_t size, const int64_t *places, float *y, int64_t rows);

/* noise.c: keys [rows, 2], y [rows, size]: the noise of `ids`, or, if that is missing, of the ids from `first` on. */
void gumbel(const int32_t *keys, int32_t first, const int64_t *ids, float *y, int64_t rows, int64_t size);

/* sampling.c: the ids of the largest of each row's logits, divided by its temperature and shifted by its noise [size]
   where it has any; -1 where no number is the largest. And of its `count` largest, [rows, count], largest first, with
   those numbers in `best`. */
void draw(const float *logits, int64_t stride, const float *temperatures, const float *const *noise, int64_t *ids,
          int64_t rows, int64_t size);
void rank(const float *logits, int64_t stride, const float *temperatures, const float *const *noise, int64_t *ids,
          float *best, int64_t count, int64_t rows, int64_t size);
/* Adds one row, whose numbers have the ids from `first` on, to the `found` best; returns how many there are then. */
int64_t add_best(const float *x, int64_t size, float temperature, const float *noise, int64_t first, int64_t *ids,
                 float *best, int64_t count, int64_t found);

/* attention.c: keys and values [layers, slots, kv_heads] in cells of `cell` bytes, a layer `layer_size` bytes, and which
   of them each token sees: those in `slots[begin[t]]` to `slots[begin[t] + count[t] - 1]`, the last of which is its own;
   `longest` is the largest count. A cell has the `dim` numbers of a head in float32, or as signed bytes and behind them
   the float32 step by which these are multiplied. */
typedef struct {
    char *keys, *values;
    int64_t layer_size, cell;
    const int64_t *slots, *begin, *count;
    int64_t longest;
} store_t;

/* The slots of `count` pages of `size` tokens, page after page. */
void expand(const int64_t *pages, int64_t count, int64_t size, int64_t *slots);
void put(const store_t *to, int64_t layer, const float *k, int64_t k_stride, const float *v, int64_t v_stride,
         int64_t tokens, int64_t heads, int64_t dim);

/* The attention of some tokens: q [tokens, heads, dim], rows `q_stride` apart -> out [tokens, heads * dim]. Of its keys
   in `shared` and behind those in `own`, which may be missing, a token sees the last `window`. Keys are cut into segments
   in each of the two: so 100 shared ones and 5 own ones give other bits than the same 105 shared ones. `sinks` [heads],
   which may be missing, are the scores of a key without value that every token sees. */
typedef struct {
    const store_t *shared, *own;
    const float *q;
    float *out;
    int64_t q_stride, layer, heads, kv_heads, dim, window;
    float scale, cap;
    const float *sinks;
} attend_t;

/* For the tokens from `from` to `to` - 1. `scratch` has the bytes that `parts_bytes` of attention.py says. */
#define PARTS (1 << 20)
void attend(const attend_t *by, int64_t from, int64_t to, float *scratch);

/* A weight [outputs, inputs], packed by blocks of output channels. products.c: in numbers of 2 or 4 `bytes`, bfloat16
   (or with `half` float16) or float32. groups.h: in codes of 4, 6 or 8 `bits`, in groups; inputs are then rounded to
   integers of `parts` bytes, or with 0 parts stay float32. What is not so is 0. With `rowwise` it is for `look_up` and
   `dots` alone: outputs follow each other, of groups each as steps, offsets if there are any, both in float32, and
   codes of 8 bits. If `named` codes of 4 bits name codes of 8 in `table`.

   A row of y has `columns` numbers: the outputs of this weight, then those of `next`, if there is one. */
typedef struct product {
    int64_t inputs, outputs, bytes, bits, group, zero, offsets, wide, parts, rowwise, span, columns, half;
    const char *weight;
    const float *bias;
    const struct product *next;
    int64_t named;
    uint8_t table[16];
} product_t;

/* x [rows, inputs], at a `stride`, times a weight -> y [rows, columns]. `rounded` is the scratch of `multiply`. */
typedef struct {
    const product_t *by;
    const float *x;
    float *y;
    char *rounded;
    int64_t stride, rows;
} multiply_t;

/* One block of output channels, for `share`. `round_rows` fills `rounded` for `rounded_product`. */
work_t grouped_product, rounded_product;
void round_rows(const multiply_t *of);
/* y [rows, inputs]: the rows of a packed weight that `places` names, in float32. */
void group_row(const product_t *by, int64_t channel, float *y);
void look_up(const product_t *by, const int64_t *places, float *y, int64_t rows);
/* attention.c: y [rows, count], x [rows, inputs] times these rows; `scratch` is for DOTS of them. */
#define DOTS LANES
void dots(const product_t *by, const float *x, const int64_t *places, int64_t count, float *y, int64_t rows,
          float *scratch);
/* `scratch` is for rounded inputs, of 64 rows at a time: rows * inputs * (parts + 4) bytes are always enough. */
void multiply(const product_t *by, const float *x, int64_t stride, float *y, int64_t rows, void *scratch);

/* products.c: some rows of 16-bit inputs times a weight of 4 bits, all of them zeros in 2 MB of `memory`, to be timed. */
void sample_product(int64_t rows, char *memory);

/* products.c: reads memory and does no more: as fast as a product could be. */
void read_only(const char *from, int64_t bytes);

/* decoder.c: a layer. `q_norm` and `k_norm` may be missing. With a `token_norm` (EAGLE-3) its input are pairs: the
   token's embedding, normed by that, and x, normed by `attention_norm`; what it adds to is x, or with
   `normed_residual` the normed x. */
typedef struct {
    const float *attention_norm, *forward_norm, *q_norm, *k_norm, *token_norm;
    float eps;
    product_t qkv, out, gate_up, down;
    int64_t heads, kv_heads, dim;
    float scale;
    int64_t window, normed_residual;
} layer_t;

/* The next `tokens` tokens see their keys in `shared`, and behind those their keys in `own`, which may be missing. */
typedef struct {
    const store_t *shared, *own;
    int64_t tokens;
} view_t;

/* `embedded` [rows, width] is for layers with a `token_norm`; else it may be missing. */
void decoder(const layer_t *layers, int64_t first, int64_t stop, const float *cosines, const float *sines,
             const int64_t *positions, const float *x, const float *embedded, float *y, int64_t rows,
             const view_t *views, int64_t count, float *scratch);

/* states.c: rows of a batch, as `StateRow` of ssd/layers/recurrent.py has them; `replayed` is a number here. */
typedef struct {
    int64_t source, replayed, tokens, target, written, save, saved;
} state_row_t;

/* The changes of `count` rows, `total` in all. `entries` has their places in `kept`, or -1 - i for token i of `made`. */
typedef struct {
    const float *kept, *made;
    int64_t size;
    const int64_t *entries;
    int64_t total;
    const state_row_t *rows;
    int64_t count;
} changes_t;

/* `weight` [window, channels], `states` [slots, window - 1, channels] -> y [tokens, channels] */
#define MAX_WINDOW 64
typedef struct {
    changes_t in;
    float *states;
    const float *weight, *bias;
    float *y;
    int64_t channels, window, silu;
} convolution_t;

void convolve(const convolution_t *of);

/* `states` [slots, heads, key_dim, value_dim] -> y [tokens, heads * value_dim]. `prepared` is scratch: for each change
   its keys and queries, and two numbers a head. */
typedef struct {
    changes_t in;
    float *states;
    const float *queries;
    int64_t query_stride;
    const float *decay, *dt_bias;
    float *y, *prepared;
    int64_t heads, key_heads, key_dim, value_dim, tiled;
} delta_t;

void gated_delta(const delta_t *of);

/* suffixes.c: texts in `blocks` blocks, numbered from `blocks` + 1 on; `next` is the number of the next one. `tokens` and
   both `links` have room for a block's tokens times `blocks`, both `heads` for `mask` + 1 numbers. */
typedef struct {
    int64_t blocks, next, mask;
    int32_t *tokens;
    uint32_t *links[2], *heads[2];
    void *headers;
} suffixes_t;

/* A text that grows: its last token is at `end` in `block`, 0 before the first one. It `owns` that block, or the block
   belongs to a text that has the same tokens. `tail` has its last tokens. It finds only what texts of its `scope` have. */
#define SUFFIX_TAIL 32
typedef struct {
    uint64_t scope;
    int64_t block, end, owns, length;
    int32_t tail[SUFFIX_TAIL];
} suffix_text_t;

int64_t suffixes_begin(suffixes_t *in, suffix_text_t *text, const int32_t *tokens, int64_t count);
void suffixes_add(suffixes_t *in, suffix_text_t *text, const int32_t *tokens, int64_t count);
int64_t suffixes_find(const suffixes_t *in, const suffix_text_t *text, int64_t count, int32_t *tokens, int32_t *votes,
                      int64_t *longest);
