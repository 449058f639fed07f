"""Who does an op's work in a benchmark: bagu's backends, and the peers that are importable here.

Every public function of an op's peers.py is a peer under its own name and takes the op's arguments. `eager` is what a
PyTorch user writes today, and torch.compile of it is the peer `compile`. A peer that returns None is a yardstick: it
does other work of a known size (three plain GEMMs, say), is timed whole, and is never called the best peer.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bagu.errors import BackendError, NotOffered, UnknownName
from bagu.machine.device import cxx_compiler
from bagu.ops.core import OpSpec
from bagu.ops.dispatch import call

__all__ = ["Implementation", "chosen_backends", "implementations", "is_absent", "label"]

LABELS = {"eager": "torch eager", "compile": "torch.compile"}
CUDA_ONLY = ("liger",)  # Triton kernels: on a CPU there is nothing to time


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to do an op's work. `backend` says whether it is ours; `run` takes the op's arguments."""

    name: str
    backend: bool
    run: Callable[..., Any]


def label(name: str, *, backend: bool) -> str:
    """The name people read."""
    return f"bagu {name}" if backend else LABELS.get(name, name)


def chosen_backends(specs: Sequence[OpSpec], asked: Sequence[str], device: torch.device) -> tuple[str, ...]:
    """The backends to time: those asked for, else all that run on `device`."""
    known = list(dict.fromkeys(b for s in specs for b in s.backends))
    for name in asked:
        if name not in known:
            raise UnknownName.among("backend", name, known)
        if name != "torch" and device.type != "cuda":
            raise BackendError(
                f"the {name} backend was asked for, and the benchmark runs on {device}",
                hint="kernels are timed on a CUDA device; the interpreter's speed says nothing about them",
            )
    return tuple(asked) or tuple(b for b in known if b == "torch" or device.type == "cuda")


def implementations(
    spec: OpSpec, backends: Sequence[str], device: torch.device, *, compiled: bool
) -> tuple[list[Implementation], list[str]]:
    """All that can be timed on `device`, bagu's backends first, and a note for each that is left out."""
    ours = sorted((b for b in spec.backends if b in backends), key=lambda b: b == "torch")  # kernels first
    found = [Implementation(name=b, backend=True, run=partial(call, spec, b)) for b in ours]
    notes: list[str] = []
    for name, fn in _peers(spec).items():
        if name in CUDA_ONLY and device.type != "cuda":
            continue
        found.append(Implementation(name=name, backend=False, run=fn))
        if name == "eager" and compiled:
            if device.type == "cpu" and cxx_compiler() is None:
                notes.append("torch.compile is left out: it needs a C++ compiler on a CPU (g++ or clang++)")
            else:
                run = torch.compile(fn, dynamic=False)
                found.append(Implementation(name="compile", backend=False, run=run))
    return found, notes


def is_absent(error: BaseException) -> bool:
    """Whether an error says that a peer has no such case or is not installed, and not that its import is broken."""
    if isinstance(error, NotOffered):
        return True
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return False
    return importlib.util.find_spec(error.name.partition(".")[0]) is None


def _peers(spec: OpSpec) -> dict[str, Callable[..., Any]]:
    if not spec.peers:
        return {}
    module = importlib.import_module(f"bagu.ops.{spec.name}.peers")
    return {
        name: fn
        for name, fn in vars(module).items()
        if inspect.isfunction(fn) and not name.startswith("_") and fn.__module__ == module.__name__
    }
