// A step of a whole model on a CPU: S new tokens, in one parallel region. A decode has one token of each sequence;
// verified drafts and prompts have several tokens of a sequence, whose keys and values are all stored before one of them
// attends.
//
// serve/cpu/match.py finds out whether a model computes this. Activations are fp32, the pool is fp32 or bf16, and weights
// are that, int8 or int4. Between two barriers every thread computes some tiles of a product, or the attention of some
// sequences.
//
//     qkv = norm(x) Wqkv      QK norm, RoPE, store k and v, attend      x += y Wout
//     a = activation(norm(x) Wgate) * (norm(x) Wup), or activation(norm(x) Wup)      x += a Wdown
//
// A token with a LoRA adapter adds B (A x) to the outputs of each product: qkv, out, up (with gate), down.
//
// The gain of a norm and its sqrt(size) are in the weight behind it and in A; what is left of the norm is one number a
// token, which multiplies the sums. A tile of Wgate and Wup has W outputs of each, so that the gate is applied before anything
// is stored.
//
// Dims: S = new tokens, H = heads, G = key heads, D = features of a head, B = places of a block.

#include <algorithm>
#include <utility>

#include "ops/paged_attention/decode.h"
#include "serve/cpu/packed_linear.h"
#include "serve/cpu/prompt_attention.h"

namespace bagu {

struct Layer {
    Linear qkv, out, up, down;
    const float* qk_gain;  // [H + G, D], times sqrt(D); null without a QK norm
    void *keys, *values;   // [N, B, G, D]
    void* means;           // [N, G, D]: the mean keys of full blocks, where queries choose blocks; else null
    int64_t window, group; // 0: none; the group of layers whose block tables it reads
};

struct Model {
    int64_t hidden, heads, key_heads, head_dim, inner, block_size, num_layers, activation, gated;
    float eps, qk_eps, scale;  // of the norms, times their size
    const void* table;         // [vocabulary, hidden]
    const float* gain;         // of the last norm, times sqrt(hidden)
    const float *cos, *sin;    // [positions, D / 2], or null
    const Layer* layers;
    int64_t top, near, dense_below;  // of the choice of blocks (ops/choose_blocks), where layers have means
};

// Memory for a choice of blocks. Each thread has its own.
struct Choice {
    std::vector<float> query;
    std::vector<std::pair<float, int64_t>> ranked;  // the negative score of a block, and its number
    std::vector<int32_t> table;
};

struct Step {
    int64_t tokens, several, threads;           // several: a sequence may have more than one token
    int64_t rows, columns;                      // of the block tables of a group
    const int64_t *ids, *lengths, *table_rows;  // a length is the position of the token in its sequence, plus one
    const int32_t* tables;                      // [groups, rows, columns]: token s has row table_rows[s] of each
    float *x, *qkv, *y, *inner;  // [S, hidden], [S, (H + 2G) D], [S, H D], [S, inner]
    int8_t* quantized;           // [S, largest padded K], where activations are quantized
    Group* groups;               // [S, most groups of a token], likewise
    const Pair* const* adapters; // [S]: the pairs of a token's adapter [layers, 4], or null; null if no token has one
    float* low;                  // [S, low_width]: room for A x
    int64_t low_width;
    void* out;                   // [S, hidden]
};

enum Activation : int64_t { SILU, GELU, GELU_TANH, RELU_SQUARED };

// erf to 1.5e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
inline vec erf(vec x) {
    vec size = x < 0.0f ? -x : x, t = 1.0f / (1.0f + 0.3275911f * size);
    vec sum = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    vec y = 1.0f - sum * exp(-size * size);
    return x < 0.0f ? -y : y;
}

inline vec activate(int64_t activation, vec x) {
    switch (activation) {
        case GELU: return 0.5f * x * (1.0f + erf(x * 0.70710678f));
        case GELU_TANH:  // x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
            return x / (1.0f + exp(-1.5957691f * (x + 0.044715f * x * x * x)));
        case RELU_SQUARED: return x < 0.0f ? vec{} : x * x;
        default: return x / (1.0f + exp(-x));
    }
}

// 1 / sqrt(sum of x^2 + eps): what a norm multiplies by.
inline float inverse_norm(const float* x, int64_t K, float eps) {
    vec sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * W <= K; i += 2 * W)
        for (int j = 0; j < 2; j++) sums[j] += load(x + i + j * W) * load(x + i + j * W);
    float rest = 0;
    for (; i < K; i++) rest += x[i] * x[i];
    return 1.0f / std::sqrt(sum(sums[0] + sums[1]) + rest + eps);
}

