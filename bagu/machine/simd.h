// fp32 vectors as wide as the machine's registers, with the vector types of GCC and Clang: operators compile to
// AVX-512, AVX2 or NEON. 16-bit and 8-bit numbers are widened when loaded; sums are fp32.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace bagu {

#if defined(__AVX512F__)
constexpr int W = 16;  // lanes
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));
typedef int8_t bvec __attribute__((vector_size(W)));

struct bf16 {
    uint16_t bits;  // the upper half of an fp32
};

inline vec all(float x) { return x - vec{}; }

inline vec load(const float* p) {
    vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Intrinsics, because GCC 12 would widen these vectors lane by lane.
inline vec load(const bf16* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(__aarch64__)
    return (vec)vshll_n_u16(vld1_u16((const uint16_t*)p), 16);
#else
    hvec h;
    std::memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
#endif
}

inline vec load(const int8_t* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif defined(__aarch64__)
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return (vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
#else
    bvec b;
    std::memcpy(&b, p, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, ivec), vec);
#endif
}

inline float widen(float x) { return x; }

inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline void narrow(float x, bf16& to) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void narrow(float x, float& to) { to = x; }

inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }

// Loads the first n numbers, n < W, and fills with zeros. Memory past them is not read.
template <class T>
inline vec load(const T* p, int64_t n) {
    vec v{};
    for (int64_t i = 0; i < n; i++) v[i] = widen(p[i]);
    return v;
}

inline void store(float* p, vec v, int64_t n) { std::memcpy(p, &v, 4 * n); }

// a * b + c, rounded once where the CPU can. Compilers may fuse `a * b + c` in one function and not in the next.
inline vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline float sum(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX__)
    __m128 x = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
#elif defined(__aarch64__)
    return vaddvq_f32((float32x4_t)v);
#else
    return (v[0] + v[1]) + (v[2] + v[3]);
#endif
}

// e^x for x up to 88, to 2 ulp. Below -87.3 the result is 1.2e-38, not 0, to avoid denormals.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series (the first omitted term is r^8 / 8!: 5e-9).
inline vec exp(vec x) {
    const vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds x to an integer, stored in the low bits
    x = x < -87.0f ? all(-87.0f) : x;    // NaN passes both comparisons
    x = x > 88.0f ? all(88.0f) : x;
    vec rounded = x * 1.44269504f + magic;
    vec n = rounded - magic;
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts: the first product is exact
    vec y = all(1.0f / 5040);
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    ivec power = ((ivec)rounded - (ivec)magic + 127) << 23;
    return y * (vec)power;
}

}  // namespace bagu
