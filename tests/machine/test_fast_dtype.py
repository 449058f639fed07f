"""The faster dtype is measured once per machine and setting, then cached."""

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


def test_the_choice_agrees_with_a_timing(tmp_path: Path) -> None:
    """Time the same product: bf16 is chosen only if it is not slower, fp32 only if bf16 is not much faster."""
    chosen = compute_dtype(CPU)
    much_slower = matmul_rates().bf16 < matmul_rates().fp32 / 4
    # the best of twelve: with more processes than cores, a process loses its core in the middle of a product
    rates = fast_dtype._rates_at(256 if much_slower else 1024, rounds=2 if much_slower else 12)
    assert rates.bf16 > rates.fp32 / 1.5 if chosen == torch.bfloat16 else rates.bf16 < 2 * rates.fp32
    assert compute_dtype_name(CPU) == ("bf16" if chosen == torch.bfloat16 else "fp32")


def test_measuring_emits_no_warning() -> None:
    """torch warns with a C++ stack if oneDNN has no bf16 matmul; measuring hides this warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute_dtype(CPU)


def test_a_second_process_reads_the_cached_rates(tmp_path: Path) -> None:
    matmul_rates()
    (path,) = files(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fp32": 1.0, "bf16": 3.0}))
    fast_dtype._rates_of.cache_clear()  # as in a new process
    assert matmul_rates() == MatmulRates(fp32=1.0, bf16=3.0)
    assert compute_dtype(CPU) == torch.bfloat16


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"fp32": 1.0}', '{"fp32": "fast", "bf16": 1.0}',
                                  '{"fp32": NaN, "bf16": 1.0}', '{"fp32": 0.0, "bf16": 0.0}'])  # fmt: skip
def test_a_broken_cache_file_is_replaced(tmp_path: Path, text: str) -> None:
    measured = matmul_rates()
    (path,) = files(tmp_path)
    path.write_text(text)
    fast_dtype._rates_of.cache_clear()
    again = matmul_rates()
    assert again.fastest == measured.fastest and again.fp32 > 1e6
    assert json.loads(path.read_text())["fp32"] == again.fp32


def test_each_thread_count_and_setting_has_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_unwritable_cache_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert matmul_rates().fp32 > 0
