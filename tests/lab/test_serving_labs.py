"""The inference labs: their measurements and verdicts."""

from __future__ import annotations

import pytest
import torch

from bagu.bench.known_text import counts_upwards
from bagu.lab.core import Row
from bagu.lab.model import attention_complexity, flash_attention
from bagu.lab.numerics import batch_invariance
from bagu.lab.serve import continuous_batching, kv_cache, paging, prefix_cache, speculation
from bagu.nn import Transformer, init_weights
from bagu.types import Completion

# --- KV cache ---------------------------------------------------------------------------------------------------------


def cache_rows(cached: list[float], uncached: list[float], training: float = 0.1) -> list[Row]:
    return [
        {
            "length_tokens": 64 * 4**i,
            "no_cache_ms": w,
            "cache_ms": c,
            "training_ms_per_token": training,
            "cache_bytes": 1 << 20,
        }
        for i, (c, w) in enumerate(zip(cached, uncached, strict=True))
    ]


@pytest.mark.parametrize(
    ("cached", "uncached", "training", "kind"),
    [
        ([1.0, 1.1, 1.2], [4.0, 16.0, 64.0], 0.1, "held"),
        ([1.0, 1.1, 3.0], [4.0, 16.0, 64.0], 0.1, "holds only where"),
        ([1.0, 1.0, 1.0], [0.5, 0.6, 0.7], 0.1, "did not hold"),
        ([1.0, 1.0, 1.0], [4.0, 16.0, 64.0], 2.0, "did not hold"),
    ],
)
def test_kv_cache_flips(cached: list[float], uncached: list[float], training: float, kind: str) -> None:
    assert kv_cache.verdict(cache_rows(cached, uncached, training)).kind == kind


# --- paging -----------------------------------------------------------------------------------------------------------


def test_waste_by_page_size() -> None:
    """Requests of 17 to 24 tokens: pages of 1 waste nothing, a reservation nearly everything."""
    lengths = [(17, 8)] * (2 * paging.POOL // 17)
    none, some = (paging.serve(lengths, page) for page in (1, 64))
    assert none["waste_percent"] == 0.0
    assert 100 * (1 - 24 / 64) <= paging.number(some, "waste_percent") <= 100 * (1 - 17 / 64)
    reserved = paging.serve(lengths[:200], paging.LONGEST)
    assert paging.number(reserved, "waste_percent") > 98
    assert reserved["running_sequences"] == paging.POOL / paging.LONGEST
    assert reserved["recomputed_percent"] == reserved["preemptions"] == 0, "a reservation is never preempted"


def paging_rows(reserved: dict[str, float], paged: float) -> list[Row]:
    return [
        {
            "load": load,
            "page_tokens": page,
            "waste_percent": waste,
            "running_sequences": 10.0,
            "recomputed_percent": 0.0,
        }
        for load, much in reserved.items()
        for page, waste in ((paging.PAGE, paged), (paging.LONGEST, much))
    ]


@pytest.mark.parametrize(
    ("reserved", "paged", "kind"),
    [
        ({"chat": 80, "uniform": 61}, 3.0, "held"),
        ({"chat": 80, "uniform": 50}, 3.0, "holds only where"),
        ({"chat": 80, "uniform": 61}, 5.0, "did not hold"),
    ],
)
def test_paging_flips(reserved: dict[str, float], paged: float, kind: str) -> None:
    assert paging.verdict(paging_rows(reserved, paged)).kind == kind


# --- continuous batching ----------------------------------------------------------------------------------------------


def test_each_way_of_batching_generates_all_tokens() -> None:
    model = init_weights(Transformer(continuous_batching.MODEL), 0).eval()
    work = continuous_batching.jobs("uniform", 20, 0, None)
    rows = {way: continuous_batching.serve(model, work, way) for way in continuous_batching.WAYS}
    static = sum(max(j.answer for j in batch) for batch in (work[:16], work[16:]))
    assert rows["static"]["steps"] == rows["static, padded"]["steps"] == static
    assert continuous_batching.number(rows["continuous"], "steps") < static
    wanted = sum(job.answer for job in work)
    computed = sum(len(batch) * max(j.answer for j in batch) for batch in (work[:16], work[16:]))
    assert rows["static, padded"]["computed_for_nothing_percent"] == pytest.approx(100 * (1 - wanted / computed))
    assert rows["continuous"]["computed_for_nothing_percent"] == rows["static"]["computed_for_nothing_percent"] == 0


def batching_rows(rate: dict[str, float], tail: float) -> list[Row]:
    """Rows with `rate` times the static throughput (by spread) and a tail latency `tail` times as long."""
    rows: list[Row] = []
    for spread, gain in rate.items():
        for way in continuous_batching.WAYS:
            best = way == continuous_batching.CONTINUOUS
            row: Row = {"spread": spread, "way": way, "answer_tokens_per_s": 100 * (gain if best else 1), "steps": 9}
            row |= {"latency_p99_ms": 10 * (tail if best else 1)}
            rows += [row | {"load": load} for load in ("all at once", "poisson")]
    return rows


@pytest.mark.parametrize(
    ("rate", "tail", "kind"),
    [
        ({"equal": 1.6, "long tail": 3.0}, 0.5, "held"),
        ({"equal": 1.0, "long tail": 3.0}, 0.5, "holds only where"),
        ({"equal": 1.6, "long tail": 3.0}, 1.1, "did not hold"),
    ],
)
def test_continuous_batching_flips(rate: dict[str, float], tail: float, kind: str) -> None:
    assert continuous_batching.verdict(batching_rows(rate, tail)).kind == kind


# --- complexity of attention ------------------------------------------------------------------------------------------


def test_all_window_implementations_agree() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1024, 2, 64).unbind()
    found = {name: call() for name, call in attention_complexity.ways(q, k, v).items()}
    torch.testing.assert_close(found["blocked"], found["scores"])
    torch.testing.assert_close(found["window, cut"], found["window, op"])
    assert not torch.allclose(found["window, op"], found["blocked"])


