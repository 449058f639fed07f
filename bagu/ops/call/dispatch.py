"""Dispatch of a public call: check the arguments, choose a backend, run it.

The choice is made at each call: `backend=` of the call, else the innermost `use(...)`, else by device (Triton on CUDA
except for the rules in the spec's `prefer_torch`, torch elsewhere). A requested backend runs or raises; an automatic
one may fall back to torch with a single warning. The backend that runs the forward also runs the backward (link.py).

The torch backend is called directly: it is ordinary differentiable PyTorch, which the compiler, autograd, DTensor and
FLOP counters can trace. Every other backend runs as custom ops (custom.py) if the call is traced or intercepted, and
as one autograd node (node.py) if not.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from bagu.errors import ArgumentError, BackendError, UnknownName
from bagu.machine.device import triton_interprets
from bagu.ops.call import recording, scope
from bagu.ops.call.custom import listed, needs_custom_op, register
from bagu.ops.call.eager import autocasting, constant, saved_tensor_hooks, traced, transformed
from bagu.ops.call.node import Node
from bagu.ops.call.swap import placed
from bagu.ops.contract.core import OpSpec
from bagu.ops.contract.values import debugging
from bagu.ops.invariant.mode import backend_of, forward_of
from bagu.ops.replay.launcher import available_launcher
from bagu.ops.replay.replay import Route, kind_of, remember
from bagu.ops.tuning.lookup import tuned

BACKENDS = ("torch", "triton")

_any_autocast = torch._C._is_any_autocast_enabled  # the check for a single device takes 4 us
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_deterministic = torch._C._get_deterministic_algorithms
_only_warns = torch._C._get_deterministic_algorithms_warn_only
_NOT_WIDENED = (torch.float32, torch.float64)  # dtypes in which torch's own products run on a CPU
_nodes: dict[tuple[str, str], Node] = {}  # loaded backends, by op and backend
_warned: set[str] = set()  # warnings already given


class use:
    """`with bagu.ops.use("torch"):` runs every op inside it on that backend, in this thread or asyncio task."""

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
    """Run `spec` on these arguments and return its outputs: one tensor, or a tuple if it has none or several.

    The arguments set the dtypes of an op, so torch.autocast is off inside it.
    """
    if torch.compiler.is_compiling():
        results = _while_compiling(spec, backend, args)
    elif _dispatch_modes() and (recorder := recording.active()) is not None:
        results = recorder.call(spec, args)
    else:
        if saved_tensor_hooks(True) is not None:
            scope.keep_for_recompute()
        values = tuple(map(args.__getitem__, spec.names))
        route, pointers = _route(spec, backend, args, values)
        if spec.check_values is not None and debugging():
            _check_values(spec, args)
        results = route(values, pointers)
    count = len(spec.sig.outputs)
    return results[0] if count == 1 else tuple(results[:count])


def calls_torch(x: torch.Tensor, *, on_gpu: bool = False) -> bool:
    """Whether an op on x whose torch backend is a single torch function runs just that function: x is an fp32 or fp64
    tensor on a CPU, or, for an op that prefers that function on a GPU too (`on_gpu`), any tensor there; and nothing can
    change the call: no compiler, recorder, `use`, invariant mode or checkpointed block, and on a CPU no autocast. On a
    GPU autocast is the function's own.

    A layer can then call the function itself. That saves the checks and the dispatch: 20 us for a linear layer and 90
    for a convolution on a Neoverse-N1, where torch's own calls take 8 and 13 us, and several times that if the caches
    are cold; 26 and 76 us on the host of an H200. Each check here takes 0.5 us.
    """
    if is_dynamo_compiling() or scope.opened() or saved_tensor_hooks(True) or placed:
        return False
    if x.is_cuda:
        return on_gpu
    return x.is_cpu and x.dtype in _NOT_WIDENED and not (_dispatch_modes() or _any_autocast())


def _route(
    spec: OpSpec, backend: str | None, args: Mapping[str, Any], values: Sequence[Any]
) -> tuple[Route, Sequence[int]]:
    """Return the route of an eager call, from the cache if this kind of call is known, and the tensors' addresses.

    Checking the arguments and choosing a backend takes 10 to 100 us, and a training step of a small model has hundreds
    of calls. The cache key holds everything that both depend on, and for GPU tensors what launches depend on. It is
    made of C functions as far as possible: a Python function takes 0.1 us more.
    """
    choice = stack[-1].choice if (stack := scope.opened()) else scope.NOTHING
    first = values[spec.first]
    try:
        if isinstance(first, torch.Tensor) and first.is_cuda:
            kind, pointers = kind_of(values)
        else:
            kind, pointers = list(map(_kind, values)), []
        key = (
            *(backend, choice, _transforms(), forward_ad._current_level, _dispatch_modes()),
            *(_any_autocast() and autocasting(first), torch.is_grad_enabled(), _deterministic(), _only_warns()),
            *kind,
        )
        route = spec.routes.get(key)
    # symbolic sizes, a list in place of a scalar, a tensor without memory, or an object that is not a tensor
    except (TypeError, RuntimeError, AttributeError):
        return _found_route(spec, backend, choice, args, values), []
    if route is None:
        route = remember(spec.routes, key, _found_route(spec, backend, choice, args, values))
    return route, pointers


def _kind(v: Any) -> tuple[Any, ...]:
    """The properties of an argument that its check and the choice of a backend depend on."""
    return (type(v), v.shape, v.dtype, v.device, v.layout) if isinstance(v, torch.Tensor) else (type(v), v)


def _found_route(
    spec: OpSpec, backend: str | None, choice: scope.Choice, args: Mapping[str, Any], values: Sequence[Any]
) -> Route:
    """Check a call's arguments and choose its route; raise if no backend can run it."""
    if backend is not None:
        _check_name(backend)
    spec.bind(args)
    first = values[spec.first]
    asked, casts = backend if backend is not None else choice.backend, autocasting(first)
    if choice.invariant:
        route = _invariant(spec, asked, first, values, args)
    elif asked is None and spec.name in placed and not transformed() and placed[spec.name].supports(args):
        route = placed[spec.name]
    elif (name := _choose(spec, asked, first, args)) == "torch" and not (casts and spec.grads and not traced(first)):
        forward = spec.torch_backend.forward
        # an op without gradients has none on any backend; the key of the route has the grad mode
        route = _in_order(spec, forward if spec.grads or not torch.is_grad_enabled() else torch.no_grad()(forward))
    elif name == "torch":  # inside autocast, autograd's backward would cast its products
        load(spec.name, name)
        route = _nodes[spec.name, name].route(values)
    elif transformed():
        raise _without_transforms(spec, name)
    elif needs_custom_op(values):
        load_op(spec.name, name)
        op = getattr(torch.ops.bagu, f"{spec.name}_{name}")
        route = lambda values, pointers: listed(op(*values))  # noqa: E731
    else:
        load(spec.name, name)
        route = _nodes[spec.name, name].route(values)
    return _without_autocast(route, first.device.type) if casts else route


