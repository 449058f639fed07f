"""The folder of what can be made again: token stores, compiled C++."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """$BAGU_CACHE, or .cache/bagu in the home folder."""
    given = os.environ.get("BAGU_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "bagu"
