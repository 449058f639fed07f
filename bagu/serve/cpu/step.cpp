// A decode step of a whole model on a CPU: one new token for each of S sequences, in one parallel region.
//
// The model is the common kind (serve/cpu/layers.py : supports) with SwiGLU. Activations are fp32, the pool is fp32 or
// bf16, and weights are that or int8. Between two barriers every thread computes some tiles of a product, or the
// attention of some sequences.
//
//     qkv = norm(x) Wqkv      turn (QK norm, RoPE), store k and v, attend      x += y Wout
//     a = silu(norm(x) Wgate) * (norm(x) Wup)                                  x += a Wdown
//
// The gain of a norm and its sqrt(size) are in the weight behind it; what is left of the norm is one number a token,
// which multiplies the sums. A tile of Wgate and Wup has W outputs of each, so that SwiGLU is applied before
// anything is stored.
//
// Dims: S = sequences, H = heads, G = key heads, D = features of a head, B = places of a block.

#include "ops/paged_attention/decode.h"
#include "serve/cpu/packed_linear.h"

namespace bagu {

struct Layer {
    Linear qkv, out, up, down;
    const float* head_gain;  // [H + G, D], times sqrt(D); null without a QK norm
    void *keys, *values;     // [N, B, G, D]
    int64_t window;          // 0: none
};

struct Model {
    int64_t hidden, heads, key_heads, width, inner, block_size, num_layers;
    float floor, head_floor, scale;  // eps * hidden, eps * D
    const void* table;               // [vocabulary, hidden]
    const float* gain;               // of the last norm, times sqrt(hidden)
    const float *cos, *sin;          // [positions, D / 2], or null
    const Layer* layers;
};

struct Step {
    int64_t sequences, threads, columns;        // of the block tables
    const int64_t *ids, *lengths, *table_rows;  // a length counts the new token, which is the last
    const int32_t* tables;                      // [rows, columns]: the block table of sequence s is row table_rows[s]
    float *x, *qkv, *y, *inner;  // [S, hidden], [S, (H + 2G) D], [S, H D], [S, inner]
    int8_t* quantized;           // [S, largest padded K], where int8 is computed by dot products
    float* scales;               // [S], likewise
    void* out;                   // [S, hidden]
};

inline float unit(const float* x, int64_t K, float floor) {
    vec sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * W <= K; i += 2 * W)
        for (int j = 0; j < 2; j++) sums[j] += load(x + i + j * W) * load(x + i + j * W);
    float rest = 0;
    for (; i < K; i++) rest += x[i] * x[i];
    return 1.0f / std::sqrt(sum(sums[0] + sums[1]) + rest + floor);
}

// QK norm and RoPE of one head, in place.
inline void turn(float* x, int64_t D, const float* gain, float floor, const float* cos, const float* sin) {
    if (gain) {
        float scale = unit(x, D, floor);
        for (int64_t i = 0; i < D; i++) x[i] *= scale * gain[i];
    }
    if (cos)
        for (int64_t i = 0; i < D / 2; i++) {
            float a = x[i], b = x[i + D / 2];
            x[i] = a * cos[i] - b * sin[i];
            x[i + D / 2] = b * cos[i] + a * sin[i];
        }
}

// The attention of sequence s in key heads first … last: its key and value are stored first.
template <class T>
void token(const Model& m, const Layer& layer, const Step& step, int64_t s, int64_t first, int64_t last,
           Scratch& scratch) {
    int64_t H = m.heads, G = m.key_heads, D = m.width, n = H / G;
    float *row = step.qkv + s * (H + 2 * G) * D, *q = row + first * n * D, *k = row + H * D, *v = row + (H + G) * D;
    int64_t end = step.lengths[s], begin = layer.window && layer.window < end ? end - layer.window : 0;
    const float* cos = m.cos ? m.cos + (end - 1) * (D / 2) : nullptr;
    const float* sin = m.sin ? m.sin + (end - 1) * (D / 2) : nullptr;
    auto gain = [&](int64_t h) { return layer.head_gain ? layer.head_gain + h * D : nullptr; };
    for (int64_t h = first * n; h < last * n; h++) turn(row + h * D, D, gain(h), m.head_floor, cos, sin);
    Pages<T> pages{{static_cast<T*>(layer.keys), G * D, D}, {static_cast<T*>(layer.values), G * D, D},
                   step.tables + step.table_rows[s] * step.columns, m.block_size};
    int64_t slot = pages.slot(end - 1);
    for (int64_t g = first; g < last; g++) {
        turn(k + g * D, D, gain(H + g), m.head_floor, cos, sin);
        T *key = pages.k.at(slot, g), *value = pages.v.at(slot, g);
        for (int64_t i = 0; i < D; i++) narrow(k[g * D + i], key[i]);
        for (int64_t i = 0; i < D; i++) narrow(v[g * D + i], value[i]);
    }
    float* y = step.y + s * H * D + first * n * D;
    attend_any(pages, q, y, n, D, D, first, last, begin, end, m.scale, scratch);
}