def _invariant(
    spec: OpSpec, asked: str | None, first: torch.Tensor, values: Sequence[Any], args: Mapping[str, Any]
) -> Route:
    """The route of a call in batch-invariant mode; raises if the op has no such kernel for it."""
    backend = backend_of(spec, asked, first)
    if backend == "torch":
        return _in_order(spec, forward_of(spec, backend, first))
    _choose(spec, backend, first, args)  # raises if the kernels cannot run
    if transformed():
        raise _without_transforms(spec, backend)
    key = spec.name, "invariant"
    if key not in _nodes:
        module: Any = spec.module(backend)
        backward = getattr(module, "invariant_backward", None)
        _nodes[key] = _node(spec, backend, forward_of(spec, backend, first), backward)
    return _nodes[key].route(values)


def _without_transforms(spec: OpSpec, backend: str) -> BackendError:
    return BackendError(
        f"{spec.name}: the {backend} backend has no torch.func transforms (grad, vmap, jvp) and no forward-mode AD",
        hint="ask for backend='torch' there",
    )


def _in_order(spec: OpSpec, forward: Callable[..., Any]) -> Route:
    if (record := spec.args) is not None:
        return lambda values, pointers: forward(record(*values))
    return lambda values, pointers: forward(*values)


def _without_autocast(run: Route, device: str) -> Route:
    def route(values: Sequence[Any], pointers: Sequence[int]) -> Any:
        with torch.autocast(device, enabled=False):
            return run(values, pointers)

    return route


