"""Put another implementation in place of an op, for as long as a `with` lasts: a learner's answer, an experiment.

    with bagu.ops.swap("rms_norm", module) as placed:    # module.forward(x=…, w=…, eps=…) -> y
        train()
    print(placed.calls)

It must agree with the op's spec first, on every small case in fp32. Calls that name a backend, that run inside
`use(...)`, in invariant mode, under torch.compile or another transform keep bagu's own. The backward is that of the
torch backend, which computes what it needs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from bagu.ops.contract.core import OpSpec, check

SMALL = 1 << 16  # elements of the largest input of a case that is checked

placed: dict[str, Placed] = {}  # by the name of the op


class Placed:
    """An implementation in place of an op, and how often it was called."""

    def __init__(self, spec: OpSpec, module: Any) -> None:
        self.spec, self.module, self.calls = spec, module, 0
        self._apply = _function(self).apply

    def supports(self, args: Mapping[str, Any]) -> bool:
        """Whether the module computes this call; `module.supports(args)` says so if it is there."""
        supports: Callable[[Mapping[str, Any]], bool] | None = getattr(self.module, "supports", None)
        return supports is None or supports(args)

    def __call__(self, values: Any, pointers: Any = ()) -> Any:
        self.calls += 1
        return self._apply(*values)

    @property
    def name(self) -> str:
        return f"bagu.ops.{self.spec.name}"

    def forward(self, values: Any) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            out = self.module.forward(**dict(zip(self.spec.names, values, strict=True)))
        return tuple(out) if isinstance(out, tuple | list) else (out,)


def _function(mine: Placed) -> Any:
    """The autograd.Function: the module's forward, the torch backend's gradients."""
    spec = mine.spec

    def forward(ctx: Any, *values: Any) -> Any:
        ctx.values = values
        results = mine.forward(values)
        ctx.mark_non_differentiable(
            *(r for r, o in zip(results, spec.sig.outputs, strict=True) if o.name in spec.constant)
        )
        return results

    def backward(ctx: Any, *douts: Any) -> Any:
        given = [
            v.detach().requires_grad_(n) if isinstance(v, torch.Tensor) else v
            for v, n in zip(ctx.values, ctx.needs_input_grad, strict=True)
        ]
        with torch.enable_grad():
            outputs = spec.apply(spec.torch_backend.forward, dict(zip(spec.names, given, strict=True)))[
                : len(spec.sig.outputs)
            ]
        flows = [(y, d) for y, d in zip(outputs, douts, strict=True) if y.requires_grad and d is not None]
        wanted = [v for v in given if isinstance(v, torch.Tensor) and v.requires_grad]
        grads = iter(torch.autograd.grad([y for y, _ in flows], wanted, [d for _, d in flows]))
        return tuple(next(grads) if isinstance(v, torch.Tensor) and v.requires_grad else None for v in given)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"{spec.name}_swapped", (torch.autograd.Function,), members)


@contextmanager
def swap(name: str, module: Any) -> Iterator[Placed]:
    """Run calls of the op `name` by `module.forward`, which takes the op's arguments by name and returns its outputs.

    Raises ConformanceError if it does not agree with the spec.
    """
    from bagu.ops.catalogue import spec as spec_of

    spec = spec_of(name)
    mine = Placed(spec, module)
    conform(mine)
    placed[name] = mine
    spec.routes.clear()
    try:
        yield mine
    finally:
        del placed[name]
        spec.routes.clear()


def conform(mine: Placed) -> None:
    """Raise ConformanceError if the module disagrees with the spec at a small case that it supports."""
    from dataclasses import replace

    from bagu.ops.contract.core import Streams

    spec = replace(mine.spec, grads=(), twins={}, saves=())

    def run(**args: Any) -> Any:
        out = mine.forward([args[n] for n in spec.names])
        return out[0] if len(spec.sig.outputs) == 1 else out

    for case in (c for c in spec.cases if not c.bench):
        drawn = spec.inputs(case, Streams(spec.name, case.name))
        large = max(v.numel() for v in drawn.values() if isinstance(v, torch.Tensor)) > SMALL
        if not large and mine.supports(drawn):
            check(spec, case, torch.float32, run, backend="torch")