// QK norm and RoPE of one head, in place.
inline void norm_and_rotate(float* x, int64_t D, const float* gain, float eps, const float* cos, const float* sin) {
    if (gain) {
        float scale = inverse_norm(x, D, eps);
        for (int64_t i = 0; i < D; i++) x[i] *= scale * gain[i];
    }
    if (cos)
        for (int64_t i = 0; i < D / 2; i++) {
            float a = x[i], b = x[i + D / 2];
            x[i] = a * cos[i] - b * sin[i];
            x[i + D / 2] = b * cos[i] + a * sin[i];
        }
}

template <class T>
Pages<T> pages_of(const Model& m, const Layer& layer, const Step& step, int64_t s) {
    int64_t G = m.key_heads, D = m.head_dim;
    return {{static_cast<T*>(layer.keys), G * D, D}, {static_cast<T*>(layer.values), G * D, D},
            step.tables + (layer.group * step.rows + step.table_rows[s]) * step.columns, m.block_size};
}

// QK norm and RoPE of token s in key heads first … last, whose keys and values are then stored.
template <class T>
void store_token(const Model& m, const Layer& layer, const Step& step, int64_t s, int64_t first, int64_t last) {
    int64_t H = m.heads, G = m.key_heads, D = m.head_dim, n = H / G, place = step.lengths[s] - 1;
    float *row = step.qkv + s * (H + 2 * G) * D, *k = row + H * D, *v = row + (H + G) * D;
    const float* cos = m.cos ? m.cos + place * (D / 2) : nullptr;
    const float* sin = m.sin ? m.sin + place * (D / 2) : nullptr;
    auto gain = [&](int64_t h) { return layer.qk_gain ? layer.qk_gain + h * D : nullptr; };
    for (int64_t h = first * n; h < last * n; h++) norm_and_rotate(row + h * D, D, gain(h), m.qk_eps, cos, sin);
    Pages<T> pages = pages_of<T>(m, layer, step, s);
    int64_t slot = pages.slot(place);
    for (int64_t g = first; g < last; g++) {
        norm_and_rotate(k + g * D, D, gain(H + g), m.qk_eps, cos, sin);
        T *key = pages.k.at(slot, g), *value = pages.v.at(slot, g);
        for (int64_t i = 0; i < D; i++) narrow(k[g * D + i], key[i]);
        for (int64_t i = 0; i < D; i++) narrow(v[g * D + i], value[i]);
    }
}

// The attention of token s in key heads first … last, over the positions up to its own.
template <class T>
void attend_token(const Model& m, const Layer& layer, const Step& step, int64_t s, int64_t first, int64_t last,
                  Scratch& scratch) {
    int64_t H = m.heads, G = m.key_heads, D = m.head_dim, n = H / G;
    const float* q = step.qkv + s * (H + 2 * G) * D + first * n * D;
    int64_t end = step.lengths[s], begin = layer.window && layer.window < end ? end - layer.window : 0;
    float* y = step.y + s * H * D + first * n * D;
    attend_any(pages_of<T>(m, layer, step, s), q, y, n, D, D, first, last, begin, end, m.scale, scratch);
}

// The mean keys of the block that token s fills, if it does, in key heads first … last.
template <class T>
void store_mean(const Model& m, const Layer& layer, const Step& step, int64_t s, int64_t first, int64_t last) {
    int64_t G = m.key_heads, D = m.head_dim, B = m.block_size, place = step.lengths[s] - 1;
    if ((place + 1) % B) return;
    Pages<T> pages = pages_of<T>(m, layer, step, s);
    int64_t page = pages.table[place / B];
    for (int64_t g = first; g < last; g++)
        for (int64_t i = 0; i < D; i++) {
            float sum = 0;
            for (int64_t j = 0; j < B; j++) sum += widen(pages.k.at(page * B + j, g)[i]);
            narrow(sum / B, static_cast<T*>(layer.means)[(page * G + g) * D + i]);
        }
}

