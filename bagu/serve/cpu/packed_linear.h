// Linear layers for few tokens: y[S, N] = x[S, K] Wᵀ in fp32, with the weights of tile_product.h and the adapters of
// low_rank.h. The caller's epilogue runs on the sums of a tile before anything is stored.
//
// Dims: S = tokens, K = inputs, N = outputs, W = lanes of a vector.
#pragma once

#include <vector>

#include "serve/cpu/low_rank.h"
#include "serve/cpu/tile_product.h"

namespace bagu {

// Calls put(s, tile, first W outputs, the others, the bias of both) for every token and tile. Called by all threads of a
// parallel region; ends with a barrier.
template <class T, class Put>
void linear(const Linear& weight, const Input& in, const LowRank& low, int64_t S, int64_t K, int64_t count,
            const Put& put) {
    if (low.adapters) low_rank_products(low, in.x, S, K);
    if constexpr (QUANTIZES<T>) {
        int64_t Kp = padded<T>(K), G = num_groups<T>(K), size = INT4<T> ? GROUP : Kp;
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < S; s++)
            for (int64_t g = 0; g < G; g++) {
                int64_t from = g * size, values = K - from < size ? K - from : size;
                int64_t room = Kp - from < size ? Kp - from : size;
                in.groups[s * G + g] = quantize(in.x + s * K + from, values, in.quantized + s * Kp + from, room);
            }
    }
    Blocks<T> block(weight, in, S, K);
#pragma omp for collapse(2) schedule(static)
    for (int64_t p = 0; p < count; p++)
        for (int64_t s = 0; s < S; s += BLOCK<T>) {
            int64_t rows = S - s < BLOCK<T> ? S - s : BLOCK<T>;
            vec sums[BLOCK<T>][2], scale[2], bias[2] = {};
            block(rows, s, p, sums);
            for (int i = 0; i < 2; i++) {
                scale[i] = weight.scales && !INT4<T> ? load(weight.scales + (2 * p + i) * W) : all(1.0f);
                if (weight.bias) bias[i] = load(weight.bias + (2 * p + i) * W);
            }
            for (int64_t r = 0; r < rows; r++) {
                for (int i = 0; i < 2; i++) sums[r][i] *= scale[i];
                add_low_rank(low, s + r, p, sums[r]);
                put(s + r, p, sums[r][0], sums[r][1], bias[0], bias[1]);
            }
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
    std::vector<float> largest(S, -INFINITY);
    std::vector<int8_t> quantized(QUANTIZES<T> ? S * padded<T>(K) : 0);
    std::vector<Group> groups(QUANTIZES<T> ? S * num_groups<T>(K) : 0);
    std::vector<char> invalid(S);
    Input in{x, quantized.data(), groups.data()};
    for (int64_t s = 0; s < S; s++) tokens[s] = 0;
#pragma omp parallel num_threads(threads)
    {
        std::vector<ArgMax> rows(S);
        linear<T>(weight, in, LowRank{}, S, K, tiles(N), [&](int64_t s, int64_t p, vec a, vec b, vec c, vec d) {
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
