"""The list of calls that found no tuning: one JSON line per kind, beside the user's store.

Each process adds a kind that is not in the list yet. `bagu tune missing` prints the list.
"""

import json
import logging
from contextlib import suppress
from pathlib import Path

from bagu.ops.tuning.store import Kind, kind_fields, parse_kind, user_store

LIMIT = 1000  # kinds in the list: a server meets batches of every size

_log = logging.getLogger(__name__)


class Missing:
    """The kinds that this process has looked for in vain."""

    def __init__(self) -> None:
        self.listed: set[Kind] | None = None  # read at the first miss

    def add(self, kind: Kind) -> None:
        """Log a kind, and write it to the list if it is not there. Called once per kind."""
        shapes = " ".join(f"{name}{list(shape)}" for name, shape in kind.shapes)
        _log.info("no tuning for %s %s of %s %s: the default options are used", kind.op, kind.step, kind.dtype, shapes)
        with suppress(OSError):  # the list is a convenience: a call works without it
            self.listed = set(missing()) if self.listed is None else self.listed
            if kind not in self.listed and len(self.listed) < LIMIT:
                self.listed.add(kind)
                missing_file().parent.mkdir(parents=True, exist_ok=True)
                with missing_file().open("a") as file:
                    file.write(json.dumps(kind_fields(kind)) + "\n")


def missing_file() -> Path:
    path = user_store().path
    return path.with_name(f"{path.stem}.missing.jsonl")


def missing() -> list[Kind]:
    """The kinds of calls, of all processes, that found no tuning; each once. A damaged line is skipped."""
    found: dict[Kind, None] = {}
    if missing_file().is_file():
        for line in missing_file().read_bytes().splitlines():
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                found[parse_kind(json.loads(line))] = None
    return list(found)
