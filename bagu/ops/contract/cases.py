"""The first cases of ops over rows, x[*M, N]. Each op adds those that its own formula and launchers need."""

from bagu.ops.contract.core import Case

ROW_CASES = (
    Case("even", "powers of two need no masks, so a failure here is the math", M=8, N=64),
    Case("ragged", "neither side is a multiple of a block, so every mask is used", M=5, N=123),
    Case("batched", "the leading dims are several, and are folded into rows", lead=(2, 3), N=40),
    Case("single", "there is no leading dim at all: one row", lead=(), N=24),
    Case("empty", "there is no row, and nothing is launched", M=0, N=24),
)
