"""Models without memory for their weights: built on many ranks, of which each keeps a part.

`with hollow():` makes parameters that have shape, dtype and device but no storage. Whoever divides the model asks a
`Values` for one parameter at a time and keeps what the rank needs, so that no rank ever has the whole model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

Values = Callable[[str], torch.Tensor]  # the whole value of a parameter by its name in the model, on the CPU


@contextmanager
def hollow() -> Iterator[None]:
    """Inside, parameters lose their memory as soon as a module has them: one at a time exists."""

    def release(_: nn.Module, __: str, p: Any) -> None:
        if isinstance(p, nn.Parameter):
            p.untyped_storage().resize_(0)

    handle = register_module_parameter_registration_hook(release)
    try:
        yield
    finally:
        handle.remove()


def is_hollow(p: torch.Tensor) -> bool:
    """Whether a parameter has no memory yet."""
    return p.numel() > 0 and p.untyped_storage().nbytes() == 0


def value_of(name: str, p: torch.Tensor, values: Values | None) -> torch.Tensor:
    """The value of a parameter: its own, or the one that `values` has for a hollow one."""
    if values is None or not is_hollow(p):
        return p.detach()
    return values(name).to(p.device, p.dtype)
