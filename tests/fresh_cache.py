"""A cache folder for one test: its tokens and tokenizers are new, the compiled C++ is that of all tests."""

from __future__ import annotations

from pathlib import Path

from bagu.machine.cache import cache_folder


def fresh_cache(folder: Path) -> str:
    """Make the folder and return it for BAGU_CACHE. Compiling the C++ again would take 20 s."""
    compiled = cache_folder() / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True)
    (folder / "native").symlink_to(compiled.resolve())
    return str(folder)
