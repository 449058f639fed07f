"""Random orders that are the same on every machine and in every NumPy version."""

import hashlib
from collections.abc import Callable

import numpy as np

Order = Callable[[int, int], np.ndarray]  # (epoch, n) -> a permutation of range(n)


def philox(seed: int, *names: str | int) -> np.random.Philox:
    """A counter-based generator for this seed and purpose. Its raw output is the same in every NumPy version."""
    text = "\0".join(str(part) for part in (seed, *names))
    return np.random.Philox(key=int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little"))


def shuffled(seed: int, name: str) -> Order:
    """A new order for every epoch, a function of (seed, name, epoch)."""

    def order(epoch: int, n: int) -> np.ndarray:
        # not Generator.permutation: NumPy keeps the raw output stable between versions, but not Generator's methods
        return np.argsort(philox(seed, name, epoch).random_raw(n), kind="stable")

    return order


def in_order(epoch: int, n: int) -> np.ndarray:
    return np.arange(n)
