"""One helper process for all tests of drills: it imports torch once, and forks a process per answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bagu.lab.drill.answers import Answers


@pytest.fixture(scope="session")
def answers() -> Iterator[Answers]:
    with Answers() as host:
        yield host
