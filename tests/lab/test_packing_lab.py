"""The packing lab: padding, and verdicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagu.data import Document, TokenDocument, TokenStore, in_memory
from bagu.lab.core import Row
from bagu.lab.train import packing
from bagu.train.cross_entropy import nll_sum


def store() -> TokenStore:
    stream = np.random.default_rng(0)
    documents = [
        TokenDocument(id=str(i), tokens=stream.integers(packing.VOCAB, size=n))
        for i, n in enumerate(stream.integers(2, 400, size=200))
    ]
    return in_memory(documents, token_bytes=np.full(packing.VOCAB, 3, np.int32))


def test_padding_is_computed_and_changes_no_loss() -> None:
    padded = packing.loader(store(), "padded", context=256, seed=0)
    assert isinstance(padded, packing.Padded)
    rows = padded.batch(0)[0]
    separate = super(packing.Padded, padded).batch(0)[0]  # the same rows, with padding as a separate segment
    assert rows.uniform and not separate.uniform
    assert rows.num_padding == separate.num_padding > 0
    model = packing.model("cpu", 256, seed=0)
    torch.testing.assert_close(nll_sum(model, rows), nll_sum(model, separate))


def test_a_step_has_the_same_number_of_targets_in_each_way() -> None:
    targets = {
        way: sum(b.num_targets for s in range(8) for b in packing.loader(store(), way, context=256, seed=0).batch(s))
        for way in packing.WAYS
    }
    assert max(targets.values()) < 1.1 * min(targets.values()), targets


def test_functions_of_a_module_do_not_overlap() -> None:
    text = "x = 1\ndef f():\n    def inner():\n        return 1\n    return inner\nclass A:\n    def g(self): pass\n"
    found = packing.of_module(Document(id="m", text=text))
    assert [d.id for d in found] == ["m:2", "m:7"]
    assert found[0].text == text[text.index("def f") : text.index("\nclass")]


def rows(*, gains: dict[str, float], worse: dict[str, float]) -> list[Row]:
    """Packed ways that are `gains` times as fast as padding (by documents) and have `worse` nats more loss (by way)."""
    made: list[Row] = []
    for documents, gain in gains.items():
        for way in packing.WAYS:
            rate = 1000.0 * (1 if way == "padded" else gain)
            row: Row = {"kind": "speed", "documents": documents, "context_tokens": 256, "way": way}
            made.append(row | {"useful_tokens_per_s": rate})
    for way in packing.WAYS:
        for seed in (1, 2, 3):
            loss = 4.0 + 0.001 * seed + worse.get(way, 0.0)
            made.append(
                {"kind": "loss", "way": way, "seed": seed} | {f"val_{p}_loss_nats": loss for p in packing.PLACES}
            )
    return made


@pytest.mark.parametrize(
    ("gains", "worse", "kind"),
    [
        ({"functions": 2.0, "modules": 1.2}, {}, "held"),
        ({"functions": 2.0, "modules": 1.0}, {}, "holds only where"),
        ({"functions": 2.0, "modules": 1.2}, {"stream": 0.1}, "holds only where"),
        ({"functions": 2.0, "modules": 1.2}, {"stream": 0.1, "whole": 0.1}, "did not hold"),
        ({"functions": 0.9, "modules": 1.0}, {}, "did not hold"),
    ],
)
def test_the_verdict_follows_the_numbers(gains: dict[str, float], worse: dict[str, float], kind: str) -> None:
    assert packing.verdict(rows(gains=gains, worse=worse)).kind == kind


def test_the_verdict_reports_the_effect_of_joined_documents() -> None:
    told = packing.verdict(rows(gains={"functions": 2.0}, worse={"joined": 0.25})).sentence_en
    assert "+0.250 ± 0.000 nats on single documents" in told
