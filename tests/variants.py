"""Variants of a test that are in `make test`; the others are in `make test-full`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest


def some(values: Sequence[Any], quick: Collection[str], name: Callable[[Any], str] = str) -> list[Any]:
    """All values as parameters, of which those named in `quick` are not slow."""
    names = [name(value) for value in values]
    if unknown := set(quick).difference(names):
        raise ValueError(f"no variant is named {', '.join(sorted(unknown))}")
    return [
        pytest.param(value, id=each, marks=() if each in quick else pytest.mark.slow)
        for value, each in zip(values, names, strict=True)
    ]


def of_cases(cases: Sequence[Any], *quick: str) -> list[Any]:
    """`some` for values with a name."""
    return some(cases, quick, lambda case: case.name)
