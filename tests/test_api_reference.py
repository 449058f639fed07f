"""`make api`: the reference that is built from docstrings has the names of the front door."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import bagu

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_reference_has_the_front_door(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="pdoc is in the extra dev")
    build = (
        "from pathlib import Path; from benchmarks.tools.api import main; "
        f"main(Path({str(tmp_path)!r}), ('bagu', '!bagu.ops'))"
    )
    subprocess.run([sys.executable, "-c", build], check=True, capture_output=True, cwd=ROOT)
    page = (tmp_path / "bagu.html").read_text(encoding="utf-8")
    for name in set(bagu.__all__) - {"ops"}:
        assert f'id="{name}"' in page, name
        assert (getattr(bagu, name).__doc__ or "")[:12] in page, name
    for method in ("generate", "chat", "score", "embed"):
        assert f'id="Model.{method}"' in page
