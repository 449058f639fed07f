"""Batches of random tokens, for benchmarks: speed does not depend on the token values."""

from collections.abc import Sequence

import torch

from bagu.errors import BaguError
from bagu.types import Batch


def random_batches(
    vocab_size: int, lengths: Sequence[int], *, micro_batches: int = 1, device: torch.device, seed: int = 0
) -> tuple[Batch, ...]:
    """Documents of these lengths, every token a target, split into micro-batches with the same number of documents."""
    if len(lengths) % micro_batches:
        raise BaguError(
            f"cannot split {len(lengths)} documents into {micro_batches} micro-batches", hint="choose a divisor"
        )
    generator, each = torch.Generator().manual_seed(seed), len(lengths) // micro_batches
    return tuple(_batch(vocab_size, lengths[i : i + each], generator).to(device) for i in range(0, len(lengths), each))


def _batch(vocab_size: int, lengths: Sequence[int], generator: torch.Generator) -> Batch:
    T = sum(lengths)
    ids = torch.randint(vocab_size, (T + 1,), generator=generator)
    return Batch(
        ids=ids[:-1],
        targets=ids[1:],
        positions=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max_len=max(lengths),
        num_targets=T,
        target_bytes=0,
    )
