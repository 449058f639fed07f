// The sums of some tokens times one tile of a weight, with weights in fp32, bf16, int8 or int4.
//
// A weight [N, K] is packed in tiles of TILE_N outputs, each stored as [K, TILE_N], so that it is read once and in
// order. A tile of ROWS tokens by TILE_N outputs is accumulated in registers.
//
// int8 weights: where the CPU has dot products of int8 (ARM's asimddp, x86's VNNI), activations are quantized too, a scale
// a token, and a tile is [K / 4, TILE_N, 4]. x86 multiplies unsigned by signed bytes: its tiles hold w + 128, and
// 128 sum_k x_k is subtracted from each sum, which fits 32 bits up to K = 66,000. Elsewhere the weights are widened and
// activations stay fp32.
//
// int4 weights: int4_product.h. Activations are quantized to int8 on every CPU, with a scale per group of 128.
//
// Blocks of 16 tokens times int8 or int4: by AMX where the CPU has it (amx_product.h).
//
// Dims: S = tokens, K = inputs, N = outputs, W = lanes of a vector, R = tokens of a tile.
#pragma once

#include <type_traits>
#include <vector>

#include "machine/simd.h"
#include "serve/cpu/amx_product.h"
#include "serve/cpu/int4_product.h"

namespace bagu {

constexpr int ROWS = REGISTERS == 32 ? 8 : 4;

#if defined(__ARM_FEATURE_DOTPROD) || defined(BAGU_VNNI)
constexpr int DOT = 4;  // inputs that one lane of an int8 dot product takes
#else
constexpr int DOT = 1;
#endif
#if defined(BAGU_VNNI)
constexpr bool PLUS_128 = true;
#else
constexpr bool PLUS_128 = false;
#endif
constexpr int DOT_STEP = DOT > 1 ? 16 : 1;  // inputs of one step of an int8 product

// What K of a quantized weight is padded to a multiple of, and the tokens of which a thread computes one tile at a time.
#if defined(BAGU_AMX)
constexpr int INT8_PADDING = AMX_INPUTS, INT4_PADDING = AMX_INPUTS, QUANTIZED_BLOCK = AMX_TOKENS;
#else
constexpr int INT8_PADDING = DOT_STEP, INT4_PADDING = INT4_K_STEP, QUANTIZED_BLOCK = ROWS;
#endif

template <class T>
constexpr bool INT4 = std::is_same<T, int4_pair>::value;
template <class T>
constexpr bool DOTS = DOT > 1 && std::is_same<T, int8_t>::value;
template <class T>
constexpr bool QUANTIZES = DOTS<T> || INT4<T>;  // activations are quantized to int8 too
template <class T>
constexpr int BLOCK = QUANTIZES<T> ? QUANTIZED_BLOCK : ROWS;

struct Linear {
    const void* tiles;    // [ceil(N / TILE_N), K, TILE_N], or as int4_product.h describes
    const float* scales;  // int8: [N], in the order of the tiles and padded as they are; int4: [tiles, G, TILE_N]; or null
    const float* bias;    // [N] in the order of the tiles, or null
};

// Activations of a linear layer, and room for their int8 form.
struct Input {
    const float* x;     // [S, K]
    int8_t* quantized;  // [S, padded K]
    Group* groups;      // [S, number of groups]
};

template <class T>
inline int64_t padded(int64_t K) {
    constexpr int64_t step = INT4<T> ? INT4_PADDING : DOTS<T> ? INT8_PADDING : 1;
    return (K + step - 1) / step * step;
}

template <class T>
inline int64_t num_groups(int64_t K) {
    return INT4<T> ? (K + GROUP - 1) / GROUP : 1;
}

inline int64_t tiles(int64_t N) { return (N + TILE_N - 1) / TILE_N; }

template <int R>
constexpr int chains() {  // independent accumulators per output: an FMA has a latency of 4 cycles
    return R * 4 <= ROWS ? 4 : R * 2 <= ROWS ? 2 : 1;
}

// sums[R][2] = x[R, K] times one tile.
template <class T, int R>
void product(const float* x, int64_t K, const T* w, vec (*sums)[2]) {
    constexpr int CHAINS = chains<R>();
    vec a[CHAINS][R] = {}, b[CHAINS][R] = {};
    auto add = [&](int64_t k, int c) {
        const T* row = w + k * TILE_N;
        vec w0 = load(row), w1 = load(row + W);
        for (int r = 0; r < R; r++) {
            a[c][r] += x[r * K + k] * w0;
            b[c][r] += x[r * K + k] * w1;
        }
    };
    int64_t k = 0;
    for (; k + CHAINS <= K; k += CHAINS) {
        prefetch(w + k * TILE_N, CHAINS * TILE_N);
        for (int c = 0; c < CHAINS; c++) add(k + c, c);
    }
    for (; k < K; k++) add(k, 0);
    for (int r = 0; r < R; r++) {
        for (int c = 1; c < CHAINS; c++) a[0][r] += a[c][r], b[0][r] += b[c][r];
        sums[r][0] = a[0][r], sums[r][1] = b[0][r];
    }
}

#if defined(__ARM_FEATURE_DOTPROD)
// The same with x in int8, K a multiple of DOT_STEP.
template <int R>
void product(const int8_t* x, const Group* groups, int64_t K, const int8_t* w, vec (*sums)[2]) {
    int32x4_t acc[R][2] = {};
    for (int64_t k = 0; k < K; k += DOT_STEP) {
        prefetch(w + k * TILE_N, DOT_STEP * TILE_N);
        int8x16_t xs[R];
        for (int r = 0; r < R; r++) xs[r] = vld1q_s8(x + r * K + k);
        auto add = [&](auto lane) {  // a constant, as the intrinsic wants it
            for (int v = 0; v < 2; v++) {
                int8x16_t tile = vld1q_s8(w + k * TILE_N + (2 * lane + v) * 16);
                for (int r = 0; r < R; r++) acc[r][v] = vdotq_laneq_s32(acc[r][v], tile, xs[r], lane);
            }
        };
        add(std::integral_constant<int, 0>{}), add(std::integral_constant<int, 1>{});
        add(std::integral_constant<int, 2>{}), add(std::integral_constant<int, 3>{});
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2; v++) sums[r][v] = (vec)vcvtq_f32_s32(acc[r][v]) * groups[r].scale;
}
#elif defined(BAGU_VNNI)
template <int R>
void product(const int8_t* x, const Group* groups, int64_t K, const int8_t* w, vec (*sums)[2]) {
    constexpr int CHAINS = chains<R>();
    ivec a[CHAINS][R] = {}, b[CHAINS][R] = {};
    auto add = [&](int64_t k, int c) {
        bytes w0, w1;
        std::memcpy(&w0, w + k * TILE_N, sizeof w0);
        std::memcpy(&w1, w + k * TILE_N + DOT * W, sizeof w1);
        for (int r = 0; r < R; r++) {
            int32_t four;
            std::memcpy(&four, x + r * K + k, sizeof four);
            a[c][r] = (ivec)dot((bytes)a[c][r], w0, repeat(four));
            b[c][r] = (ivec)dot((bytes)b[c][r], w1, repeat(four));
        }
    };
    for (int64_t k = 0; k < K; k += DOT_STEP) {
        prefetch(w + k * TILE_N, DOT_STEP * TILE_N);
        for (int i = 0; i < DOT_STEP / DOT; i++) add(k + DOT * i, i % CHAINS);
    }
    for (int r = 0; r < R; r++) {
        for (int c = 1; c < CHAINS; c++) a[0][r] += a[c][r], b[0][r] += b[c][r];
        ivec offset = 16 * groups[r].offset - ivec{};
        sums[r][0] = __builtin_convertvector(a[0][r] - offset, vec) * groups[r].scale;
        sums[r][1] = __builtin_convertvector(b[0][r] - offset, vec) * groups[r].scale;
    }
}
#endif

template <class T, int R = ROWS>
void some_rows(int64_t rows, const Input& in, int64_t s, int64_t K, const Linear& weight, int64_t p, vec (*sums)[2]) {
    if constexpr (R > 0) {
        if (rows != R) return some_rows<T, R - 1>(rows, in, s, K, weight, p, sums);
        int64_t Kp = padded<T>(K), G = num_groups<T>(K);
        // of one tile; an int4_pair is two values
        const T* w = static_cast<const T*>(weight.tiles) + p * Kp * (INT4<T> ? W : TILE_N);
        if constexpr (INT4<T>) {
            int4_product<R>(in.quantized + s * Kp, in.groups + s * G, Kp, G, w, weight.scales + p * G * TILE_N, sums);
        } else if constexpr (DOTS<T>) {
            product<R>(in.quantized + s * Kp, in.groups + s, Kp, w, sums);
        } else {
            product<T, R>(in.x + s * K, K, w, sums);
        }
    }
}

// The products of one thread in one linear layer: a block of at most BLOCK tokens times one tile at a time.
template <class T>
struct Blocks {
    const Linear& weight;
    const Input& in;
    int64_t K;
#if defined(BAGU_AMX)
    bool amx;
    std::vector<uint8_t> unpacked = {};  // tile `tile` of an int4 weight
    int64_t tile = -1;