// The attention of token s in key head g, over the blocks that it chooses: its own, those near, the first, and the `top`
// of the others by the product of the sum of its queries with their mean keys, of equal ones the earlier.
template <class T>
void attend_chosen(const Model& m, const Layer& layer, const Step& step, int64_t s, int64_t g, Scratch& scratch,
                   Choice& choice) {
    int64_t H = m.heads, G = m.key_heads, D = m.head_dim, n = H / G, B = m.block_size, place = step.lengths[s] - 1;
    int64_t own = place / B, low = place < m.dense_below || own < m.near ? 0 : own - m.near;
    const float* q = step.qkv + s * (H + 2 * G) * D + g * n * D;
    Pages<T> pages = pages_of<T>(m, layer, step, s);
    choice.table.clear();
    if (low > 0) choice.table.push_back(pages.table[0]);
    if (low > 1) {
        choice.query.assign(D, 0.0f);
        for (int64_t h = 0; h < n; h++)
            for (int64_t i = 0; i < D; i++) choice.query[i] += q[h * D + i];
        choice.ranked.clear();
        for (int64_t j = 1; j < low; j++) {
            const T* mean = static_cast<const T*>(layer.means) + (int64_t(pages.table[j]) * G + g) * D;
            vec sums{};
            int64_t i = 0;
            for (; i + W <= D; i += W) sums += load(choice.query.data() + i) * load(mean + i);
            float score = sum(sums);
            for (; i < D; i++) score += choice.query[i] * widen(mean[i]);
            choice.ranked.push_back({-score, j});
        }
        size_t count = std::min<size_t>(m.top, choice.ranked.size());
        std::partial_sort(choice.ranked.begin(), choice.ranked.begin() + count, choice.ranked.end());
        choice.ranked.resize(count);
        std::sort(choice.ranked.begin(), choice.ranked.end(), [](auto a, auto b) { return a.second < b.second; });
        for (auto [score, j] : choice.ranked) choice.table.push_back(pages.table[j]);
    }
    for (int64_t j = low; j <= own; j++) choice.table.push_back(pages.table[j]);
    int64_t end = (int64_t(choice.table.size()) - 1) * B + place % B + 1;
    pages.table = choice.table.data();
    attend_any(pages, q, step.y + s * H * D + g * n * D, n, D, D, g, g + 1, int64_t(0), end, m.scale, scratch);
}

// Consecutive tokens of one sequence, at most GROUP_TOKENS.
struct TokenGroup {
    int64_t first, count;
};

inline std::vector<TokenGroup> token_groups(const Step& step) {
    std::vector<TokenGroup> groups;
    for (int64_t s = 0; s < step.tokens; s++) {
        bool next = s && step.table_rows[s] == step.table_rows[s - 1] && step.lengths[s] == step.lengths[s - 1] + 1;
        if (next && groups.back().count < GROUP_TOKENS)
            groups.back().count++;
        else
            groups.push_back({s, 1});
    }
    return groups;
}

// The attention of a group of tokens in key head g, each over the positions up to its own.
template <class T>
void attend_tokens(const Model& m, const Layer& layer, const Step& step, TokenGroup group, int64_t g, Scratch& scratch) {
    int64_t H = m.heads, G = m.key_heads, D = m.head_dim, n = H / G, s = group.first, row = (H + 2 * G) * D;
    Queries own{step.qkv + s * row + g * n * D, step.y + s * H * D + g * n * D, row, H * D, group.count,
                step.lengths[s], layer.window};
    attend_group_any(pages_of<T>(m, layer, step, s), own, n, D, g, m.scale, scratch);
}