def test_peak_memory() -> None:
    def call() -> None:
        torch.zeros(1 << 20)  # 4 MiB, freed at once
        a = torch.zeros(1 << 19)
        torch.zeros(1 << 19).add_(a)

    assert attention_complexity.peak_bytes(call, "cpu") == 4 << 20


def complexity_rows(time: dict[str, float], memory: dict[str, float]) -> list[Row]:
    return [
        {"way": way, "length_tokens": L, "time_ms": L ** time[way], "peak_bytes": L ** memory[way]}
        for L in (1024, 2048)
        for way in attention_complexity.CLAIMED
    ]


def test_attention_complexity_flips() -> None:
    claimed = {way: float(power) for way, power in attention_complexity.CLAIMED.items()}
    swapped = {way: 3 - power for way, power in claimed.items()}
    assert attention_complexity.verdict(complexity_rows(claimed, claimed)).kind == "held"
    blocked = attention_complexity.verdict(complexity_rows(claimed, claimed | {"blocked": 1.0}))
    assert blocked.kind == "holds only where"
    assert "Not as claimed: the memory of “blocked”." in blocked.sentence_en
    assert attention_complexity.verdict(complexity_rows(swapped, swapped)).kind == "did not hold"


# --- FlashAttention ---------------------------------------------------------------------------------------------------


def test_all_ways_of_flash_attention_agree_and_blocked_ones_keep_no_scores() -> None:
    torch.manual_seed(0)
    leaves = [x.requires_grad_() for x in torch.randn(3, 128, 2, 64).unbind()]
    calls = flash_attention.ways(*leaves, backend=None)
    outs = {way: call() for way, call in calls.items()}
    for way in flash_attention.WAYS[1:]:
        torch.testing.assert_close(outs[way], outs["scores"])
    kept = {way: flash_attention.kept_bytes(call) for way, call in calls.items()}
    tokens, weights = 4 * 128 * 2 * 64, 4 * 2 * 128 * 128
    assert kept["scores"] >= weights + 3 * tokens
    assert all(kept[way] <= 4 * tokens + 4 * 2 * 128 for way in flash_attention.WAYS[1:])


def flash_rows(memory: dict[str, float], slower: float) -> list[Row]:
    return [
        {
            "way": way,
            "device": "cpu",
            "length_tokens": L,
            "forward_ms": 1.0,
            "forward_and_backward_ms": 3.0 * (slower if way in flash_attention.BLOCKED else 1.0),
            "peak_bytes": L ** memory[way],
            "kept_bytes": L,
        }
        for L in (1024, 2048)
        for way in flash_attention.WAYS
    ]


def test_flash_attention_flips() -> None:
    claimed = {way: 1.0 if way in flash_attention.BLOCKED else 2.0 for way in flash_attention.WAYS}
    swapped = {way: 3 - power for way, power in claimed.items()}
    assert flash_attention.verdict(flash_rows(claimed, 0.5)).kind == "held"
    slow = flash_attention.verdict(flash_rows(claimed, 1.5))
    assert slow.kind == "holds only where" and "Not as claimed: SDPA is faster, bagu is faster." in slow.sentence_en
    assert flash_attention.verdict(flash_rows(swapped, 1.5)).kind == "did not hold"


