/* The decoder layers of the Llama family, from the kernels of the other files. Bit for bit what `ssd.models.families.llama` does
   in single calls. */

#include "kernels.h"

static void add(const float *x, const float *y, float *sum, int64_t count) {
    for (int64_t i = 0; i < count; i++) sum[i] = x[i] + y[i];
}

static void norm_heads(float *x, const float *weight, int64_t heads, const layer_t *by, int64_t rows, int64_t stride) {
    for (int64_t row = 0; row < rows; row++, x += stride) rms_norm(x, by->dim, weight, x, heads, by->dim, by->eps);
}

/* Norms pairs; returns what the layer adds to, x or y. */
static const float *norm_pairs(const layer_t *by, const float *embedded, const float *x, float *pairs, float *y,
                               int64_t rows) {
    const int64_t width = by->out.outputs;
    for (int64_t row = 0; row < rows; row++, pairs += 2 * width) {
        rms_norm(embedded + row * width, width, by->token_norm, pairs, 1, width, by->eps);
        rms_norm(x + row * width, width, by->attention_norm, pairs + width, 1, width, by->eps);
        if (by->normed_residual) memcpy(y + row * width, pairs + width, width * sizeof *y);
    }
    return by->normed_residual ? y : x;
}

/* x [rows, width] -> y, which may be x. `scratch` holds the buffers below. */
static void decoder_layer(const layer_t *by, int64_t layer, const float *x, const float *embedded, const float *cos,
                          const float *sin, float *y, int64_t rows, const view_t *views, int64_t count,
                          float *scratch) {
    const int64_t dim = by->dim, inputs = by->qkv.inputs, width = by->out.outputs, attended = by->heads * dim, kv = by->kv_heads * dim;
    const int64_t turned = attended + kv, projected = turned + kv;
    float *normed = scratch, *qkv = normed + rows * inputs, *rotated = qkv + rows * projected;
    float *attention = rotated + rows * turned, *gate_up = attention + rows * attended;
    float *gated = gate_up + rows * by->gate_up.columns, *rest = gated + rows * by->down.inputs;

    if (by->token_norm) x = norm_pairs(by, embedded, x, normed, y, rows);
    else rms_norm(x, width, by->attention_norm, normed, rows, width, by->eps);
    multiply(&by->qkv, normed, inputs, qkv, rows, rest);
    if (by->q_norm) {
        norm_heads(qkv, by->q_norm, by->heads, by, rows, projected);
        norm_heads(qkv + attended, by->k_norm, by->kv_heads, by, rows, projected);
    }
    rotate(qkv, projected, cos, sin, rotated, rows, by->heads + by->kv_heads, dim);
    for (int64_t view = 0, row = 0; view < count; row += views[view++].tokens) {
        const store_t *shared = views[view].shared, *own = views[view].own;
        const int64_t tokens = views[view].tokens;
        const float *q = rotated + row * turned;
        put(own ? own : shared, layer, q + attended, turned, qkv + row * projected + turned, projected, tokens, by->kv_heads, dim);
        const attend_t given = {shared,    own,          q,       attention + row * attended, turned,    layer,
                                by->heads, by->kv_heads, dim,     by->window,                 by->scale, 0.0f};
        attend(&given, 0, tokens, rest);
    }
    multiply(&by->out, attention, attended, normed, rows, rest);
    add(x, normed, y, rows * width);
    rms_norm(y, width, by->forward_norm, normed, rows, width, by->eps);
    multiply(&by->gate_up, normed, width, gate_up, rows, rest);
    silu_mul(gate_up, gated, rows, by->down.inputs);
    multiply(&by->down, gated, by->down.inputs, normed, rows, rest);
    add(y, normed, y, rows * width);
}

/* Puts keys and values that the `count` layers make of normed x [rows, width] to where `to` has each row's own. */
void remember(const layer_t *layers, int64_t count, const float *cosines, const float *sines, const int64_t *positions,
              const float *x, int64_t rows, const store_t *to, float *scratch) {
    const int64_t dim = layers->dim, attended = layers->heads * dim, kv = layers->kv_heads * dim, projected = attended + 2 * kv;
    float *cos = scratch, *sin = cos + rows * dim, *qkv = sin + rows * dim, *rotated = qkv + rows * projected;
    float *keys = qkv + attended, *rest = rotated + rows * kv;
    gather(cosines, dim, positions, cos, rows);
    gather(sines, dim, positions, sin, rows);
    for (int64_t layer = 0; layer < count; layer++) {
        const layer_t *by = layers + layer;
        multiply(&by->qkv, x, by->qkv.inputs, qkv, rows, rest);
        if (by->k_norm) norm_heads(keys, by->k_norm, by->kv_heads, by, rows, projected);
        rotate(keys, projected, cos, sin, rotated, rows, by->kv_heads, dim);
        put(to, layer, rotated, kv, keys + kv, projected, rows, by->kv_heads, dim);
    }
}

/* x [rows, width] -> y, by the layers from `first` to `stop` - 1 of all `layers`. `cosines` and `sines` are the tables
   of every position, and `positions` [rows] those of the rows. */
void decoder(const layer_t *layers, int64_t first, int64_t stop, const float *cosines, const float *sines,
             const int64_t *positions, const float *x, const float *embedded, float *y, int64_t rows,
             const view_t *views, int64_t count, float *scratch) {
    const int64_t dim = layers->dim;
    float *cos = scratch, *sin = cos + rows * dim, *rest = sin + rows * dim;
    gather(cosines, dim, positions, cos, rows);
    gather(sines, dim, positions, sin, rows);
    for (int64_t layer = first; layer < stop; layer++, x = y)
        decoder_layer(layers + layer, layer, x, embedded, cos, sin, y, rows, views, count, rest);
}
