"""Triton's interpreter must be chosen before Triton is imported, and only where there is no GPU to compile for."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests import bytecode
from tests.forked import remember_environment, starts

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
remember_environment()
hypothesis.settings.register_profile("busy cores", deadline=None)  # a first call imports, and other processes run
hypothesis.settings.load_profile("busy cores")


@pytest.fixture
def forked() -> Iterator[None]:
    """Python processes that this process starts are forked from one that has imported torch: tests/forked.py."""
    with starts():
        yield


def pytest_sessionstart(session: pytest.Session) -> None:
    gc.disable()  # nothing that collection makes is garbage: looking for it is a fifth of its CPU time
    bytecode.share(session.config)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a script's `make test &`; child processes inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    gc.freeze()  # twelve thousand items, torch and Triton: a full collection would take 1 s, again and again
    gc.enable()
