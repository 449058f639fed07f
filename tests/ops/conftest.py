"""Installs the faster search for builtins in Triton's interpreter, in which most tests of ops spend their time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bagu.ops.contract import values
from tests.ops import interpreter

interpreter.install()


@pytest.fixture(autouse=torch.cuda.is_available())
def exact_cudnn() -> Iterator[None]:
    """fp32 convolutions without TF32, which torch allows by default, and gradients whose bits repeat."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops check the values of their arguments."""
    monkeypatch.setenv("BAGU_DEBUG", "1")
    values.debugging.cache_clear()
    yield
    monkeypatch.undo()
    values.debugging.cache_clear()
