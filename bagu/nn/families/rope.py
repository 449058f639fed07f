"""RoPE in config.json: `rope_theta` and `rope_scaling`, which transformers 5 writes as one `rope_parameters`.

Both layouts are read with the precedence of transformers 5: `rope_scaling` before `rope_parameters`, which is then
ignored. Versions 4 and 5 disagree on files that set a value twice, and those are refused: `type` with a different
`rope_type`, and `rope_theta` or `original_max_position_embeddings` at the top with a different value inside.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from bagu.machine.hub import WeightsError
from bagu.nn.config import LongRopeScaling, ModelConfig, Rope, YarnScaling
from bagu.nn.families.keys import Key, Keys, Only, Read, Required, resolve
from bagu.nn.position_choices import LinearScaling, Llama3Scaling

ROPE: dict[str, Key] = {  # at the top of config.json; None is an absent key
    "rope_theta": Read(float, None, above=0),
    "rope_scaling": Read(dict | None, None),
    "rope_parameters": Read(dict | None, None),
    "partial_rotary_factor": Only(1.0, None),
    "original_max_position_embeddings": Read(int, None, least=1),
}
OPTIONAL = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
TYPES: dict[str, Keys] = {  # the keys of each type in rope_scaling or rope_parameters, besides the common ones
    "default": {},
    "linear": {"factor": Required(float, above=0)},
    "llama3": {name: Required(float, above=0) for name in ("factor", "low_freq_factor", "high_freq_factor")},
    "yarn": {
        "factor": Required(float | None, above=0),  # null is the ratio of the two lengths
        **{name: Read(float | None, None) for name in OPTIONAL},
        "truncate": Read(bool, True),
    },
    "longrope": {
        "short_factor": Required(list),
        "long_factor": Required(list),
        "factor": Read(float | None, None, above=0),  # null is the ratio of the two lengths
        "attention_factor": Read(float | None, None),
    },
}
USUAL = ("default", "linear", "llama3", "yarn")


def read_rope(
    hf: Mapping[str, Any],
    layout: Literal["half", "interleaved"] = "half",
    *,
    base: float = 10000.0,
    types: Collection[str] = USUAL,
) -> Rope:
    """The values of `ROPE` as a Rope; an unsupported type, or a key that its type does not have, is refused. `base` is
    the family's default."""
    where = "rope_scaling" if hf["rope_scaling"] else "rope_parameters"
    return read_rope_parameters(f"config.json: {where}", hf[where] or {}, hf, layout, base=base, types=types)


def read_rope_parameters(
    owner: str,
    given: Mapping[str, Any],
    hf: Mapping[str, Any],
    layout: Literal["half", "interleaved"] = "half",
    *,
    base: float,
    types: Collection[str] = USUAL,
) -> Rope:
    """The Rope of the parameters `given`. `hf` has the values at the top of config.json."""
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in types:
        raise WeightsError(f"{owner} has rope_type = {kind!r}", hint=f"supported: {', '.join(types)}")
    common: dict[str, Key] = {
        "rope_type": Only(kind),
        "type": Only(kind),
        "rope_theta": Read(float, None, above=0),
        "partial_rotary_factor": Only(1.0),
    }
    if "partial_rotary_factor" in hf:  # a family that reads it
        common["partial_rotary_factor"] = Read(float, None, above=0)
    length: dict[str, Key] = {}
    if kind in ("llama3", "yarn", "longrope"):
        length = {"original_max_position_embeddings": Read(int, None, least=1)}
    values = resolve(owner, given, {**common, **length, **TYPES[kind]})
    return Rope(
        base=float(_single("rope_theta", hf, values, base)),
        dim=_read_dim(hf, values),
        layout=layout,
        scaling=_read_scaling(kind, values, hf),
    )


def _read_dim(hf: Mapping[str, Any], values: Mapping[str, Any]) -> int | None:
    """The number of features that RoPE rotates, for a family that reads partial_rotary_factor; None is all."""
    if "partial_rotary_factor" not in hf:
        return None
    head_dim = hf["head_dim"] or hf["hidden_size"] // hf["num_attention_heads"]
    dim = int(head_dim * _single("partial_rotary_factor", hf, values, 1.0))
    return None if dim == head_dim else dim


def _single(name: str, hf: Mapping[str, Any], inside: Mapping[str, Any], default: Any) -> Any:
    """The value of a key that may be at the top of config.json or in the parameters of RoPE."""
    given = [value for value in (hf[name], inside[name]) if value is not None]
    if len(given) == 2 and given[0] != given[1]:
        raise WeightsError(
            f"config.json has {name} = {given[0]!r} at the top and {given[1]!r} in the parameters of RoPE",
            hint="versions 4 and 5 of transformers use different ones: remove one",
        )
    return given[0] if given else default


def _read_scaling(
    kind: str, values: Mapping[str, Any], hf: Mapping[str, Any]
) -> LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=float(values["factor"]))
    longest = hf["max_position_embeddings"]
    original: int = _single("original_max_position_embeddings", hf, values, longest)
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(values["factor"]),
            low_freq_factor=float(values["low_freq_factor"]),
            high_freq_factor=float(values["high_freq_factor"]),
            original_max_len=original,
        )
    factor = longest / original if values["factor"] is None else values["factor"]
    if kind == "longrope":
        return LongRopeScaling(
            factor=float(factor),
            original_max_len=original,
            short_factors=tuple(values["short_factor"]),
            long_factors=tuple(values["long_factor"]),
            attention_factor=values["attention_factor"],
        )
    return YarnScaling(
        factor=float(factor),
        original_max_len=original,
        beta_fast=float(values["beta_fast"] or 32),
        beta_slow=float(values["beta_slow"] or 1),
        attention_factor=values["attention_factor"],
        mscale=values["mscale"],
        mscale_all_dim=values["mscale_all_dim"],
        truncate=values["truncate"],
    )


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The older format, which transformers 4 and 5, vLLM and llama.cpp all read."""
    rope = config.positions
    if not isinstance(rope, Rope):
        raise WeightsError(f"the model has {rope.kind!r} positions, not RoPE", hint="")
    return {"rope_theta": rope.base, "rope_scaling": write_scaling(rope)}


def write_scaling(rope: Rope) -> dict[str, Any] | None:
    """The value of `rope_scaling`."""
    if rope.scaling is None:
        return None
    scaling: dict[str, Any] = {"rope_type": rope.scaling.kind, "factor": rope.scaling.factor}
    if isinstance(rope.scaling, LinearScaling):
        return scaling
    scaling["original_max_position_embeddings"] = rope.scaling.original_max_len
    if isinstance(rope.scaling, Llama3Scaling):
        names: tuple[str, ...] = ("low_freq_factor", "high_freq_factor")
    elif isinstance(rope.scaling, LongRopeScaling):
        scaling |= {"short_factor": list(rope.scaling.short_factors), "long_factor": list(rope.scaling.long_factors)}
        names = ("attention_factor",)
    else:
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
    return scaling | {name: value for name in names if (value := getattr(rope.scaling, name)) is not None}
