"""The sampling parameters of all unfinished choices in arrays, so that a step gathers those of its rows.

A choice has a slot from its request's submission to its end. The random number of a token
is `nn.sample.uniform(seed, choice, position)`: seed and choice are hashed once, when the slot is written, and only the
position is hashed in each step. For 256 rows this takes 0.1 ms instead of the 1 ms of a loop over rows.
"""

from collections.abc import Sequence

import numpy as np

from bagu.serve.request import Sampling
from bagu.serve.sample import Parameters

MIN_TEMPERATURE = 1e-6  # smaller ones may round to 0, which is greedy
SPARE = 0  # a greedy slot, for rows whose token is ignored
MASK = 0xFFFFFFFFFFFFFFFF


class Slots:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._free: list[int] = []
        self._used = 0  # slots that have been given out, free ones included
        self._top_k = np.zeros(0, dtype=np.int64)
        self._num_prompt = np.zeros(0, dtype=np.int64)
        self._hash = np.zeros(0, dtype=np.uint64)  # of seed and choice
        self._floats = np.zeros((4, 0), dtype=np.float32)  # temperature, top_p, min_p; u is written in each step
        self.add(Sampling(temperature=0.0), 0, 0, 0)

    def add(self, sampling: Sampling, seed: int, choice: int, num_prompt: int) -> int:
        """Write the parameters of a choice and return its slot."""
        if not self._free:
            if self._used == len(self._top_k):
                self._resize(max(2 * self._used, 64))
            self._free.append(self._used)
            self._used += 1
        at, s = self._free.pop(), sampling
        self._top_k[at] = self.vocab_size if s.top_k is None else min(s.top_k, self.vocab_size)
        self._floats[:3, at] = s.temperature and max(s.temperature, MIN_TEMPERATURE), s.top_p, s.min_p
        self._hash[at] = _hash(_hash(np.zeros(1, np.uint64), seed & MASK), choice)[0]
        self._num_prompt[at] = num_prompt
        return at

    def remove(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)

    def greedy(self, slots: np.ndarray) -> bool:
        """Whether all these choices are greedy."""
        return not self._floats[0, slots].any()

    def parameters(self, slots: np.ndarray, lengths: np.ndarray) -> Parameters:
        """The parameters of rows: `lengths` are the numbers of their tokens so far, prompt and output."""
        floats = self._floats[:, slots]
        floats[3] = (
            _hash(self._hash[slots], (lengths - self._num_prompt[slots]).astype(np.uint64)) >> np.uint64(11)
        ) / 2.0**53
        return Parameters.of(self._top_k[slots], floats)

    def _resize(self, count: int) -> None:
        """Grow the arrays to `count` slots."""
        extra = count - self._used
        self._top_k, self._num_prompt, self._hash, self._floats = (
            np.concatenate([a, np.zeros((*a.shape[:-1], extra), a.dtype)], axis=-1)
            for a in (self._top_k, self._num_prompt, self._hash, self._floats)
        )


def _hash(x: np.ndarray, part: int | np.ndarray) -> np.ndarray:
    """One part of the key of `nn.sample.uniform`: a step of splitmix64."""
    x = x + np.uint64(0x9E3779B97F4A7C15) + np.asarray(part, dtype=np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
