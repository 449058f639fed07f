"""The chat page: plain HTML, CSS and JavaScript modules, served from the package as they are.

There is no build step and no outside request; `HEADERS` make the browser hold the page to that. What a model writes
becomes DOM text nodes and never a string of HTML: `require-trusted-types-for` forbids the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["HEADERS", "Asset", "assets"]

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a new version of the package is seen at the next load
}
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asset:
    """A file of the page, ready to be sent with `HEADERS`."""

    body: bytes
    media_type: str


def assets() -> dict[str, Asset]:
    """Every file of the page by the path it is served at: index.html at "/", the others at "/NAME"."""
    found = {}
    for file in files(__name__).iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in MEDIA_TYPES:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            found[path] = Asset(body=file.read_bytes(), media_type=MEDIA_TYPES[suffix])
    return found
