"""The hash that identifies weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from bagu.nn.digest import BLOCK, BLOCKS, digest_of, fingerprint_of

Tensors = Mapping[str, torch.Tensor]
BASE = {name: torch.arange(12.0).reshape(3, 4) + i for i, name in enumerate("abcdefgh")}  # more tensors than threads


def test_equal_weights_have_one_digest() -> None:
    transposed = {name: t.T.contiguous().T for name, t in BASE.items()}  # other strides, in fresh memory
    assert digest_of(transposed) == digest_of(BASE)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {**w, "b": w["b"].index_fill(1, torch.tensor([3]), 0.5)},
        lambda w: {**w, "b": w["c"], "c": w["b"]},
        lambda w: {**w, "b": w["b"].reshape(4, 3)},
        lambda w: {**w, "b": w["b"].view(torch.int32)},
        lambda w: {{"b": "z"}.get(name, name): t for name, t in w.items()},
        lambda w: {**w, "more": torch.empty(0)},
    ],
    ids=["value", "place", "shape", "dtype", "name", "another"],
)
def test_every_change_gives_another_digest(change: Callable[[Tensors], Tensors]) -> None:
    assert digest_of(change(BASE)) != digest_of(BASE)
    assert fingerprint_of(change(BASE)) != fingerprint_of(BASE)


def test_a_fingerprint_reads_a_sample_of_large_tensors() -> None:
    values = torch.arange(2 * BLOCK * BLOCKS, dtype=torch.float32)
    known = fingerprint_of({"a": values})
    for changed, seen in (
        (slice(0, 1), True),
        (slice(-1, None), True),
        (slice(None, None, 500), True),
        (BLOCK // 4, False),
    ):
        other = values.clone()
        other[changed] += 1
        assert (fingerprint_of({"a": other}) != known) == seen, changed
