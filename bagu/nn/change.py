"""The ways in which other parts change a model from outside. The model itself has no code for any of them.

    way           changes                                            for
    running_as    how a module's forward runs, for a while           recomputed blocks, CUDA graphs (train/)
    around        what goes into a module, or comes out of it        tensor parallelism, ZeRO-3 (parallel/)
    override      a method of a module                               expert and tensor parallelism (parallel/)
    place         the memory in which a parameter's values lie       flat buffers, shards of tp, ep and ZeRO
    attach        a module that trains with the model                PPO's critic (train/rl/ppo.py)
    with_modules  a copy that has other layers in some places        int8, int4, merged LoRA, adapters (serve/)

Three more are `nn`'s own: lora.py adds adapters, `Linear.quantize` stores a weight in int8, and trace.py records a
forward. A test (tests/nn/test_change.py) finds code of other parts that does one of these without this module.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@contextmanager
def running_as(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, calls of `module` run `forward` instead of its own."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # the attribute of the instance; the method of the class is visible again


def around(
    module: nn.Module, *, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> list[RemovableHandle]:
    """Call `before(module, args)` with the arguments of each call, which it may replace, and `after(module, args,
    output)` with its output. The handles remove them."""
    handles = [] if before is None else [module.register_forward_pre_hook(before)]
    return handles if after is None else [*handles, module.register_forward_hook(after)]


def override(module: nn.Module, **methods: Callable[..., Any]) -> None:
    """Replace methods of one module."""
    for name, method in methods.items():
        setattr(module, name, method)


def place(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Let a parameter be `values`, in their memory; it stays the same parameter for optimizers and hooks."""
    parameter.data = values


def attach(model: nn.Module, name: str, module: nn.Module) -> None:
    """Make `module` a part of the model, which optimizers and checkpoints then contain."""
    model.add_module(name, module)


def detach(model: nn.Module, name: str) -> None:
    """Undo `attach`."""
    del model._modules[name]


def with_modules(model: ModuleT, make: Callable[[str, nn.Module], nn.Module | None]) -> ModuleT:
    """A copy of the model that shares its tensors. `make` gets each module by its name, from the model down, and
    returns the one to use instead; None keeps it, and goes on with the modules inside."""

    def copied(module: nn.Module, name: str) -> nn.Module:
        if (other := make(name, module)) is not None:
            return other
        twin, prefix = copy.copy(module), f"{name}." if name else ""
        twin._modules = {n: None if m is None else copied(m, prefix + n) for n, m in module._modules.items()}
        return twin

    return copied(model, "")  # type: ignore[return-value]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode: no dropout, stored statistics. The mode before is restored."""
    was = model.training
    if was:
        model.eval()
    try:
        yield
    finally:
        if was:
            model.train()
