"""SmolLM3: a Llama in which every fourth layer has no positions (NoPE)."""

from collections.abc import Mapping
from typing import Any

from bagu.nn.config import LayerPositions, ModelConfig, Rope
from bagu.nn.families.decoder import (
    DECODER,
    DENSE,
    FULL,
    QKV,
    SLIDING,
    decoder,
    layer_windows,
    read_decoder,
    write_decoder,
    write_windows,
)
from bagu.nn.families.keys import UNUSED, Key, Read, refuse_value
from bagu.nn.families.rope import read_rope
from bagu.nn.position_choices import NoPositions

KEYS: dict[str, Key] = {
    **DECODER,
    "num_key_value_heads": Read(int | None, 4, least=1),
    "head_dim": Read(int, None, least=1),
    "tie_word_embeddings": Read(bool, True),
    "attention_bias": Read(bool, False),
    "mlp_bias": Read(bool, False),
    "use_sliding_window": Read(bool, False),
    "sliding_window": Read(int | None, None, least=1),
    "layer_types": Read(list | None, None),
    "no_rope_layers": Read(list | None, None),  # 1 for a layer with RoPE, 0 for one without
    "no_rope_layer_interval": Read(int, 4, least=1),
    "max_window_layers": UNUSED,
    "pretraining_tp": UNUSED,
}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    num_layers, rope, interval = hf["num_hidden_layers"], hf["no_rope_layers"], hf["no_rope_layer_interval"]
    if rope is None:
        rope = [int((i + 1) % interval != 0) for i in range(num_layers)]
    if len(rope) < num_layers or any(type(one) is not int for one in rope):
        refuse_value("config.json", "no_rope_layers", rope, f"0 or 1 for each of {num_layers} layers")
    without = tuple(i for i in range(num_layers) if not rope[i])
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    kinds = hf["layer_types"]
    if kinds is None:
        kinds = [SLIDING if window is not None and i in without else FULL for i in range(num_layers)]
    fields, bias = read_decoder(hf, positions=read_rope(hf, base=2_000_000.0)), hf["attention_bias"]
    some = None
    if len(without) == num_layers:
        fields["positions"] = NoPositions()
    elif without:
        some = LayerPositions(layers=without, positions=NoPositions())
    return ModelConfig(
        **fields,
        layer_positions=some,
        windows=layer_windows(kinds, num_layers, window),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=hf["mlp_bias"],
    )


def write(config: ModelConfig) -> dict[str, Any]:
    some, layers = config.layer_positions, range(config.num_layers)
    without = () if some is None else some.layers
    if not isinstance(config.positions, Rope):
        without = tuple(layers)
    rope: dict[str, Any] | None = None if isinstance(config.positions, Rope) else {}
    windows = {name: value for name, value in write_windows(config).items() if name != "max_window_layers"}
    return (
        write_decoder(config, rope=rope)
        | windows
        | {
            "no_rope_layers": [int(i not in without) for i in layers],
            "attention_bias": config.qkv_bias,
            "mlp_bias": config.ffn_bias,
        }
    )


SMOLLM3 = decoder(
    "smollm3", "SmolLM3ForCausalLM", "SmolLM3ForSequenceClassification", read, write, (*QKV, *DENSE), keys=KEYS
)
