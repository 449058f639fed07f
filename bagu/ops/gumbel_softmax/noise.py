"""Stateless noise: Philox4x32-10 of (seed; column // 4, row), and Gumbel numbers from it.

One call of Philox gives four 32-bit words, for four neighbouring columns. Every backend generates the same words, so
the backward generates the noise again instead of storing it. Paper: https://doi.org/10.1145/2063384.2063405
"""

from math import prod

import torch

LOW = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1

Quad = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Quad, key: tuple[torch.Tensor, torch.Tensor]) -> Quad:
    """Four words from four words and a key. Words are int64 in [0, 2^32); a product wraps and keeps all its 64 bits."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = _upper(b) ^ c1 ^ k0, b & LOW, _upper(a) ^ c3 ^ k1, a & LOW
        k0, k1 = k0 + KEY_STEPS[0] & LOW, k1 + KEY_STEPS[1] & LOW
    return c0, c1, c2, c3


def _upper(x: torch.Tensor) -> torch.Tensor:
    """The upper 32 of 64 bits. Not with `>>`, which returns a DTensor unshifted (torch 2.13)."""
    return torch.bitwise_right_shift(x, 32) & LOW


def words(logits: torch.Tensor, seed: int) -> torch.Tensor:
    """The random word of every element of `logits`, as int64 in [0, 2^32).

    Columns are numbered with new_ones and cumsum instead of arange, because those return a DTensor for a DTensor.
    """
    *lead, N = logits.shape
    column = logits.new_ones((N + 3) // 4, dtype=torch.int64).cumsum(0) - 1  # one counter per four columns
    row = (logits.new_ones(prod(lead), dtype=torch.int64).cumsum(0) - 1).view(*lead, 1)
    key = torch.full((), seed, dtype=torch.int64, device=logits.device)
    quad = philox((column, row & LOW, _upper(row), torch.zeros_like(column)), (key & LOW, _upper(key)))
    return torch.stack(quad, -1).flatten(-2)[..., :N]


def gumbel(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """-log(-log(1 - u)) for u = (word + 1/2) / 2^32, accurate to the last digits of `dtype` in both tails.

    1 - u has the same distribution as u, and floats are dense near 0, so the large values, which decide an argmax, have
    a fine resolution. `near` is the distance of u to the nearer end of (0, 1). It is exact there, where u would round
    to 1.
    """
    below = word < 1 << 31
    near = (torch.where(below, word, LOW - word).to(dtype) + 0.5) * 2.0**-32
    return -torch.log(torch.where(below, -torch.log1p(-near), -torch.log(near)))
