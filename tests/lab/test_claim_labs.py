"""Labs of single claims of the notes: planted numbers for both verdicts, and the limits of the fits and counts."""

from __future__ import annotations

import random

import pytest

from bagu.lab.core import Row
from bagu.lab.model import embedding_terms
from bagu.lab.parallel import bounded_delay, ps_or_ring, ring_scaling, staleness
from bagu.lab.serve import autoscaling
from tests.lab.test_micro_labs import rows_of


def ring_rows(alpha: float) -> list[Row]:
    """Times by the formula with `alpha` µs a message and 1 GB/s."""
    columns, found = "ranks size_bytes time_us sent_bytes", []
    for ranks in (2, 4, 8):
        for size in (1024, 1 << 24):
            sent = 2 * (ranks - 1) / ranks * size
            found.append((ranks, size, ring_scaling.predicted_us(alpha, 1e-3, ranks, size), sent))
    return rows_of(columns, *found)


def terms(mixed: float) -> list[Row]:
    parts = zip(embedding_terms.TERMS, (1 - 2 * mixed, mixed, mixed, 0.0), strict=True)
    return rows_of("kind term share", *(("random", *part) for part in parts))


def ada(adagrad: float, adam: float, uncorrected: float) -> list[Row]:
    ends = {
        "Adagrad": (1.0, adagrad),
        "RMSProp": (10.0, 1.0),
        "Adam": (1.0, adam),
        "Adam, uncorrected": (uncorrected, 1.0),
    }
    return [
        {"name": n, "step": s, "update": v} for n, pair in ends.items() for s, v in zip((1, 2000), pair, strict=True)
    ]


def links(ring: float, one: float, many: float) -> list[Row]:
    grown = {"ring": ring, "1 server": one, "N servers": many}
    return [{"way": w, "workers": n, "busiest_share": v} for w, g in grown.items() for n, v in ((2, 1.0), (64, g))]


def waits(left: float) -> list[Row]:
    columns = "steps workers delay idle_percent speed"
    return rows_of(columns, ("jitter", 4, 0, 60.0, 1.0), ("jitter", 4, 8, left, 1.5))


def excess(kept: float, dropped: float) -> list[Row]:
    columns = "method feedback name seed bytes_share excess_loss"
    cases = [(m, f, m, 0, 0.25, kept if f else dropped) for m in ("int8", "topk") for f in (True, False)]
    return rows_of(columns, *cases)


def layers(stream: float, change: float) -> list[Row]:
    return rows_of("depth layer stream change", (8, 2, 1.0, 1.0), (8, 8, stream, change))


def norms(layer: float) -> list[Row]:
    return rows_of(
        "name count time_us gb_per_s", ("LayerNorm", 1, layer, 1), ("RMSNorm", 1, 1.0, 1), ("ScaleNorm", 1, 1.0, 1)
    )


def aids(printed: bool) -> list[Row]:
    cases = [("device_print", False, printed), ("device_print", True, True)]
    return rows_of("name debug happened", *cases)


def temperatures(largest: float, spread: float) -> list[Row]:
    columns, warm, hard = "tau way bias spread largest", (1.0, "soft", 0.2, 1.0, 0.7), (1.0, "hard", 0.3, 2.0, 1.0)
    return rows_of(columns, (0.1, "soft", 0.2, spread, largest), warm, hard)


def patches(gain: float) -> list[Row]:
    rows = [(p, seed, 2.0, 0.3 + gain * i + 0.001 * seed * i) for i, p in enumerate((16, 8, 4)) for seed in range(3)]
    return rows_of("patch_pixels seed cpu_s found_share", *rows)


def batches(gain: float) -> list[Row]:
    sizes = enumerate((16, 64, 256))
    rows = [(b, 0.002, seed, 0.3 + gain * i + 0.001 * seed * i) for i, b in sizes for seed in range(3)]
    return rows_of("batch learning_rate seed found_share", *rows)


def images(new: float, blocks: int, encoded: int) -> list[Row]:
    columns = "side_pixels kind tokens time_ms blocks encoded_images"
    return rows_of(
        columns, (64, "text", 48, 1.0, 3, 0), (64, "image", 48, new, blocks, 1), (64, "seen", 48, 1.0, 3, encoded)
    )


def routed(many: float, one: float) -> list[Row]:
    """The tail latency by affinity with many prefixes and with one; that of the shortest queue is 4 s."""
    loads = (("40 prefixes", many), ("one prefix for all", one))
    cases = [(load, r, 0, s) for load, a in loads for r, s in (("affinity", a), ("queue", 4.0), ("finish", 0.9))]
    return rows_of("load router seed ttft_p99_s", *cases)


def scaled(queue: dict[str, float]) -> list[Row]:
    """Replicas by the length of the queue for each load with the only threshold that keeps the target there; by the
    predicted wait 4 under every load."""
    found = []
    for threshold, (load, replicas) in enumerate(queue.items()):
        for i in range(len(queue)):  # other thresholds are cheaper and wait too long
            found.append((load, "queue", float(i), 0, *((9.0, replicas) if i == threshold else (90.0, 1.0))))
        found += [(load, "wait", 2.0, 0, 9.0, 4.0), (load, "wait", 8.0, 0, 90.0, 2.0)]
    return rows_of("load signal threshold seed wait_p99_s replicas", *found)


def slowed(delayed: float) -> list[Row]:
    cases = [(2.0, "delay", 0, 1.0), (2.0, "delay", 8, delayed), (2.0, "shares", 0, 1.7)]
    return rows_of("slowness way delay speed", *cases)


