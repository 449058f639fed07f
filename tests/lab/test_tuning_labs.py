"""Planted rows and small parts of the labs about learning rates, small batches and temperatures."""

from __future__ import annotations

import math
import random
from functools import partial
from itertools import product

import pytest
import torch

from bagu.lab.core import Row
from bagu.lab.model import groupnorm_batch, gumbel_temperature
from bagu.lab.parts.tiny import tiny
from bagu.lab.train import lr_sensitivity

SEEDS = (1, 2, 3)


def valley(rate: float, decades: float, best: float = 0.01) -> float:
    """A loss that is 5 % above its least at both ends of a range of so many decades."""
    return 3 * (1 + 0.05 * (2 * math.log10(rate / best) / decades) ** 2)


def curves(adaptive: dict[str, float], others: float = 1.0, noise: float = 0.0) -> list[Row]:
    """Losses over the learning rate; the ranges of the seeds differ by `noise`."""
    rows: list[Row] = []
    for (name, (_, usual)), seed in product(lr_sensitivity.USUAL.items(), SEEDS):
        wide = adaptive.get(name, others) + noise * (seed - 2) * (-1) ** len(name)
        found = lr_sensitivity.searched(partial(valley, decades=wide, best=3 * usual), usual)
        columns: Row = {"optimizer": name, "seed": seed}
        rows += [columns | {"rate": r, "val_loss_nats": v} for r, v in found.items()]
    return rows


def batches(small: dict[int, float], group: float = 0.95) -> list[Row]:
    """Shares named right by BatchNorm at a batch of 2, by the side of the last map; 0.96 in larger batches."""
    rows: list[Row] = []
    for (side, share), kind, batch, seed in product(small.items(), ("batch", "group"), (2, 16), SEEDS):
        right = (share if kind == "batch" else group) if batch == 2 else 0.96
        cell: Row = {"kind": kind, "map_side": side, "batch": batch, "learning_rate": 0.2, "seed": seed}
        rows.append(cell | {"right_share": right + 0.001 * seed, "exact_share": right})
    return rows


def samples(largest: float, bias: float, variance: float) -> list[Row]:
    """Of the soft samples at temperature 0.05; at 1 the bias is 0.4 and the variance 0.7."""
    cells = {0.05: (largest, bias, variance), 0.1: (0.9, 0.2, 20.0), 1.0: (0.5, 0.4, 0.7)}
    rows: list[Row] = []
    for way, (tau, (top, off, spread)), n in product(("soft", "hard"), cells.items(), range(4)):
        row: Row = {"way": way, "tau": tau, "problem": n, "largest": top, "entropy_nats": 1.0, "still_share": 0.1}
        rows.append(row | {"bias_squared": off**2 * (1 + n / 100), "variance": spread})
    return [*rows, {"way": "REINFORCE", "tau": None, "problem": 0, "bias_squared": 0.0, "variance": 5.0}]


WIDE, NARROW = dict.fromkeys(lr_sensitivity.ADAPTIVE, 2.0), dict.fromkeys(lr_sensitivity.ADAPTIVE, 0.6)
PLANTED: dict[str, tuple[list[Row], list[Row]]] = {
    "lr_sensitivity": (curves(WIDE), curves(NARROW)),
    "groupnorm_batch": (batches({1: 0.2, 4: 0.8}), batches({1: 0.95, 4: 0.96})),
    "gumbel_temperature": (samples(0.97, 0.05, 3.0), samples(0.8, 0.2, 90.0)),
}


def test_some_parts_hold() -> None:
    mixed = lr_sensitivity.verdict(curves(WIDE | {"Adagrad": 0.5}))
    assert mixed.kind == "holds only where" and "Adagrad -0.5" in mixed.sentence_en
    assert groupnorm_batch.verdict(batches({1: 0.2, 4: 0.96})).kind == "holds only where"
    assert groupnorm_batch.verdict(batches({1: 0.2, 4: 0.3}, group=0.5)).kind == "did not hold"
    assert gumbel_temperature.verdict(samples(0.97, 0.05, 50.0)).kind == "holds only where"


