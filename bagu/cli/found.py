"""Checks of names and paths that run before torch is imported: a mistyped one is reported in a second, not in ten."""

from pathlib import Path

from bagu.errors import BaguError


def check_model(name: str | None) -> None:
    """Raise if MODEL is not there. A URL is a server's and is not asked here."""
    if name is not None and not name.startswith(("http://", "https://")):
        from bagu.recipes.find import find_model

        find_model(name)


def check_files(*paths: str | Path | None) -> None:
    """Raise for the first path that does not exist."""
    for path in paths:
        if path is not None and not Path(path).expanduser().exists():
            raise BaguError(f"there is no file or folder {path}", hint="check the path and the working folder")
