"""LoRA: train W + (alpha / rank) * B A instead of W, where A is [rank, in] and B is [out, rank].

Paper: https://arxiv.org/abs/2106.09685

`add_lora` freezes the model and adds a pair (A, B) to each selected linear. B starts at zero, so the outputs are
unchanged until training. `merge` adds the pairs to the weights and removes them. A fused linear (qkv) gets one pair.

With base="int8", W is int8 with a scale per row (nn/int8.py). QLoRA does the same with 4 bits:
https://arxiv.org/abs/2305.14314
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from bagu.errors import ArgumentError
from bagu.nn.config import ModelConfig
from bagu.nn.init import draw
from bagu.nn.linear import Linear, linears_of
from bagu.nn.model import Transformer
from bagu.nn.moe import Router

Base = Literal["int8"]  # how the frozen weights are stored, if not in the dtype of the model


def add_lora(
    model: Transformer, *, rank: int, alpha: float, targets: str = ".*", seed: int = 0, base: Base | None = None
) -> list[str]:
    """Add a pair of rank `rank` to every linear but routers whose full name matches `targets`, and freeze all other
    parameters except a score head, which starts at zero and has nothing to keep.

    Names are those of `model.named_modules()`: ".*(qkv|out)" is attention, ".*" is every linear. Returns the names.
    A router is a parameter to PEFT, not a module, and the requests of a served batch cannot differ in it.
    `base` "int8" rounds the weights of all linears, chosen or not. Embeddings, norms, routers and experts keep their
    dtype: a rounded router may choose another expert.
    """
    if rank < 1:
        raise ArgumentError(f"LoRA of rank {rank}", hint="use a rank of 1 or more; 8 to 64 is common")
    chosen = _chosen(model, targets)
    for name, linear in chosen.items():
        if linear.lora_a is not None:
            raise ArgumentError(f"{name} has LoRA already", hint="merge it first")
        if linear.gain is not None:
            raise ArgumentError(
                f"{name} has weight normalization, which cannot be merged with LoRA",
                hint="create the model with weight_norm=False",
            )
    model.requires_grad_(False)
    if model.score is not None:
        model.score.requires_grad_(True)
    for name, linear in chosen.items():
        w = linear.weight
        a = draw((rank, linear.in_features), f"{name}.lora_a", seed) / linear.in_features**0.5
        linear.lora_a = nn.Parameter(a.to(w.device, w.dtype))
        linear.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank, device=w.device, dtype=w.dtype))
        linear.lora_scale = alpha / rank
    if base == "int8":
        for linear in linears_of(model).values():
            if linear.gain is None and not isinstance(linear, Router):
                linear.quantize()
    return list(chosen)


def check_targets(targets: str) -> None:
    """Raise if `targets` is not a regular expression."""
    try:
        re.compile(targets)
    except (re.error, OverflowError, RecursionError) as error:
        raise ArgumentError(
            f"the LoRA targets {targets!r} are not a regular expression: {error}",
            hint='".*" is every linear, ".*(qkv|out)" is attention; escape special characters',
        ) from error


def lora_parameters(config: ModelConfig, *, rank: int, targets: str = ".*") -> int:
    """The number of parameters that `add_lora` adds to a model of this configuration."""
    chosen = _chosen(Transformer(config, device="meta"), targets)
    return sum(rank * (m.in_features + m.out_features) for m in chosen.values())


def has_lora(model: Transformer) -> bool:
    return any(isinstance(m, Linear) and m.lora_a is not None for m in model.modules())


@contextmanager
def without_lora(model: Transformer) -> Iterator[None]:
    """Inside, the model computes with its base weights alone: the pairs are taken out, and put back at the end."""
    pairs = [(linear, linear.lora_a, linear.lora_b) for linear in _adapted(model).values()]
    for linear, _, _ in pairs:
        linear.lora_a = linear.lora_b = None
    try:
        yield
    finally:
        for linear, a, b in pairs:
            linear.lora_a, linear.lora_b = a, b


@torch.no_grad()
def merge(model: Transformer) -> None:
    """Add every pair to its weight, remove it, dequantize int8 weights, and make all parameters trainable again."""
    int8 = [linear for linear in linears_of(model).values() if linear.weight_scale is not None]
    for linear in {*_adapted(model).values(), *int8}:
        linear.merge()
    model.requires_grad_(True)


def lora_state(model: Transformer) -> dict[str, torch.Tensor]:
    """The pairs by name; peft.py writes and reads them as files."""
    return {name: p.detach() for name, p in model.named_parameters() if name.endswith((".lora_a", ".lora_b"))}


def _chosen(model: Transformer, targets: str) -> dict[str, Linear]:
    """The linears whose full name matches `targets`, at least one, and no router."""
    check_targets(targets)
    linears = {name: m for name, m in linears_of(model).items() if not isinstance(m, Router)}
    chosen = {name: m for name, m in linears.items() if re.fullmatch(targets, name)}
    if not chosen:
        example = ", ".join(list(linears)[:4])
        raise ArgumentError(f"no linear of the model matches {targets!r}", hint=f"an example of a name is {example}")
    return chosen


def _adapted(model: Transformer) -> dict[str, Linear]:
    found = {name: m for name, m in linears_of(model).items() if m.lora_a is not None}
    if not found:
        raise ArgumentError("the model has no LoRA", hint="call add_lora first")
    return found
