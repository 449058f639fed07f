"""Installs the faster search for builtins in Triton's interpreter, in which most tests of ops spend their time."""

from __future__ import annotations

from tests.ops import interpreter

interpreter.install()
