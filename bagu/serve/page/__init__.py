"""The chat page: plain HTML, CSS and JavaScript modules, sent from the package without a build step.

The page loads nothing from other servers; the Content-Security-Policy in `HEADERS` enforces this. The model's output
becomes DOM text nodes, never an HTML string; `require-trusted-types-for` enforces this too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["HEADERS", "Asset", "assets"]

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the browser checks for a new version at every load
}
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asset:
    """A file of the page; send it with `HEADERS`."""

    body: bytes
    media_type: str


def assets() -> dict[str, Asset]:
    """The files of the page by URL path: index.html at "/", the others at "/NAME"."""
    found = {}
    for file in files(__name__).iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in MEDIA_TYPES:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            found[path] = Asset(body=file.read_bytes(), media_type=MEDIA_TYPES[suffix])
    return found
