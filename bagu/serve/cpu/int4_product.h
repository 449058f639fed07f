// Products of int8 activations and int4 weights, and the rounding of activations to int8.
//
// A weight [N, K] has 4-bit values q of 0 … 15 and a scale for each group of 128 inputs; it stands for (q - 8) * scale.
// Activations are int8 with a scale for each group. The sum of a group is exact:
//
//     sum_k x_k (q_k - 8) = sum_k x_k q_k - 8 sum_k x_k
//
// 8 sum_k x_k is computed once per token.
//
// A tile has TILE_N outputs and is stored as [K / 4, W, 4] bytes. The low half of a byte is the value of one of the
// first W outputs, the high half that of the same one of the other W. Scales are [G, TILE_N] per tile. K is padded to a
// multiple of 16, not of a group.
//
// x86 multiplies signed by unsigned bytes: both halves hold q, and a vector of bytes becomes two operands after one mask
// and one shift. ARM multiplies signed bytes: the high half holds q - 8 in two's complement (SIGNED_HIGH), so a whole
// byte is low + 16 (high - 8) and is an operand itself, without the shift. The low part is subtracted once per group.
//
// Dims: K = inputs, G = groups, W = lanes of a vector, R = tokens of a tile.
#pragma once

#include <type_traits>

#include "machine/simd.h"

namespace bagu {

constexpr int TILE_N = 2 * W;
// How far ahead of the weight being read memory is prefetched. x86: 4096 takes 4 to 10 % off a step. Neoverse-N1: 4096
// disturbs its own prefetcher; all products of the 135M shape for one token take 10.8 ms with 4096, 8.2 with 1024 and 8.3
// without in int8, and 6.6, 5.4 and 5.7 in int4 (one core).
#if defined(__aarch64__)
constexpr int PREFETCH_BYTES = 1024;
#else
constexpr int PREFETCH_BYTES = 4096;
#endif
constexpr int GROUP = 128, INT4_K_STEP = 16;  // inputs of a group, and of one step of the loop below

struct int4_pair {
    uint8_t bits;
};

// Some inputs of a token that share a scale.
struct Group {
    float scale;     // NaN if a value is not finite
    int32_t offset;  // 8 times the sum of the int8 values
};

template <class T>
inline void prefetch(const T* w, int64_t count) {
    const char* next = reinterpret_cast<const char*>(w) + PREFETCH_BYTES;
    for (size_t i = 0; i < sizeof(T) * count; i += 64) __builtin_prefetch(next + i);
}

// `count` values in int8: the largest becomes 127. The rest of `room` is filled with zeros.
inline Group quantize(const float* x, int64_t count, int8_t* to, int64_t room) {
    vec most = all(1e-30f), nans{};  // `nans` stays 0 unless there is a NaN or an infinity
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        vec v = load(x + i), size = v < 0.0f ? -v : v;
        most = size > most ? size : most;
        nans += v * 0.0f;
    }
    float largest = 0.0f, invalid = sum(nans);
    for (int j = 0; j < W; j++) largest = most[j] > largest ? most[j] : largest;
    for (; i < count; i++) {
        largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
        invalid += x[i] * 0.0f;
    }
    bool finite = invalid == 0.0f;
    float inverse = 127.0f / largest;
    int32_t total = 0;
    for (i = 0; i < count; i++) {
        int32_t value = int32_t(std::nearbyint(finite ? x[i] * inverse : 0.0f));
        to[i] = int8_t(value);
        total += value;
    }
    for (; i < room; i++) to[i] = 0;
    return {finite ? largest / 127.0f : NAN, 8 * total};
}

#if defined(__ARM_FEATURE_DOTPROD) && !defined(BAGU_PORTABLE)
constexpr bool SIGNED_HIGH = true;

// acc[R][2] += 16 inputs of R tokens, which are `stride` apart, times one tile: its low halves, and its whole bytes.
template <int R>
inline void add_dots(const int8_t* x, int64_t stride, const int4_pair* w, ivec (*acc)[2]) {
    int8x16_t xs[R];
    for (int r = 0; r < R; r++) xs[r] = vld1q_s8(x + r * stride);
    auto add = [&](auto lane) {  // a constant, as the intrinsic wants it
        uint8x16_t pairs = vld1q_u8(&w->bits + lane * 16);
        int8x16_t low = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15))), whole = vreinterpretq_s8_u8(pairs);
        for (int r = 0; r < R; r++) {
            acc[r][0] = (ivec)vdotq_laneq_s32((int32x4_t)acc[r][0], low, xs[r], lane);
            acc[r][1] = (ivec)vdotq_laneq_s32((int32x4_t)acc[r][1], whole, xs[r], lane);
        }
    };
    add(std::integral_constant<int, 0>{}), add(std::integral_constant<int, 1>{});
    add(std::integral_constant<int, 2>{}), add(std::integral_constant<int, 3>{});
}

