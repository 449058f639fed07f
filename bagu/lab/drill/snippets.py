"""Code that several of bagu's own answers have in common."""

ADD_ROWS = """

@triton.jit
def add_rows(parts, total, M, N, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.float32)
    for row in range(0, M):
        found += tl.load(parts + row * N + column, mask=column < N, other=0.0)
    tl.store(total + column, found.to(total.dtype.element_ty), mask=column < N)
"""
BLOCK_REDUCE = """
__device__ float reduced(float v, bool maximum) {  // over the threads of a block, a power of two of them
    __shared__ float part[1024];
    part[threadIdx.x] = v;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            float a = part[threadIdx.x], b = part[threadIdx.x + half];
            part[threadIdx.x] = maximum ? fmaxf(a, b) : a + b;
        }
        __syncthreads();
    }
    float whole = part[0];
    __syncthreads();  // `part` is written again by the next call
    return whole;
}
"""
