"""From a public call to a backend: check the arguments, choose, run.

The choice is made at the call: `backend=` of the call, else the innermost `use(...)`, else by device (Triton on
CUDA, torch elsewhere). A backend that was asked for runs or raises; an automatic one may fall back to torch, and
says so once. Whatever ran the forward runs its backward too, since the backward is a custom op of that backend.

The torch backend is called as it is: ordinary differentiable PyTorch that the compiler, autograd, DTensor and FLOP
counters see through. Every other backend becomes two `torch.library` custom ops, `bagu::<op>_<backend>` and
`bagu::<op>_<backend>_backward`, whose schema and fake function come from the spec's signature.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch

from bagu.device import triton_interprets
from bagu.errors import BackendError, UnknownName
from bagu.ops.core import OpSpec
from bagu.ops.invariant import active, forward_of
from bagu.ops.signature import ScalarArg, TensorArg

__all__ = ["call", "use"]

BACKENDS = ("torch", "triton")

# What `use` asks for. A plain global, because torch.compile guards on it and recompiles when it changes; it reads a
# ContextVar not at all and a threading.local without a guard (torch 2.13). So `use` holds for the whole process,
# and threads that need different backends pass `backend=`.
_asked: str | None = None


class use:
    """`with bagu.ops.use("torch"):` runs every op inside on that backend."""

    def __init__(self, backend: str) -> None:
        if backend not in BACKENDS:
            raise UnknownName.among("backend", backend, BACKENDS)
        self.backend = backend

    def __enter__(self) -> None:
        global _asked
        self.before, _asked = _asked, self.backend

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        global _asked
        _asked = self.before


def call(spec: OpSpec, backend: str | None, /, **args: Any) -> Any:
    """Run `spec` on these arguments; returns its outputs (one tensor, or a tuple of none or several)."""
    spec.admit(args)
    first = args[spec.sig.tensors[0].name]  # the first tensor is never optional
    asked = backend if backend is not None else _asked
    if active():
        results = forward_of(spec, asked, first)(**args)
    elif (name := _choose(spec, asked, first)) == "torch":
        results = spec.torch_backend.forward(**args)
    else:
        results = getattr(torch.ops.bagu, f"{spec.name}_{name}")(*(args[a.name] for a in spec.sig.inputs))
        results = () if results is None else results if isinstance(results, (tuple, list)) else (results,)
    outputs = tuple(results[: len(spec.sig.outputs)])
    return outputs[0] if len(outputs) == 1 else outputs


def _choose(spec: OpSpec, asked: str | None, first: torch.Tensor) -> str:
    on = first.device.type
    if asked is None:
        automatic = on == "cuda" and type(first) in (torch.Tensor, torch.nn.Parameter) and "triton" in spec.backends
        return "triton" if automatic and _available(spec.name) else "torch"
    if asked not in spec.backends:
        raise UnknownName.among(f"backend of {spec.name}", asked, spec.backends)
    if asked != "torch":
        load(spec.name, asked)
        if on != "cuda" and not _interpreted():
            raise BackendError(
                f"{spec.name}: the {asked} backend was asked for, and the tensors are on {on}",
                hint="move them to a CUDA device, or set TRITON_INTERPRET=1 before Python starts to run it slowly here",
            )
    return asked


@torch.compiler.assume_constant_result
def _interpreted() -> bool:
    return triton_interprets()


@torch.compiler.assume_constant_result
def _available(op: str) -> bool:
    """Whether the automatic Triton backend can be had; if not, says so once."""
    if importlib.util.find_spec("triton") is not None:
        load(op, "triton")
        return True
    warnings.warn("Triton is not installed: bagu.ops runs on the torch backend", RuntimeWarning, stacklevel=2)
    return False


@torch.compiler.assume_constant_result
def load(op: str, backend: str) -> None:
    """Import a backend and register its custom ops, the first time it is needed.

    It takes the op's name, since a compiler that runs it at trace time can hand over a string but not a spec.
    """
    if hasattr(torch.ops.bagu, f"{op}_{backend}"):
        return
    from bagu.ops.catalogue import SPECS

    spec = SPECS[op]
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        raise BackendError(
            f"{spec.name}: the triton backend was asked for, and Triton is not installed",
            hint="pip install 'bagu[triton]', or ask for backend='torch'",
        )
    module = spec.module(backend)
    _register_forward(spec, backend, module.forward)
    if spec.grads:
        _register_backward(spec, backend, module.backward)


def _on(x: torch.Tensor) -> AbstractContextManager[None]:
    """A Triton kernel runs on the current device, wherever its tensors are: make it theirs."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _register_forward(spec: OpSpec, backend: str, forward: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    sig, names = spec.sig, [a.name for a in spec.sig.inputs]
    first = sig.tensors[0].name

    def run(*values: Any) -> Any:
        args = dict(zip(names, values, strict=True))
        with _on(args[first]):
            return _returned(forward(**args))

    def fake(*values: Any) -> Any:
        args = dict(zip(names, values, strict=True))
        dims = sig.measure(args, {s.name: args[s.name] for s in sig.scalars})
        dims |= spec.derive(args, dims) if spec.derive is not None else {}
        x = args[first]
        given = args.get("dtype")
        results = [x.new_empty(r.shape(dims), dtype=r.result_dtype(x.dtype, given)) for r in sig.results]
        return _returned(results)

    schema = sig.schema(sig.inputs, len(sig.results), spec.mutates)
    op = torch.library.custom_op(f"bagu::{spec.name}_{backend}", run, mutates_args=spec.mutates, schema=schema)
    op.register_fake(fake)


