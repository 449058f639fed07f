// LoRA adapters: a token may add a product of low rank to its outputs, y += B (A x), in fp32 for any weights.
//
// Dims: S = tokens, K = inputs, N = outputs, W = lanes of a vector.
#pragma once

#include "serve/cpu/tile_product.h"

namespace bagu {

// B A of one adapter for one linear layer. A rank of 0: the adapter does not change this layer.
struct Pair {
    const float* a;  // [tiles of rank, K, TILE_N], or [K, W] for a rank of at most W: half of a tile would be zeros
    const float* b;  // [tiles of N, rank, TILE_N]
    int64_t rank;
};

// y += B (A x) of the tokens that have an adapter.
struct LowRank {
    const Pair* const* adapters;  // [S]: a token's adapter, a pair per linear layer, or null; null if no token has one
    int64_t layer;                // the number of this linear layer
    float* products;              // [S, width]: room for A x
    int64_t width;                // the most that an adapter needs

    const Pair* of(int64_t s) const {
        const Pair* pairs = adapters ? adapters[s] : nullptr;
        return pairs && pairs[layer].rank ? pairs + layer : nullptr;
    }
};

// A x of one token, for a rank of at most W.
inline vec narrow_product(const float* x, int64_t K, const float* a) {
    constexpr int CHAINS = chains<1>();
    vec sums[CHAINS] = {};
    int64_t k = 0;
    for (; k + CHAINS <= K; k += CHAINS)
        for (int c = 0; c < CHAINS; c++) sums[c] += x[k + c] * load(a + (k + c) * W);
    for (; k < K; k++) sums[0] += x[k] * load(a + k * W);
    for (int c = 1; c < CHAINS; c++) sums[0] += sums[c];
    return sums[0];
}

// products = A x. Called by all threads of a parallel region; ends with a barrier.
inline void low_rank_products(const LowRank& low, const float* x, int64_t S, int64_t K) {
#pragma omp for schedule(static)
    for (int64_t s = 0; s < S; s++) {
        const Pair* pair = low.of(s);
        float* products = low.products + s * low.width;
        if (pair && pair->rank <= W) store(products, narrow_product(x + s * K, K, pair->a));
        for (int64_t p = 0; pair && pair->rank > W && p < tiles(pair->rank); p++) {
            vec sums[1][2];
            product<float, 1>(x + s * K, K, pair->a + p * K * TILE_N, sums);
            for (int i = 0; i < 2; i++) store(products + p * TILE_N + i * W, sums[0][i]);
        }
    }
}

// Adds B (A x) of token s to the outputs of tile p.
inline void add_low_rank(const LowRank& low, int64_t s, int64_t p, vec* sums) {
    const Pair* pair = low.of(s);
    if (!pair) return;
    const float *b = pair->b + p * pair->rank * TILE_N, *product = low.products + s * low.width;
    for (int64_t r = 0; r < pair->rank; r++)
        for (int i = 0; i < 2; i++) sums[i] += product[r] * load(b + r * TILE_N + i * W);
}

}  // namespace bagu