def _check_values(spec: OpSpec, args: Mapping[str, Any]) -> None:
    first = args[spec.names[spec.first]]
    if spec.check_values is not None and not traced(first) and first.device.type != "meta":
        spec.check_values(args, spec.bind(args))


def _while_compiling(spec: OpSpec, backend: str | None, args: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """The call under torch.compile, which traces this function."""
    if backend is not None:
        _check_name(backend)
    try:
        spec.bind(args)
    except ArgumentError as error:
        _refuse_while_compiling(error.args[0], error.hint)
    first = args[spec.names[spec.first]]
    if autocasting(first):
        with torch.autocast(first.device.type, enabled=False):
            return _traced(spec, backend, first, args)
    return _traced(spec, backend, first, args)


def _traced(spec: OpSpec, backend: str | None, first: torch.Tensor, args: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    choice = scope.current()
    asked = backend if backend is not None else choice.backend
    if choice.invariant:
        return spec.apply(forward_of(spec, backend_of(spec, asked, first), first), args)
    name = _choose(spec, asked, first, args)
    if name == "torch":
        load(spec.name, name)
        with nullcontext() if spec.grads else torch.no_grad():
            return spec.apply(spec.torch_backend.forward, args)
    load_op(spec.name, name)
    return listed(getattr(torch.ops.bagu, f"{spec.name}_{name}")(*[args[n] for n in spec.names]))


@constant  # runs, and so raises, while the compiler traces the call: the compiler's own report would lack the message
def _refuse_while_compiling(message: str, hint: str) -> None:
    raise ArgumentError(message, hint=hint)


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
    """The default backend on a CUDA device with Triton: "triton", unless it cannot run the call or torch is faster."""
    if spec.unsupported is not None and (lack := spec.unsupported(args)) is not None:
        _warn_once(f"{spec.name} runs on the torch backend here, not on Triton: {lack}")
        return "torch"
    return "torch" if any(rule.holds(args) for rule in spec.prefer_torch) else "triton"


@constant
def _warn_once(sentence: str) -> None:
    if sentence not in _warned:
        _warned.add(sentence)
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)


@constant
def _interpreted() -> bool:
    return triton_interprets()


@constant
def _available(op: str) -> bool:
    """Whether the Triton backend of an op can be loaded; warns once if it cannot."""
    if importlib.util.find_spec("triton") is not None:
        load(op, "triton")
        return True
    warnings.warn("Triton is not installed: bagu.ops runs on the torch backend", RuntimeWarning, stacklevel=2)
    return False


@constant
def load(op: str, backend: str) -> None:
    """Import a backend on first use.

    It takes the op's name because the compiler, which runs it at trace time, can pass a string but not a spec.
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
    _nodes[op, backend] = _node(spec, backend, *_steps(spec, backend))


def _steps(spec: OpSpec, backend: str) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """A backend's forward and backward, those of Triton with tuned options."""
    module = spec.module(backend)
    backward = module.backward if spec.grads else None
    if backend != "triton":
        return module.forward, backward
    return tuned(spec, "forward", module.forward), None if backward is None else tuned(spec, "backward", backward)


def _node(spec: OpSpec, backend: str, forward: Callable[..., Any], backward: Callable[..., Any] | None = None) -> Node:
    """A forward of a backend, with this backward or the backend's."""
    launcher = available_launcher() if backend == "triton" else None
    return Node(spec, backend, forward, (backward or spec.module(backend).backward) if spec.grads else None, launcher)


@constant
def load_op(op: str, backend: str) -> None:
    """Register a loaded backend's custom ops when a call is first traced or intercepted."""
    if hasattr(torch.ops.bagu, f"{op}_{backend}"):
        return
    from bagu.ops.catalogue import SPECS

    spec = SPECS[op]
    forward, backward = _steps(spec, backend)
    register(spec, backend, forward, backward)
