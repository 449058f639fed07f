"""Labs of claims that training decides: planted numbers for each verdict, and what they plant or estimate."""

from __future__ import annotations

import random
from itertools import product
from types import ModuleType

import pytest
import torch

from bagu.lab.core import Row
from bagu.lab.model import norm_final_loss, rope_linear, swiglu
from bagu.lab.parts.more_steps import hidden
from bagu.lab.parts.tiny import tiny
from bagu.lab.post_train import how_much_changes
from bagu.lab.serve import cold_start
from bagu.lab.train import batch_noise, fp8_training, loss_spikes, vocab_size
from bagu.nn import Transformer, init_weights
from tests.lab.test_context_labs import losses
from tests.lab.test_micro_labs import rows_of


def gated(*percents: float) -> list[Row]:
    """SwiGLU's loss against GELU's at two widths."""
    names = ("gelu", "relu2", "geglu")
    return [
        row | {"width": width}
        for width, p in zip((32, 64), percents, strict=True)
        for row in losses(dict.fromkeys(names, 0.0) | {"swiglu": p}, by="kind")
    ]


def normed(*percents: float) -> list[Row]:
    """Post-norm's loss against pre-norm's at two depths."""
    return [
        row | {"part": "chosen", "layers": depth, "rate": 3e-3}
        for depth, p in zip((3, 9), percents, strict=True)
        for row in losses({"pre": 0.0, "post": p, "sandwich": 0.0}, by="kind")
    ]


def encoded(rope: float, decay: float) -> list[Row]:
    rows = losses({"none": 0.0, "sinusoidal": -2.0, "RoPE": rope, "decay": decay}, by="kind")
    columns = "part head_dim negative_weights_percent negative_sums_percent"
    divisors = rows_of(columns, *(("divisor", dim, 10.0, 5.0) for dim in rope_linear.HEAD_DIMS))
    return divisors + [row | {"part": "loss"} for row in rows]


def batches(steps: dict[int, int], noise: float) -> list[Row]:
    columns = "batch seed rate steps_to_loss noise_scale budget"
    return rows_of(columns, *((b, 1, 1.0, n, noise if b == 16 else None, 9999) for b, n in steps.items()))


def spikes(left: dict[str, float]) -> list[Row]:
    """A damage of 10 nats by each cause, of which a remedy leaves this share."""
    cells = product(loss_spikes.CAUSES, loss_spikes.REMEDIES)
    return [
        {"cause": c, "remedy": r, "seed": 1, "loss_sum_nats": 50 + (0 if c == "none" else 10 * left.get(r, 1.0))}
        for c, r in cells
    ]


def sizes(*percents: float) -> list[Row]:
    names = dict(zip(("262", "512", "1024"), percents, strict=True))
    rows = losses(names, by="size")
    more = {"flops": 1e11, "bytes_per_token": 2.0}
    return [r | more | {"vocabulary": int(str(r["size"])), "bits_per_byte": r["val_loss_nats"]} for r in rows]


def rounded(plain: float, outliers: float) -> list[Row]:
    rows: list[Row] = [
        row | {"part": "loss", "width": 32, "start": start}
        for start, p in (("plain", plain), ("outliers", outliers))
        for row in losses({"full": 0.0, "fp8": p}, by="kind")
    ]
    error = {"part": "error", "layer": "0.ffn.down", "width": 32, "zeros_percent": 0.0}
    return rows + [error | {"start": s, "error_percent": e} for s, e in (("plain", 2.6), ("outliers", 40.0))]


def requests(cold: float, rehearsed: float) -> list[Row]:
    firsts = {"cold": cold, "rehearsed": rehearsed}
    return rows_of(
        "way round request time_ms", *((w, 0, i, f if i == 1 else 1.0) for w, f in firsts.items() for i in range(1, 9))
    )


def changed(weights: float, gain: float) -> list[Row]:
    """DPO and GRPO beside an SFT that moves 1 % of the weights and 10 points."""
    stages = {"continued": (2.0, 0.0), "SFT": (1.0, 10.0), "DPO": (weights, gain), "GRPO": (weights, gain)}
    columns = "stage seed weights_percent bf16_percent kl_nats gain_points"
    return rows_of(columns, *((s, seed, w, 50.0, 0.1, g) for s, (w, g) in stages.items() for seed in (1, 2, 3)))


