"""`replace(model)`: give torch.nn's layers in any model the forward of this package, in place.

Only the class of a module changes. Its parameters, buffers, hooks, tied weights and state dict are the same objects as
before, and an optimizer made earlier stays valid.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from bagu.nn.drop_in import attention, encoder, layers
from bagu.nn.drop_in.norms import recognized, recognized_class

LAYERS: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Linear: layers.Linear,
    nn.Conv2d: layers.Conv2d,
    nn.BatchNorm2d: layers.BatchNorm2d,
    nn.LayerNorm: layers.LayerNorm,
    nn.RMSNorm: layers.RMSNorm,
    nn.GroupNorm: layers.GroupNorm,
    nn.MultiheadAttention: attention.MultiheadAttention,
    nn.TransformerEncoderLayer: encoder.TransformerEncoderLayer,
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A module whose forward was replaced."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Left:
    """A module with parameters that was left alone, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """What `replace` did. Print it for a summary."""

    replaced: tuple[Change, ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        kinds = Counter((c.before, c.after) for c in self.replaced)
        lines = [f"replaced {n} x {before} by {after}" for (before, after), n in kinds.items()]
        lines += [f"left {m.name or 'the model itself'} ({m.kind}): {m.reason}" for m in self.left]
        return "\n".join(lines) or "replaced nothing: the model has no layers"


def replace(model: nn.Module, *, layers: Mapping[type[nn.Module], type[nn.Module]] = LAYERS) -> Replacement:
    """Replace the layers of `model` in place, and say which were replaced and which were left, with a reason.

    `layers` maps a class of torch.nn to its replacement; `{**LAYERS, nn.Linear: Int8Linear}` multiplies in int8. A
    class of its own that computes x / rms(x) * weight, such as LlamaRMSNorm, is recognized by its numbers.
    """
    replaced, left = [], []
    for name, module in list(_outside_attention(model)):
        kind = type(module)
        after = layers.get(kind)
        reason = _reason_to_leave(module) if after is not None else None
        if after is None and nn.RMSNorm in layers and recognized(module):
            after, reason = recognized_class(kind), _reason_to_leave(module)
        if after is not None and reason is None:
            module.__class__ = after
            replaced.append(Change(name=name, before=kind.__name__, after=f"bagu {after.__name__}"))
        elif next(module.parameters(recurse=False), None) is not None and kind not in layers.values():
            left.append(Left(name=name, kind=kind.__name__, reason=reason or _unknown(module, layers)))
    return Replacement(replaced=tuple(replaced), left=tuple(left))


def _outside_attention(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules, each once, except those inside a MultiheadAttention: it reads their weights itself."""
    inside = {id(m) for a in model.modules() if isinstance(a, nn.MultiheadAttention) for m in list(a.modules())[1:]}
    return ((name, m) for name, m in model.named_modules() if id(m) not in inside)


def _reason_to_leave(module: nn.Module) -> str | None:
    """Why a module of a known class keeps its forward; None if it can be replaced."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        return "its parameters are not initialized yet: run the model once, then replace"
    if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
        return f"padding_mode is {module.padding_mode!r}; only zeros are supported"
    return None


def _unknown(module: nn.Module, layers: Mapping[type[nn.Module], type[nn.Module]]) -> str:
    if parametrize.is_parametrized(module):
        return "its weight is parametrized (weight norm or the like), which changes its class"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by torch.jit"
    parent = next((k for k in layers if isinstance(module, k)), None)
    if parent is not None:
        return f"a subclass of {parent.__name__} whose forward may differ"
    if isinstance(module, nn.Embedding):
        return "torch's embedding is already a copy at full bandwidth"
    return "no layer of bagu has its numbers"
