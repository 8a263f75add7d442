/* The tokens of `ssd.speculation.sampling`, in one pass over the logits. */

#include "kernels.h"

/* Where the largest number of a row is, the first of equals; -1 if it is not finite or there is none. */
static int64_t first_largest(const float *x, int64_t size, float temperature, const float *noise) {
    const lanes none = {0};
    lanes most = none - INFINITY;
    places where = {0}, unsound = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        lanes v = left >= LANES ? load(x + i) : load_some(x + i, left);
        if (noise) v = v / temperature + (left >= LANES ? load(noise + i) : load_some(noise + i, left));
        if (left < LANES)
            for (int64_t lane = left; lane < LANES; lane++) v[lane] = -INFINITY;
        const places better = v > most;
        unsound |= v != v;
        most = pick(better, v, most);
        where = (better & (int32_t)(i / LANES)) | (~better & where);
    }
    int64_t id = -1;
    float highest = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t here = (int64_t)where[lane] * LANES + lane;
        if (unsound[lane]) return -1;
        if (most[lane] > highest || (most[lane] == highest && here < id)) highest = most[lane], id = here;
    }
    return isfinite(highest) ? id : -1;
}

void draw(const float *logits, int64_t stride, const float *temperatures, const float *const *noise, int64_t *ids,
          int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++, logits += stride)
        ids[row] = first_largest(logits, size, noise ? temperatures[row] : 1.0f, noise ? noise[row] : NULL);
}