PLANTED: dict[str, tuple[list[Row], list[Row]]] = {
    "swiglu": (gated(-2.0, -1.0), gated(0.0, 1.0)),
    "norm_final_loss": (normed(-2.0, -1.0), normed(3.0, 20.0)),
    "rope_linear": (encoded(-5.0, 0.0), encoded(-5.0, -6.0)),
    "batch_noise": (batches({1: 400, 4: 110, 16: 40, 64: 30}, 20.0), batches({1: 100, 4: 90, 16: 9, 64: 2}, 9000.0)),
    "loss_spikes": (spikes({"clip": 0.1, "skip": 0.0, "warm-up": 0.1}), spikes({})),
    "vocab_size": (sizes(0.0, -3.0, -5.0), sizes(0.0, 2.0, 4.0)),
    "fp8_training": (rounded(0.1, 0.2), rounded(3.0, 9.0)),
    "cold_start": (requests(5.0, 1.05), requests(1.1, 1.0)),
    "how_much_changes": (changed(0.1, 2.0), changed(3.0, 40.0)),
}
MIXED: dict[ModuleType, list[Row]] = {
    swiglu: gated(-2.0, 1.0),
    norm_final_loss: normed(-2.0, 5.0),
    rope_linear: encoded(-6.0, -2.0),
    batch_noise: batches({1: 400, 4: 110, 16: 40, 64: 30}, 9000.0),
    loss_spikes: spikes({"skip": 0.0}),
    vocab_size: sizes(0.0, -3.0, 1.0),
    fp8_training: rounded(0.1, 9.0),
    cold_start: requests(5.0, 3.0),
    how_much_changes: changed(0.1, 40.0),
}
NAMED = {lab.__name__.split(".")[-1]: lab for lab in MIXED}


@pytest.mark.parametrize("name", NAMED)
def test_some_parts_hold(name: str) -> None:
    assert NAMED[name].verdict(MIXED[NAMED[name]]).kind == "holds only where"


@pytest.mark.parametrize("name", ["swiglu", "norm_final_loss", "rope_linear", "fp8_training", "vocab_size"])
def test_seeds_that_disagree_leave_it_open(name: str) -> None:
    draw = random.Random(0)
    drawn = ("val_loss_nats", "bits_per_byte")
    rows = [row | {key: draw.uniform(1, 9) for key in drawn if key in row} for row in MIXED[NAMED[name]]]
    assert NAMED[name].verdict(rows).kind == "not decided"


def test_too_few_batches_and_harmless_causes_leave_it_open() -> None:
    assert batch_noise.verdict(rows_of("batch seed rate steps_to_loss", (1, 1, 1.0, 9), (4, 1, 1.0, None))).kind == (
        "not decided"
    )
    harmless = loss_spikes.verdict(spikes(dict.fromkeys(loss_spikes.REMEDIES, 0.0)))
    assert harmless.kind == "not decided" and "bad batch, rate, start" in harmless.sentence_en
    still = [row | {"gain_points": float(i % 3 - 1)} for i, row in enumerate(changed(0.1, 0.0))]
    assert how_much_changes.verdict(still).kind == "not decided"


def test_the_critical_batch() -> None:
    assert batch_noise.critical({1: 100.0, 4: 25.0, 16: 13.0, 64: 10.0}) == 16
    assert batch_noise.critical({1: 100.0, 4: 25.0}) == 4


def test_planted_outliers_do_not_change_the_function() -> None:
    model = init_weights(Transformer(tiny(40, 32, heads=2, ffn=96, max_len=16)), 0)
    ids = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
    before = hidden(model, ids).detach()
    fp8_training.planted(model)
    torch.testing.assert_close(hidden(model, ids), before, rtol=1e-4, atol=1e-5)
    hidden(model, ids).sum().backward()
    for block in model.blocks:
        gradient = block.ffn.down.weight.grad
        assert gradient is not None and not gradient[:, : fp8_training.FEATURES].any() and gradient.any()


def test_rotated_features_have_negative_sums_in_small_heads_only() -> None:
    small, large = rope_linear.signs(4), rope_linear.signs(64)
    assert small["negative_sums_percent"] > 10 and large["negative_sums_percent"] == 0


def test_a_decay_of_one_is_plain_linear_attention() -> None:
    config = tiny(40, 32, heads=2, ffn=48, max_len=16, attention="linear", positions=rope_linear.NoPositions())
    model = init_weights(Transformer(config), 0).eval()
    ids = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
    plain = hidden(model, ids)
    for block in model.blocks:
        whole = rope_linear.partial(rope_linear.decayed, block.attention, torch.ones(2))
        rope_linear.override(block.attention, linear=whole)
    torch.testing.assert_close(hidden(model, ids), plain, rtol=1e-4, atol=1e-5)


def test_how_far_weights_moved() -> None:
    a = init_weights(Transformer(tiny(8, 16, heads=2, ffn=16, max_len=8)), 0)
    b = how_much_changes.copy.deepcopy(a)
    assert how_much_changes.moved(a, b) == how_much_changes.differ(a, b) == 0
    with torch.no_grad():
        for p in b.parameters():
            p.mul_(1.1)
    assert how_much_changes.moved(a, b) == pytest.approx(0.1) and how_much_changes.differ(a, b) > 0.9


def test_an_unknown_way_of_a_new_process_is_an_error() -> None:
    times = cold_start.serve_new("rehearsed", "cpu", 2)
    assert len(times) == 2 and min(times) > 0
