"""The implementations that a benchmark of an op compares: bagu's backends, and the peers that can be imported.

Every public function of an op's peers.py is a peer under its own name and takes the op's arguments. `eager` is plain
PyTorch code, and torch.compile of it is the peer `compile`. A peer that returns None is a yardstick: it does different
work of a known size (for example three GEMMs), is timed as one call, and is never the best peer.
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
from bagu.ops.call.dispatch import call
from bagu.ops.contract.core import OpSpec

LABELS = {
    "eager": "torch eager",
    "compile": "torch.compile",
    "cudnn": "cuDNN",
    "flash_attention_2": "FlashAttention-2",
}
CUDA_ONLY = ("liger", "cudnn", "flash_attention_2")  # GPU kernels: they cannot be timed on a CPU


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One implementation of an op. `backend` says whether it is bagu's; `run` takes the op's arguments."""

    name: str
    backend: bool
    run: Callable[..., Any]


def label(name: str, *, backend: bool) -> str:
    """The displayed name."""
    return f"bagu {name}" if backend else LABELS.get(name, name)


def chosen_backends(specs: Sequence[OpSpec], asked: Sequence[str], device: torch.device) -> tuple[str, ...]:
    """The backends to time: the requested ones, else all that run on `device`."""
    known = list(dict.fromkeys(b for s in specs for b in s.backends))
    for name in asked:
        if name not in known:
            raise UnknownName.among("backend", name, known)
        if name != "torch" and device.type != "cuda":
            raise BackendError(
                f"the {name} backend cannot be timed on {device}",
                hint="use a CUDA device; the interpreter's speed is meaningless",
            )
    return tuple(asked) or tuple(b for b in known if b == "torch" or device.type == "cuda")


def implementations(
    spec: OpSpec, backends: Sequence[str], device: torch.device, *, compiled: bool
) -> tuple[list[Implementation], list[str]]:
    """All implementations that can be timed on `device`, bagu's backends first, and a note for each that is skipped."""
    ours = sorted((b for b in spec.backends if b in backends), key=lambda b: b == "torch")  # kernels first
    found = [Implementation(name=b, backend=True, run=partial(call, spec, b)) for b in ours]
    notes: list[str] = []
    for name, fn in _peers(spec).items():
        if name in CUDA_ONLY and device.type != "cuda":
            continue
        found.append(Implementation(name=name, backend=False, run=fn))
        if name == "eager" and compiled:
            if device.type == "cpu" and cxx_compiler() is None:
                notes.append("torch.compile is skipped: on a CPU it needs a C++ compiler (g++ or clang++)")
            else:
                run = torch.compile(fn, dynamic=False)
                found.append(Implementation(name="compile", backend=False, run=run))
    return found, notes


def is_absent(error: BaseException) -> bool:
    """Whether an error means that a peer does not support the case or is not installed, and not that it is broken."""
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
        name: spec.by_name(fn)
        for name, fn in vars(module).items()
        if inspect.isfunction(fn) and not name.startswith("_") and fn.__module__ == module.__name__
    }
