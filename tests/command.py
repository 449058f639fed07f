"""The `bagu` command inside a test's own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagu.cli import main

__all__ = ["bagu"]


def bagu(*args: str | Path) -> int:
    """Exit status of the command; anything but SystemExit would be a traceback for the user."""
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in args])
    return int(end.value.code or 0)
