// Row-by-row functions for batch-invariant mode, and a list of calls: a decode step is one list, run by one call from
// Python. Ops and lists run the same functions of this library, so they give the same bits.
//
//     norm       y = x r w, r = 1 / sqrt(mean of x^2 + eps); with a residual, of s = x + residual
//     rotate     RoPE of the pairs (i, i + D / 2) of H heads, by a row of the tables
//     gate       silu(x[:N]) x[N:]
//     copy       to[to_rows[m]] = from[from_rows[m]]
#pragma once

#include "machine/simd.h"

namespace bagu {

template <class T>
void store_as(T* p, vec v, int64_t n) {
    for (int64_t i = 0; i < n; i++) narrow(v[i], p[i]);
}

// The first n lanes; all of them are computed, so that every element has one formula.
template <class T>
vec load_up_to(const T* p, int64_t n) {
    return n >= W ? load(p) : load(p, n);
}

struct Norm {
    int64_t M, N, threads;
    float eps;
    const void *x, *residual;  // [M, N]; residual may be null
    const float* w;            // [N]
    void *y, *s;               // [M, N]; s is x + residual
    float* r;                  // [M], or null
};

// Sums of 512 squares are added in fp64: rows may be long.
template <class T>
__attribute__((noinline)) float inverse_rms(const T* x, int64_t N, float eps) {
    double total = 0.0;
    for (int64_t first = 0; first < N; first += 512) {
        int64_t end = first + 512 < N ? first + 512 : N;
        vec sums{};
        for (int64_t i = first; i < end; i += W) {
            vec v = load_up_to(x + i, end - i);
            sums = fma(v, v, sums);
        }
        total += sum(sums);
    }
    return float(1.0 / std::sqrt(total / double(N) + double(eps)));
}

template <class T>
__attribute__((noinline)) void scale_row(const T* x, float r, const float* w, T* y, int64_t N) {
    for (int64_t i = 0; i < N; i += W) {
        int64_t n = N - i < W ? N - i : W;
        store_as(y + i, load_up_to(x + i, n) * r * load_up_to(w + i, n), n);
    }
}

template <class T>
void norm(const Norm& c) {
#pragma omp parallel for num_threads(c.threads) if (c.M * c.N > 16384)
    for (int64_t m = 0; m < c.M; m++) {
        const T* x = static_cast<const T*>(c.x) + m * c.N;
        if (c.residual) {
            const T* other = static_cast<const T*>(c.residual) + m * c.N;
            T* s = static_cast<T*>(c.s) + m * c.N;
            for (int64_t i = 0; i < c.N; i++) narrow(widen(x[i]) + widen(other[i]), s[i]);
            x = s;
        }
        float r = inverse_rms(x, c.N, c.eps);
        if (c.r) c.r[m] = r;
        scale_row(x, r, c.w, static_cast<T*>(c.y) + m * c.N, c.N);
    }
}

struct Rotate {
    int64_t M, H, D, threads;
    const void* x;           // [M, H, D]
    const float *cos, *sin;  // [·, D / 2]
    const int64_t* at;       // [M]: rows of cos and sin
    void* y;                 // [M, H, D]
};

template <class T>
__attribute__((noinline)) void rotate_row(const T* x, const float* cos, const float* sin, T* y, int64_t R) {
    for (int64_t i = 0; i < R; i += W) {
        int64_t n = R - i < W ? R - i : W;
        vec a = load_up_to(x + i, n), b = load_up_to(x + R + i, n), c = load_up_to(cos + i, n), s = load_up_to(sin + i, n);
        store_as(y + i, fma(-b, s, a * c), n);
        store_as(y + R + i, fma(a, s, b * c), n);
    }
}

template <class T>
void rotate(const Rotate& c) {
    int64_t R = c.D / 2;
#pragma omp parallel for num_threads(c.threads) if (c.M * c.H * c.D > 16384)
    for (int64_t m = 0; m < c.M; m++)
        for (int64_t i = m * c.H * c.D; i < (m + 1) * c.H * c.D; i += c.D)
            rotate_row(static_cast<const T*>(c.x) + i, c.cos + c.at[m] * R, c.sin + c.at[m] * R,
                       static_cast<T*>(c.y) + i, R);
}

struct Gate {
    int64_t M, N, threads;
    const void* x;  // [M, 2N]
    void* y;        // [M, N]
    float* act;     // [M, N]: silu of the gate, or null
};

// Below -87, where silu is -1e-36, `exp` is clamped: 0 there, and NaN for -inf, as in PyTorch.
inline vec silu(vec x) { return x < -87.0f ? x * 0.0f : x / (1.0f + exp(-x)); }

template <class T>
__attribute__((noinline)) void gate_row(const T* x, T* y, float* act, int64_t N) {
    for (int64_t i = 0; i < N; i += W) {
        int64_t n = N - i < W ? N - i : W;
        vec a = silu(load_up_to(x + i, n));
        if (act) store_as(act + i, a, n);
        store_as(y + i, a * load_up_to(x + N + i, n), n);
    }
}

template <class T>
void gate(const Gate& c) {
#pragma omp parallel for num_threads(c.threads) if (c.M * c.N > 4096)
    for (int64_t m = 0; m < c.M; m++)
        gate_row(static_cast<const T*>(c.x) + m * 2 * c.N, static_cast<T*>(c.y) + m * c.N,
                 c.act ? c.act + m * c.N : nullptr, c.N);
}

struct Copy {
    int64_t M, N;
    const void* from;                    // [·, N]
    const int64_t *from_rows, *to_rows;  // [M], or null: row m
    void* to;                            // [·, N]
};

template <class T>
void copy(const Copy& c) {
    for (int64_t m = 0; m < c.M; m++) {
        int64_t from = c.from_rows ? c.from_rows[m] : m, to = c.to_rows ? c.to_rows[m] : m;
        std::memcpy(static_cast<T*>(c.to) + to * c.N, static_cast<const T*>(c.from) + from * c.N, c.N * sizeof(T));
    }
}

struct Narrow {
    int64_t count;
    const float* x;
    void* y;
};

enum Kind : int64_t { PRODUCT, ATTENTION, NORM, ROTATE, GATE, COPY, NARROW };

struct Call {
    int64_t kind;
    const void* args;
};

}  // namespace bagu
