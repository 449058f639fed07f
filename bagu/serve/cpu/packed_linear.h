// Linear layers for few tokens: y[S, N] = x[S, K] Wᵀ in fp32, with weights in fp32, bf16 or int8.
//
// A weight [N, K] is packed in tiles of TILE_N outputs, each stored as [K, TILE_N], so that it is read once and in
// order. A tile of ROWS tokens by TILE_N outputs is accumulated in registers, and the caller's epilogue runs on it
// before anything is stored.
//
// int8 weights: where the CPU has dot products of int8 (ARM's asimddp), activations are quantized too, a scale a token,
// and a tile is [K / 4, TILE_N, 4]. Elsewhere the weights are widened and activations stay fp32.
//
// Dims: S = tokens, K = inputs, N = outputs, W = lanes of a vector, R = tokens of a tile.
#pragma once

#include <type_traits>
#include <vector>

#include "machine/simd.h"

namespace bagu {

constexpr int ROWS = REGISTERS == 32 ? 8 : 4, TILE_N = 2 * W;
constexpr int PREFETCH_BYTES = 4096;  // ahead of the weight being read: 4 to 10 % of a step

#if defined(__ARM_FEATURE_DOTPROD)
constexpr int DOT = 4;  // inputs that one lane of an int8 dot product takes
#else
constexpr int DOT = 1;
#endif
constexpr int K_STEP = DOT > 1 ? 16 : 1;  // K of an int8 weight is padded to a multiple of this

template <class T>
constexpr bool DOTS = DOT > 1 && std::is_same<T, int8_t>::value;

struct Linear {
    const void* tiles;    // [ceil(N / TILE_N), K, TILE_N]
    const float* scales;  // [N] of int8, in the order of the tiles and padded as they are; else null
    const float* bias;    // the same, or null
};

// Activations of a linear layer, and room for their int8 form: quantized[S, padded K] and scales[S].
struct Input {
    const float* x;  // [S, K]
    int8_t* quantized;
    float* scales;
};

inline int64_t padded(int64_t K) { return (K + K_STEP - 1) / K_STEP * K_STEP; }
inline int64_t tiles(int64_t N) { return (N + TILE_N - 1) / TILE_N; }

template <int R>
constexpr int chains() {  // independent accumulators per output: an FMA has a latency of 4 cycles
    return R * 4 <= ROWS ? 4 : R * 2 <= ROWS ? 2 : 1;
}

template <class T>
inline void prefetch(const T* w, int64_t count) {
    const char* next = reinterpret_cast<const char*>(w) + PREFETCH_BYTES;
    for (size_t i = 0; i < sizeof(T) * count; i += 64) __builtin_prefetch(next + i);
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
// The same with x in int8, K a multiple of K_STEP.
template <int R>
void product(const int8_t* x, int64_t K, const int8_t* w, vec (*sums)[2]) {
    int32x4_t acc[R][2] = {};
    for (int64_t k = 0; k < K; k += K_STEP) {
        prefetch(w + k * TILE_N, K_STEP * TILE_N);
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
        for (int v = 0; v < 2; v++) sums[r][v] = (vec)vcvtq_f32_s32(acc[r][v]);
}
#endif

// One token in int8: its largest value becomes 127. Returns the scale, NaN if a value is not finite.
inline float quantize(const float* x, int64_t K, int8_t* to) {
    float largest = 1e-30f, invalid = 0.0f;
    for (int64_t i = 0; i < K; i++) {
        float size = std::fabs(x[i]);
        largest = size > largest ? size : largest;
        invalid += x[i] * 0.0f;
    }
    float inverse = invalid == 0.0f ? 127.0f / largest : 0.0f;
    for (int64_t i = 0; i < K; i++) to[i] = int8_t(std::nearbyint(invalid == 0.0f ? x[i] * inverse : 0.0f));
    for (int64_t i = K; i < padded(K); i++) to[i] = 0;
    return invalid == 0.0f ? largest / 127.0f : NAN;
}

template <class T, int R = ROWS>
void some_rows(int64_t rows, const Input& in, int64_t s, int64_t K, const T* w, vec (*sums)[2]) {
    if constexpr (R > 0) {
        if (rows != R) return some_rows<T, R - 1>(rows, in, s, K, w, sums);
        if constexpr (DOTS<T>) {
            product<R>(in.quantized + s * padded(K), padded(K), w, sums);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < 2; v++) sums[r][v] *= in.scales[s + r];
        } else {
            product<T, R>(in.x + s * K, K, w, sums);
        }
    }
}

// Calls put(s, tile, first W outputs, the others, the bias of both) for every token and tile. Called by all threads of a
// parallel region; ends with a barrier.
template <class T, class Put>
void linear(const Linear& weight, const Input& in, int64_t S, int64_t K, int64_t count, const Put& put) {
    if constexpr (DOTS<T>) {
#pragma omp for schedule(static)
        for (int64_t s = 0; s < S; s++) in.scales[s] = quantize(in.x + s * K, K, in.quantized + s * padded(K));
    }
    int64_t tile_size = (DOTS<T> ? padded(K) : K) * TILE_N;
#pragma omp for collapse(2) schedule(static)
    for (int64_t p = 0; p < count; p++)
        for (int64_t s = 0; s < S; s += ROWS) {
            int64_t rows = S - s < ROWS ? S - s : ROWS;
            vec sums[ROWS][2], scale[2], bias[2] = {};
            some_rows(rows, in, s, K, static_cast<const T*>(weight.tiles) + p * tile_size, sums);
            for (int i = 0; i < 2; i++) {
                scale[i] = weight.scales ? load(weight.scales + (2 * p + i) * W) : all(1.0f);
                if (weight.bias) bias[i] = load(weight.bias + (2 * p + i) * W);
            }
            for (int64_t r = 0; r < rows; r++)
                put(s + r, p, sums[r][0] * scale[0], sums[r][1] * scale[1], bias[0], bias[1]);
        }
}

// Stores to and loads from columns at … at + W of a row of N. Columns past the end are the padding of a tile.
inline void store_columns(float* row, int64_t at, int64_t N, vec v) {
    if (at + W <= N)
        store(row + at, v);
    else if (at < N)
        store(row + at, v, N - at);
}

inline vec load_columns(const float* row, int64_t at, int64_t N) {
    return at + W <= N ? load(row + at) : at < N ? load(row + at, N - at) : vec{};
}

// A running argmax over one row, lane by lane.
struct ArgMax {
    vec most = all(-INFINITY), invalid{};  // `invalid` stays 0 unless there was a NaN or an infinity
    ivec at{};

    void update(vec v, int64_t first, int64_t N) {
        ivec now{};
        for (int j = 0; j < W; j++) now[j] = int32_t(first) + j;
        invalid += v * 0.0f;
        if (first + W > N) v = now < int32_t(N) ? v : all(-INFINITY);
        at = v > most ? now : at;
        most = v > most ? v : most;
    }
};

// y, and the index of the first largest value of each row, or of its first NaN, as in numpy and torch. The maximum is
// taken while the values are in registers: afterwards half of a row is in another core's cache, or in none.
template <class T>
void head(const Linear& weight, const float* x, float* y, int64_t* tokens, int64_t S, int64_t K, int64_t N,
          int threads) {
    std::vector<float> largest(S, -INFINITY), scales(DOTS<T> ? S : 0);
    std::vector<int8_t> quantized(DOTS<T> ? S * padded(K) : 0);
    std::vector<char> invalid(S);
    Input in{x, quantized.data(), scales.data()};
    for (int64_t s = 0; s < S; s++) tokens[s] = 0;
#pragma omp parallel num_threads(threads)
    {
        std::vector<ArgMax> rows(S);
        linear<T>(weight, in, S, K, tiles(N), [&](int64_t s, int64_t p, vec a, vec b, vec c, vec d) {
            vec halves[2] = {a + c, b + d};
            for (int i = 0; i < 2; i++) {
                store_columns(y + s * N, (2 * p + i) * W, N, halves[i]);
                rows[s].update(halves[i], (2 * p + i) * W, N);
            }
        });
#pragma omp critical
        for (int64_t s = 0; s < S; s++) {
            invalid[s] |= sum(rows[s].invalid) != 0.0f;
            for (int j = 0; j < W; j++) {
                float v = rows[s].most[j];
                int64_t at = rows[s].at[j];
                if (v > largest[s] || (v == largest[s] && at < tokens[s])) largest[s] = v, tokens[s] = at;
            }
        }
    }
    for (int64_t s = 0; s < S; s++)
        for (int64_t i = 0; invalid[s] && i < N; i++)
            if (y[s * N + i] != y[s * N + i]) tokens[s] = i, invalid[s] = 0;
}

}  // namespace bagu