def unlike(equal: float, measured: float) -> list[Row]:
    columns = "speeds slowest shares micro_batches tokens_per_s relative predicted"
    cases = [(0.5, "equal", "", 510.0, equal, 0.5), (0.5, "measured", "8:8:8:4", 900.0, measured, 0.87)]
    return rows_of(columns, *(("1:1:1:0.5", *case) for case in cases))


def ways(delay_8: float) -> list[Row]:
    rates = {"all-reduce": 4.0, "server, delay 0": 3.0, "server, delay 8": delay_8}
    return rows_of(
        "steps way updates_per_s", *((s, way, rate) for s in ("equal", "jitter") for way, rate in rates.items())
    )


def killed(wrong: int) -> list[Row]:
    columns = "fault kills updates wrong_updates recovery_median_s recovery_max_s"
    return rows_of(columns, ("kill", 20, 900, wrong, 0.1, 0.4))


# for each lab, rows for which the claim holds, and rows for which it does not
PLANTED: dict[str, tuple[list[Row], list[Row]]] = {
    "ring_scaling": (ring_rows(1e-9), [row | {"sent_bytes": 1e9} for row in ring_rows(5000.0)]),
    "embedding_terms": (terms(0.01), terms(0.3)),
    "contrastive_batch": (batches(0.1), batches(0.0)),
    "image_tokens": (images(1.1, 3, 0), images(2.0, 9, 1)),
    "patch_size": (patches(0.1), patches(-0.1)),
    "grouping_block": (temperatures(0.99, 1.1), temperatures(0.7, 6.0)),
    "deep_prenorm": (layers(1.1, 0.9), layers(9.0, 0.1)),
    "module_or_function": (
        rows_of("name same_bits same_node module_us function_us", ("softmax", False, True, 5.0, 3.0)),
        rows_of("name same_bits same_node module_us function_us", ("softmax", True, True, 5.0, 3.0)),
    ),
    "ada_family": (ada(0.01, 0.9, 3.2), ada(0.9, 0.01, 1.0)),
    "staleness": (
        rows_of("delay seed lr steps", (0, 0, 0.1, 10), (4, 0, 0.1, 10)),
        rows_of("delay seed lr steps", (0, 0, 0.1, 10), (4, 0, 0.1, None), (4, 0, 0.01, 40)),
    ),
    "bounded_delay": (waits(5.0), waits(60.0)),
    "prefix_routing": (routed(1.0, 1.0), routed(5.0, 900.0)),
    "autoscaling": (scaled({"long": 4.0}), scaled({"short": 5.0, "long": 5.0})),
    "failover": (killed(0), killed(1)),
    "server_or_all_reduce": (ways(3.5), ways(6.0)),
    "slow_worker": (slowed(1.6), slowed(1.0)),
    "unlike_workers": (unlike(0.51, 0.52), unlike(0.9, 0.86)),
    "compression_feedback": (excess(1e-4, 0.1), excess(0.1, 0.1)),
    "ps_or_ring": (links(1.9, 32.0, 32.0), links(32.0, 1.0, 1.0)),
    "fused_epilogue": (
        rows_of("n k most_gain", (4096, 64, 2.1)),
        rows_of("n k most_gain", (4096, 64, 1.1)),
    ),
    "norm_speed": (norms(2.0), norms(1.0)),
    "triton_targets": (
        rows_of("target kernel code", ("NVIDIA H100", "sums", "cubin"), ("AMD MI300X", "sums", "")),
        rows_of("target kernel code", ("NVIDIA H100", "sums", "cubin"), ("AMD MI300X", "sums", "hsaco")),
    ),
    "triton_debug": (aids(printed=False), aids(printed=True)),
}


def test_the_fit_finds_latency_and_bandwidth() -> None:
    alpha, beta = ring_scaling.fitted(ring_rows(40.0))
    assert alpha == pytest.approx(40.0, rel=1e-6) and beta == pytest.approx(1e-3, rel=1e-6)


def test_bytes_of_a_ring_and_of_servers() -> None:
    assert max(ps_or_ring.ring(8).values()) == pytest.approx(2 * 7 / 8 * ps_or_ring.SIZE)
    assert max(ps_or_ring.server(8, 1).values()) == 8 * ps_or_ring.SIZE
    assert max(ps_or_ring.server(8, 8).values()) == ps_or_ring.SIZE


def test_a_length_for_each_load_is_not_one_for_all() -> None:
    verdict = autoscaling.verdict(scaled({"short": 4.1, "long": 5.0}))
    assert verdict.kind == "holds only where"
    assert "by the length of the queue none is enough, by the predicted wait 4.00 (2)" in verdict.sentence_en
    assert "短请求：按队列 4.10 (0)" in verdict.sentence_zh


def test_a_delay_that_diverges_is_said() -> None:
    verdict = staleness.verdict(PLANTED["staleness"][1])
    assert "4 steps old does not arrive" in verdict.sentence_en and "×4.00" in verdict.sentence_en
    assert "延迟 4 步 达不到" in verdict.sentence_zh


def test_a_delay_hides_jitter_and_not_a_slow_worker() -> None:
    jitter, slow = bounded_delay.STEPS["jitter"], bounded_delay.STEPS["one slow worker"]
    (idle, rate), (less, faster) = (bounded_delay.waited(4, 300, d, jitter, random.Random(0)) for d in (0, 8))
    assert idle > 0.3 and less < 0.1 and faster > 1.4 * rate
    (idle, rate), (less, faster) = (bounded_delay.waited(4, 300, d, slow, random.Random(0)) for d in (0, 8))
    assert less > 0.3 and faster < 1.1 * rate