// sum_k x_k (q_k - 8) of a group for the outputs of both halves. `offset` is 8 sum_k x_k.
inline void group_sums(const ivec* acc, int32_t offset, vec* sums) {
    sums[0] = __builtin_convertvector(acc[0] - offset, vec);
    sums[1] = (vec)vcvtq_n_f32_s32((int32x4_t)(acc[1] - acc[0]), 4);  // divided by 2^4
}
#else
constexpr bool SIGNED_HIGH = false;

inline void group_sums(const ivec* acc, int32_t offset, vec* sums) {
    for (int v = 0; v < 2; v++) sums[v] = __builtin_convertvector(acc[v] - offset, vec);
}

#if defined(__AVX2__) && (!defined(__AVX512F__) || defined(__AVX512BW__)) && !defined(BAGU_PORTABLE)
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define BAGU_VNNI  // `dot` is one instruction, whose sums do not saturate
#endif
#if defined(__AVX512F__)
typedef __m512i bytes;
inline bytes low_half(bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
inline bytes high_half(bytes b) { return low_half(_mm512_srli_epi16(b, 4)); }
inline bytes repeat(int32_t four) { return _mm512_set1_epi32(four); }
inline bytes dot(bytes acc, bytes q, bytes x) {
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(acc, q, x);
#else  // sums of two products are at most 2 * 15 * 127 and fit 16 bits
    return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(q, x), _mm512_set1_epi16(1)));
#endif
}
#else
typedef __m256i bytes;
inline bytes low_half(bytes b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
inline bytes high_half(bytes b) { return low_half(_mm256_srli_epi16(b, 4)); }
inline bytes repeat(int32_t four) { return _mm256_set1_epi32(four); }
inline bytes dot(bytes acc, bytes q, bytes x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(acc, q, x);
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(q, x), _mm256_set1_epi16(1)));
#endif
}
#endif
static_assert(sizeof(bytes) == sizeof(vec), "a vector of bytes has four inputs of each lane");

template <int R>
inline void add_dots(const int8_t* x, int64_t stride, const int4_pair* w, ivec (*acc)[2]) {
    for (int k = 0; k < INT4_K_STEP; k += 4) {
        bytes pairs, low, high;
        std::memcpy(&pairs, w + k * W, sizeof pairs);
        low = low_half(pairs), high = high_half(pairs);
        for (int r = 0; r < R; r++) {
            int32_t four;
            std::memcpy(&four, x + r * stride + k, sizeof four);
            acc[r][0] = (ivec)dot((bytes)acc[r][0], low, repeat(four));
            acc[r][1] = (ivec)dot((bytes)acc[r][1], high, repeat(four));
        }
    }
}
#else
template <int R>
inline void add_dots(const int8_t* x, int64_t stride, const int4_pair* w, ivec (*acc)[2]) {
    for (int k = 0; k < INT4_K_STEP; k++)
        for (int i = 0; i < W; i++) {
            int pair = w[k / 4 * 4 * W + 4 * i + k % 4].bits;
            for (int r = 0; r < R; r++) {
                acc[r][0][i] += x[r * stride + k] * (pair & 15);
                acc[r][1][i] += x[r * stride + k] * (pair >> 4);
            }
        }
}
#endif
#endif

// sums[R][2] = x[R, K] times one tile, K a multiple of INT4_K_STEP.
template <int R>
void int4_product(const int8_t* x, const Group* groups, int64_t K, int64_t G, const int4_pair* w, const float* scales,
                  vec (*sums)[2]) {
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = vec{};
    for (int64_t g = 0; g < G; g++) {
        int64_t end = (g + 1) * GROUP < K ? (g + 1) * GROUP : K;
        ivec acc[R][2] = {};
        for (int64_t k = g * GROUP; k < end; k += INT4_K_STEP) {
            prefetch(w + k * W, INT4_K_STEP * W);
            add_dots<R>(x + k, K, w + k * W, acc);
        }
        vec scale[2] = {load(scales + g * TILE_N), load(scales + g * TILE_N + W)};
        for (int r = 0; r < R; r++) {
            const Group& own = groups[r * G + g];
            vec exact[2];
            group_sums(acc[r], own.offset, exact);
            for (int v = 0; v < 2; v++) sums[r][v] = fma(exact[v], scale[v] * own.scale, sums[r][v]);
        }
    }
}

}  // namespace bagu
