// The op for one new token per sequence: decode.h over sequences and, if there are few sequences, over key heads.

#include "ops/paged_attention/decode.h"

namespace bagu {

struct Call {
    int64_t S, H, G, D, E, B, columns, window, threads;  // columns of the block tables; window 0: no window
    int64_t k_place, k_head, v_place, v_head;            // strides of the pools
    float scale;
    const void* q;  // [S, H, D]
    void *k, *v;
    const int32_t *tables, *lengths;
    void* out;   // [S, H, E]
    float* lse;  // [S, H]
};

template <class T>
void decode(const Call& c) {
    int64_t S = c.S, G = c.G, n = c.H / G, D = c.D, E = c.E;
    int64_t wanted = S < c.threads ? (c.threads + S - 1) / S : 1, parts = wanted < G ? wanted : G;
#pragma omp parallel num_threads(c.threads)
    {
        Scratch scratch;
        std::vector<float> q(c.H * D), y(c.H * E);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t s = 0; s < S; s++)
            for (int64_t i = 0; i < parts; i++) {
                int64_t first = i * G / parts, last = (i + 1) * G / parts;
                int64_t heads = (last - first) * n, at = s * c.H + first * n;
                for (int64_t j = 0; j < heads * D; j++) q[j] = widen(static_cast<const T*>(c.q)[at * D + j]);
                Pages<T> pages{{static_cast<T*>(c.k), c.k_place, c.k_head}, {static_cast<T*>(c.v), c.v_place, c.v_head},
                               c.tables + s * c.columns, c.B};
                int64_t end = c.lengths[s], begin = c.window && c.window < end ? end - c.window : 0;
                attend_any(pages, q.data(), y.data(), n, D, E, first, last, begin, end, c.scale, scratch);
                for (int64_t j = 0; j < heads * E; j++) narrow(y[j], static_cast<T*>(c.out)[at * E + j]);
                for (int64_t h = 0; h < heads; h++) c.lse[at + h] = scratch.largest[h] + std::log(scratch.total[h]);
            }
    }
}

}  // namespace bagu

extern "C" void bagu_decode_fp32(const bagu::Call* call) { bagu::decode<float>(*call); }
extern "C" void bagu_decode_bf16(const bagu::Call* call) { bagu::decode<bagu::bf16>(*call); }
