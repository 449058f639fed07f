"""The cache folder: token stores, compiled C++. Everything in it can be rebuilt."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$BAGU_CACHE, or ~/.cache/bagu."""
    given = os.environ.get("BAGU_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "bagu"