template <class Weight, class T>
void run(const Model& m, const Step& step) {
    int64_t S = step.sequences, C = m.hidden, F = m.inner, G = m.key_heads;
    int64_t HD = m.heads * m.width, QKV = HD + 2 * G * m.width;
    int64_t wanted = S < step.threads ? (step.threads + S - 1) / S : 1, parts = wanted < G ? wanted : G;
#pragma omp parallel num_threads(step.threads)
    {
        Scratch scratch;
        std::vector<float> norms(S);
        auto norm = [&] {  // by each thread for itself: no barrier
            for (int64_t s = 0; s < S; s++) norms[s] = unit(step.x + s * C, C, m.floor);
        };
        auto input = [&](const float* x) { return Input{x, step.quantized, step.scales}; };
        auto add = [&](int64_t s, int64_t p, vec a, vec b, vec c, vec d) {
            float* row = step.x + s * C;
            int64_t at = p * 2 * W;
            store_columns(row, at, C, load_columns(row, at, C) + a + c);
            store_columns(row, at + W, C, load_columns(row, at + W, C) + b + d);
        };
#pragma omp for
        for (int64_t s = 0; s < S; s++) {
            const T* row = static_cast<const T*>(m.table) + step.ids[s] * C;
            for (int64_t i = 0; i < C; i++) step.x[s * C + i] = widen(row[i]);
        }
        for (int64_t l = 0; l < m.num_layers; l++) {
            const Layer& layer = m.layers[l];
            norm();
            linear<Weight>(layer.qkv, input(step.x), S, C, tiles(QKV), [&](int64_t s, int64_t p, vec a, vec b, vec c, vec d) {
                store_columns(step.qkv + s * QKV, p * 2 * W, QKV, a * norms[s] + c);
                store_columns(step.qkv + s * QKV, p * 2 * W + W, QKV, b * norms[s] + d);
            });
#pragma omp for collapse(2) schedule(dynamic)
            for (int64_t s = 0; s < S; s++)
                for (int64_t i = 0; i < parts; i++)
                    token<T>(m, layer, step, s, i * G / parts, (i + 1) * G / parts, scratch);
            linear<Weight>(layer.out, input(step.y), S, HD, tiles(C), add);
            norm();
            int64_t gated = (F + W - 1) / W;  // tiles of W gates and W ups
            linear<Weight>(layer.up, input(step.x), S, C, gated, [&](int64_t s, int64_t p, vec a, vec b, vec c, vec d) {
                vec gate = a * norms[s] + c, up = b * norms[s] + d;
                store_columns(step.inner + s * F, p * W, F, gate / (1.0f + exp(-gate)) * up);
            });
            linear<Weight>(layer.down, input(step.inner), S, F, tiles(C), add);
        }
        norm();
#pragma omp for
        for (int64_t s = 0; s < S; s++)
            for (int64_t i = 0; i < C; i++)
                narrow(step.x[s * C + i] * norms[s] * m.gain[i], static_cast<T*>(step.out)[s * C + i]);
    }
}

}  // namespace bagu

extern "C" {

int bagu_lanes() { return bagu::W; }
int bagu_int8_dot() { return bagu::DOT; }      // inputs of one lane of a dot product; 1: none, activations stay fp32
int bagu_int8_k_step() { return bagu::K_STEP; }

#define STEP(NAME, WEIGHT, TYPE) \
    void NAME(const bagu::Model* model, const bagu::Step* step) { bagu::run<WEIGHT, TYPE>(*model, *step); }

STEP(bagu_step_fp32, float, float)
STEP(bagu_step_bf16, bagu::bf16, bagu::bf16)
STEP(bagu_step_int8_fp32, int8_t, float)
STEP(bagu_step_int8_bf16, int8_t, bagu::bf16)

#define HEAD(NAME, WEIGHT)                                                                                     \
    void NAME(const bagu::Linear* weight, const float* x, float* y, int64_t* tokens, int64_t S, int64_t K,     \
              int64_t N, int threads) {                                                                        \
        bagu::head<WEIGHT>(*weight, x, y, tokens, S, K, N, threads);                                           \
    }

HEAD(bagu_head_fp32, float)
HEAD(bagu_head_bf16, bagu::bf16)
HEAD(bagu_head_int8, int8_t)
}
