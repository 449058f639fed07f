"""The wheel: what is installed outside a clone has the C++ sources, the headers and the chat page, and works."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the contents of a wheel built from this tree, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def test_every_file_of_the_package_is_in_the_wheel(installed: Path) -> None:
    skipped = {"__pycache__"}
    files = {p.relative_to(ROOT) for p in (ROOT / "bagu").rglob("*") if p.is_file() and not skipped & set(p.parts)}
    assert {p.suffix for p in files} >= {".py", ".cpp", ".h", ".js", ".css", ".html"}
    assert files == {p.relative_to(installed) for p in (installed / "bagu").rglob("*") if p.is_file()}


def test_it_compiles_its_cpp_outside_the_clone(installed: Path, tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, bagu, warnings\n"
        "warnings.simplefilter('error')\n"
        f"assert pathlib.Path(bagu.__file__).is_relative_to({str(installed)!r}), bagu.__file__\n"
        "from bagu.machine import native\n"
        "from bagu.machine.device import cxx_compiler\n"
        "native.COMPILE = (*native.COMPILE, '-O1')\n"  # 6 s instead of 14 s; how fast it runs is not the subject
        "assert cxx_compiler() is None or native.library('serve/cpu/step.cpp')\n"  # it includes headers of two parts
    )
    env = os.environ | {"PYTHONPATH": str(installed), "BAGU_CACHE": str(tmp_path / "cache")}
    env.pop("BAGU_NATIVE", None)
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
