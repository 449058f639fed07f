"""`bagu bench ops`: a real quick run, its rows, the shrinking of sizes, and measurement faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bagu import cli
from bagu.bench import ops as bench
from bagu.bench import ops_plot, ops_table, ops_timing, roofline, sizing
from bagu.bench.implementations import Implementation, chosen_backends, implementations, is_absent
from bagu.bench.options import OpsBench, OpSetting
from bagu.errors import ArgumentError, BackendError, NotOffered, UnknownName
from bagu.machine.ceilings import Ceilings
from bagu.machine.timing import Timing
from bagu.ops.catalogue import SPECS, spec
from bagu.ops.contract.core import Case, Cost
from bagu.runs.record import read_rows

CEILINGS = Ceilings(read=100e9, write=80e9, copy=50e9, matmul=1e12, dtype="float32", device="cpu")
CPU = ops_timing.Setting(device=torch.device("cpu"), dtype=torch.float32, quick=True, compiled=False)
RMS = spec("rms_norm")
TINY = Case("llama_8b", RMS.cases[-1].why, bench=True, M=8, N=64)
BUFFER = torch.zeros(1024)
SMALL = Cost(flops=1, bytes=10**6)
COLUMNS = {
    "op", "case", "shape", "dims", "shrunk", "dtype", "device", "pass", "backend", "peer", "yardstick", "median_s",
    "low_s", "high_s", "samples", "host_s", "peak_bytes", "error", "bytes", "flops", "bound", "gb_per_s", "tflop_per_s",
    "ceiling", "share", "fault", "quick", "ceilings", "env",
}  # fmt: skip


def run_cli(*argv: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    return int(left.value.code or 0)


# --- a real run -------------------------------------------------------------------------------------------------------


def test_quick_run_prints_json_records_rows_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_cli("bench", "ops", "rms_norm", "--quick", "--json", "--device", "cpu", "--out", str(tmp_path))
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert all(set(row) == COLUMNS for row in rows)
    assert code == int(any(row["fault"] or (row["error"] and row["backend"]) for row in rows))
    who = {(row["backend"], row["peer"], row["pass"]) for row in rows}
    assert who == {(b, p, s) for b, p in (("torch", None), (None, "eager")) for s in roofline.PASSES}
    machine = rows[0]["env"]["machine"]
    assert read_rows(tmp_path / f"{machine}.jsonl") == rows
    assert (tmp_path / "plots" / machine / "rms_norm.png").stat().st_size > 5000
    assert "<svg" in (tmp_path / "plots" / machine / "rms_norm.svg").read_text()
    for row in rows:
        assert row["shrunk"] and row["quick"] and row["dtype"] == "fp32" and row["dims"]["M"] == [128]
        assert 0 < row["low_s"] <= row["median_s"] <= row["high_s"]
        least = {"memory": row["bytes"] / row["ceilings"]["copy"], "compute": row["flops"] / row["ceilings"]["matmul"]}
        # On a busy machine the matmul ceiling can be measured so low that the norm counts as compute-bound.
        assert row["bound"] == max(least, key=least.get)
        if row["bound"] == "memory":
            assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_s"] / 1e9)
            assert row["share"] == pytest.approx(least["memory"] / row["median_s"])
    assert "measured ceilings: read" in printed.err and "vs best peer" in printed.err


def test_quick_run_without_out_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "measure_ceilings", lambda *_, **__: CEILINGS)  # takes 2 s, and is tested above
    bench.main(OpsBench(names=("rms_norm",), quick=True), OpSetting(device="cpu"))
    assert list(tmp_path.iterdir()) == []
    shown = capsys.readouterr().out
    assert "rms_norm" in shown and "torch eager" in shown and "GB/s" in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80


# --- wrong names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["rms_nrom"], "no op 'rms_nrom'", "'rms_norm'"),
        (["--backend", "tritn"], "no backend 'tritn'", "'triton'"),
        (["--dtype", "bf61"], "no dtype 'bf61'", "'bf16'"),
        (["--device", "toaster"], "unknown device 'toaster'", "cuda"),
        (["--backend", "triton", "--device", "cpu"], "cannot be timed on cpu", "use a CUDA device"),
    ],
)
def test_wrong_names_give_a_hint_and_no_traceback(
    argv: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("bench", "ops", "--quick", *argv) == 2
    output = capsys.readouterr()
    assert message in output.err and hint in output.err
    assert "Traceback" not in output.err and output.out == ""


def test_backends_are_chosen_by_device() -> None:
    assert chosen_backends([RMS], [], torch.device("cpu")) == ("torch",)
    assert chosen_backends([RMS], [], torch.device("cuda")) == ("torch", "triton")
    with pytest.raises(UnknownName):
        chosen_backends([RMS], ["numpy"], torch.device("cuda"))
    with pytest.raises(BackendError):
        chosen_backends([RMS], ["triton"], torch.device("cpu"))


# --- shrinking sizes --------------------------------------------------------------------------------------------------


def test_the_number_of_rows_shrinks_first() -> None:
    small = sizing.shrink(RMS, Case("c", "", M=16384, N=4096), torch.float32, 8_000_000)
    assert small.params == {"M": 128, "N": 4096}
    assert sizing.forward_bytes(RMS, small, torch.float32) <= 8_000_000


def test_rows_get_shorter_only_if_there_are_few() -> None:
    small = sizing.shrink(RMS, Case("c", "", M=64, N=1 << 20), torch.float32, 8_000_000)
    assert small.params == {"M": 16, "N": 1 << 15}


def test_a_case_within_the_budget_is_unchanged() -> None:
    case = Case("c", "", M=16, N=64, seed=7)
    assert sizing.shrink(RMS, case, torch.float32, 8_000_000).params == case.params


def test_shrinking_skips_sizes_that_do_not_lower_the_bytes() -> None:
    case = Case("c", "", lead=(4096, 4), N=1024, seed=1 << 40)
    small = sizing.shrink(RMS, case, torch.float32, 8_000_000)
    assert small.params == {"lead": (128, 4), "N": 1024, "seed": 1 << 40}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_every_bench_case_of_every_op_fits_the_quick_budget(name: str) -> None:
    cases = [c for c in spec(name).cases if c.bench]
    assert cases
    for case in cases:
        small = sizing.shrink(spec(name), case, torch.float32, CPU.budget)
        assert sizing.forward_bytes(spec(name), small, torch.float32) <= CPU.budget, case


def test_sizes_are_given_by_name() -> None:
    assert sizing.resize(RMS, TINY, {"N": 32}).params == {"M": 8, "N": 32}
    with pytest.raises(UnknownName, match="'n'"):
        sizing.resize(RMS, TINY, {"n": 32})
    with pytest.raises(ArgumentError, match="expected a number"):
        sizing.resize(RMS, TINY, {"N": (2, 3)})


# --- the roofline and its faults --------------------------------------------------------------------------------------


def test_the_larger_floor_decides_the_bound() -> None:
    memory = roofline.floor(Cost(flops=10**9, bytes=10**9), CEILINGS)
    compute = roofline.floor(Cost(flops=10**12, bytes=10**9), CEILINGS)
    assert (memory.bound, memory.seconds) == ("memory", pytest.approx(0.02))
    assert (compute.bound, compute.seconds) == ("compute", pytest.approx(1.0))


def test_every_gradient_has_a_cost() -> None:
    assert [s.name for s in SPECS.values() if s.grads and s.cost_backward is None] == []


def test_bandwidth_meets_the_three_ceilings() -> None:
    found = [roofline.bandwidth(CEILINGS, w) for w in (0.0, 0.25, 0.5, 1.0)]
    assert found == pytest.approx([100e9, 2 / (1 / 100e9 + 1 / 50e9), 50e9, 80e9])


@pytest.mark.parametrize(
    ("gb_per_s", "written", "cached", "fault"),
    [
        (50.0, 500, 0, False),  # a copy at the copy ceiling
        (51.4, 500, 0, False),  # 2.8 % over
        (51.6, 500, 0, True),  # 3.2 % over
        (99.0, 0, 0, False),  # reads alone may exceed the copy ceiling
        (104.0, 0, 0, True),  # but not the read ceiling
        (60.0, 500, 0, True),
        (60.0, 500, 200, False),  # a fifth may have come from a cache
        (60.0, 500, 100, True),
    ],
)
def test_more_than_3_percent_over_the_ceiling_is_a_fault(
    gb_per_s: float, written: int, cached: int, fault: bool
) -> None:
    cost = Cost(flops=1, bytes=1000)
    seconds = cost.bytes / (gb_per_s * 1e9)
    assert roofline.is_fault(cost, written=written, seconds=seconds, ceilings=CEILINGS, cached=cached) is fault


def test_a_fault_is_flagged_in_its_row_and_printed() -> None:
    slow, fast = _row(seconds=1.0), _row(seconds=1e-6)
    assert not slow["fault"] and list(ops_table.remarks([slow])) == []
    assert fast["fault"]
    assert "measurement fault" in next(ops_table.remarks([fast]))


def test_flops_make_only_bagu_a_fault_and_rate_peers_over_both_passes() -> None:
    work = Cost(flops=10**12, bytes=10**6)  # 1 s of matmul
    ours = _row(seconds=0.5, cost=work)
    peer, both = (_row(seconds=0.5, cost=work, backend=False, step=step) for step in ("fwd", "fwd+bwd"))
    assert (ours["fault"], ours["tflop_per_s"], ours["share"]) == (True, 2.0, 2.0)
    assert (peer["fault"], peer["tflop_per_s"], peer["share"]) == (False, None, None)
    assert (both["fault"], both["tflop_per_s"]) == (False, 2.0)
    assert list(ops_table.tables([ours, peer, both]))


def test_the_higher_of_two_ceilings_is_used() -> None:
    other = Ceilings(read=1.0, write=90e9, copy=40e9, matmul=2e12, dtype="float32", device="cpu")
    found = roofline.higher(CEILINGS, other)
    assert (found.read, found.write, found.copy, found.matmul) == (100e9, 90e9, 50e9, 2e12)


def _row(*, seconds: float, cost: Cost = SMALL, backend: bool = True, step: str = "fwd") -> dict[str, Any]:
    job = ops_timing.Job(
        spec=RMS, case=TINY, implementation=Implementation(name="torch", backend=backend, run=lambda: None)
    )
    timing = Timing(median_s=seconds, low_s=seconds, high_s=seconds, samples=3)
    point = ops_timing.Point(
        job=job,
        shape="8×64",
        dims={},
        step=step,
        cost=cost,
        written=0,
        timing=timing,
        host_s=None,
        peak_bytes=None,
        error=None,
    )
    return ops_timing.rows_of([point], CEILINGS, CPU)[0]


def test_the_hosts_time_is_measured_at_the_tiny_case() -> None:
    seen: list[tuple[int, bool]] = []

    def run(**args: Any) -> torch.Tensor:
        seen.append((args["x"].numel(), torch.is_grad_enabled()))
        return RMS.torch_backend.forward(**args)[0]

    who = Implementation(name="torch", backend=True, run=run)
    job = ops_timing.Job(spec=RMS, case=RMS.cases[1], implementation=who, tiny=TINY)
    rows = ops_timing.rows_of(list(ops_timing.time_job(job, CPU, BUFFER)), CEILINGS, CPU)
    assert [r["pass"] for r in rows] == list(roofline.PASSES) and all(0 < r["host_s"] < 1 for r in rows)
    tiny = sizing.bench_inputs(RMS, TINY, CPU.dtype, CPU.device)["x"].numel()
    assert {grad for size, grad in seen if size == tiny} == {True, False}  # a forward without a graph, then with one
    lines = [line for line in ops_table.remarks(rows) if "host time" in line]
    assert len(lines) == 3 and "fwd without a graph: bagu torch" in lines[0] and " us" in lines[0]


# --- implementations --------------------------------------------------------------------------------------------------


def _timed(run: Any, *, backend: bool = False) -> list[dict[str, Any]]:
    job = ops_timing.Job(spec=RMS, case=TINY, implementation=Implementation(name="other", backend=backend, run=run))
    return ops_timing.rows_of(list(ops_timing.time_job(job, CPU, BUFFER)), CEILINGS, CPU)


def test_a_failed_implementation_becomes_a_row_with_the_reason() -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("no such kernel\nsecond line")

    (row,) = _timed(broken)
    assert (row["median_s"], row["error"]) == (None, "RuntimeError: no such kernel")
    assert "no such kernel" in next(ops_table.remarks([row]))
    assert list(ops_table.tables([row]))


def test_a_missing_peer_is_skipped_and_a_broken_one_is_not() -> None:
    def absent(**_: Any) -> None:
        import no_such_package_of_anyone.ops  # noqa: F401

    def broken(**_: Any) -> None:
        from json import no_such_name  # noqa: F401

    assert _timed(absent) == []
    assert [row["error"][:11] for row in _timed(broken)] == ["ImportError"]
    assert _timed(absent, backend=True), "a backend of bagu is never skipped silently"
    assert not is_absent(ModuleNotFoundError("torch.gone", name="torch.gone"))
    assert is_absent(NotOffered("half the cases"))
    assert not is_absent(NotImplementedError("a kernel that torch lacks"))


def test_a_yardstick_is_timed_as_one_call_and_is_not_a_peer() -> None:
    rows = _timed(lambda **args: None)
    assert [(r["pass"], r["yardstick"], r["share"], r["fault"]) for r in rows] == [("fwd+bwd", True, None, False)]
    ours = _row(seconds=2 * rows[0]["median_s"]) | {"pass": "fwd+bwd", "fault": False}
    assert ops_table.best_peer(ours, [ours, *rows]) is None
    assert "has 0.500× the speed of other" in next(ops_table.remarks([ours, *rows]))


def test_the_best_peer_is_the_fastest_at_the_same_work() -> None:
    ours = _row(seconds=1.0)
    peers = [ours | {"backend": None, "peer": p, "median_s": t} for p, t in (("eager", 3.0), ("liger", 2.0))]
    other = ours | {"backend": None, "peer": "compile", "median_s": 0.1, "pass": "bwd"}
    best = ops_table.best_peer(ours, [ours, *peers, other])
    assert best is not None and best["peer"] == "liger"


def _printed(*rows: dict[str, Any]) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        for part in (*ops_table.tables(rows), *ops_table.remarks(rows)):
            console.print(part)
    return captured.get()


def test_a_table_names_the_ceiling_of_its_fractions() -> None:
    matmul = _row(seconds=2.0, cost=Cost(flops=10**12, bytes=10**6))
    assert "copy ceiling 50 GB/s" in _printed(_row(seconds=1.0)) and "matmul ceiling" not in _printed(_row(seconds=1.0))
    assert "matmul ceiling 1 TFLOP/s" in _printed(matmul)
    assert "500 GFLOP/s" in _printed(matmul) and "50 % matmul" in _printed(matmul)


def test_a_ratio_inside_the_spread_is_marked() -> None:
    ours = _row(seconds=1.0)
    peer = ours | {"backend": None, "peer": "eager", "median_s": 1.2, "low_s": 1.1, "high_s": 1.3}
    clear, hidden = _printed(ours, peer), _printed(ours | {"low_s": 0.8, "high_s": 1.15}, peer)
    assert "1.20× eager" in clear and "~" not in clear
    assert "~1.20× eager" in hidden and "the ratio is meaningless" in hidden


def test_times_are_in_units_that_fit() -> None:
    shown = _printed(_row(seconds=3e-5), _row(seconds=0.25) | {"case": "b"}, _row(seconds=30.0) | {"case": "c"})
    assert "30.0 µs" in shown and "250.0 ms" in shown and "30.0 s" in shown


@pytest.mark.parametrize("name", sorted(n for n in SPECS if SPECS[n].peers))
def test_peers_are_the_public_functions_of_the_folder(name: str) -> None:
    found, _ = implementations(spec(name), ("torch",), torch.device("cpu"), compiled=False)
    assert [c.name for c in found if c.backend] == ["torch"]
    assert "eager" in [c.name for c in found] and "liger" not in [c.name for c in found]


def test_compile_is_skipped_with_a_note_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("bagu.bench.implementations.cxx_compiler", lambda: None)
    found, notes = implementations(RMS, ("torch",), cpu, compiled=True)
    assert "compile" not in [c.name for c in found] and "C++ compiler" in notes[0]


@pytest.mark.slow  # 15 s of torch.compile
def test_compile_is_timed_with_a_compiler() -> None:
    found, notes = implementations(RMS, ("torch",), torch.device("cpu"), compiled=True)
    compiled = next(c for c in found if c.name == "compile")
    job = ops_timing.Job(spec=RMS, case=TINY, implementation=compiled)
    rows = ops_timing.rows_of(list(ops_timing.time_job(job, CPU, BUFFER)), CEILINGS, CPU)
    assert notes == [] and [(r["pass"], r["error"]) for r in rows] == [(step, None) for step in roofline.PASSES]


def test_without_a_rate_nothing_is_drawn(tmp_path: Path) -> None:
    assert ops_plot.draw(_timed(lambda **args: None), tmp_path) == "no row has a rate"
    assert list(tmp_path.iterdir()) == []
