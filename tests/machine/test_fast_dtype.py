"""Which dtype is fast is measured once for each machine and setting, and kept."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from bagu.machine import fast_dtype
from bagu.machine.fast_dtype import MatmulRates, compute_dtype, compute_dtype_name, matmul_rates

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGU_CACHE", str(tmp_path / "cache"))
    fast_dtype._rates_of.cache_clear()


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "matmul").iterdir())


def test_bf16_is_chosen_where_it_is_clearly_faster() -> None:
    assert MatmulRates(fp32=1e9, bf16=2e9).fastest == torch.bfloat16
    assert MatmulRates(fp32=1e9, bf16=1.1e9).fastest == torch.float32
    assert MatmulRates(fp32=1e9, bf16=1e7).fastest == torch.float32


def test_the_choice_is_the_one_a_clock_makes(tmp_path: Path) -> None:
    """The same product timed here: bf16 is chosen only if it does not lose, fp32 only if bf16 does not win by far."""
    chosen = compute_dtype(CPU)
    rates = fast_dtype._rates_at(256 if matmul_rates().bf16 < matmul_rates().fp32 / 4 else 1024, rounds=2)
    assert rates.bf16 > rates.fp32 / 1.5 if chosen == torch.bfloat16 else rates.bf16 < 2 * rates.fp32
    assert compute_dtype_name(CPU) == ("bf16" if chosen == torch.bfloat16 else "fp32")


def test_measuring_says_nothing() -> None:
    """torch warns with a C++ stack when oneDNN cannot multiply bf16; that is what is being asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute_dtype(CPU)


def test_a_second_process_reads_what_the_first_measured(tmp_path: Path) -> None:
    matmul_rates()
    (path,) = files(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fp32": 1.0, "bf16": 3.0}))
    fast_dtype._rates_of.cache_clear()  # as a new process has it
    assert matmul_rates() == MatmulRates(fp32=1.0, bf16=3.0)
    assert compute_dtype(CPU) == torch.bfloat16


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"fp32": 1.0}', '{"fp32": "fast", "bf16": 1.0}',
                                  '{"fp32": NaN, "bf16": 1.0}', '{"fp32": 0.0, "bf16": 0.0}'])  # fmt: skip
def test_a_broken_file_is_measured_again(tmp_path: Path, text: str) -> None:
    measured = matmul_rates()
    (path,) = files(tmp_path)
    path.write_text(text)
    fast_dtype._rates_of.cache_clear()
    again = matmul_rates()
    assert again.fastest == measured.fastest and again.fp32 > 1e6
    assert json.loads(path.read_text())["fp32"] == again.fp32


def test_other_threads_and_settings_are_measured_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul_rates()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    matmul_rates()
    assert len(files(tmp_path)) == 2
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        matmul_rates()
    finally:
        torch.set_num_threads(threads)
    assert len(files(tmp_path)) == 3


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert matmul_rates().fp32 > 0
