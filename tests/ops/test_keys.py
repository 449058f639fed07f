"""Every field of the keys under which routes and plans are cached is needed.

For each field there are two calls whose keys differ in that field alone. With the whole key, the second call gives what
it gives first in a new process; with a key that lacks the field, it gets what was cached for the first one. The fields
are those of the keys that are made, so a new field without a pair of calls fails, and so does a field that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import bagu.ops
from bagu.ops.call import scope
from bagu.ops.call.dispatch import call
from bagu.ops.call.node import Node
from bagu.ops.catalogue import SPECS
from bagu.ops.replay.replay import Replayed
from tests.ops.points import DEVICE, GPU, Looked
from tests.ops.replaying import forward_of, launcher

# the fields of the keys, in order
CALL = (
    "backend=",
    "use",
    "invariant",
    "transforms",
    "forward AD",
    "modes",
    "autocast",
    "grad mode",
    "deterministic",
    "warns",
)
ROUTED = ("type", "shape", "dtype", "device", "layout")  # of a tensor that is not on a GPU
REPLAYED = ("type", "shape", "stride", "dtype", "device", "alignment", "lazy", "requires_grad")
SCALAR = ("scalar's type", "scalar")
BACKWARD = ("forward", "wanted")


def fields(key: tuple[Any, ...], leading: tuple[str, ...], tensor: tuple[str, ...]) -> list[tuple[str, Any]]:
    """The fields of a key with their names; one that has no name is an error."""
    flat = [v for part in key for v in (part if isinstance(part, scope.Choice) else (part,))]
    named = list(zip(leading, flat[: len(leading)], strict=True))
    for kind in flat[len(leading) :]:
        named += zip(tensor if issubclass(kind[0], torch.Tensor) else SCALAR, kind, strict=True)
    return named


class Cache(dict[Any, Any]):
    """A cache that leaves a field of its keys out and notes the whole keys."""

    def __init__(self, leading: tuple[str, ...], tensor: tuple[str, ...], lacks: str | None) -> None:
        super().__init__()
        self.leading, self.tensor, self.lacks = leading, tensor, lacks
        self.asked: list[list[tuple[str, Any]]] = []

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.append(fields(key, self.leading, self.tensor))
        return super().get(self._lacking(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._lacking(key), value)

    def _lacking(self, key: Any) -> Any:
        return tuple(v for name, v in fields(key, self.leading, self.tensor) if name != self.lacks)


def differing(cache: Cache) -> set[str]:
    """The fields in which the first and the last key differ."""
    return {name for (name, a), (_, b) in zip(cache.asked[0], cache.asked[-1], strict=True) if a != b}


def outcome(run: Callable[[], Any]) -> Any:
    """What a call gives: its results with their values and autograd nodes, or its error."""
    try:
        made = run()
    except Exception as error:
        return type(error).__name__, str(error)
    shown = made if isinstance(made, (tuple, list)) else (made,)
    return [
        (type(y), y.dtype, repr(y.tolist()), y.requires_grad, y.grad_fn and y.grad_fn.name())
        for y in shown
        if y is not None
    ]


class Pair(NamedTuple):
    first: Callable[[], Any]
    second: Callable[[], Any]


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


@contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def refuses_determinism(args: Any) -> str | None:
    """The reason why Triton cannot run a call: a spec's rules may look at torch's settings."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return "it is deterministic" if strict else None


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
W = torch.linspace(0.5, 1.5, 16, device=DEVICE)
NORM = replace(SPECS["rms_norm"], unsupported=refuses_determinism)


def norm(x: torch.Tensor = X, w: torch.Tensor = W, backend: str | None = None) -> torch.Tensor:
    made: torch.Tensor = call(
        NORM, backend, x=x.clone().requires_grad_(not x.is_sparse) if x is X else x, w=w, eps=1e-6
    )
    return made


