"""Records host code: the tensors it allocates, the kernels it launches on them, and products of two matrices."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bagu.ops.replay.launcher import Launch, Launcher, is_constant, noted_launches
from bagu.ops.replay.plan import Made, Operand, Plan, Pointer, Product, Results, Step

aten = torch.ops.aten
ALLOCATE = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)


def recorded(
    host: Callable[[Sequence[Any]], Results], values: Sequence[Any], launcher: Launcher
) -> tuple[Results, Plan | None]:
    """Run `host(values)`; return its results and a plan of its launches, or None if it cannot be replayed."""
    # the recorder identifies an argument by its object: a tensor that is passed twice gets an object for each argument
    separate = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]
    recorder = _Recorder(separate)
    # below autograd: autograd would wrap views in new tensors that the recorder does not see
    with torch._C._AutoDispatchBelowAutograd(), noted_launches(recorder.work.append), recorder:
        results = host(separate)
    return results, recorder.plan(results, launcher)


class _Recorder(TorchDispatchMode):
    """Follows tensors from inputs and allocations through views to launches and products. No other operation can be
    replayed."""

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__()
        self.tensors = [v for v in values if isinstance(v, torch.Tensor)]  # the inputs, then the allocations
        self.inputs = len(self.tensors)
        self.work: list[Launch | Product] = []
        self.replayable = True
        self._views: list[torch.Tensor] = []  # kept alive, so that an id identifies one tensor
        self._origin = {id(t): i for i, t in enumerate(self.tensors)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in ALLOCATE:
            self._origin[id(out)] = len(self.tensors)
            self.tensors.append(out)
        elif func.is_view:  # `reshape` and `contiguous` count as views but may copy
            for view in out if isinstance(out, (list, tuple)) else (out,):
                self._views.append(view)
                if not torch._C._is_alias_of(view, args[0]):  # type: ignore[attr-defined]
                    self.replayable = False
                elif id(args[0]) in self._origin:
                    self._origin[id(view)] = self._origin[id(args[0])]
        elif func is aten.mm.default:
            a, b = (self._operand(matrix) for matrix in args)
            if a is None or b is None:
                self.replayable = False
            else:
                self.work.append(Product(len(self.tensors) - self.inputs, (a, b)))
                self._origin[id(out)] = len(self.tensors)
                self.tensors.append(out)
        else:
            self.replayable = False
        return out

    def plan(self, results: Results, launcher: Launcher) -> Plan | None:
        """The plan of the recorded launches; None if they cannot be replayed."""
        devices = {t.get_device() for t in self.tensors}
        steps = [self._step(w, launcher) if isinstance(w, Launch) else w for w in self.work]
        products = {w.result for w in self.work if isinstance(w, Product)}
        made = [None if r is None else self._made(r) for r in results]
        lost = any(r is not None and m is None for r, m in zip(results, made, strict=True))
        if not self.replayable or len(devices) != 1 or lost or None in steps:
            return None
        allocations = tuple(
            None if i in products else (tuple(t.shape), t.stride(), t.dtype)
            for i, t in enumerate(self.tensors[self.inputs :])
        )
        return Plan(
            device=devices.pop(),
            inputs=self.inputs,
            allocations=allocations,
            steps=tuple(s for s in steps if s is not None),
            results=tuple(made),
        )

    def _step(self, launch: Launch, launcher: Launcher) -> Step | None:
        """The launch with its tensors as indices; None if one of them is not a followed tensor."""
        direct, args = launcher.direct(launch), []
        for arg in launch.args.values():
            if id(arg) in self._origin:
                origin = self._origin[id(arg)]
                args.append(Pointer(origin, _begin(arg) - _begin(self.tensors[origin])))
            elif is_constant(arg):
                args.append(arg)
            else:
                return None
        return None if direct is None else Step(direct, tuple(args))

    def _operand(self, x: torch.Tensor) -> Operand | None:
        """A matrix of a product; None if it is not a followed tensor, or begins elsewhere than the tensor does."""
        origin = self._origin.get(id(x))
        if origin is None:
            return None
        whole = self.tensors[origin]
        if (x.dtype, _begin(x)) != (whole.dtype, _begin(whole)):
            return None
        same = (x.shape, x.stride()) == (whole.shape, whole.stride())
        return Operand(origin, None if same else (tuple(x.shape), x.stride()))

    def _made(self, result: torch.Tensor) -> Made | None:
        """The allocation that a result is or views; None if it comes from an input or is unknown."""
        origin = self._origin.get(id(result), -1)
        if origin < self.inputs or result.dtype != self.tensors[origin].dtype:
            return None
        whole = self.tensors[origin]
        if (result.shape, result.stride(), _begin(result)) == (whole.shape, whole.stride(), _begin(whole)):
            return Made(origin - self.inputs, None)
        return Made(origin - self.inputs, (tuple(result.shape), result.stride(), int(result.storage_offset())))


def _begin(x: torch.Tensor) -> int:
    """The offset of a tensor in its storage, in bytes."""
    return int(x.storage_offset()) * x.itemsize
