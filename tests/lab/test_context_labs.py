"""Labs of long contexts: planted numbers for each verdict, and the limits, masks and shares they compute."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from bagu.lab.core import Row
from bagu.lab.model import attention_sinks, block_sparse, context_limit, window_reach, yarn
from bagu.lab.parts.against import against
from bagu.nn import Transformer, init_weights
from tests.lab.test_micro_labs import rows_of


def losses(percents: dict[str, float], by: str = "way", noise: float = 0.05) -> list[Row]:
    """Three seeds of each name, with losses this many percent above the first."""
    return [
        {by: name, "seed": s, "val_loss_nats": (2 + s / 9) * (1 + (p + noise * (s - 2) * bool(p)) / 100)}
        for (name, p), s in product(percents.items(), (1, 2, 3))
    ]


def limit(time: float, kv: float) -> list[Row]:
    keys = "model gpu time_tokens positions_tokens kv_bytes_1_tokens kv_bytes_32_tokens scores_tokens"
    return rows_of(keys, ("m 1B", "h200", time, 1000.0, kv, kv / 2, 10.0))


def reached(relay: int, text: int) -> list[Row]:
    """Two layers of windows of 8: at most 14 tokens back."""
    rows: list[Row] = []
    for d in range(1, 48):
        rows.append({"task": "relay", "layers": 2, "seed": 1, "distance_tokens": d, "known": float(d <= relay)})
    for d in window_reach.CONTEXTS:
        left = 9.0 if d < text else 0.1
        rows.append({"task": "text", "layers": 2, "seed": 1, "distance_tokens": d, "gain_left_percent": left})
    return rows


def sunk(window: float, kept: float) -> list[Row]:
    rows = losses({"cut": 0.0, "all": -1.0, "window": window, "+ 4 first": kept})
    weights: list[Row] = [{"part": "weight", "seed": 1, "first_percent": 30.0, "equal_percent": 2.0}]
    return [row | {"part": "loss"} for row in rows] + weights


def sparse(chosen: float, trained: float) -> list[Row]:
    names = {"dense": 0.0, "chosen 4": chosen, "nearest 4": 3.0, "trained": trained}
    rows = losses(names, by="name")
    ways = {"dense": "dense", "chosen 4": "chosen", "nearest 4": "nearest", "trained": "trained"}
    return [row | {"way": ways[str(row["name"])], "top": 4, "read_percent": 20.0} for row in rows]


def stretched(plain: float, tuned: float) -> list[Row]:
    return losses({"trained": 0.0, "short": 30.0, "YaRN": plain, "longer": 4.0, "YaRN, longer": tuned})


PLANTED: dict[str, tuple[list[Row], list[Row]]] = {
    "context_limit": (limit(100.0, 4000.0), limit(9000.0, 200.0)),
    "window_reach": (reached(14, 12), reached(7, 6)),
    "attention_sinks": (sunk(40.0, 0.2), sunk(1.0, 0.2)),
    "block_sparse": (sparse(0.2, -0.1), sparse(4.0, 3.0)),
    "yarn": (stretched(0.5, 0.2), stretched(20.0, 9.0)),
}

MIXED = {
    "context_limit": limit(300.0, 400.0),
    "window_reach": reached(14, 6),
    "attention_sinks": sunk(40.0, 9.0),
    "block_sparse": sparse(4.0, 0.1),
    "yarn": stretched(20.0, 0.5),
}
LABS = {m.__name__.split(".")[-1]: m for m in (context_limit, window_reach, attention_sinks, block_sparse, yarn)}


@pytest.mark.parametrize("name", MIXED)
def test_some_parts_hold(name: str) -> None:
    assert LABS[name].verdict(MIXED[name]).kind == "holds only where"


@pytest.mark.parametrize("name", ["attention_sinks", "block_sparse", "yarn"])
def test_seeds_that_disagree_leave_it_open(name: str) -> None:
    rows = [row | ({"val_loss_nats": 2.0 + row["seed"] / 5} if "val_loss_nats" in row else {}) for row in MIXED[name]]
    rows = [
        r | {"val_loss_nats": 9 - 2 * r["seed"]} if r.get("way") in ("cut", "dense", "trained") else r for r in rows
    ]  # type: ignore[operator]
    assert LABS[name].verdict(rows).kind == "not decided"


def test_a_relay_that_has_learned_nothing_leaves_it_open() -> None:
    assert window_reach.verdict(reached(2, 12)).kind == "not decided"


def test_percent_is_over_the_same_seed() -> None:
    found = against(losses({"a": 0.0, "b": 2.0}), "a", by="way")["b"]
    assert found.mean == pytest.approx(2.0) and 0 < found.half < 0.3


def test_the_mask_of_sinks_is_a_window_of_the_op() -> None:
    """A window without sinks gives what the model with that window gives; all first tokens are all of the text."""
    config = window_reach.tiny(40, 32, heads=2, ffn=48, max_len=24, windows=(5,))
    model = init_weights(Transformer(config), 0).eval()
    dense = Transformer(context_limit.replace(config, windows=(None,))).eval()
    dense.load_state_dict(model.state_dict())
    pieces = torch.randint(40, (3, 25), generator=torch.Generator().manual_seed(0))
    with attention_sinks.seeing(dense, 5, 0):
        torch.testing.assert_close(attention_sinks.losses(dense, pieces), attention_sinks.losses(model, pieces))
    whole = attention_sinks.losses(dense, pieces)
    with attention_sinks.seeing(dense, 1, 24):
        torch.testing.assert_close(attention_sinks.losses(dense, pieces), whole)


def test_the_share_of_keys() -> None:
    assert block_sparse.share(1000, 1, 512) == 1.0
    assert 0.05 < block_sparse.share(0, 0, 512) < 0.1


def test_the_limits_are_those_of_the_formula() -> None:
    row = context_limit.row("Qwen3 0.6B", "h200", 1024)
    assert row["kv_bytes_1_tokens"] == pytest.approx(
        (141e9 - 2 * context_limit.count.parameters(context_limit.preset("qwen3_0_6b")).total) / 114_688
    )
    n, a = context_limit.number(row, "time_tokens"), context_limit.number(row, "attention_half_tokens")
    longer = context_limit.row("Qwen3 0.6B", "4090", 1024)
    assert n > context_limit.number(longer, "time_tokens") and a > 1000
