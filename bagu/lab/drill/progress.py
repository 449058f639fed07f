"""What was solved, when and how well, in one JSON file; and what is due again: after 1, 3, 7, 21 and 60 days."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bagu.errors import BaguError

FILE = Path("drills") / "progress.json"
DAYS = (1, 3, 7, 21, 60)
DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One check of an answer. `shown`: after bagu's own answer was printed."""

    drill: str
    level: str
    letter: str
    when: float
    cause: str = ""
    shown: bool = False
    digest: str = ""  # of the file


def digest_of(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Progress:
    attempts: tuple[Attempt, ...] = ()
    shown: Mapping[str, float] = field(default_factory=dict)  # drill -> when its answer was printed
    hints: Mapping[str, int] = field(default_factory=dict)  # drill -> hints that were read

    @classmethod
    def read(cls, file: Path = FILE) -> Progress:
        if not file.exists():
            return cls()
        try:
            said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            attempts = tuple(Attempt(**a) for a in said["attempts"])
            return cls(attempts=attempts, shown=said["shown"], hints=said["hints"])
        except (ValueError, KeyError, TypeError) as error:
            raise BaguError(f"{file} is no record of drills: {error}", hint="move it away to begin a new one") from None

    def write(self, file: Path = FILE) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}.tmp")
        new.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        new.replace(file)

    def best(self, drill: str) -> Attempt | None:
        mine = [a for a in self.attempts if a.drill == drill]
        return min(mine, key=lambda a: (a.letter, a.shown), default=None)

    def passed(self, drill: str, source: str) -> bool:
        """Whether a check found this very file right."""
        return any(a.digest == digest_of(source) and a.letter in "ABC" for a in self.attempts if a.drill == drill)

    def solved(self, drill: str) -> list[Attempt]:
        return [a for a in self.attempts if a.drill == drill and a.letter in "ABC"]

    def due(self, drill: str) -> float | None:
        """When the drill is due again; None if it was never solved. Solves on one day count once."""
        solved = self.solved(drill)
        if not solved:
            return None
        repeated = len({int(a.when // DAY) for a in solved})
        return solved[-1].when + DAYS[min(repeated, len(DAYS)) - 1] * DAY

    def is_due(self, drill: str, now: float | None = None) -> bool:
        when = self.due(drill)
        return when is not None and when <= (time.time() if now is None else now)