template <class Weight, class T>
void run(const Model& m, const Step& step) {
    int64_t S = step.tokens, C = m.hidden, F = m.inner, G = m.key_heads;
    int64_t HD = m.heads * m.head_dim, QKV = HD + 2 * G * m.head_dim;
    int64_t wanted = S < step.threads ? (step.threads + S - 1) / S : 1, parts = wanted < G ? wanted : G;
    std::vector<TokenGroup> groups;
    if (step.several) groups = token_groups(step);
    int64_t num_groups = groups.size();
#pragma omp parallel num_threads(step.threads)
    {
        Scratch scratch;
        Choice choice;
        std::vector<float> norms(S);
        auto norm = [&] {  // by each thread for itself: no barrier
            for (int64_t s = 0; s < S; s++) norms[s] = inverse_norm(step.x + s * C, C, m.eps);
        };
        auto input = [&](const float* x) { return Input{x, step.quantized, step.groups}; };
        auto low = [&](int64_t l, int64_t which) {
            return LowRank{step.adapters, 4 * l + which, step.low, step.low_width};
        };
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
            auto put_qkv = [&](int64_t s, int64_t p, vec a, vec b, vec c, vec d) {
                store_columns(step.qkv + s * QKV, p * 2 * W, QKV, a * norms[s] + c);
                store_columns(step.qkv + s * QKV, p * 2 * W + W, QKV, b * norms[s] + d);
            };
            linear<Weight>(layer.qkv, input(step.x), low(l, 0), S, C, tiles(QKV), put_qkv);
            if (step.several && layer.means) {
#pragma omp for schedule(static)
                for (int64_t s = 0; s < S; s++) store_token<T>(m, layer, step, s, 0, G);
#pragma omp for schedule(static)
                for (int64_t s = 0; s < S; s++) store_mean<T>(m, layer, step, s, 0, G);
#pragma omp for collapse(2) schedule(dynamic)
                for (int64_t s = 0; s < S; s++)
                    for (int64_t g = 0; g < G; g++) attend_chosen<T>(m, layer, step, s, g, scratch, choice);
            } else if (step.several) {
#pragma omp for schedule(static)
                for (int64_t s = 0; s < S; s++) store_token<T>(m, layer, step, s, 0, G);
#pragma omp for collapse(2) schedule(dynamic)
                for (int64_t i = 0; i < num_groups; i++)
                    for (int64_t g = 0; g < G; g++) attend_tokens<T>(m, layer, step, groups[i], g, scratch);
            } else {
#pragma omp for collapse(2) schedule(dynamic)
                for (int64_t s = 0; s < S; s++)
                    for (int64_t i = 0; i < parts; i++) {
                        int64_t first = i * G / parts, last = (i + 1) * G / parts;
                        store_token<T>(m, layer, step, s, first, last);
                        if (layer.means) {
                            store_mean<T>(m, layer, step, s, first, last);
                            for (int64_t g = first; g < last; g++) attend_chosen<T>(m, layer, step, s, g, scratch, choice);
                            continue;
                        }
                        attend_token<T>(m, layer, step, s, first, last, scratch);
                    }
            }
            linear<Weight>(layer.out, input(step.y), low(l, 1), S, HD, tiles(C), add);
            norm();
            int64_t count = m.gated ? (F + W - 1) / W : tiles(F);  // with a gate, tiles of W gates and W ups
            auto put_up = [&](int64_t s, int64_t p, vec a, vec b, vec c, vec d) {
                vec first = activate(m.activation, a * norms[s] + c), second = b * norms[s] + d;
                float* row = step.inner + s * F;
                if (m.gated) return store_columns(row, p * W, F, first * second);
                store_columns(row, p * 2 * W, F, first);
                store_columns(row, p * 2 * W + W, F, activate(m.activation, second));
            };
            linear<Weight>(layer.up, input(step.x), low(l, 2), S, C, count, put_up);
            linear<Weight>(layer.down, input(step.inner), low(l, 3), S, F, tiles(C), add);
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
int bagu_int8_k_step() { return bagu::INT8_PADDING; }
int bagu_int8_plus_128() { return bagu::PLUS_128; }  // 1: int8 weights are stored as w + 128 in unsigned bytes
int bagu_int4_k_step() { return bagu::INT4_PADDING; }
int bagu_int4_signed_high() { return bagu::SIGNED_HIGH; }  // 1: the high half of a byte holds q - 8

#define STEP(NAME, WEIGHT, TYPE) \
    void NAME(const bagu::Model* model, const bagu::Step* step) { bagu::run<WEIGHT, TYPE>(*model, *step); }

STEP(bagu_step_fp32, float, float)
STEP(bagu_step_bf16, bagu::bf16, bagu::bf16)
STEP(bagu_step_int8_fp32, int8_t, float)
STEP(bagu_step_int8_bf16, int8_t, bagu::bf16)
STEP(bagu_step_int4_fp32, bagu::int4_pair, float)
STEP(bagu_step_int4_bf16, bagu::int4_pair, bagu::bf16)

#define HEAD(NAME, WEIGHT)                                                                                     \
    void NAME(const bagu::Linear* weight, const float* x, float* y, int64_t* tokens, int64_t S, int64_t K,     \
              int64_t N, int threads) {                                                                        \
        bagu::head<WEIGHT>(*weight, x, y, tokens, S, K, N, threads);                                           \
    }

HEAD(bagu_head_fp32, float)
HEAD(bagu_head_bf16, bagu::bf16)
HEAD(bagu_head_int8, int8_t)
HEAD(bagu_head_int4, bagu::int4_pair)
}
