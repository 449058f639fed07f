"""RoPE in config.json: `rope_theta` and `rope_scaling`, which transformers 5 writes as one `rope_parameters`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from bagu.nn.config import Llama3Scaling, ModelConfig, Rope, YarnScaling
from bagu.nn.hub import WeightsError

__all__ = ["read_rope", "write_rope"]


def read_rope(hf: Mapping[str, Any], layout: Literal["half", "interleaved"] = "half") -> Rope:
    """Both spellings are read; a scaling that is not known here is refused."""
    p = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = p.get("rope_type", p.get("type", "default"))
    if p.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise WeightsError("config.json turns a part of each head only", hint="no family known here does that")
    base = float(p.get("rope_theta", hf.get("rope_theta", 10000.0)))
    return Rope(base=base, layout=layout, scaling=_read_scaling(kind, p, hf))


def _read_scaling(kind: str, p: Mapping[str, Any], hf: Mapping[str, Any]) -> Llama3Scaling | YarnScaling | None:
    original = p.get("original_max_position_embeddings") or hf["max_position_embeddings"]
    if kind == "default":
        return None
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(p["factor"]),
            low_freq_factor=float(p["low_freq_factor"]),
            high_freq_factor=float(p["high_freq_factor"]),
            original_max_len=original,
        )
    if kind == "yarn":
        return YarnScaling(
            factor=float(p.get("factor") or hf["max_position_embeddings"] / original),
            original_max_len=original,
            beta_fast=float(p.get("beta_fast") or 32),
            beta_slow=float(p.get("beta_slow") or 1),
            attention_factor=p.get("attention_factor"),
            mscale=p.get("mscale"),
            mscale_all_dim=p.get("mscale_all_dim"),
            truncate=p.get("truncate", True),
        )
    raise WeightsError(f"config.json has rope_type {kind!r}", hint="known here: default, llama3, yarn")


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The older spelling, which transformers 4 and 5, vLLM and llama.cpp all read."""
    rope = config.positions
    if not isinstance(rope, Rope):
        raise WeightsError(f"the model has {rope.kind!r} positions, not RoPE", hint="")
    scaling: dict[str, Any] | None = None
    if isinstance(rope.scaling, Llama3Scaling):
        scaling = {"low_freq_factor": rope.scaling.low_freq_factor, "high_freq_factor": rope.scaling.high_freq_factor}
    elif isinstance(rope.scaling, YarnScaling):
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        scaling = {name: value for name in names if (value := getattr(rope.scaling, name)) is not None}
    if rope.scaling is not None and scaling is not None:
        scaling |= {
            "rope_type": rope.scaling.kind,
            "factor": rope.scaling.factor,
            "original_max_position_embeddings": rope.scaling.original_max_len,
        }
    return {"rope_theta": rope.base, "rope_scaling": scaling}
