/* The vectors of the products, and the instructions that the compiler's own vectors lack: the only place that differs
   between processors. WIDTH is missing where there are no such instructions, and with it all products.

   `dot4` multiplies codes (4 bytes for each of WIDTH channels, CODE_BITS bits used of each) by four signed bytes, and
   adds up a channel's four products. Its `partial` sums hold 8 calls, and `whole` makes them sums of 32 bits. `dot8`, if
   DOT8 is defined, multiplies codes of 6 bits of eight inputs. */

#pragma once

#include "common.h"

#if defined(__AVX512BW__)
#define WIDTH 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WIDTH 8
#elif defined(__aarch64__)
#define WIDTH 4
#endif

#ifdef WIDTH

typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint8_t bytes __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t shorts __attribute__((vector_size(2 * WIDTH)));

static inline bytes bytes_at(const char *x) {
    bytes v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline floats floats_at(const char *x) {
    floats v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline floats powers_at(const char *x) { /* the exponent of a float32 */
    uint8_t v __attribute__((vector_size(WIDTH)));
    memcpy(&v, x, sizeof v);
    return (floats)(__builtin_convertvector(v, ints) << 23);
}

static inline floats bfloats_at(const char *x) { /* the first half of a float32 */
    shorts v;
    memcpy(&v, x, sizeof v);
    return (floats)(__builtin_convertvector(v, ints) << 16);
}

static inline bytes repeated(const uint8_t *sixteen) {
    bytes v;
    for (int i = 0; i < 4 * WIDTH; i += 16) memcpy((char *)&v + i, sixteen, 16);
    return v;
}

static inline ints every(int32_t x) { return (ints){0} + x; }
static inline floats alike(float x) { return (floats)every(bits_of(x)); }

#if defined(__x86_64__)
#include <immintrin.h>

static inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
static inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#if WIDTH == 16
static inline floats fused(floats a, floats b, floats c) {
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
static inline floats halves_at(const char *x) { return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)x)); }
static inline floats integers_at(const char *x) { /* of 8 bits; compilers make worse of a vector's conversion */
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)x)));
}
#else
static inline floats fused(floats a, floats b, floats c) {
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
static inline floats halves_at(const char *x) { return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const void *)x)); }
static inline floats integers_at(const char *x) {
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)x)));
}
#endif

static inline bytes named(bytes table, bytes names) { /* in a `repeated` table */
#if WIDTH == 16
    return (bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)names);
#else
    return (bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)names);
#endif
}

#if defined(__AVX512VNNI__) || (WIDTH == 8 && defined(__AVXVNNI__))
#define CODE_BITS 8
typedef ints partial;
static inline partial dot4(partial sums, bytes codes, int32_t four) {
#if WIDTH == 16
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)every(four));
#else
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, (__m256i)every(four));
#endif
}
static inline ints whole(partial sums) { return sums; }
#else
#define CODE_BITS 4 /* so 16 products of at most 15 * 128 are a sum of 16 bits */
typedef int16_t partial __attribute__((vector_size(4 * WIDTH)));
static inline partial dot4(partial sums, bytes codes, int32_t four) {
#if WIDTH == 16
    return sums + (partial)_mm512_maddubs_epi16((__m512i)codes, (__m512i)every(four));
#else
    return sums + (partial)_mm256_maddubs_epi16((__m256i)codes, (__m256i)every(four));
#endif
}
static inline ints whole(partial sums) {
#if WIDTH == 16
    return (ints)_mm512_madd_epi16((__m512i)sums, (__m512i)((partial){0} + 1));
#else
    return (ints)_mm256_madd_epi16((__m256i)sums, (__m256i)((partial){0} + 1));
#endif
}
#define DOT8 /* 4 * 63 * 128 = 32,256 fits 16 bits */
static inline ints dot8(ints sums, bytes first, bytes second, const int32_t fours[2]) {
    return sums + whole(dot4(dot4((partial){0}, first, fours[0]), second, fours[1]));
}
#endif

#else
#include <arm_neon.h>

static inline float from_half(uint16_t x) {
    __fp16 half;
    memcpy(&half, &x, sizeof half);
    return half;
}

static inline uint16_t to_half(float x) {
    const __fp16 half = (__fp16)x;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

static inline floats fused(floats a, floats b, floats c) {
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
static inline floats halves_at(const char *x) { return (floats)vcvt_f32_f16(vld1_f16((const void *)x)); }
static inline bytes named(bytes table, bytes names) { return (bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)names); }
static inline floats integers_at(const char *x) {
    int8_t v __attribute__((vector_size(WIDTH)));
    memcpy(&v, x, sizeof v);
    return __builtin_convertvector(v, floats);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define CODE_BITS 8
typedef ints partial;
static inline partial dot4(partial sums, bytes codes, int32_t four) {
    return (ints)vusdotq_s32((int32x4_t)sums, (uint8x16_t)codes, (int8x16_t)every(four));
}
static inline ints whole(partial sums) { return sums; }
#elif defined(__ARM_FEATURE_DOTPROD)
#define CODE_BITS 4
typedef ints partial;
static inline partial dot4(partial sums, bytes codes, int32_t four) {
    return (ints)vdotq_s32((int32x4_t)sums, (int8x16_t)codes, (int8x16_t)every(four));
}
static inline ints whole(partial sums) { return sums; }
#else
#define CODE_BITS 4 /* so 8 products of at most 15 * 128 are a sum of 16 bits */
typedef struct {
    int16x8_t low, high;
} partial;
static inline partial dot4(partial sums, bytes codes, int32_t four) {
    const int8x16_t x = (int8x16_t)codes, y = (int8x16_t)every(four);
    return (partial){vmlal_s8(sums.low, vget_low_s8(x), vget_low_s8(y)), vmlal_high_s8(sums.high, x, y)};
}
static inline ints whole(partial sums) { return (ints)vpaddq_s32(vpaddlq_s16(sums.low), vpaddlq_s16(sums.high)); }
#endif
#endif

#endif
