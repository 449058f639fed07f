"""What the tests of this folder share: groups of ranks, which are slow to start, and runs without ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks, ranks
from tiny import Alone


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    with ranks(2) as group:
        yield group


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    with ranks(4) as group:
        yield group


@pytest.fixture(scope="session")
def alone() -> Alone:
    return Alone()
