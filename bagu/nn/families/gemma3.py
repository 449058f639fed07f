"""Gemma 3, the text model: norms before and after each sublayer whose gain is 1 + weight, an embedding multiplied by
sqrt(hidden_size), QK norm, and two kinds of layers: a window with one RoPE, and full attention with another.

Checkpoints with a vision tower (model_type gemma3) are refused: families/__init__.py.
"""

from collections.abc import Mapping
from typing import Any

from bagu.machine.hub import WeightsError
from bagu.nn.config import LayerPositions, ModelConfig, Multipliers, NormConfig, Rope
from bagu.nn.families.core import Rule
from bagu.nn.families.decoder import (
    DECODER,
    DENSE,
    FULL,
    QK_NORM,
    QKV,
    SLIDING,
    decoder,
    layer_windows,
    read_act,
    read_decoder,
    write_decoder,
)
from bagu.nn.families.keys import UNUSED, Key, Only, Read
from bagu.nn.families.rope import read_rope_parameters, write_scaling

LAYER = "model.layers.{layer}"
NORMS = (
    Rule("blocks.{layer}.attention_norm.weight", f"{LAYER}.input_layernorm.weight"),
    Rule("blocks.{layer}.attention_post_norm.weight", f"{LAYER}.post_attention_layernorm.weight"),
    Rule("blocks.{layer}.ffn_norm.weight", f"{LAYER}.pre_feedforward_layernorm.weight"),
    Rule("blocks.{layer}.ffn_post_norm.weight", f"{LAYER}.post_feedforward_layernorm.weight"),
)
BASES = {FULL: 1_000_000.0, SLIDING: 10_000.0}
KEYS: dict[str, Key] = {
    **{name: key for name, key in DECODER.items() if name not in ("hidden_act", "original_max_position_embeddings")},
    "num_key_value_heads": Read(int, 4, least=1),
    "head_dim": Read(int, 256, least=1),
    "hidden_activation": Read(str, "gelu_pytorch_tanh"),
    "tie_word_embeddings": Read(bool, True),
    "attention_bias": Read(bool, False),
    "query_pre_attn_scalar": Read(int, 256, least=1),
    "sliding_window": Read(int | None, 4096, least=1),
    "layer_types": Read(list | None, None),
    "sliding_window_pattern": Read(int, 6, least=1),  # of older files, for layer_types
    "rope_local_base_freq": Read(float, None, above=0),  # of older files: the base of layers with a window
    "final_logit_softcapping": Only(None),
    "attn_logit_softcapping": Only(None),
    "use_bidirectional_attention": Only(False, None),
    "cache_implementation": UNUSED,
    "_sliding_window_pattern": UNUSED,  # in files of transformers 5, which have layer_types too
}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    kinds, pattern = hf["layer_types"], hf["sliding_window_pattern"]
    if kinds is None:
        kinds = [SLIDING if (i + 1) % pattern else FULL for i in range(hf["num_hidden_layers"])]
    windows = layer_windows(kinds, hf["num_hidden_layers"], hf["sliding_window"])
    local = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
    ropes = _read_ropes(hf)
    main, some = ropes[FULL], None
    if len(local) == len(kinds):
        main = ropes[SLIDING]
    elif local and ropes[SLIDING] != main:
        some = LayerPositions(layers=local, positions=ropes[SLIDING])
    scalar, bias = hf["query_pre_attn_scalar"], hf["attention_bias"]
    fields = read_decoder(hf, positions=main, ffn=read_act(hf, "hidden_activation")) | {
        "norm": NormConfig(kind="rms", placement="sandwich", eps=float(hf["rms_norm_eps"]), unit_offset=True),
        "multipliers": Multipliers(
            embedding=hf["hidden_size"] ** 0.5, attention=None if scalar == hf["head_dim"] else scalar**-0.5
        ),
    }
    return ModelConfig(**fields, layer_positions=some, windows=windows, qk_norm=True, qkv_bias=bias, out_bias=bias)


def _read_ropes(hf: Mapping[str, Any]) -> dict[str, Rope]:
    """RoPE of each type of layer. In files of transformers 4, `rope_scaling` is that of full attention."""
    given, scaling = hf["rope_parameters"] or {}, hf["rope_scaling"]
    where = "config.json: rope_parameters"
    if given and scaling:
        raise WeightsError(
            "config.json has rope_scaling and rope_parameters", hint="remove rope_scaling, which is the older one"
        )
    if unknown := sorted(given.keys() - BASES.keys()):
        raise WeightsError(f"{where} has {', '.join(map(repr, unknown))}", hint=f"supported: {', '.join(BASES)}")
    if scaling:
        where, given = "config.json: rope_scaling", {FULL: scaling}
    tops = {FULL: hf["rope_theta"], SLIDING: hf["rope_local_base_freq"]}
    ropes = {}
    for kind, base in BASES.items():
        parameters = given.get(kind) or {}
        if not isinstance(parameters, Mapping) or "type" in parameters:
            raise WeightsError(
                f"{where} has {kind} = {parameters!r}", hint="it is an object with rope_type, and without type"
            )
        top = {"rope_theta": tops[kind], "max_position_embeddings": hf["max_position_embeddings"]}
        top["original_max_position_embeddings"] = None
        ropes[kind] = read_rope_parameters(f"{where}.{kind}", parameters, top, base=base)
    return ropes


def write(config: ModelConfig) -> dict[str, Any]:
    some = config.layer_positions
    main = config.positions
    local = main if some is None else some.positions
    if not isinstance(main, Rope) or not isinstance(local, Rope):
        raise WeightsError("the model has layers without RoPE", hint="")
    windows = [config.window(i) for i in range(config.num_layers)]
    nested = {
        kind: {"rope_type": "default", **(write_scaling(rope) or {}), "rope_theta": rope.base}
        for kind, rope in ((FULL, main), (SLIDING, local))
    }
    scale = config.multipliers.attention
    return write_decoder(config, rope={"rope_parameters": nested}, act="hidden_activation") | {
        "query_pre_attn_scalar": config.head_dim if scale is None else round(1 / scale**2),
        "attention_bias": config.qkv_bias,
        "sliding_window": max((w for w in windows if w is not None), default=4096),
        "layer_types": [FULL if w is None else SLIDING for w in windows],
    }


GEMMA3 = decoder(
    "gemma3_text",
    "Gemma3ForCausalLM",
    "Gemma3TextForSequenceClassification",
    read,
    write,
    (*QKV, *QK_NORM, *DENSE),
    keys=KEYS,
    norms=NORMS,
)
