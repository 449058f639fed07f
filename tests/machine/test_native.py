"""C++ compiled on first use: cached, reused, and replaced by PyTorch if it does not compile."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagu.machine import native

COMPILER = shutil.which("c++") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
ANSWER = 'extern "C" int answer() { return %s; }\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BAGU_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BAGU_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@needs_compiler
def test_a_changed_source_or_header_is_recompiled(tmp_path: Path) -> None:
    source, header = tmp_path / "x.cpp", tmp_path / "x.h"
    header.write_text("constexpr int N = 41;\n")
    source.write_text(f'#include "{header}"\n' + ANSWER % "N + 1")
    for number in (41, 1):
        header.write_text(f"constexpr int N = {number};\n")
        native.library.cache_clear()
        library = native.library(str(source))
        assert library is not None and library.answer() == number + 1
    assert len(list((tmp_path / "cache" / "native").glob("x-*.so"))) == 2
    assert {p.suffix for p in (tmp_path / "cache" / "native").iterdir()} == {".so"}, "temporary files are left"


@pytest.mark.slow
@needs_compiler
def test_processes_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, log, compiler = tmp_path / "x.cpp", tmp_path / "log", tmp_path / "c++"
    source.write_text(ANSWER % "7")
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo "$@" >> {log}\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    script = f"from bagu.machine import native; assert native.library({str(source)!r}).answer() == 7"
    processes = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(log.read_text().splitlines()) == 2, "expected one compile and one link"


@needs_compiler
def test_a_second_checkout_of_the_same_files_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        package = tmp_path / name
        package.mkdir()
        (package / "x.h").write_text("constexpr int N = 7;\n")
        (package / "x.cpp").write_text('#include "x.h"\n' + ANSWER % "N")
        monkeypatch.setattr(native, "PACKAGE", package)
        native.library.cache_clear()
        library = native.library("x.cpp")
        assert library is not None and library.answer() == 7
    assert len(list((tmp_path / "cache" / "native").iterdir())) == 1


@needs_compiler
def test_a_compile_error_warns_once_and_returns_none(tmp_path: Path) -> None:
    source = tmp_path / "x.cpp"
    source.write_text(ANSWER % "no_such_name")
    with pytest.warns(RuntimeWarning, match=r"x\.cpp could not be compiled .*using PyTorch instead"):
        assert native.library(str(source)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library(str(source)) is None, "the second call must not warn"


def test_a_missing_compiler_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.warns(RuntimeWarning, match="CXX is /no/such/compiler"):
        assert native.library("serve/cpu/step.cpp") is None


@needs_compiler
def test_an_unwritable_cache_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "x.cpp").write_text(ANSWER % "7")
    monkeypatch.setenv("BAGU_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="Not a directory"):
        assert native.library(str(tmp_path / "x.cpp")) is None


def test_bagu_native_0_disables_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGU_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library("serve/cpu/step.cpp") is None


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_only_one_openmp_runtime_is_loaded(tmp_path: Path) -> None:
    """In a child process: a parallel region runs on torch's threads, and no second runtime is loaded."""
    source = tmp_path / "x.cpp"
    source.write_text(
        'extern "C" int answer() {\n    int n = 0;\n#pragma omp parallel num_threads(2) reduction(+ : n)\n    n += 1;\n'
        "    return n;\n}\n"
    )
    script = (
        "import torch\nfrom bagu.machine import native\n"
        f"assert native.library({str(source)!r}).answer() == 2\n"
        "torch.ones(1 << 20).exp().sum()\n"
        "files = {line.split()[-1] for line in open('/proc/self/maps') if '/' in line}\n"
        "found = [f for f in files if any(n in f.rsplit('/')[-1] for n in ('libgomp', 'libiomp', 'libomp'))]\n"
        "assert len(found) == 1, found\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
