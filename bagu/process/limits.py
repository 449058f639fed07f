"""Limits as text, e.g. "purity >= 99.2": read by a small parser, never evaluated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import erfc, sqrt

import numpy as np

from bagu.errors import ArgumentError, UnknownName
from bagu.process.schema import Schema

LIMIT = re.compile(r"^\s*(?:'([^']+)'|\"([^\"]+)\"|(.+?))\s*(>=|<=|≥|≤|>|<)\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*$")
MOST = 100


@dataclass(frozen=True)
class Limit:
    name: str
    above: bool
    bound: float

    @property
    def text(self) -> str:
        return f"{self.name} {'>=' if self.above else '<='} {self.bound:g}"

    def probability(self, mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
        """That a measured row keeps the limit, for a normal spread."""
        z = (mean - self.bound) / np.maximum(spread, 1e-12) * (1 if self.above else -1)
        return np.array([0.5 * erfc(-v / sqrt(2)) for v in z])


def parse_limits(texts: Iterable[str], schema: Schema) -> list[Limit]:
    """Limits of targets, settings or contexts of the schema. Two that contradict each other are named."""
    found = [_parse(text, schema) for text in _at_most(list(texts))]
    for low in (limit for limit in found if limit.above):
        for high in (limit for limit in found if not limit.above):
            if low.name == high.name and low.bound > high.bound:
                raise ArgumentError(f"{low.text!r} contradicts {high.text!r}", hint="change one of the two limits")
    return found


def _at_most(texts: Sequence[str]) -> Sequence[str]:
    if len(texts) > MOST:
        raise ArgumentError(f"there are {len(texts):,} limits", hint=f"give at most {MOST}")
    return texts


def _parse(text: str, schema: Schema) -> Limit:
    match = LIMIT.match(text) if len(text) <= 300 else None
    try:
        bound = float(match[5]) if match else float("nan")
    except ValueError:
        match = None
    if match is None:
        raise ArgumentError(
            f"{text[:80]!r} is not a limit", hint='give NAME >= NUMBER or NAME <= NUMBER, e.g. "purity >= 99.2"'
        )
    name = (match[1] or match[2] or match[3]).strip()
    known = [f.name for f in schema.columns if f.kind == "number" and f.role in ("target", "setting")]
    UnknownName.check("target or setting", name, known)
    return Limit(name, match[4] in (">=", "≥", ">"), bound)


def limit_name(text: str) -> str:
    """The quantity that a limit names; "" if it is not a limit."""
    match = LIMIT.match(text) if len(text) <= 300 else None
    return (match[1] or match[2] or match[3]).strip() if match else ""
