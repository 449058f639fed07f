"""From a public call to a backend: check the arguments, choose, run.

The choice is made at the call: `backend=` of the call, else the innermost `use(...)`, else by device (Triton on
CUDA but for what the spec's `prefer_torch` names, torch elsewhere). A backend that was asked for runs or raises; an
automatic one may fall back to torch, and says so once. Whatever ran the forward runs its backward too: custom.py links
the two.

The torch backend is called as it is: ordinary differentiable PyTorch that the compiler, autograd, DTensor and FLOP
counters see through. Every other backend becomes custom ops, or an autograd node where nobody looks (custom.py).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from bagu.errors import ArgumentError, BackendError, UnknownName
from bagu.machine.device import triton_interprets
from bagu.ops import recording, scope
from bagu.ops.core import OpSpec
from bagu.ops.custom import Run, node, register, watched
from bagu.ops.eager import autocasting, constant, traced, transformed
from bagu.ops.invariant import forward_of
from bagu.ops.values import debugging

__all__ = ["automatic_backend", "call", "use"]

BACKENDS = ("torch", "triton")

_nodes: dict[tuple[str, str], Run] = {}  # of the backends that are loaded, by op and backend
_said: set[str] = set()  # warnings that were given


class use:
    """`with bagu.ops.use("torch"):` runs every op inside on that backend, in this thread or asyncio task."""

    def __init__(self, backend: str) -> None:
        _check_name(backend)
        self.backend = backend
        self._entered: list[scope.Choice] = []  # one instance may be entered several times

    def __enter__(self) -> None:
        self._entered.append(scope.enter(backend=self.backend))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        scope.leave(self._entered.pop())


def _check_name(backend: object) -> None:
    if not isinstance(backend, str):
        raise ArgumentError(
            f"backend is {backend!r} ({type(backend).__name__}), and a name is wanted",
            hint=f"one of {', '.join(BACKENDS)}; to choose by device, leave backend= out and do not enter use()",
        )
    if backend not in BACKENDS:
        raise UnknownName.among("backend", backend, BACKENDS)


def call(spec: OpSpec, backend: str | None, /, **args: Any) -> Any:
    """Run `spec` on these arguments; returns its outputs (one tensor, or a tuple of none or several).

    An op's dtypes are those of its arguments, so torch.autocast is off inside it.
    """
    if backend is not None:
        _check_name(backend)
    spec.admit(args)
    first = args[spec.sig.tensors[0].name]  # the first tensor is never optional
    if spec.check_values is not None and not traced(first) and debugging() and first.device.type != "meta":
        spec.check_values(args, spec.bind(args))
    if (recorder := recording.active()) is not None:
        results = recorder.call(spec, args)
    elif autocasting(first):
        with torch.autocast(first.device.type, enabled=False):
            results = _run(spec, backend, first, args, explicit=True)
    else:
        results = _run(spec, backend, first, args)
    outputs = tuple(results[: len(spec.sig.outputs)])
    return outputs[0] if len(outputs) == 1 else outputs


def _run(
    spec: OpSpec, backend: str | None, first: torch.Tensor, args: Mapping[str, Any], *, explicit: bool = False
) -> Sequence[torch.Tensor]:
    """Outputs and residuals. `explicit`: with the explicit backward of the torch backend, where autograd's own would
    have its products autocast."""
    choice = scope.current()
    if not torch.compiler.is_compiling():
        scope.keep_for_recompute()
    asked = backend if backend is not None else choice.backend
    if choice.invariant:
        return forward_of(spec, asked, first)(**args)
    name = _choose(spec, asked, first, args)
    if name == "torch" and not (explicit and spec.grads and not traced(first)):
        return spec.torch_backend.forward(**args)
    values = [args[a.name] for a in spec.sig.inputs]
    if name != "torch" and transformed():
        raise BackendError(
            f"{spec.name}: the {name} backend has no torch.func transforms (grad, vmap, jvp) and no forward-mode AD",
            hint="ask for backend='torch' there",
        )
    if name != "torch" and (torch.compiler.is_compiling() or watched(values)):
        load_op(spec.name, name)
        results = getattr(torch.ops.bagu, f"{spec.name}_{name}")(*values)
    else:
        load(spec.name, name)
        results = _nodes[spec.name, name](*values)
    return () if results is None else results if isinstance(results, (tuple, list)) else (results,)


def _choose(spec: OpSpec, asked: str | None, first: torch.Tensor, args: Mapping[str, Any]) -> str:
    on = first.device.type
    if asked is None:
        plain = type(first) in (torch.Tensor, torch.nn.Parameter) and not transformed()
        automatic = on == "cuda" and plain and "triton" in spec.backends
        return automatic_backend(spec, args) if automatic and _available(spec.name) else "torch"
    if asked not in spec.backends:
        raise UnknownName.among(f"backend of {spec.name}", asked, spec.backends)
    if asked != "torch":
        load(spec.name, asked)
        if on != "cuda" and not _interpreted():
            raise BackendError(
                f"{spec.name}: the {asked} backend was asked for, and the tensors are on {on}",
                hint="move them to a CUDA device, or set TRITON_INTERPRET=1 before Python starts to run it slowly here",
            )
        if spec.unsupported is not None and (lack := spec.unsupported(args)) is not None:
            raise BackendError(
                f"{spec.name}: the {asked} backend was asked for, and {lack}", hint="ask for backend='torch' there"
            )
    return asked


def automatic_backend(spec: OpSpec, args: Mapping[str, Any]) -> str:
    """What runs a call on a CUDA device where Triton is: its kernels, unless they cannot or torch is faster."""
    if spec.unsupported is not None and (lack := spec.unsupported(args)) is not None:
        _say_once(f"{spec.name} runs on the torch backend here, not on Triton: {lack}")
        return "torch"
    return "torch" if any(rule.holds(args) for rule in spec.prefer_torch) else "triton"


@constant
def _say_once(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)


@constant
def _interpreted() -> bool:
    return triton_interprets()


@constant
def _available(op: str) -> bool:
    """Whether the automatic Triton backend can be had; if not, says so once."""
    if importlib.util.find_spec("triton") is not None:
        load(op, "triton")
        return True
    warnings.warn("Triton is not installed: bagu.ops runs on the torch backend", RuntimeWarning, stacklevel=2)
    return False


@constant
def load(op: str, backend: str) -> None:
    """Import a backend, the first time it is needed.

    It takes the op's name, since a compiler that runs it at trace time can hand over a string but not a spec.
    """
    if (op, backend) in _nodes:
        return
    from bagu.ops.catalogue import SPECS

    spec = SPECS[op]
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        raise BackendError(
            f"{spec.name}: the triton backend was asked for, and Triton is not installed",
            hint="pip install 'bagu[triton]', or ask for backend='torch'",
        )
    module = spec.module(backend)
    _nodes[op, backend] = node(spec, backend, module.forward, module.backward if spec.grads else None)


@constant
def load_op(op: str, backend: str) -> None:
    """Register a loaded backend's custom ops, the first time something looks at a call."""
    if hasattr(torch.ops.bagu, f"{op}_{backend}"):
        return
    from bagu.ops.catalogue import SPECS

    spec = SPECS[op]
    module = spec.module(backend)
    register(spec, backend, module.forward, module.backward if spec.grads else None)
