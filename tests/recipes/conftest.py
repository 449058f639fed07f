"""What tests of whole runs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forked import fork_server
from tests.fresh_cache import fresh_cache


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token stores of this test alone: none is found that another has left."""
    monkeypatch.setenv("BAGU_CACHE", fresh_cache(tmp_path / "cache"))


@pytest.fixture(scope="session")
def forkserver() -> Any:
    """Processes that are forked from one which has imported bagu and trained nothing: real, and started at once."""
    return fork_server()