    Blocks(const Linear& weight, const Input& in, int64_t S, int64_t K)
        : weight(weight), in(in), K(K), amx(QUANTIZES<T> && S >= BLOCK<T> && has_amx()) {
        if (amx) _tile_loadconfig(&AMX_REGISTERS);
    }
    ~Blocks() {
        if (amx) _tile_release();
    }

    void by_amx(int64_t s, int64_t p, vec (*sums)[2]) {
        int64_t Kp = padded<T>(K), G = num_groups<T>(K);
        const int8_t* x = in.quantized + s * Kp;
        if constexpr (INT4<T>) {
            if (p != tile) unpack(static_cast<const T*>(weight.tiles) + p * Kp * W, Kp, unpacked), tile = p;
            amx_int4_product(x, in.groups + s * G, Kp, G, unpacked.data(), weight.scales + p * G * TILE_N, sums);
        } else {
            amx_product(x, in.groups + s, Kp, static_cast<const uint8_t*>(weight.tiles) + p * Kp * TILE_N, sums);
        }
    }
#else
    Blocks(const Linear& weight, const Input& in, int64_t, int64_t K) : weight(weight), in(in), K(K) {}
#endif

    // sums[rows][2] of tokens s … and tile p
    void operator()(int64_t rows, int64_t s, int64_t p, vec (*sums)[2]) {
#if defined(BAGU_AMX)
        if (amx && rows == BLOCK<T>) return by_amx(s, p, sums);
#endif
        for (int64_t r = 0; r < rows; r += ROWS)
            some_rows<T>(rows - r < ROWS ? rows - r : ROWS, in, s + r, K, weight, p, sums + r);
    }
};

}  // namespace bagu
