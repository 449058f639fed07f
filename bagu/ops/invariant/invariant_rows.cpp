// Products and attention for batch-invariant mode: a row's bits do not depend on the other rows, because the numbers of
// each output are added in an order that is fixed by its own length alone.
//
//     product     lane l of one accumulator adds the inputs k with k % W == l, in order; then the lanes are added
//     attention   each query runs alone (paged_attention/decode.h), also in training and in a prefill
//     others      invariant_program.h
//
// Several rows and columns share loads, but each output has its own accumulator.
//
// Dims: M = rows, N = outputs, K = inputs; the rest as in decode.h.
#include <algorithm>

#include "ops/invariant/invariant_program.h"
#include "ops/paged_attention/decode.h"

namespace bagu {

constexpr int BLOCK_M = REGISTERS == 32 ? 4 : 2, BLOCK_N = 4;
constexpr int64_t TILE_M = 32, TILE_N = 16;  // outputs of one task: their weights stay in the L1 cache

template <class T>
struct Matrix {
    const T* base;
    int64_t stride;  // of a row; the last dim is contiguous

    const T* row(int64_t i) const { return base + i * stride; }
};

struct Product {
    int64_t M, N, K, x_stride, w_stride, threads;
    const void *x, *w;
    const float* bias;  // [N], or null
    float* y;           // [M, N]
};

// y[m … m + R, n … n + C] = x w^T + bias. Without the pragmas GCC 12 keeps the accumulators in memory: 2.3 times as slow.
template <class T, int R, int C>
void block(const Matrix<T>& x, const Matrix<T>& w, const Product& p, int64_t m, int64_t n) {
    vec acc[R][C] = {};
    const T *xs[R], *ws[C];
    for (int r = 0; r < R; r++) xs[r] = x.row(m + r);
    for (int c = 0; c < C; c++) ws[c] = w.row(n + c);
    int64_t k = 0, K = p.K;
    for (; k + W <= K; k += W) {
        vec a[R];
        if (R == 1 && k % (64 / int64_t(sizeof(T))) == 0)
            for (int c = 0; c < C; c++) __builtin_prefetch(ws[c] + C * w.stride + k);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) a[r] = load(xs[r] + k);
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) {
            vec b = load(ws[c] + k);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) acc[r][c] = fma(a[r], b, acc[r][c]);
        }
    }
    float* y = p.y + m * p.N + n;
    const float* bias = p.bias ? p.bias + n : nullptr;
    int64_t N = p.N;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) {
            vec last = acc[r][c];
            if (k < K) last = fma(load(xs[r] + k, K - k), load(ws[c] + k, K - k), last);
            y[r * N + c] = sum(last) + (bias ? bias[c] : 0.0f);
        }
}

// A row alone has twice the outputs per block: an FMA has a latency of 4 cycles.
template <class T, int R>
void rows(const Matrix<T>& x, const Matrix<T>& w, const Product& p, int64_t m, int64_t n, int64_t end) {
    constexpr int C = R == 1 ? 2 * BLOCK_N : BLOCK_N;
    for (; n + C <= end; n += C) block<T, R, C>(x, w, p, m, n);
    for (; n < end; n++) block<T, R, 1>(x, w, p, m, n);
}

template <class T>
void product(const Product& p) {
    Matrix<T> x{static_cast<const T*>(p.x), p.x_stride}, w{static_cast<const T*>(p.w), p.w_stride};
#pragma omp parallel for collapse(2) schedule(static) num_threads(p.threads)
    for (int64_t n = 0; n < p.N; n += TILE_N)
        for (int64_t first = 0; first < p.M; first += TILE_M) {
            int64_t end = std::min(n + TILE_N, p.N), last = std::min(first + TILE_M, p.M), m = first;
            for (; m + BLOCK_M <= last; m += BLOCK_M) rows<T, BLOCK_M>(x, w, p, m, n, end);
            for (; m < last; m++) rows<T, 1>(x, w, p, m, n, end);
        }
}

struct Queries {
    int64_t T, H, G, D, E, B, columns, threads;  // columns of the block tables
    int64_t k_place, k_head, v_place, v_head;    // strides of keys and values
    float scale;
    const void *q, *k, *v;                     // q [T, H, D]
    const int64_t *begins, *ends, *row, *slot;  // [T]: places attended to, row of the tables, slot of place 0
    const int32_t* tables;
    void* out;   // [T, H, E]
    float* lse;  // [T, H]
};

template <class T>
void attention(const Queries& c) {
    int64_t G = c.G, n = c.H / G, D = c.D, E = c.E;
    int64_t parts = std::min(G, (c.threads + c.T - 1) / c.T);
#pragma omp parallel num_threads(c.threads)
    {
        Scratch scratch;
        std::vector<float> q(c.H * D), y(c.H * E);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t t = c.T - 1; t >= 0; t--)
            for (int64_t i = 0; i < parts; i++) {
                int64_t first = i * G / parts, last = (i + 1) * G / parts;
                int64_t heads = (last - first) * n, at = t * c.H + first * n;
                for (int64_t j = 0; j < heads * D; j++) q[j] = widen(static_cast<const T*>(c.q)[at * D + j]);
                T* k = const_cast<T*>(static_cast<const T*>(c.k)) + c.slot[t] * c.k_place;
                T* v = const_cast<T*>(static_cast<const T*>(c.v)) + c.slot[t] * c.v_place;
                Pages<T> pages{{k, c.k_place, c.k_head}, {v, c.v_place, c.v_head}, c.tables + c.row[t] * c.columns, c.B};
                attend_any(pages, q.data(), y.data(), n, D, E, first, last, c.begins[t], c.ends[t], c.scale, scratch);
                for (int64_t j = 0; j < heads * E; j++) narrow(y[j], static_cast<T*>(c.out)[at * E + j]);
                for (int64_t h = 0; h < heads; h++) c.lse[at + h] = scratch.largest[h] + std::log(scratch.total[h]);
            }
    }
}

// Runs a list of calls in order.
template <class T>
void run(const Call* calls, int64_t count) {
    for (const Call* c = calls; c < calls + count; c++) switch (c->kind) {
            case PRODUCT: product<T>(*static_cast<const Product*>(c->args)); break;
            case ATTENTION: attention<T>(*static_cast<const Queries*>(c->args)); break;
            case NORM: norm<T>(*static_cast<const Norm*>(c->args)); break;
            case ROTATE: rotate<T>(*static_cast<const Rotate*>(c->args)); break;
            case GATE: gate<T>(*static_cast<const Gate*>(c->args)); break;
            case COPY: copy<T>(*static_cast<const Copy*>(c->args)); break;
            case NARROW: {
                auto n = static_cast<const Narrow*>(c->args);
                for (int64_t i = 0; i < n->count; i++) narrow(n->x[i], static_cast<T*>(n->y)[i]);
                break;
            }
        }
}

}  // namespace bagu

extern "C" void bagu_run_fp32(const bagu::Call* calls, int64_t count) { bagu::run<float>(calls, count); }
extern "C" void bagu_run_bf16(const bagu::Call* calls, int64_t count) { bagu::run<bagu::bf16>(calls, count); }
