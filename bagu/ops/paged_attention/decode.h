// Attention of one new token over the pages of its sequence: one pass over keys and values with an online softmax
// (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867), read in place in the pool.
//
// A decode reads every key and value once and does very little arithmetic, so the order of the reads matters: a slot of
// the pool holds all key heads of a token contiguously, and all of them are read before the next slot. The queries of a
// group share the load of their key.
//
// Dims: H = heads, G = key heads, n = H / G, D = features of a key, E = features of a value, B = positions per block.
#pragma once

#include <vector>

#include "machine/simd.h"

namespace bagu {

template <class T>
struct Pool {
    T* base;
    int64_t place, head;  // strides, in elements; the last dim is contiguous

    T* at(int64_t slot, int64_t g) const { return base + slot * place + g * head; }
};

template <class T>
struct Pages {
    Pool<T> k, v;
    const int32_t* table;  // blocks of this sequence
    int64_t B;

    int64_t slot(int64_t place) const { return int64_t(table[place / B]) * B + place % B; }
};

// Scratch memory for the work on one token. Each thread has its own.
struct Scratch {
    std::vector<float> scores, largest, total, keep;
};

constexpr int TILE = 32;  // keys per tile: the softmax of their scores is computed and used at once
constexpr int KEYS = 4;   // keys that are read together, so that their sums are independent

// The number of vectors of a row: FIXED if it is known at compile time, else as many as fit, and a remainder.
template <int FIXED>
inline int64_t whole(int64_t width) {
    return FIXED ? FIXED : width / W;
}

// scores[j] = scale * q . k_j for KEYS keys.
template <int FIXED, class T>
inline void dots(const float* q, const T* const* k, int64_t D, float scale, float* scores) {
    vec acc[KEYS] = {};
    int64_t full = whole<FIXED>(D);
    for (int64_t i = 0; i < full; i++) {
        vec x = load(q + i * W);
        for (int j = 0; j < KEYS; j++) acc[j] += x * load(k[j] + i * W);
    }
    if (!FIXED && full * W < D) {
        vec x = load(q + full * W, D - full * W);
        for (int j = 0; j < KEYS; j++) acc[j] += x * load(k[j] + full * W, D - full * W);
    }
    for (int j = 0; j < KEYS; j++) scores[j] = scale * sum(acc[j]);
}

// out = keep * out + sum_j p_j v_j for KEYS values.
template <int FIXED, class T>
inline void add(float* out, float keep, const float* p, const T* const* v, int64_t E) {
    int64_t full = whole<FIXED>(E);
    for (int64_t i = 0; i < full; i++) {
        vec y = load(out + i * W) * keep;
        for (int j = 0; j < KEYS; j++) y += p[j] * load(v[j] + i * W);
        store(out + i * W, y);
    }
    if (int64_t rest = E - full * W; !FIXED && rest) {
        vec y = load(out + full * W, rest) * keep;
        for (int j = 0; j < KEYS; j++) y += p[j] * load(v[j] + full * W, rest);
        store(out + full * W, y, rest);
    }
}

// Scores to weights in place, `count` of them, a multiple of W (-inf where there is no key). Returns the factor for the
// previous sums, because the largest score may be new.
inline float soften(float* scores, int64_t count, float& largest, float& total) {
    float most = largest;
    for (int64_t j = 0; j < count; j++) most = scores[j] > most ? scores[j] : most;
    vec sums{};
    for (int64_t j = 0; j < count; j += W) {
        vec s = load(scores + j), p = exp(s - most);
        p = s == -INFINITY ? vec{} : p;
        store(scores + j, p);
        sums += p;
    }
    float keep = std::exp(largest - most);  // 0 for the first tile, whose `largest` is -inf
    total = total * keep + sum(sums);
    largest = most;
    return keep;
}

// out[n (last - first), E] of the heads q[n (last - first), D] of key heads first … last, over places begin … end.
template <int FIXED, class T>
void attend(const Pages<T>& pages, const float* q, float* out, int64_t n, int64_t D, int64_t E, int64_t first,
            int64_t last, int64_t begin, int64_t end, float scale, Scratch& scratch) {
    int64_t heads = n * (last - first);
    scratch.scores.resize(heads * TILE);
    scratch.largest.assign(heads, -INFINITY);
    scratch.total.assign(heads, 0.0f);
    scratch.keep.resize(heads);
    std::memset(out, 0, sizeof(float) * heads * E);
    for (int64_t at = begin; at < end; at += TILE) {
        int64_t count = end - at < TILE ? end - at : TILE;
        int64_t slots[TILE];  // past the end: a position that is attended to, with weight 0
        for (int64_t j = 0; j < TILE; j++) slots[j] = pages.slot(at + (j < count ? j : 0));
        for (int64_t j = 0; j < count; j += KEYS)
            for (int64_t g = first; g < last; g++) {
                const T* k[KEYS];
                for (int i = 0; i < KEYS; i++) k[i] = pages.k.at(slots[j + i], g);
                for (int64_t h = (g - first) * n; h < (g - first + 1) * n; h++)
                    dots<FIXED>(q + h * D, k, D, scale, &scratch.scores[h * TILE + j]);
            }
        for (int64_t h = 0; h < heads; h++) {
            float* row = &scratch.scores[h * TILE];
            for (int64_t j = count; j < TILE; j++) row[j] = -INFINITY;
            scratch.keep[h] = soften(row, TILE, scratch.largest[h], scratch.total[h]);
        }
        for (int64_t j = 0; j < count; j += KEYS)
            for (int64_t g = first; g < last; g++) {
                const T* v[KEYS];
                for (int i = 0; i < KEYS; i++) v[i] = pages.v.at(slots[j + i], g);
                for (int64_t h = (g - first) * n; h < (g - first + 1) * n; h++)
                    add<FIXED>(out + h * E, j ? 1.0f : scratch.keep[h], &scratch.scores[h * TILE + j], v, E);
            }
    }
    for (int64_t h = 0; h < heads; h++) {
        float share = 1.0f / scratch.total[h];
        for (int64_t i = 0; i < E; i++) out[h * E + i] *= share;
    }
}

// The same, with specialized code for the usual widths.
template <class T, class... Rest>
void attend_any(const Pages<T>& pages, const float* q, float* out, int64_t n, int64_t D, int64_t E, Rest&&... rest) {
    if (D == E && D == 64)
        attend<64 / W>(pages, q, out, n, D, E, rest...);
    else if (D == E && D == 128)
        attend<128 / W>(pages, q, out, n, D, E, rest...);
    else
        attend<0>(pages, q, out, n, D, E, rest...);
}

}  // namespace bagu
