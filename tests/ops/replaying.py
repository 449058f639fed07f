"""Record and replay calls of ops, for tests: a launcher for the interpreter, a call's inputs, results and plans."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from bagu.ops.call.node import Node
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import Case, OpSpec, Streams
from bagu.ops.contract.layouts import lay_out
from bagu.ops.replay.launcher import Direct, Launch, Launcher, cuda_launcher
from bagu.ops.replay.plan import Plan
from tests.ops.points import DEVICE

GPU = torch.cuda.is_available()


class Interpreted:
    """A launcher for Triton's interpreter: it makes a tensor of one element at each address."""

    def ready(self) -> bool:
        return True

    def current_device(self) -> int:
        return -1

    def stream(self, device: int) -> int:
        return 0

    def empty(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype).fill_(1)  # CUDA's function does not fill memory with NaN

    def filled(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    def direct(self, launch: Launch) -> Direct | None:
        dtypes = [a.dtype if isinstance(a, torch.Tensor) else None for a in launch.args.values()]
        fn, grid, options = launch.fn, launch.grid, launch.options

        def run(stream: int, *args: Any) -> None:
            given = [a if d is None else _at(a, d) for a, d in zip(args, dtypes, strict=True)]
            fn.run(*given, grid=grid, warmup=False, **options)

        return Direct(run, (), ())


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    if address == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


def launcher() -> Launcher:
    found = cuda_launcher() if GPU else Interpreted()
    assert found is not None, "torch or Triton lacks a private function that launches are repeated with"
    return found


def drawn(spec: OpSpec, case: Case, dtype: torch.dtype, layout: str, seed: int) -> dict[str, Any]:
    """A call's inputs; another seed is other values of the same kind, elsewhere in memory."""
    args = spec.cast(case, spec.inputs(case, Streams(spec.name, case.name, seed)), dtype)
    return {
        k: lay_out(v.to(DEVICE), layout, i).requires_grad_(
            k in spec.grads and k not in case.frozen and v.is_floating_point()
        )
        if isinstance(v, torch.Tensor)
        else v
        for i, (k, v) in enumerate(args.items())
    }


def ran(spec: OpSpec, run: Callable[..., Any], args: dict[str, Any], seed: int) -> list[torch.Tensor]:
    """Every result and every gradient of a call."""
    results = run(*(args[n] for n in spec.names))
    flows = [r for r, o in zip(results, spec.sig.results, strict=False) if o.name in spec.differentiable]
    leaves = [args[g] for g in spec.grads if args[g] is not None and args[g].requires_grad]
    if not leaves:
        return list(results)
    torch.manual_seed(seed)
    douts = [torch.randn_like(f, memory_format=torch.contiguous_format) for f in flows]
    return [*results, *torch.autograd.grad(flows, leaves, douts)]


def plans(run: Any) -> list[Plan]:
    """What a node, or the backward of one, replays."""
    return [calls.plan for calls in run.kinds.values() if calls.plan is not None]


def forward_of(op: str, replaying: Launcher | None) -> Node:
    """An op's Triton forward."""
    return Node(SPECS[op], "forward", SPECS[op].module("triton").forward, None, replaying)
