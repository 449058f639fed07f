"""Typical mistakes of each op as formulas: if an answer's numbers are those of a mistake, it is named. And the cause
that a case is there for, used where no formula fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Args = Mapping[str, Any]


def _softmax(a: Args, *, over: int = -1) -> torch.Tensor:
    from bagu.ops.softmax.spec import reference

    return reference(a["x"].transpose(0, -1), a["scale"], None, None).transpose(0, -1) if over != -1 else reference(**a)


def _layer(
    a: Args, *, eps: float | None = None, over: str = "", bias: bool = True, centre: bool = True
) -> torch.Tensor:
    x, eps = a["x"], a["eps"] if eps is None else eps
    c = x - x.mean(-1, keepdim=True) if centre else x
    n = x.shape[-1] - (over == "n-1")
    var = c.square().sum(-1, keepdim=True) / n
    r = 1 / (var.sqrt() + eps) if over == "outside" else torch.rsqrt(var + eps)
    y = c * r * a["w"]
    return y + a["b"] if bias and a.get("b") is not None else y


def _rope(a: Args, *, sign: float = 1.0, layout: str | None = None) -> torch.Tensor:
    from bagu.ops.rope.spec import Args, reference

    return reference(Args(**{**a, "sin": sign * a["sin"], "layout": layout or a["layout"]}))


def _swap(layout: str) -> str:
    return "interleaved" if layout == "half" else "half"


def _attention(a: Args, **changes: Any) -> torch.Tensor:
    from bagu.ops.attention.spec import Args, reference

    return reference(Args(**{**a, **changes}))[0]


MISTAKES: Mapping[str, Mapping[str, Callable[[Args], Any]]] = {
    "softmax": {
        "formula": lambda a: _softmax(a, over=0),
        "normalize": lambda a: _softmax(a) / _softmax(a).amax(-1, keepdim=True),  # exp(x - max)
        "mask": lambda a: _softmax({**a, "lengths": None if a["lengths"] is None else a["lengths"] + 1}),
    },
    "layer_norm": {
        "eps": lambda a: _layer(a, over="outside"),
        "off_by_one": lambda a: _layer(a, over="n-1"),
        "formula": lambda a: _layer(a, centre=False),
        "factor": lambda a: _layer({**a, "w": torch.ones_like(a["w"])}),
    },
    "rms_norm": {
        "eps": lambda a: _layer(a, over="outside", centre=False),
        "formula": lambda a: _layer(a, centre=True),
        "off_by_one": lambda a: _layer(a, over="n-1", centre=False),
        "ignored": lambda a: _layer({**a, "w": torch.ones_like(a["w"])}, centre=False),
    },
    "rope": {
        "sign": lambda a: _rope(a, sign=-1.0),
        "ignored": lambda a: _rope(a, layout=_swap(a["layout"])),
        "order": lambda a: _rope({**a, "cos": a["sin"], "sin": a["cos"]}),
    },
    "swiglu": {
        "order": lambda a: _gated(a, swap=True),
        "formula": lambda a: _gated(a, gate=torch.sigmoid),
        "factor": lambda a: _gated(a, gate=torch.relu),
    },
    "cross_entropy": {
        "sign": lambda a: -_losses(a),
        "factor": lambda a: _losses(a) / max(1, a["targets"].numel()),
    },
    "matmul": {
        "order": lambda a: a["x"] @ a["w"],
        "ignored": lambda a: a["x"] @ a["w"].mT,
    },
    "attention": {
        "factor": lambda a: _attention(a, scale=1.0),
        "mask": lambda a: _attention(a, causal=not a["causal"]),
        "ignored": lambda a: _attention(a, window=None),
        "off_by_one": lambda a: _attention(a, window=None if a["window"] is None else a["window"] + 1),
    },
}


def _gated(a: Args, *, swap: bool = False, gate: Any = None) -> torch.Tensor:
    g, u = a["x"].chunk(2, -1) if a["up"] is None else (a["x"], a["up"])
    g, u = (u, g) if swap else (g, u)
    return gate(g) * u if gate is not None else g * torch.sigmoid(g) * u


def _losses(a: Args) -> torch.Tensor:
    from bagu.ops.cross_entropy.spec import Args, reference

    return reference(Args(**a))


BY_CASE: Mapping[str, str] = {
    "loud": "overflow", "deep": "overflow", "flipped": "overflow", "faint": "eps", "zero": "eps", "wide_faint": "eps",
    "nan": "special", "inf": "special", "void": "special", "wide_nan": "special", "wide_void": "special",
    "tail_void": "special", "blind": "special", "flat": "special", "outside": "special", "empty": "empty",
    "narrow": "rows", "crowd": "rows", "batched": "rows", "alone": "tail", "wide": "tail", "unaligned": "tail",
    "tail": "tail", "odd": "tail", "ragged": "tail", "padded": "mask", "mixed": "precision", "sharp": "precision",
}  # fmt: skip
