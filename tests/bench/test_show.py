"""`bagu ops list` and `bagu ops show`, and the command line around them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from bagu import cli
from bagu.bench import show, units
from bagu.errors import ArgumentError, UnknownName
from bagu.machine.ceilings import Ceilings
from bagu.machine.device import default_device, this_machine
from bagu.ops.catalogue import SPECS
from bagu.runs.record import append_rows

CEILINGS = Ceilings(read=20e9, write=20e9, copy=10e9, matmul=1e12, dtype="float32", device=str(default_device()))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Results of this machine: an older run, the latest full run, and a quick run that must be ignored."""
    rows = [
        {"quick": quick, "ceilings": asdict(CEILINGS) | {"copy": copy}, "env": {"time": f"2026-08-0{day}"}}
        for day, copy, quick in ((1, 1e9, False), (2, 10e9, False), (3, 2e9, True))
    ]
    append_rows(tmp_path / f"{this_machine().name}.jsonl", rows)
    return tmp_path


def shown(name: str, results: Path, **options: str) -> str:
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as captured:
        show.show_op(name, console, dtype="fp32", results=results, **options)
    return captured.get()


def test_show_has_formula_arguments_cases_backends_cost_and_time(results: Path) -> None:
    text = shown("rms_norm", results, size="M=1000,N=1000")
    spec = SPECS["rms_norm"]
    assert spec.signature in text
    assert "r[m] = 1 / sqrt(mean_n x[m, n]^2 + eps)" in text
    assert all(case.name in text for case in spec.cases) and "so a kernel that drops eps shows it" in text
    assert "num_warps" in text
    assert "cost at 1000×1000 in float32" in text
    assert "8.01 MB" in text and "4 MFLOP" in text
    assert "≥ 800.8 µs" in text  # at 10 GB/s
    assert "measured 2026-08-02" in text


def test_show_json_has_the_same_facts(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show.show_op("rms_norm", Console(), size="M=1000,N=1000", dtype="fp32", as_json=True, results=results)
    facts = json.loads(capsys.readouterr().out)
    assert facts["cost"]["fwd"]["predicted_s"] == pytest.approx(800.8e-6)
    assert facts["cost"]["fwd"]["bound"] == "memory"
    assert facts["cost"]["fwd"]["bytes"] == 8_008_000  # x and y once each, w, and r
    assert facts["size"] == {"case": "llama_8b", "shape": "1000×1000", "dtype": "float32"}
    assert [a["name"] for a in facts["arguments"] if a["gradient"]] == ["x", "w"]


def test_without_results_the_ceilings_are_measured(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "measure_ceilings", lambda *_, **__: CEILINGS)
    assert "measured now" in shown("rms_norm", tmp_path / "empty")
    assert "measured now" in shown("rms_norm", results, measure=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(SPECS))
def test_every_op_can_be_shown(name: str, results: Path) -> None:
    assert "predicted time" in shown(name, results)


def test_sizes_are_parsed_or_refused() -> None:
    assert show.parse_size(" M=4, shape=2x3 ,") == {"M": 4, "shape": (2, 3)}
    for wrong in ("M", "M=", "M=four", "M=-1", "M=0", "M=2x"):
        with pytest.raises(ArgumentError, match="NAME=NUMBER"):
            show.parse_size(wrong)


def test_unknown_names_suggest_the_closest(results: Path) -> None:
    with pytest.raises(UnknownName, match="no op 'rmsnorm'") as caught:
        shown("rmsnorm", results)
    assert "'rms_norm'" in caught.value.hint
    with pytest.raises(UnknownName, match="size of rms_norm"):
        shown("rms_norm", results, size="K=3")


def test_list_is_a_table_of_one_screen_at_80_columns() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        show.list_ops(console)
    lines = captured.get().splitlines()
    assert len(lines) <= len(SPECS) + 5 and all(len(line.rstrip()) <= 80 for line in lines)
    found = {line.split()[0]: line.split()[1:4] for line in lines[1 : len(SPECS) + 1]}
    assert found.keys() == SPECS.keys()
    assert found["rms_norm"] == ["yes", "yes", "memory"] and found["grouped_matmul"] == ["yes", "yes", "compute"]
    assert found["kv_write"][:2] == ["no", "no"]
    assert "RMSNorm" in next(line for line in lines if line.startswith("rms_norm "))


def test_numbers_have_readable_units() -> None:
    assert [units.si(v, "B/s") for v in (12.0, 999_900, 8_008_000, 4.28e12)] == [
        "12 B/s", "1 MB/s", "8.01 MB/s", "4.28 TB/s",
    ]  # fmt: skip
    assert [units.duration(s) for s in (8e-4, 0.0123, 4.5, 75.0)] == ["800.0 µs", "12.3 ms", "4,500.0 ms", "75.0 s"]


# --- the command line -------------------------------------------------------------------------------------------------


def test_bagu_alone_prints_help_and_version_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (((), ("doctor", "bench", "ops", "lab")), (("--version",), ("bagu 0.",))):
        with pytest.raises(SystemExit) as left:
            cli.main(argv)
        assert not left.value.code
        text = capsys.readouterr().out
        assert all(word in text for word in words)


def test_an_error_prints_no_traceback_unless_requested(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["lab", "run", "no_such_lab"])
    assert left.value.code == 2
    assert "bagu: there is no lab 'no_such_lab'\n  -> " in capsys.readouterr().err
    monkeypatch.setenv("BAGU_TRACEBACK", "1")
    with pytest.raises(UnknownName):
        cli.main(["ops", "show", "no_such_op"])


def test_help_needs_no_torch() -> None:
    script = "import sys; import bagu.cli; assert 'torch' not in sys.modules and 'bagu.ops' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
