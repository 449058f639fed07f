"""The positions lab: both losses are of the same tokens; verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
import torch

from bagu.lab.core import Row
from bagu.lab.model import positions
from bagu.lab.model.positions import lengths, shift
from bagu.nn import Transformer, init_weights
from bagu.nn.config import Alibi, Rope
from bagu.nn.position_choices import Learned

L = lengths.L


def made_up(percents: Mapping[str, float | None], *, window: float = 0.0, drift: float = 1e-6) -> list[Row]:
    """Three seeds whose loss past L is this many percent above that in windows; None refuses."""
    rows: list[Row] = [
        {"part": "shift", "arithmetic": a, "shift_tokens": 1024, "drift_max_percent": drift} for a in shift.ARITHMETIC
    ]
    for (name, percent), seed, start in product(percents.items(), (1, 2, 3), (0, L, 2 * L)):
        sort = lengths.TRAINED[name][0]
        common: Row = {
            "part": "length", "encoding": name, "sort": sort, "seed": seed, "steps": 10, "train_length_tokens": L,
            "position_from_tokens": start, "position_to_tokens": start + L, "short_loss_nats": 2.0,
        }  # fmt: skip
        for reading, more in (("as trained", percent), ("window", window), ("YaRN", 5.0)):
            loss = 2.0 if start < L else None if more is None else 2.0 * (1 + more / 100 + 1e-4 * (seed - 2))
            if reading != "YaRN" or name == "RoPE":
                rows.append(common | {"reading": reading, "loss_nats": loss})
    return rows


ALL_GOOD = {"learned": None, "sinusoidal": 20.0, "RoPE": 0.1, "ALiBi": -0.5, "T5": 0.2, "none": 3.0}


def test_the_verdict_flips() -> None:
    assert positions.verdict(made_up(ALL_GOOD)).kind == "held"
    some = positions.verdict(made_up(ALL_GOOD | {"RoPE": 20.0}))
    assert some.kind == "holds only where"
    assert "Gets worse: sinusoidal +20.0 ± 0.0 %, RoPE +20.0 ± 0.0 %" in some.sentence_en
    assert "Refuses longer inputs: learned." in some.sentence_en
    assert positions.verdict(made_up(ALL_GOOD | {"sinusoidal": 0.0})).kind == "holds only where"
    assert positions.verdict(made_up(ALL_GOOD | {"RoPE": 9.0, "ALiBi": 9.0, "T5": 9.0})).kind == "did not hold"


def test_products_that_change_with_the_shift_refute_it() -> None:
    moved = positions.verdict(made_up(ALL_GOOD, drift=1.0))
    assert moved.kind == "did not hold"
    assert "depends on more than the distance" in moved.sentence_en


def test_inconclusive_seeds_leave_it_open() -> None:
    rows = made_up(ALL_GOOD)
    for row in rows:
        if row.get("encoding") == "ALiBi" and row["seed"] == 3 and row["loss_nats"] != 2.0:
            row["loss_nats"] = 2.2
    found = positions.excess(rows, "ALiBi", "as trained")
    assert found is not None
    assert found.standing == "open"


@pytest.mark.parametrize(("arithmetic", "most", "least"), [("fp64 angles", 1e-5, 0), ("bf16 angles", 100, 5)])
def test_rope_depends_on_the_distance_within_precision(arithmetic: str, most: float, least: float) -> None:
    for row in shift.measure(arithmetic, (1, 2**12, 2**20), "cpu"):
        assert least <= row["drift_max_percent"] <= most  # type: ignore[operator]


def pieces(count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(lengths.VOCAB, (count, lengths.LONGER * L + 1), generator=generator)


def test_both_losses_are_the_same_up_to_the_training_length() -> None:
    model = init_weights(Transformer(lengths.config(Rope())), 0)
    full, windows = lengths.full_context(model, pieces()), lengths.in_windows(model, pieces())
    assert full.shape == windows.shape == (2, lengths.LONGER * L)
    torch.testing.assert_close(full[:, :L], windows[:, :L], rtol=1e-6, atol=0)  # of fp32 sums over other shapes
    # the token at L + L/2 - 1 is the last of the window that starts at L/2
    alone = lengths.losses(model, pieces()[:, L // 2 : L // 2 + L + 1])
    torch.testing.assert_close(windows[:, L : L + L // 2], alone[:, L // 2 :], rtol=1e-6, atol=0)
    assert not torch.allclose(full[:, L:], windows[:, L:])


def test_a_window_gives_rope_the_same_context() -> None:
    """One layer with a window of L: the last token of a window attends to the same tokens as in the full piece."""
    for encoding in (Rope(), Alibi()):
        config = lengths.readings(lengths.config(encoding))["window"]
        model = init_weights(Transformer(config), 0)
        model.blocks = model.blocks[:1]
        last = lengths.losses(model, pieces()[:, 3 * L : 4 * L + 1])[:, -1]
        torch.testing.assert_close(lengths.full_context(model, pieces())[:, -1], last, rtol=1e-4, atol=1e-5)


def test_a_learned_table_ends_at_the_training_length() -> None:
    model = init_weights(Transformer(lengths.config(Learned())), 0)
    assert lengths.full_context(model, pieces()).shape == (2, L)
