// CPU counterparts of the GPU's micro-labs: each takes its data and the work to do, and returns a value that depends on it.
#include <cmath>
#include <cstdint>

extern "C" uint32_t chase(const uint32_t* next, int64_t steps) {  // a dependent chain of loads
  uint32_t p = 0;
  for (int64_t i = 0; i < steps; i++) p = next[p];
  return p;
}

extern "C" float strided(const float* x, int64_t mask, int64_t stride, int64_t reads) {  // independent loads
  float a = 0, b = 0, c = 0, d = 0;
  for (int64_t i = 0; i < reads; i += 4) {
    a += x[(i * stride) & mask], b += x[((i + 1) * stride) & mask];
    c += x[((i + 2) * stride) & mask], d += x[((i + 3) * stride) & mask];
  }
  return a + b + c + d;
}

extern "C" int64_t branches(const uint8_t* way, int64_t n, int64_t rounds) {  // a branch that the data decide
  volatile int64_t a = 0, b = 0;
  for (int64_t r = 0; r < rounds; r++)
    for (int64_t i = 0; i < n; i++) {
      if (way[i]) a = a + 1;
      else b = b + 3;
    }
  return a + b;
}

// a constraint for a register of floats
#if defined(__x86_64__)
#define KEEP "+x"
#else
#define KEEP "+w"
#endif

template <int CHAINS> static float chains(int64_t rounds) {  // independent chains of dependent multiply-adds
  float a[CHAINS];
  for (int c = 0; c < CHAINS; c++) a[c] = c;
  for (int64_t i = 0; i < rounds; i++)
    for (int c = 0; c < CHAINS; c++) {
      a[c] = std::fma(a[c], 1.000001f, 0.5f);
      asm volatile("" : KEEP(a[c]));  // keeps the chains apart: no vector instruction joins them
    }
  float s = 0;
  for (int c = 0; c < CHAINS; c++) s += a[c];
  return s;
}
extern "C" float fma_chains(int count, int64_t rounds) {
  switch (count) {
    case 1: return chains<1>(rounds);
    case 2: return chains<2>(rounds);
    case 4: return chains<4>(rounds);
    default: return chains<8>(rounds);
  }
}