def _returned(results: Sequence[torch.Tensor]) -> Any:
    """Results as a custom op returns them: nothing, one tensor, or a tuple."""
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def _register_backward(spec: OpSpec, backend: str, backward: Callable[..., tuple[torch.Tensor | None, ...]]) -> None:
    """The backward as an op of its own, and the link from the forward to it."""
    sig = spec.sig
    by_name: dict[str, TensorArg] = {t.name: t for t in (*sig.tensors, *sig.results)}
    takes: list[TensorArg | ScalarArg] = [TensorArg(f"d{o}", by_name[o].dims, "", False) for o in spec.differentiable]
    takes += [by_name[s] for s in spec.saves]
    takes += sig.scalars
    names = [a.name for a in takes]
    selective = "needs" in inspect.signature(backward).parameters  # it can leave out gradients nobody wants

    def run(needs: list[bool], *values: Any) -> Any:
        more = {"needs": dict(zip(spec.made, needs, strict=True))} if selective else {}
        with _on(values[0]):
            grads = backward(**dict(zip(names, values, strict=True)), **more)
        absent = values[0].new_empty(0)  # an op returns tensors, never None
        found = [absent.clone() if g is None else g for g in grads]
        return found[0] if len(found) == 1 else tuple(found)

    def fake(needs: list[bool], *values: Any) -> Any:
        args = dict(zip(names, values, strict=True))
        known = {o: args[f"d{o}"] for o in spec.differentiable} | {s: args[s] for s in spec.saves}
        dims = sig.measure(known, {s.name: args[s.name] for s in sig.scalars})
        if any(name not in dims for g in spec.made for _, name in by_name[g].dims if name):
            assert spec.derive is not None, f"{spec.name}: nothing the backward is given has the dims of its gradients"
            dims |= spec.derive(args, dims)
        found = []
        for g, needed in zip(spec.made, needs, strict=True):
            gone = (g in known and known[g] is None) or (selective and not needed)
            dtype = known[g].dtype if known.get(g) is not None else values[0].dtype
            found.append(values[0].new_empty(0 if gone else by_name[g].shape(dims), dtype=dtype))
        return found[0] if len(found) == 1 else tuple(found)

    schema = sig.schema(takes, len(spec.made)).replace("(", "(bool[] needs, ", 1)
    op = f"bagu::{spec.name}_{backend}"
    torch.library.custom_op(f"{op}_backward", run, mutates_args=(), schema=schema).register_fake(fake)
    grad_op = getattr(torch.ops.bagu, f"{spec.name}_{backend}_backward")
    positions = {a.name: i for i, a in enumerate(sig.inputs)}
    flows = [i for i, o in enumerate(sig.outputs) if o.name in spec.differentiable]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, (tuple, list)) else (output,)
        known = {n: inputs[i] for n, i in positions.items()} | dict(
            zip((r.name for r in sig.results), results, strict=True)
        )
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in flows))
        ctx.save_for_backward(*(known[s] for s in spec.saves))
        ctx.scalars = [known[s.name] for s in sig.scalars]
        ctx.absent = {g for g in spec.grads if known[g] is None}

    def link(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = {g for g in spec.grads if ctx.needs_input_grad[positions[g]] and g not in ctx.absent}
        sources = {spec.twins.get(g, g) for g in wanted}
        made = grad_op([g in sources for g in spec.made], *(douts[i] for i in flows), *ctx.saved_tensors, *ctx.scalars)
        grads = dict(zip(spec.made, made if isinstance(made, (tuple, list)) else (made,), strict=True))
        return tuple(grads[spec.twins.get(a.name, a.name)] if a.name in wanted else None for a in sig.inputs)

    torch.library.register_autograd(op, link, setup_context=setup_context)


def paired(
    spec: OpSpec,
    forward: Callable[..., tuple[torch.Tensor, ...]],
    backward: Callable[..., tuple[torch.Tensor | None, ...]] | None,
) -> Callable[..., Any]:
    """A differentiable call out of one forward and one backward, which may come from different backends or tunings."""
    sig, names = spec.sig, [a.name for a in spec.sig.inputs]

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Any) -> Any:
            args = dict(zip(names, values, strict=True))
            results = tuple(forward(**args))
            known = args | dict(zip((r.name for r in sig.results), results, strict=True))
            ctx.known = {n: known[n] for n in (*spec.saves, *(s.name for s in sig.scalars))}
            ctx.mark_non_differentiable(
                *(r for r, o in zip(results, sig.results, strict=True) if o.name not in spec.differentiable)
            )
            return results

        @staticmethod
        def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            assert backward is not None, f"{spec.name} has gradients and no backward was given"
            given = {f"d{o.name}": d for o, d in zip(sig.results, douts, strict=True) if o.name in spec.differentiable}
            more = {}
            if "needs" in inspect.signature(backward).parameters:
                more["needs"] = dict.fromkeys(spec.made, True)
            grads = dict(zip(spec.made, backward(**given, **ctx.known, **more), strict=True))
            return tuple(grads.get(spec.twins.get(n, n)) for n in names)

    def run(**args: Any) -> Any:
        results = Pair.apply(*(args[n] for n in names))
        outputs = tuple(results[: len(sig.outputs)])
        return outputs[0] if len(outputs) == 1 else outputs

    return run
