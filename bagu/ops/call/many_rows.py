"""The rule that blocks of several products share: with many rows they run PyTorch's libraries."""

from bagu.ops.contract.core import Rule
from bagu.ops.kernels.launch import few_rows


def many_rows(weight: str, *, runs: str) -> Rule:
    """Prefer torch for calls that `few_rows` excludes, by the number of rows of x and by the argument `weight`."""
    return Rule(
        when=f"rows times the numbers of {weight} are more than 2^33, or not 16-bit",
        runs=runs,
        why="the GPU's time is the limit there, and the libraries are faster",
        holds=lambda args: not few_rows(args["x"], args[weight]),
    )
