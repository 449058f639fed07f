// Attention of several consecutive new tokens of a sequence in one key head, over the pages of the sequence.
//
// A token alone (decode.h) reads all keys and values before it. For a prompt these no longer fit in the L2 cache from a
// few hundred tokens on, so a tile of keys and values is used by all tokens of a group while it is in the L1 cache, and
// a register with a part of a key or value by ROW_BLOCK rows.
//
// Dims: n = query heads of a key head, D = features of a head, rows = tokens of the group times n.
#pragma once

#include "ops/paged_attention/decode.h"

namespace bagu {

constexpr int64_t GROUP_TOKENS = 16;
constexpr int ROW_BLOCK = REGISTERS == 32 ? 4 : 2;

struct Queries {
    const float* q;  // of the first token: [n, D]
    float* y;        // likewise
    int64_t q_stride, y_stride, tokens;
    int64_t end, window;  // the first token attends to places before `end`, at most `window` of them; 0: no window
};

// scores[r][j] = scale * q_r . k_j for R rows and KEYS keys.
template <int FIXED, int R, class T>
inline void dots_of_rows(const float* const* q, const T* const* k, int64_t D, float scale, float (*scores)[TILE]) {
    vec acc[R][KEYS] = {};
    int64_t full = whole<FIXED>(D), rest = FIXED ? 0 : D - full * W;
    for (int64_t i = 0; i < full; i++) {
        vec keys[KEYS];
        for (int j = 0; j < KEYS; j++) keys[j] = load(k[j] + i * W);
        for (int r = 0; r < R; r++) {
            vec x = load(q[r] + i * W);
            for (int j = 0; j < KEYS; j++) acc[r][j] += x * keys[j];
        }
    }
    for (int r = 0; rest && r < R; r++)
        for (int j = 0; j < KEYS; j++) acc[r][j] += load(q[r] + full * W, rest) * load(k[j] + full * W, rest);
    for (int r = 0; r < R; r++)
        for (int j = 0; j < KEYS; j++) scores[r][j] = scale * sum(acc[r][j]);
}

// y_r = keep_r * y_r + sum_j p[r][j] v_j for R rows and KEYS values.
template <int FIXED, int R, class T>
inline void add_to_rows(float* const* y, const float* keep, const float (*p)[TILE], const T* const* v, int64_t D) {
    int64_t full = whole<FIXED>(D), rest = FIXED ? 0 : D - full * W;
    for (int64_t i = 0; i < full; i++) {
        vec values[KEYS];
        for (int j = 0; j < KEYS; j++) values[j] = load(v[j] + i * W);
        for (int r = 0; r < R; r++) {
            vec sums = load(y[r] + i * W) * keep[r];
            for (int j = 0; j < KEYS; j++) sums += p[r][j] * values[j];
            store(y[r] + i * W, sums);
        }
    }
    for (int r = 0; rest && r < R; r++) {
        vec sums = load(y[r] + full * W, rest) * keep[r];
        for (int j = 0; j < KEYS; j++) sums += p[r][j] * load(v[j] + full * W, rest);
        store(y[r] + full * W, sums, rest);
    }
}

// Some rows of a tile of `count` keys and values at places at …: scores, their softmax, and the weighted values.
template <int FIXED, int R, class T>
inline void attend_rows(const Queries& own, int64_t row, int64_t n, int64_t D, const T* const* k, const T* const* v,
                        int64_t at, int64_t count, float scale, Scratch& scratch) {
    const float* q[R];
    float *y[R], keep[R], ones[R], scores[R][TILE];
    for (int r = 0; r < R; r++) {
        int64_t t = (row + r) / n, h = (row + r) % n;
        q[r] = own.q + t * own.q_stride + h * D, y[r] = own.y + t * own.y_stride + h * D, ones[r] = 1.0f;
    }
    for (int64_t j = 0; j < count; j += KEYS) dots_of_rows<FIXED, R>(q, k + j, D, scale, (float(*)[TILE])(scores[0] + j));
    for (int r = 0; r < R; r++) {
        int64_t end = own.end + (row + r) / n, begin = own.window && own.window < end ? end - own.window : 0;
        int64_t low = begin > at ? begin - at : 0, high = end - at < TILE ? end - at : TILE;
        if (low >= high) {  // no key of this tile
            keep[r] = 1.0f;
            std::memset(scores[r], 0, sizeof scores[r]);
            continue;
        }
        for (int64_t j = 0; j < low; j++) scores[r][j] = -INFINITY;
        for (int64_t j = high; j < TILE; j++) scores[r][j] = -INFINITY;
        keep[r] = soften(scores[r], TILE, scratch.largest[row + r], scratch.total[row + r]);
    }
    for (int64_t j = 0; j < count; j += KEYS)
        add_to_rows<FIXED, R>(y, j ? ones : keep, (const float(*)[TILE])(scores[0] + j), v + j, D);
}

template <int FIXED, class T>
void attend_group(const Pages<T>& pages, const Queries& own, int64_t n, int64_t D, int64_t g, float scale,
                  Scratch& scratch) {
    int64_t rows = own.tokens * n, last = own.end + own.tokens - 1;
    scratch.largest.assign(rows, -INFINITY);
    scratch.total.assign(rows, 0.0f);
    for (int64_t t = 0; t < own.tokens; t++) std::memset(own.y + t * own.y_stride, 0, sizeof(float) * n * D);
    for (int64_t at = own.window && own.window < own.end ? own.end - own.window : 0; at < last; at += TILE) {
        int64_t count = last - at < TILE ? last - at : TILE;
        const T *k[TILE], *v[TILE];  // past `count`: a place of the tile, with weight 0
        for (int64_t j = 0; j < TILE; j++) {
            int64_t slot = pages.slot(at + (j < count ? j : 0));
            k[j] = pages.k.at(slot, g), v[j] = pages.v.at(slot, g);
        }
        int64_t row = 0;
        for (; row + ROW_BLOCK <= rows; row += ROW_BLOCK)
            attend_rows<FIXED, ROW_BLOCK>(own, row, n, D, k, v, at, count, scale, scratch);
        for (; row < rows; row++) attend_rows<FIXED, 1>(own, row, n, D, k, v, at, count, scale, scratch);
    }
    for (int64_t row = 0; row < rows; row++) {
        float share = 1.0f / scratch.total[row], *y = own.y + row / n * own.y_stride + row % n * D;
        for (int64_t i = 0; i < D; i++) y[i] *= share;
    }
}

// The same, with specialized code for the usual widths.
template <class T>
void attend_group_any(const Pages<T>& pages, const Queries& own, int64_t n, int64_t D, int64_t g, float scale,
                      Scratch& scratch) {
    auto attend = D == 64 ? attend_group<64 / W, T> : D == 128 ? attend_group<128 / W, T> : attend_group<0, T>;
    attend(pages, own, n, D, g, scale, scratch);
}

}  // namespace bagu
