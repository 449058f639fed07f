"""Groups of ranks that the tests of this folder share: starting one is the expensive part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks, ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    with ranks(2) as group:
        yield group


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    with ranks(4) as group:
        yield group
