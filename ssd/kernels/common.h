/* Used by all kernels. Each computes rows of float32 and adds up a row in an order that depends only on its length, so
   a row has the same bits in any batch. Vectors are those of GCC and clang, which compile them for any processor. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINED static inline __attribute__((always_inline))
#define LANES 16
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t places __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef float quarter __attribute__((vector_size(16)));

/* The vector of one register. */
#if defined(__AVX512F__)
typedef lanes piece;
#elif defined(__AVX__)
typedef float piece __attribute__((vector_size(32)));
#else
typedef quarter piece;
#endif
#define SIZE (int64_t)(sizeof(piece) / sizeof(float))

static inline lanes load(const float *x) {
    lanes v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline void store(float *x, lanes v) { memcpy(x, &v, sizeof v); }

static inline quarter folded(lanes v) {
    quarter part[4];
    memcpy(part, &v, sizeof v);
    return (part[0] + part[1]) + (part[2] + part[3]);
}

static inline float sum(lanes v) {
    const quarter four = folded(v);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

static inline float total(const float *x, int64_t size) {
    lanes acc = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) acc += load(x + i);
    float all = sum(acc);
    for (; i < size; i++) all += x[i];
    return all;
}

static inline int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Comparisons, register by register: those of wider vectors GCC 12 does number by number. */
#define COMPARED(name, sign)                                                                                           \
    INLINED places name(lanes x, lanes y) {                                                                            \
        piece a[LANES / SIZE], b[LANES / SIZE];                                                                        \
        memcpy(a, &x, sizeof a), memcpy(b, &y, sizeof b);                                                              \
        for (int i = 0; i < LANES / SIZE; i++) a[i] = (piece)(a[i] sign b[i]);                                         \
        memcpy(&x, a, sizeof x);                                                                                       \
        return (places)x;                                                                                              \
    }
COMPARED(greater, >)
COMPARED(equal, ==)

/* Added to a number below 2^22, it leaves the number, rounded, in the last bits of the sum. */
static const float UNITS = 12582912.0f; /* 1.5 * 2^23 */

static inline lanes pick(places which, lanes yes, lanes no) {
    return (lanes)((which & (places)yes) | (~which & (places)no));
}

static inline float largest(const float *x, int64_t size) {
    lanes most = (lanes){0} - INFINITY;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) most = pick(greater(load(x + i), most), load(x + i), most);
    float all = -INFINITY;
    for (; i < size; i++) all = x[i] > all ? x[i] : all;
    for (int lane = 0; lane < LANES; lane++) all = most[lane] > all ? most[lane] : all;
    return all;
}

/* e^x within a few units in the last place: 2^n times a polynomial on -ln 2 / 2 to ln 2 / 2 (S. Moshier's Cephes). Below
   -87.3 it is 1e-38; NaN stays NaN. */
static inline lanes exponential(lanes x) {
    const lanes least = x * 0.0f - 87.3f, most = x * 0.0f + 88.0f;
    x = pick(greater(least, x), least, x);
    x = pick(greater(x, most), most, x);
    const lanes shifted = x * 1.44269504f + UNITS, n = shifted - UNITS;
    const lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return y * (lanes)(((places)shifted - bits_of(UNITS) + 127) << 23);
}

static inline float exponential_of(float x) { return exponential((lanes){0} + x)[0]; }

/* ln x within a unit in the last place or two, for positive numbers that are not denormal: those of the exponent times
   ln 2, and a polynomial on sqrt 1/2 to sqrt 2 (Cephes, as above). */
static inline lanes logarithm(lanes x) {
    const places exponent = ((places)x - bits_of(0.70710678f)) >> 23;
    const lanes n = __builtin_convertvector(exponent, lanes), m = (lanes)((places)x - (exponent << 23)) - 1.0f;
    lanes y = m * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    const lanes square = m * m;
    y = y * m * square + n * -2.12194440e-4f - 0.5f * square;
    return m + y + n * 0.693359375f;
}

/* The first `count` of LANES numbers, with zeros behind them. */
static inline lanes load_some(const float *x, int64_t count) {
    lanes v = {0};
    memcpy(&v, x, count * sizeof *x);
    return v;
}

static inline void store_some(float *x, lanes v, int64_t count) { memcpy(x, &v, count * sizeof *x); }
