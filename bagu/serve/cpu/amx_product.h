// Products of int8 activations and int8 or int4 weights by AMX: 16 tokens by one tile of 32 outputs.
//
// A register of AMX is 16 rows of 64 bytes. Of activations it holds 16 tokens by 64 inputs; of weights 16 times 4 inputs
// by 16 outputs, which is the order of an int8 tile of tile_product.h. An int4 tile is unpacked to that order once for
// all tokens of a thread. Linux gives a process these registers when it asks for them.
//
// Dims: K = inputs, G = groups, W = 16 lanes of a vector.
#pragma once

#include <vector>

#include "serve/cpu/int4_product.h"

#if defined(BAGU_VNNI) && defined(__AVX512F__) && defined(__AMX_INT8__) && defined(__linux__)
#define BAGU_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace bagu {

constexpr int AMX_TOKENS = 16, AMX_INPUTS = 64;  // of a register; K is padded to a multiple of AMX_INPUTS
static_assert(GROUP % AMX_INPUTS == 0, "a register has inputs of one group");

struct alignas(64) TileConfig {
    uint8_t palette, start, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
constexpr TileConfig AMX_REGISTERS = {1, 0, {}, {64, 64, 64, 64, 64}, {16, 16, 16, 16, 16}};

inline bool has_amx() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

// acc[2][16] = x[16, K] times one tile of unsigned bytes; rows of x are `stride` apart.
inline void amx_dots(const int8_t* x, int64_t stride, int64_t K, const uint8_t* w, ivec (*acc)[AMX_TOKENS]) {
    asm volatile("" ::: "memory");  // GCC does not know that a load of a register reads memory
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < K; k += AMX_INPUTS) {
        _tile_loadd(2, x + k, stride);
        _tile_loadd(3, w + k * TILE_N, 4 * TILE_N);
        _tile_loadd(4, w + k * TILE_N + 4 * W, 4 * TILE_N);
        _tile_dpbsud(0, 2, 3);
        _tile_dpbsud(1, 2, 4);
    }
    _tile_stored(0, acc[0], sizeof(ivec));
    _tile_stored(1, acc[1], sizeof(ivec));
}

// sums[16][2] = x[16, K] times one tile of w + 128.
inline void amx_product(const int8_t* x, const Group* groups, int64_t K, const uint8_t* w, vec (*sums)[2]) {
    ivec acc[2][AMX_TOKENS];
    amx_dots(x, K, K, w, acc);
    for (int r = 0; r < AMX_TOKENS; r++)
        for (int v = 0; v < 2; v++)
            sums[r][v] = __builtin_convertvector(acc[v][r] - 16 * groups[r].offset, vec) * groups[r].scale;
}

// The same with an unpacked int4 tile and scales [G, TILE_N]: the numbers of int4_product, and in its order.
inline void amx_int4_product(const int8_t* x, const Group* groups, int64_t K, int64_t G, const uint8_t* w,
                             const float* scales, vec (*sums)[2]) {
    for (int r = 0; r < AMX_TOKENS; r++) sums[r][0] = sums[r][1] = vec{};
    for (int64_t g = 0; g < G; g++) {
        int64_t from = g * GROUP, count = K - from < GROUP ? K - from : GROUP;
        ivec acc[2][AMX_TOKENS];
        amx_dots(x + from, K, count, w + from * TILE_N, acc);
        for (int v = 0; v < 2; v++) {
            vec scale = load(scales + g * TILE_N + v * W);
            for (int r = 0; r < AMX_TOKENS; r++) {
                const Group& own = groups[r * G + g];
                vec exact = __builtin_convertvector(acc[v][r] - own.offset, vec);
                sums[r][v] = fma(exact, scale * own.scale, sums[r][v]);
            }
        }
    }
}

// A tile of int4 pairs [K / 4, W, 4] as bytes [K / 4, TILE_N, 4].
inline void unpack(const int4_pair* w, int64_t K, std::vector<uint8_t>& to) {
    to.resize(K * TILE_N);
    for (int64_t k = 0; k < K; k += 4) {
        bytes pairs;
        std::memcpy(&pairs, w + k * W, sizeof pairs);
        bytes halves[2] = {low_half(pairs), high_half(pairs)};
        std::memcpy(to.data() + k * TILE_N, halves, sizeof halves);
    }
}

}  // namespace bagu
#endif
