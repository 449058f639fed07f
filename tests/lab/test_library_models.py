"""The small models of labs: checkpoints are copies, an epoch reads all text."""

from __future__ import annotations

from collections import Counter

import torch

from bagu.data import DataConfig, Document, Loader
from bagu.lab.parts.library_models import epoch_steps, new_model, read_library, train


def test_checkpoints_are_copies_at_their_steps() -> None:
    library = read_library(quick=True)
    model = new_model(width=32, seed=1, device="cpu")
    first, last = train(model, library.held_tokens, steps=3, seed=1, checkpoints=(1, 3))
    weights = [m.state_dict()["embedding.weight"] for m in (first, last, model)]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1])
    other = new_model(width=32, seed=1, device="cpu")
    (again,) = train(other, library.held_tokens, steps=1, seed=1, checkpoints=(1,))
    assert torch.equal(weights[0], again.state_dict()["embedding.weight"])


def test_an_epoch_reads_every_token() -> None:
    library = read_library(quick=True)
    store = library.store([Document(id=str(i), text=f"value_{i} = {i}\n" * 40) for i in range(9)])
    for packing in ("whole", "stream"):
        loader = Loader({"text": store}, DataConfig(context=64, rows=2, packing=packing))
        steps = [Counter(b.ids.tolist()) for s in range(epoch_steps(loader)) for b in loader.batch(s)]
        read, whole = sum(steps, Counter()), Counter(store.flat.tolist())
        end = int(store.flat[-1])  # the last end token has no successor, so it may not be read
        assert all(read[token] >= n for token, n in whole.items() if token != end)
        assert read.total() <= store.num_tokens + 2 * 128  # the last step, and padding