# --- batch invariance -------------------------------------------------------------------------------------------------


def test_differing_bits() -> None:
    one = torch.tensor(-1.0)
    next_to_it = torch.nextafter(one, torch.tensor(-2.0)).item()
    assert batch_invariance.differing_bits(-1.0, -1.0) == 0
    assert batch_invariance.differing_bits(-1.0, next_to_it) == 1
    assert batch_invariance.differing_bits(-1.0, -2.0) == 24


def completion(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Completion:
    return Completion(prompt=0, choice=0, tokens=tokens, text=None, finish="length", logprobs=logprobs)


def test_logprobs_are_compared_up_to_the_first_different_token() -> None:
    row = batch_invariance.compare([completion((1, 2, 3), (-1.0, -1.0, -1.0))],
                                   [completion((1, 2, 4), (-1.0, -2.0, -9.0))])  # fmt: skip
    assert (row["compared_tokens"], row["other_texts"], row["changed_percent"]) == (2, 1, 50.0)
    assert (row["max_bits"], row["max_difference_nats"]) == (24, 1.0)


def invariance_rows(bits: dict[str, int]) -> list[Row]:
    return [
        {
            "mode": mode, "dtype": "fp32", "case": f"batch of {n}", "batch_sequences": n, "requests": 8,
            "other_texts": 0, "max_bits": bits[mode], "max_difference_nats": 1e-6, "generated_tokens_per_s": 100.0,
        }
        for mode in batch_invariance.MODES
        for n in (2, 8)
    ]  # fmt: skip


def test_batch_invariance_flips() -> None:
    verdicts = {
        "held": {"fast": 0, "invariant": 0},
        "holds only where": {"fast": 3, "invariant": 0},
        "did not hold": {"fast": 3, "invariant": 1},
    }
    for kind, bits in verdicts.items():
        assert batch_invariance.verdict(invariance_rows(bits)).kind == kind


# --- prefix cache -----------------------------------------------------------------------------------------------------


def prefix_rows(cost: float, gain: float) -> list[Row]:
    """Pairs on a machine that is at times twice as slow; both halves of a pair are affected."""
    return [
        {"shared_tokens": shared, "pair": i, "with_ms": slow * (cost if shared == 0 else 1 / gain), "without_ms": slow}
        for shared in prefix_cache.SHARED
        for i, slow in enumerate([100.0, 101.0, 200.0, 99.0, 150.0])
    ]


@pytest.mark.parametrize(
    ("cost", "gain", "kind"),
    [(1.005, 1.8, "held"), (1.02, 1.8, "holds only where"), (1.0, 1.2, "holds only where"), (1.1, 0.9, "did not hold")],
)
def test_prefix_cache_flips(cost: float, gain: float, kind: str) -> None:
    rows = prefix_rows(cost, gain)
    assert prefix_cache.verdict(rows).kind == kind
    middle, low, high = prefix_cache.ratio(rows, 0)
    assert low <= middle <= high
    assert middle == pytest.approx(cost)


# --- speculation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gains", "kind"), [((2.0, 1.4), "held"), ((2.0, 0.9), "holds only where"), ((0.9, 0.5), "did not hold")]
)
def test_speculation_flips(gains: tuple[float, float], kind: str) -> None:
    rows: list[Row] = [
        {"batch": batch, "drafts": drafts, "rate": rate, "speedup": gain * rate / speculation.LIKELY}
        for batch, gain in zip((1, 16), gains, strict=True)
        for drafts in speculation.DRAFTS
        for rate in speculation.RATES
    ]
    assert speculation.verdict(rows).kind == kind
    assert speculation.breaks_even(rows, 1, 3) == (0.6 if gains[0] == 2.0 else 0.95)


def test_speculation_measures_the_chosen_acceptance() -> None:
    model = counts_upwards(init_weights(Transformer(speculation.MODEL), 0)).eval()
    engine = speculation.engine(model, 2, 3)
    assert engine.speculator is not None
    engine.speculator.proposer = speculation.Knows(0.8)
    speculation.decode(engine, 2, 40, "all")
    stats = engine.stats()
    expected = 0.8 + 0.8**2 + 0.8**3  # accepted of three drafts
    assert abs(stats.accepted_tokens / stats.drafts - expected) < 4 * 1.2 / stats.drafts**0.5
