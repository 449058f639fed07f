// Products of a few rows with a large weight, y[S, N] = x[S, K] Wᵀ, in fp32 with weights of fp32, bf16 or int8.
//
// A weight [N, K] is laid out in panels of 2 W rows, W the lanes of a vector, each [K, 2 W]: it is read once, straight
// on, and a tile of ROWS tokens has its 2 ROWS sums in registers. What is to be done with the sums is done before they
// are stored.
//
// Dims: S = tokens, K = inputs, N = outputs, W = lanes.
#pragma once

#include <vector>

#include "simd.h"

namespace bagu {

constexpr int ROWS = REGISTERS == 32 ? 8 : 4;
constexpr int AHEAD = 4096;  // bytes of a weight that are asked for before they are needed: 4 to 10 % of a step

struct Linear {
    const void* panels;   // [ceil(N / 2W), K, 2W]
    const float* scales;  // [N] of int8, in the order of the panels and padded as they are; else null
    const float* bias;    // the same, or null
};

inline int64_t panels(int64_t N) { return (N + 2 * W - 1) / (2 * W); }

// sums[R][2] = x[R, K] of one panel. A sum waits for the one before it, 4 cycles, in which a core could do 8: few rows
// have sums of their own for every CHAINS-th k.
template <class T, int R>
void product(const float* x, int64_t K, const T* w, vec (*sums)[2]) {
    constexpr int CHAINS = R * 4 <= ROWS ? 4 : R * 2 <= ROWS ? 2 : 1;
    vec a[CHAINS][R] = {}, b[CHAINS][R] = {};
    auto add = [&](int64_t k, int c) {
        const T* row = w + k * 2 * W;
        vec w0 = load(row), w1 = load(row + W);
        for (int r = 0; r < R; r++) {
            a[c][r] += x[r * K + k] * w0;
            b[c][r] += x[r * K + k] * w1;
        }
    };
    int64_t k = 0;
    for (; k + CHAINS <= K; k += CHAINS) {
        const char* next = reinterpret_cast<const char*>(w + k * 2 * W) + AHEAD;
        for (size_t i = 0; i < sizeof(T) * 2 * W * CHAINS; i += 64) __builtin_prefetch(next + i);
        for (int c = 0; c < CHAINS; c++) add(k + c, c);
    }
    for (; k < K; k++) add(k, 0);
    for (int r = 0; r < R; r++) {
        for (int c = 1; c < CHAINS; c++) a[0][r] += a[c][r], b[0][r] += b[c][r];
        sums[r][0] = a[0][r], sums[r][1] = b[0][r];
    }
}

template <class T, int R = ROWS>
void some_rows(int64_t rows, const float* x, int64_t K, const T* w, vec (*sums)[2]) {
    if constexpr (R > 0) rows == R ? product<T, R>(x, K, w, sums) : some_rows<T, R - 1>(rows, x, K, w, sums);
}

// put(s, panel, first W outputs, the others, the bias of both) for every token and panel. Called by all threads of a
// parallel region; ends with a barrier.
template <class T, class Put>
void linear(const Linear& weight, const float* x, int64_t S, int64_t K, int64_t count, const Put& put) {
#pragma omp for collapse(2) schedule(static)
    for (int64_t p = 0; p < count; p++)
        for (int64_t s = 0; s < S; s += ROWS) {
            int64_t rows = S - s < ROWS ? S - s : ROWS;
            vec sums[ROWS][2], scale[2], bias[2] = {};
            some_rows(rows, x + s * K, K, static_cast<const T*>(weight.panels) + p * K * 2 * W, sums);
            for (int i = 0; i < 2; i++) {
                scale[i] = weight.scales ? load(weight.scales + (2 * p + i) * W) : all(1.0f);
                if (weight.bias) bias[i] = load(weight.bias + (2 * p + i) * W);
            }
            for (int64_t r = 0; r < rows; r++)
                put(s + r, p, sums[r][0] * scale[0], sums[r][1] * scale[1], bias[0], bias[1]);
        }
}

// A vector to and from columns at … at + W of a row of N: past the end are the rows that fill a panel up.
inline void put_at(float* row, int64_t at, int64_t N, vec v) {
    if (at + W <= N)
        store(row + at, v);
    else if (at < N)
        store(row + at, v, N - at);
}

inline vec get_at(const float* row, int64_t at, int64_t N) {
    return at + W <= N ? load(row + at) : at < N ? load(row + at, N - at) : vec{};
}

// The largest of the numbers seen so far of one row, lane by lane, and its place.
struct Largest {
    vec most = all(-INFINITY), odd{};  // `odd` stays 0 unless there was a NaN, or an infinity
    ivec at{};

    void see(vec v, int64_t first, int64_t N) {
        ivec now{};
        for (int j = 0; j < W; j++) now[j] = int32_t(first) + j;
        odd += v * 0.0f;
        if (first + W > N) v = now < int32_t(N) ? v : all(-INFINITY);
        at = v > most ? now : at;
        most = v > most ? v : most;
    }
};

// y, and the place of the first of the largest of each row; of the first NaN where there is one, as in numpy and torch.
// The numbers are looked at while they are in registers: afterwards half of a row is in another core's cache, or in
// none.
template <class T>
void head(const Linear& weight, const float* x, float* y, int64_t* tokens, int64_t S, int64_t K, int64_t N,
          int threads) {
    std::vector<float> largest(S, -INFINITY);
    std::vector<char> odd(S);
    for (int64_t s = 0; s < S; s++) tokens[s] = 0;
#pragma omp parallel num_threads(threads)
    {
        std::vector<Largest> rows(S);
        linear<T>(weight, x, S, K, panels(N), [&](int64_t s, int64_t p, vec a, vec b, vec c, vec d) {
            vec halves[2] = {a + c, b + d};
            for (int i = 0; i < 2; i++) {
                put_at(y + s * N, (2 * p + i) * W, N, halves[i]);
                rows[s].see(halves[i], (2 * p + i) * W, N);
            }
        });
#pragma omp critical
        for (int64_t s = 0; s < S; s++) {
            odd[s] |= sum(rows[s].odd) != 0.0f;
            for (int j = 0; j < W; j++) {
                float v = rows[s].most[j];
                int64_t at = rows[s].at[j];
                if (v > largest[s] || (v == largest[s] && at < tokens[s])) largest[s] = v, tokens[s] = at;
            }
        }
    }
    for (int64_t s = 0; s < S; s++)
        for (int64_t i = 0; odd[s] && i < N; i++)
            if (y[s * N + i] != y[s * N + i]) tokens[s] = i, odd[s] = 0;
}

}  // namespace bagu
