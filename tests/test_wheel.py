"""The wheel: what is installed outside a clone has the C++ sources, the headers, the chat page and the tuning store."""

from __future__ import annotations

import email
import email.message
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bagu.machine import native
from bagu.machine.device import cxx_compiler

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
    assert {p.suffix for p in files} >= {".py", ".cpp", ".h", ".js", ".css", ".html", ".jsonl"}
    assert files == {p.relative_to(installed) for p in (installed / "bagu").rglob("*") if p.is_file()}


def metadata_of(folder: Path) -> email.message.Message:
    (file,) = folder.glob("*.dist-info/METADATA")
    return email.message_from_string(file.read_text(encoding="utf-8"))


def test_the_page_of_the_package_has_no_link_that_leads_nowhere(installed: Path) -> None:
    found = metadata_of(installed)
    assert found["Requires-Python"] == "<3.14,>=3.11" and found["License-Expression"] == "Apache-2.0"
    assert {"Programming Language :: Python :: 3.13", "Typing :: Typed"} <= set(found.get_all("Classifier", []))
    text = found.get_payload()
    assert isinstance(text, str) and text.startswith("# bagu")
    assert "pip install" in text and "## Four examples" in text
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")] == []


def test_a_release_links_to_its_repository(tmp_path: Path) -> None:
    build = {**os.environ, "BAGU_REPOSITORY_URL": "https://example.org/bagu/blob/v0.1.0/"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path, [name for name in file.namelist() if name.endswith("METADATA")])
    found = metadata_of(tmp_path)
    assert "Documentation, https://example.org/bagu/blob/v0.1.0/docs/README.md" in found.get_all("Project-URL", [])
    text = str(found.get_payload())
    linked = re.findall(r"\]\(https://example.org/bagu/blob/v0.1.0/([^)#]*)", text)
    assert len(linked) > 10 and all((ROOT / path).exists() for path in linked)
    assert re.findall(r"\]\((?!https://)", text) == []


SOURCE = "ops/paged_attention/decode.cpp"  # the smallest that includes headers of two parts


@pytest.mark.slow
@pytest.mark.skipif(cxx_compiler() is None, reason="needs a C++ compiler")
def test_it_compiles_its_cpp_outside_the_clone(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clone then finds the compiled library: its sources are the same, at another path."""
    optimize = "-O1"  # 1 s; how fast the library runs is not the subject
    script = (
        "import pathlib, sys, bagu, warnings\n"
        "warnings.simplefilter('error')\n"
        f"assert pathlib.Path(bagu.__file__).is_relative_to({str(installed)!r}), bagu.__file__\n"
        "from bagu.machine import native\n"
        f"native.COMPILE = (*native.COMPILE, {optimize!r})\n"
        f"assert native.library({SOURCE!r})\n"
    )
    monkeypatch.setenv("BAGU_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BAGU_NATIVE", raising=False)
    env = os.environ | {"PYTHONPATH": str(installed)}
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    monkeypatch.setattr(native, "COMPILE", (*native.COMPILE, optimize))
    native.library.cache_clear()
    try:
        assert native.library(SOURCE)
    finally:
        native.library.cache_clear()
    assert len(list((tmp_path / "cache" / "native").iterdir())) == 1