def test_numbers_that_disagree_leave_it_open() -> None:
    assert lr_sensitivity.verdict(curves(WIDE, noise=0.9)).kind == "not decided"
    draw = random.Random(0)
    rows = [row | {"right_share": draw.uniform(0.5, 1)} for row in batches({1: 0.2, 4: 0.9})]
    assert groupnorm_batch.verdict(rows).kind == "not decided"
    rows = [row | {"bias_squared": draw.choice((0.0, 9.0))} for row in samples(0.97, 0.05, 3.0)]
    assert gumbel_temperature.verdict(rows).kind == "not decided"


@pytest.mark.parametrize("decades", [0.5, 1.3, 3.0])
def test_the_range_of_good_rates(decades: float) -> None:
    for start in (1e-4, 0.01, 0.5):
        found = lr_sensitivity.searched(lambda lr: valley(lr, decades), start)
        assert lr_sensitivity.decades(found, 1.05 * min(found.values())) == pytest.approx(decades, abs=0.15)
        assert lr_sensitivity.decades(found, 2.9) == 0
    lost = lr_sensitivity.searched(lambda lr: 9.0 if lr > 0.01 else valley(lr, decades), 0.001)
    assert lr_sensitivity.decades(lost, 3.15) == pytest.approx(decades / 2, abs=0.15)


def test_the_range_skips_a_bad_rate_and_a_search_ends() -> None:
    assert lr_sensitivity.decades({0.01: 1.0, 0.1: 1.0, 1.0: 3.0, 10.0: 1.0}, 2.0) == pytest.approx(2.0)
    assert len(lr_sensitivity.searched(lambda lr: 1.0, 1.0)) == 2 * lr_sensitivity.FAR + 1


def test_a_run_that_diverges_counts_as_equal_probabilities() -> None:
    config = tiny(lr_sensitivity.VOCAB, 16, layers=1, heads=2, ffn=16, max_len=8)
    pieces = torch.randint(4, (32, 9), generator=torch.Generator().manual_seed(0))
    losses = [lr_sensitivity.trained(config, pieces, pieces, rule, 1, 20, 0.02) for rule in ("adam", "muon")]
    assert max(losses) < 4 and lr_sensitivity.trained(config, pieces, pieces, "sgd", 1, 20, 1e9) == lr_sensitivity.LOST


def test_a_mean_of_samples_of_reinforce_is_the_wanted_gradient() -> None:
    logits, readout = gumbel_temperature.problem(0)
    p, hot = torch.softmax(logits, -1), torch.eye(len(logits), dtype=logits.dtype)
    each = gumbel_temperature.loss(hot, readout)
    torch.testing.assert_close((p * each).unsqueeze(1).mul(hot - p).sum(0), gumbel_temperature.wanted(logits, readout))
    cold, warm = (gumbel_temperature.measured(0, tau, False, 20_000) for tau in (0.1, 1.0))
    assert cold["bias_squared"] < warm["bias_squared"] and cold["variance"] > warm["variance"]  # type: ignore[operator]
    assert gumbel_temperature.measured(0, 1.0, True, 100)["largest"] == 1


def test_nets_of_one_seed_differ_by_their_norm_alone() -> None:
    for side in groupnorm_batch.STRIDES:
        nets = [groupnorm_batch.new_net(kind, side, 0) for kind in groupnorm_batch.KINDS]
        a, b = (dict(net.named_parameters()) for net in nets)
        assert all(torch.equal(a[name], b[name]) for name in a) and a.keys() == b.keys()
        assert nets[0][:-2](torch.zeros(2, 1, 16, 16)).shape[2:] == (side, side)


def test_exact_statistics_are_those_of_all_pictures() -> None:
    net = groupnorm_batch.new_net("batch", 4, 0)
    stream = torch.Generator().manual_seed(0)
    x, names = torch.randn(16, 1, 16, 16, generator=stream), torch.randint(40, (16,), generator=stream)
    before = [p.clone() for p in net.parameters()]
    assert groupnorm_batch.train(net, x, names, 4, 0.1, 0) == 4
    assert not any(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    groupnorm_batch.measure_statistics(net, x)
    assert torch.allclose(net(x), net.eval()(x), atol=0.1)
