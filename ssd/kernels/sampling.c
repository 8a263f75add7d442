/* The tokens of `ssd.speculation.sampling`, in one pass over the logits. */

#include "kernels.h"

/* The index of the largest number of a row, the first of equals; -1 if it is not finite or the row has a NaN. */
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
        const places better = greater(v, most);
        unsound |= ~equal(v, v);
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

#define BLOCK (8 * LANES)

/* Computes a block of scores; returns the largest, lane by lane. Scores behind the end of a row are NaN. */
static inline lanes scored(const float *x, int64_t size, float temperature, const float *noise, float *scores) {
    const lanes none = {0};
    lanes most = none - INFINITY;
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        const int64_t left = size - i;
        lanes v = none / none;
        if (left >= LANES) v = noise ? load(x + i) / temperature + load(noise + i) : load(x + i);
        else
            for (int64_t lane = 0; lane < left; lane++)
                v[lane] = noise ? x[i + lane] / temperature + noise[i + lane] : x[i + lane];
        store(scores + i, v);
        most = pick(greater(v, most), v, most);
    }
    return most;
}

static inline int any(places where) {
    int64_t part[LANES / 2];
    memcpy(part, &where, sizeof part);
    return ((part[0] | part[1]) | (part[2] | part[3]) | (part[4] | part[5]) | (part[6] | part[7])) != 0;
}

int64_t add_best(const float *x, int64_t size, float temperature, const float *noise, int64_t first, int64_t *ids,
                 float *best, int64_t count, int64_t found) {
    float scores[BLOCK];
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        const int64_t here = size - begin < BLOCK ? size - begin : BLOCK;
        const lanes most = scored(x + begin, here, temperature, noise ? noise + begin : NULL, scores);
        if (found == count && !any(greater(most, (lanes){0} + best[count - 1]))) continue;
        for (int64_t i = 0; i < here; i++) {
            const float score = scores[i] == scores[i] ? scores[i] : -INFINITY;
            if (found == count && !(score > best[count - 1])) continue;
            int64_t place = found < count ? found++ : count - 1;
            for (; place > 0 && score > best[place - 1]; place--) best[place] = best[place - 1], ids[place] = ids[place - 1];
            best[place] = score, ids[place] = first + begin + i;
        }
    }
    return found;
}

/* The first of equals comes first, NaNs last and as -inf. */
void rank(const float *logits, int64_t stride, const float *temperatures, const float *const *noise, int64_t *ids,
          float *best, int64_t count, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++, logits += stride, ids += count, best += count)
        add_best(logits, size, noise ? temperatures[row] : 1.0f, noise ? noise[row] : NULL, 0, ids, best, count, 0);
}

void draw(const float *logits, int64_t stride, const float *temperatures, const float *const *noise, int64_t *ids,
          int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++, logits += stride)
        ids[row] = first_largest(logits, size, noise ? temperatures[row] : 1.0f, noise ? noise[row] : NULL);
}