def inside(around: Callable[[], AbstractContextManager[Any]], run: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    def within() -> Any:
        with around():
            return run(*args)

    return within


def triton(x: torch.Tensor = X) -> torch.Tensor:
    return norm(x, backend="triton")


def product() -> torch.Tensor:
    return bagu.ops.matmul(X.clone().requires_grad_(), X)


QUANTIZED = bagu.ops.quantize_int8(X)


def quantized_product() -> torch.Tensor:
    return bagu.ops.w8a16_matmul(X.clone().requires_grad_(), *QUANTIZED, backend="torch")


def flipped(dim: Any) -> Callable[[], Any]:
    return lambda: bagu.ops.transpose(X, 0, dim, backend="torch")


def with_tangent() -> Any:
    with forward_ad.dual_level():
        return triton(forward_ad.make_dual(X + 0, X))


# On a GPU rms_norm runs the same kernel in invariant mode; a product is torch's without the mode.
either = product if GPU else norm
ROUTES = {
    "backend=": Pair(norm, triton) if not GPU else Pair(norm, lambda: norm(backend="torch")),
    "use": Pair(norm, inside(lambda: bagu.ops.use("torch" if GPU else "triton"), norm)),
    "invariant": Pair(either, inside(bagu.ops.invariant, either)),
    "transforms": Pair(lambda: triton(X + 0), lambda: torch.func.grad(lambda x: triton(x).sum())(X + 0)),
    "forward AD": Pair(lambda: triton(X + 0), with_tangent),
    "modes": Pair(triton, inside(Watch, triton)),
    "autocast": Pair(product, inside(lambda: torch.autocast(DEVICE, dtype=torch.bfloat16), product)),
    "grad mode": Pair(inside(torch.no_grad, quantized_product), quantized_product),
    "deterministic": Pair(triton, inside(deterministic, triton)),
    "warns": Pair(inside(lambda: deterministic(True), triton), inside(deterministic, triton)),
    "type": Pair(triton, lambda: triton(X.clone().as_subclass(Looked).requires_grad_())),
    "shape": Pair(norm, lambda: norm(w=W[:9])),
    "dtype": Pair(norm, lambda: norm(w=torch.ones(16, device=DEVICE, dtype=torch.int64))),
    "device": Pair(norm, lambda: norm(w=torch.ones(16, device="cpu" if GPU else "meta"))),
    "layout": Pair(lambda: norm(X + 0), lambda: norm(X.to_sparse())),
    "scalar's type": Pair(flipped(1), flipped(True)),
    "scalar": Pair(flipped(1), flipped(5)),
}  # fmt: skip
# fields of a tensor on a GPU for which a route has a plan; tests below show on a CPU that plans need them
PLANNED = ("stride", "alignment", "lazy", "requires_grad")


@pytest.mark.parametrize("field", [*CALL, *(f for f in (REPLAYED if GPU else ROUTED) if f not in PLANNED), *SCALAR])
def test_a_route_is_found_by_every_field(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if GPU and field == "transforms":
        pytest.skip("a wrapped tensor has no address, so on a GPU its calls are not cached")

    def second(lacks: str | None, pair: Pair) -> tuple[Any, set[str]]:
        caches = [Cache(CALL, REPLAYED if GPU else ROUTED, lacks) for _ in range(4)]
        for spec, cache in zip((NORM, *map(SPECS.get, ("matmul", "w8a16_matmul", "transpose"))), caches, strict=True):
            monkeypatch.setitem(vars(spec), "routes", cache)
        outcome(pair.first)
        got = outcome(pair.second)
        (used,) = [cache for cache in caches if cache.asked]
        return got, differing(used)

    alone, _ = second(None, Pair(ROUTES[field].second, ROUTES[field].second))
    whole, fields_between = second(None, ROUTES[field])
    assert fields_between == {field} and whole == alone
    assert second(field, ROUTES[field])[0] != alone


STORAGE = torch.randn(4 * 40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
ROWS = STORAGE[:128].view(4, 32)


@contextmanager
def on_another_device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "get_device", lambda self: 3)
        yield


PLANS: dict[str, tuple[torch.Tensor, Any, Callable[[], AbstractContextManager[Any]]]] = {
    "shape": (ROWS[:3], 1.0, nullcontext),
    "stride": (STORAGE.as_strided((4, 32), (34, 1)), 1.0, nullcontext),
    "dtype": (ROWS.view(torch.float16).as_strided((4, 32), (32, 1)), 1.0, nullcontext),
    "lazy": (torch._neg_view(ROWS), 1.0, nullcontext),
    "scalar": (ROWS, 2.0, nullcontext),
    # for these the host code does the same and the kernel that Triton compiles differs, or the place where it runs
    "type": (ROWS.as_subclass(torch.nn.Parameter).requires_grad_(False), 1.0, nullcontext),
    "device": (ROWS, 1.0, on_another_device),
    "alignment": (STORAGE[1:129].view(4, 32), 1.0, nullcontext),
    "requires_grad": (ROWS.detach().requires_grad_(), 1.0, nullcontext),
    "scalar's type": (ROWS, 1, nullcontext),
}
BLIND = ("type", "device", "alignment", "requires_grad", "scalar's type")


@pytest.mark.parametrize("field", [*REPLAYED, *SCALAR])
def test_a_plan_is_found_by_every_field(field: str) -> None:
    if GPU and field == "alignment":
        pytest.skip("a launch that assumes another alignment is a fault of the device, which ends the process' context")
    x, scale, around = PLANS[field]
    run, lacking = forward_of("softmax", launcher()), forward_of("softmax", launcher())
    run.kinds, lacking.kinds = Cache((), REPLAYED, None), Cache((), REPLAYED, field)
    want = outcome(lambda: forward_of("softmax", None)(x, scale, None, None))
    for node in (run, lacking):
        for _ in range(3):
            node(ROWS, 1.0, None, None)
    with around():
        got = [outcome(lambda node=node: node(x, scale, None, None)) for node in (run, lacking)]  # type: ignore[misc]
    assert differing(run.kinds) == {field} and got[0] == want
    assert (len(run.kinds), len(lacking.kinds)) == (2, 1)
    assert field in BLIND or got[1] != want


DOUT = STORAGE.flip(0)[:128].view(4, 32)


@pytest.mark.parametrize(
    "field, scale, dout",
    [
        # shape, dtype and device of a gradient, and which inputs need one, follow from the forward
        ("forward", 2.0, DOUT),
        ("stride", 1.0, STORAGE.flip(0).as_strided((4, 32), (34, 1))),
        ("lazy", 1.0, torch._neg_view(DOUT)),
    ],
)
def test_the_plan_of_a_backward_is_found_by_every_field(field: str, scale: float, dout: torch.Tensor) -> None:
    spec, x = SPECS["softmax"], ROWS.detach().requires_grad_()
    module = spec.module("triton")

    def after_another(lacks: str | None, by: Any) -> tuple[Any, Cache]:
        node, cache = Node(spec, "r", module.forward, module.backward, by), Cache(BACKWARD, REPLAYED, lacks)
        assert node.backward is not None
        node.backward.kinds = cache
        run = lambda scale, dout: torch.autograd.grad(node(x, scale, None, None)[0], x, dout)  # noqa: E731
        for _ in range(3 if by else 0):
            run(1.0, DOUT)
        return outcome(lambda: run(scale, dout)), cache

    want = after_another(None, None)[0]
    whole, cache = after_another(None, launcher())
    assert differing(cache) == {field} and whole == want
    assert after_another(field, launcher())[0] != want


def test_the_plan_of_a_backward_after_hooks_is_found_by_the_gradients_that_are_needed() -> None:
    """The two summands of add_rms_norm are not saved: only `wanted` tells which of them need a gradient."""
    spec = SPECS["add_rms_norm"]
    module = spec.module("triton")

    def grads(lacks: str | None) -> tuple[Any, Cache]:
        node, cache = Node(spec, "r", module.forward, module.backward, launcher()), Cache((), REPLAYED, lacks)
        assert node.backward is not None
        node.backward.kinds = cache
        for both in (False, False, False, True):
            x, r = X.clone().requires_grad_(), X.clone().requires_grad_(both)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                y = node(x, r, W, 1e-6)[0]
            made = outcome(lambda: torch.autograd.grad(y, [x, r] if both else [x], X))  # noqa: B023
        return made, cache

    whole, cache = grads(None)
    assert differing(cache) == {"scalar"} and len(whole) == 2 and isinstance(whole, list)
    assert grads("scalar")[0] != whole


def test_a_mode_sees_the_host_code_of_a_replayed_backward() -> None:
    spec, x = SPECS["rms_norm"], X.clone().requires_grad_()
    module = spec.module("triton")
    seen: list[list[str]] = []
    for by in (None, launcher()):
        node = Node(spec, "r", module.forward, module.backward, by)
        for _ in range(3):
            torch.autograd.grad(node(x, W, 1e-6)[0], x, X)
        y = node(x, W, 1e-6)[0]
        with Watch() as watch:
            torch.autograd.grad(y, x, X)
        seen.append(watch.seen)
    assert seen[0] == seen[1] and seen[0]


def test_a_mode_sees_every_call_of_host_code_that_is_replayed_alone() -> None:
    seen: list[list[str]] = []
    host = lambda values: SPECS["relu_squared"].module("triton").forward(values[0])  # noqa: E731
    for run in (lambda x: host([x]), Replayed(host, launcher)):
        with Watch() as watch:
            for _ in range(4):
                run(X)
        seen.append(watch.seen)
    assert seen[0] == seen[1] and seen[0]
