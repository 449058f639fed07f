"""`bagu profile`: the sums over a trace, the advice, and the three commands on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bagu.bench.profile import Entry, Profile, _union, advice, profiled
from bagu.cli import main


def profile_of(device: str, seconds: float, busy: float, *entries: tuple[str, int, float]) -> Profile:
    made = tuple(Entry(name=n, calls=c, seconds=s) for n, c, s in entries)
    return Profile(device=device, steps=2, seconds=seconds, busy_s=busy, entries=made)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (profile_of("cuda", 1.0, 0.5, ("a", 10, 0.25), ("b", 10, 0.25)), ["GPU is idle 50%", "10 launches"]),
        (profile_of("cuda", 1.0, 0.98, ("tiny", 400_000, 0.9)), ["200000 calls a step take less than 5 us"]),
        (profile_of("cpu", 1.0, 0.98, ("aten::copy_", 9, 0.3), ("mm", 9, 0.4), ("x", 9, 0.28)), ["Copies take 31%"]),
        (profile_of("cpu", 1.0, 0.98, ("mm", 9, 0.8)), ["mm takes 82%"]),
        (profile_of("cpu", 1.0, 0.6, ("a", 9, 0.2), ("b", 9, 0.2), ("c", 9, 0.2)), ["40% of the time is outside"]),
        (profile_of("cpu", 1.0, 0.98, ("a", 9, 0.3), ("b", 9, 0.3), ("c", 9, 0.3)), ["No single cause"]),
    ],
)
def test_advice_names_the_cause(found: Profile, words: list[str]) -> None:
    text = " ".join(advice(found))
    assert all(word in text for word in words)


def test_overlapping_intervals_count_once() -> None:
    assert _union([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5
    assert _union([]) == 0


def test_a_profile_counts_the_operators_of_a_step(tmp_path: Path) -> None:
    x = torch.randn(64, 64)
    found = profiled(lambda: x @ x @ x, torch.device("cpu"), steps=4, trace=tmp_path / "trace.json")
    mm = next(e for e in found.entries if e.name == "aten::mm")
    assert mm.calls == 8 and 0 < mm.seconds <= found.busy_s <= found.seconds
    assert any(e.get("name") == "aten::mm" for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


def test_profile_of_an_op_and_a_wrong_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["profile", "op", "swiglu", "--device", "cpu", "--steps", "2", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert (
        stopped.value.code == 0
        and "By the measured ceilings a step takes at least" in shown
        and "calls a step" in shown
    )
    assert (tmp_path / "trace.json").stat().st_size > 1000 and (tmp_path / "profile.png").stat().st_size > 5000
    for argv, hint in ((["op", "swigul"], "'swiglu'"), (["train", "llama_1"], "'llama_1b'")):
        with pytest.raises(SystemExit):
            main(["profile", *argv])
        assert hint in capsys.readouterr().err
