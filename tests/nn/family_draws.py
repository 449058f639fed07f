"""Random config.json files: values for every key of transformers' config classes, and for related keys.

`VALUES[key]` is (supported, odd): values that bagu must load where transformers does, and values that transformers may
take and bagu may refuse, wrong types included. A value can be a function of the file so far and the generator, for keys
whose meaning depends on others. A file is a family's `BASE` with some keys replaced, so most keys are absent most of
the time and their defaults are compared too.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

from bagu.nn.families.keys import SHARED

__all__ = ["BASE", "EXTRA", "LENGTH", "VALUES", "Draw", "draw_file"]

LENGTH = 24  # tokens of the longest compared document
Hf = dict[str, Any]


def _layer_types(hf: Hf, rng: random.Random) -> list[str]:
    default = None if hf["model_type"] == "smollm3" else 4096
    windows = hf.get("use_sliding_window") is True and hf.get("sliding_window", default) is not None
    kinds = ["full_attention", *(["sliding_attention"] if windows else [])]
    return [rng.choice(kinds) for _ in range(int(hf["num_hidden_layers"]))]


def _layer_types_without_window(hf: Hf, rng: random.Random) -> list[str]:
    return ["sliding_attention"] * int(hf["num_hidden_layers"])


def _too_few_layer_types(hf: Hf, rng: random.Random) -> list[str]:
    return _layer_types(hf, rng)[1:]


def _first_layer(hf: Hf, rng: random.Random) -> list[int]:
    return [0] if int(hf["num_hidden_layers"]) > 1 else []  # at least one layer must have experts


def _every_second(hf: Hf, rng: random.Random) -> int:
    return 2 if int(hf["num_hidden_layers"]) > 1 and not hf.get("mlp_only_layers") else 1


def _one_dense(hf: Hf, rng: random.Random) -> int:
    return 1 if int(hf["num_hidden_layers"]) > 1 else 0


def _groups(hf: Hf, rng: random.Random) -> int:
    return min(2, hf["n_group"]) if type(hf["n_group"]) is int else 1


def _mixed_layer_types(hf: Hf, rng: random.Random) -> list[str]:
    return [rng.choice(("full_attention", "sliding_attention")) for _ in range(int(hf["num_hidden_layers"]))]


def _rope_flags(hf: Hf, rng: random.Random) -> list[int]:
    return [rng.choice((0, 1)) for _ in range(int(hf["num_hidden_layers"]))]


def _too_few_flags(hf: Hf, rng: random.Random) -> list[int]:
    return _rope_flags(hf, rng)[1:]


def _heads(hf: Hf, rng: random.Random) -> int:
    return int(hf["num_attention_heads"])


def _rope_dim(hf: Hf, rng: random.Random) -> int:
    return int(hf["qk_rope_head_dim"])


FLAGS = ([True, False], [None, "true"])
ANY_FLAG = ([True, False], [])
EPS = ([1e-6, 0.01, 0.3], [0.0, -1.0, 1, "1e-6"])
DROPOUT = ([0.0, 0.3], [])
TOKEN = ([None, 0, 3], [])
WIDTH = ([24, 40], [0, 24.0, "24", None])
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    # the base class
    "architectures": ([None, ["SomeModel"]], []),
    "chunk_size_feed_forward": ([0, 1], []),
    "dtype": (["float32", "bfloat16", None], []),
    "torch_dtype": (["float16", "float32"], []),
    "id2label": ([None, {"0": "a", "1": "b", "2": "c"}], []),
    "label2id": ([None, {"a": 0, "b": 1, "c": 2}], []),
    "is_encoder_decoder": ([False], [True]),
    "output_hidden_states": ANY_FLAG,
    "problem_type": ([None, "regression"], []),
    "return_dict": ANY_FLAG,
    "transformers_version": ([None, "4.30.0", "5.22.2"], []),
    "bos_token_id": TOKEN,
    "eos_token_id": ([None, 2, [1, 2]], []),
    "pad_token_id": TOKEN,
    "use_cache": ANY_FLAG,
    "tie_word_embeddings": FLAGS,
    "initializer_range": ([0.02, 0.5, 1.0], [None]),
    "add_cross_attention": ([False], [True]),
    # decoders
    "vocab_size": ([61, 64], [61.0, "61"]),
    "hidden_size": ([16, 32], [16.0, None]),
    "num_hidden_layers": ([1, 2, 3], ["2"]),
    "num_attention_heads": ([2, 4], [2.0]),
    "num_key_value_heads": ([1, 2, None], [3, 8, "2", 2.0]),
    "head_dim": ([8, 12], [None, 7, "8"]),
    "intermediate_size": WIDTH,
    "max_position_embeddings": ([32, 64], [64.0]),
    "rms_norm_eps": EPS,
    "hidden_act": (["silu", "gelu", "gelu_pytorch_tanh"], ["relu", "gelu_new", "swish", "tanh"]),
    "attention_bias": FLAGS,
    "attention_dropout": DROPOUT,
    "mlp_bias": FLAGS,
    "pretraining_tp": ([1, 2], []),
    "use_sliding_window": ([True, True, False], [None, "true"]),
    "sliding_window": ([3, 8, None], [0, -3, "4", 4.0]),
    "max_window_layers": ([0, 1, 2, 28], [None, "1", -1]),
    "layer_types": (
        [None, _layer_types],
        [_too_few_layer_types, _layer_types_without_window, ["attention"] * 2, ["chunked_attention"] * 2, "full"],
    ),
    # experts
    "moe_intermediate_size": ([8, 12], [None]),
    "num_experts": ([4, 8], [2.0]),
    "num_experts_per_tok": ([1, 2, 3], [None, 9]),
    "norm_topk_prob": FLAGS,
    "mlp_only_layers": ([None, [], _first_layer, [7]], [[0, 1, 2], "0"]),
    "decoder_sparse_step": ([1, _every_second], [0, 3, None]),
    "router_aux_loss_coef": ([0.0, 0.5], []),
    "output_router_logits": ANY_FLAG,
    # DeepSeek
    "n_shared_experts": ([1, 2], [0, None]),
    "n_routed_experts": ([8, 16], [4]),
    "routed_scaling_factor": ([1.0, 2.5], [1, "2"]),
    "kv_lora_rank": ([8, 12], [0]),
    "q_lora_rank": ([None, 8, 12], [0]),
    "qk_rope_head_dim": ([4, 8], [3]),
    "qk_nope_head_dim": ([4, 8], [None]),
    "v_head_dim": ([6, 8], [None]),
    "n_group": ([1, 2, 4], [3, None]),
    "topk_group": ([1, _groups], [5, None]),
    "first_k_dense_replace": ([0, _one_dense], [9, None]),
    "rope_interleave": ([True, False, None], ["true"]),
    "num_mtp_layers": ([0, 1, 2], []),
    # GPT-2
    "n_positions": ([32, 64], []),
    "n_embd": ([16, 32], [16.0]),
    "n_layer": ([1, 2, 3], []),
    "n_head": ([2, 4], []),
    "n_inner": ([None, 20], [0, "20"]),
    "activation_function": (["gelu_new", "gelu", "gelu_pytorch_tanh", "relu2"], ["relu", "silu", "gelu_10"]),
    "resid_pdrop": DROPOUT,
    "embd_pdrop": DROPOUT,
    "attn_pdrop": DROPOUT,
    "layer_norm_epsilon": EPS,
    "summary_type": (["cls_index", "mean"], []),
    "summary_use_proj": ANY_FLAG,
    "summary_activation": ([None, "tanh"], []),
    "summary_proj_to_labels": ANY_FLAG,
    "summary_first_dropout": DROPOUT,
    "scale_attn_weights": ([True], [False]),
    "scale_attn_by_inverse_layer_idx": ([False], [True]),
    "reorder_and_upcast_attn": ANY_FLAG,
    # BERT
    "hidden_dropout_prob": DROPOUT,
    "attention_probs_dropout_prob": DROPOUT,
    "type_vocab_size": ([1, 2, 3], [0, None]),
    "layer_norm_eps": EPS,
    "classifier_dropout": ([None, 0.3], []),
    "is_decoder": ([False], [True]),
    # keys of none of these classes
    "is_causal": ([True], [False]),
    "attn_implementation": (["eager", "sdpa"], []),
    "max_length": ([20], []),
    "gradient_checkpointing": ([False], []),
    "pruned_heads": ([{}], [{"0": [0]}]),
    "some_new_switch": ([], [True]),
    "scoring_func": (["sigmoid"], ["softmax"]),
    "topk_method": (["noaux_tc"], ["greedy"]),
    "moe_layer_freq": ([1], [2]),
    "position_embedding_type": (["absolute"], ["relative_key"]),
    "n_ctx": ([32], []),
    "num_local_experts": ([8], []),
    "num_nextn_predict_layers": ([0, 1], []),
    # Gemma 3
    "hidden_activation": (["gelu_pytorch_tanh", "gelu", "silu"], ["relu", "tanh"]),
    "query_pre_attn_scalar": ([8, 5, 256], [0, "8"]),
    "final_logit_softcapping": ([None], [3.0]),
    "attn_logit_softcapping": ([None], [3.0]),
    "use_bidirectional_attention": ([False], [True]),
    "sliding_window_pattern": ([1, 2, 6], [0]),
    "rope_local_base_freq": ([100.0, 30], ["1e4"]),
    # Phi-3
    "original_max_position_embeddings": ([4, 4096], []),
    # SmolLM3
    "no_rope_layers": ([None, _rope_flags], [_too_few_flags, "1"]),
    "no_rope_layer_interval": ([1, 2, 4], [0]),
    # Granite
    "embedding_multiplier": ([12.0, 3, 0.5], ["12"]),
    "attention_multiplier": ([0.25, 1], [0.0, "1"]),
    "residual_multiplier": ([0.22, 2], ["1"]),
    "logits_scaling": ([8.0, 3], [0.0, "8"]),
    # gpt-oss
    "swiglu_alpha": ([1.702, 1.0], ["1"]),
    "swiglu_limit": ([7.0, 0.5], [0.0, "7"]),
    "router_jitter_noise": ([0.0, 0.1], []),
}  # fmt: skip
DECODER_SIZES: Hf = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = DECODER_SIZES | {"num_key_value_heads": 2}
BASE: dict[str, Hf] = {
    "llama": DECODER_SIZES,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 8},
    "qwen3_moe": GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "deepseek_v3": DECODER_SIZES | {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 8, "first_k_dense_replace": 0, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6,
    },
    "gpt2": {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bert": {k: v for k, v in DECODER_SIZES.items() if k != "initializer_range"},
    "roberta": DECODER_SIZES,
    "gemma3_text": GROUPED | {"head_dim": 8, "num_hidden_layers": 3, "sliding_window": 5},
    "phi3": GROUPED | {"pad_token_id": 0},
    "olmo2": DECODER_SIZES,
    "smollm3": GROUPED | {"num_hidden_layers": 3, "pad_token_id": 0},
    "mixtral": GROUPED | {"num_local_experts": 4, "head_dim": 8},  # transformers needs head_dim for a scaled RoPE
    "granite": DECODER_SIZES,
    "gpt_oss": GROUPED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
}  # fmt: skip
# values specific to a family, and keys that its files have but its class does not
OWN: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    "mistral": {"num_key_value_heads": ([1, 2], [None, 3, 8])},
    "qwen3_moe": {"num_key_value_heads": ([1, 2], [None, 3, 8])},
    "qwen2": {"attention_bias": ([True], [False])},
    "deepseek_v3": {
        "attention_bias": ([False], [True]),
        "head_dim": ([_rope_dim], [16]),
        "num_key_value_heads": ([_heads, None], [1]),
        "num_experts_per_tok": ([1, 2], [3, None, 9]),  # there may be only one group of two experts
    },
    "bert": {"hidden_act": (["gelu"], ["relu", "gelu_new"])},
    "roberta": {
        "hidden_act": (["gelu"], ["relu", "gelu_new"]),
        "pad_token_id": ([0, 1, 3], [None, -1, 60]),
    },
    "gemma3_text": {
        "num_key_value_heads": ([1, 2], [3, "2"]),
        "sliding_window": ([3, 8], [0, None]),
        "layer_types": ([None, _mixed_layer_types], [_too_few_layer_types, "full"]),
        "num_hidden_layers": ([2, 3], []),
    },
    "smollm3": {"num_key_value_heads": ([1, 2, None], [3])},
    "mixtral": {"num_key_value_heads": ([1, 2], [3, 8]), "num_local_experts": ([4, 8], []), "num_experts": ([4], [])},
    "gpt_oss": {
        "num_key_value_heads": ([1, 2], [3]),
        "sliding_window": ([3, 8], [0, None]),
        "layer_types": ([None, _mixed_layer_types], [_too_few_layer_types, "full"]),
        "num_local_experts": ([4, 8], []),
        "hidden_act": (["silu", "gelu"], []),
        "attn_implementation": (["eager"], []),
        "attention_bias": ([True, False], []),
    },
    "phi3": {"num_key_value_heads": ([1, 2, None], [3])},
}
AROUND = (
    "attn_implementation",
    "gradient_checkpointing",
    "max_length",
    "pruned_heads",
    "some_new_switch",
    "torch_dtype",
)
EXTRA: dict[str, tuple[str, ...]] = {
    "llama": ("is_causal", "sliding_window", "layer_types"),
    "mistral": ("is_causal", "use_sliding_window", "layer_types"),
    "qwen2": ("is_causal", "head_dim", "attention_bias"),
    "qwen3": ("is_causal",),
    "qwen3_moe": ("is_causal", "head_dim", "num_local_experts", "max_window_layers", "layer_types"),
    "deepseek_v3": (
        "is_causal", "head_dim", "scoring_func", "topk_method", "moe_layer_freq", "num_nextn_predict_layers",
    ),
    "gpt2": ("is_causal", "n_ctx", "hidden_size", "num_attention_heads", "num_hidden_layers"),
    "bert": ("position_embedding_type", "is_causal"),
    "roberta": ("position_embedding_type", "is_causal"),
    "gemma3_text": ("is_causal", "sliding_window_pattern", "rope_local_base_freq"),
    "phi3": ("is_causal",),
    "olmo2": ("is_causal", "sliding_window"),
    "smollm3": ("is_causal",),
    "mixtral": ("is_causal", "layer_types"),
    "granite": ("is_causal", "sliding_window"),
    "gpt_oss": ("is_causal",),
}  # fmt: skip
LATE = (
    "layer_types",
    "no_rope_layers",
    "head_dim",
    "decoder_sparse_step",
    "topk_group",
    "first_k_dense_replace",
)  # keys whose values here depend on others
# odd for any value if the class of the family does not have the key
FOREIGN = {
    "llama": {"sliding_window", "layer_types"},
    "mistral": {"use_sliding_window", "layer_types"},
    "qwen3_moe": {"layer_types"},
    "bert": {"is_causal"},
    "roberta": {"is_causal"},
    "olmo2": {"sliding_window"},
    "granite": {"sliding_window"},
    "mixtral": {"layer_types"},
}


@dataclass
class Draw:
    family: str
    hf: Hf
    drawn: set[str]  # keys that differ from BASE, including those inside the RoPE dicts
    odd: set[str]  # those of them that bagu may refuse


def draw_file(family: str, fields: set[str], seed: int) -> Draw:
    """File number `seed` of a family whose config class has these fields."""
    rng = random.Random(f"{family} {seed}")
    draw = Draw(family, {"model_type": family, **BASE[family]}, set(), set())
    keys = sorted((fields | set(EXTRA[family]) | set(AROUND)) - {"rope_parameters"})
    rng.shuffle(keys)
    keys.sort(key=lambda k: (k not in BASE[family], k in LATE))
    odd_left = rng.choice((0, 0, 0, 1, 1, 2))
    for key in keys:
        if rng.random() > (0.2 if key in SHARED else 0.5):
            continue
        supported, odd = OWN.get(family, {}).get(key) or VALUES[key]
        foreign = key in FOREIGN.get(family, ())
        use_odd = odd_left > 0 and (foreign or odd) and rng.random() < 0.3
        if (foreign or not supported) and not use_odd:
            continue
        value = rng.choice([*supported, *odd] if foreign else odd if use_odd else supported)
        draw.hf[key] = value(draw.hf, rng) if callable(value) else value
        draw.drawn.add(key)
        if use_odd:
            draw.odd.add(key)
            odd_left -= 1
    if family == "gemma3_text":
        _draw_two_ropes(draw, rng)
    elif "rope_parameters" in fields:
        _draw_rope(draw, rng, odd=odd_left > 0)
    if family == "deepseek_v3":
        draw.hf.setdefault("num_key_value_heads", draw.hf["num_attention_heads"])
    return draw


def _draw_two_ropes(draw: Draw, rng: random.Random) -> None:
    """Gemma 3: a RoPE per type of layer, in the layout of transformers 4 or of 5."""
    if rng.random() < 0.4:
        draw.hf["rope_theta"] = rng.choice([100.0, 50])
        draw.drawn.add("rope_theta")
    kinds: list[Hf | None] = [
        None, {"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ]  # fmt: skip
    place = rng.choice((None, "rope_scaling", "rope_parameters"))
    if place == "rope_scaling":
        draw.hf[place] = copy.deepcopy(rng.choice(kinds))
    elif place == "rope_parameters":
        draw.hf[place] = {
            kind: copy.deepcopy(rng.choice(kinds))
            for kind in ("full_attention", "sliding_attention") if rng.random() < 0.8
        }  # fmt: skip
    if place:
        draw.drawn.add(place)


def _draw_rope(draw: Draw, rng: random.Random, *, odd: bool) -> None:
    """RoPE in the layout of transformers 4, of 5, or in both."""
    places = rng.choice(
        ([], [], ["rope_scaling"], ["rope_parameters"], ["rope_parameters"], ["rope_parameters", "rope_scaling"])
    )
    for place in places:
        draw.hf[place] = _rope_dict(draw, rng, odd=odd)
        draw.drawn.add(place)
    for key, values in (
        ("rope_theta", [100.0, 50, 10000.0]),
        ("original_max_position_embeddings", [4, 16, 256]),
        ("partial_rotary_factor", [1.0, None, *([0.5] if odd else [])]),
    ):
        if draw.family in ("phi3", "gpt_oss") and key != "rope_theta":  # they have defaults of their own
            continue
        if rng.random() < 0.35:
            draw.hf[key] = rng.choice(values)
            draw.drawn.add(key)
            inside = {draw.hf[place].get(key) for place in places if draw.hf[place]} - {None, draw.hf[key]}
            if draw.hf[key] == 0.5 or (inside and key != "partial_rotary_factor"):
                draw.odd.add(key)
    if draw.family == "phi3" and rng.random() < 0.5:
        draw.hf["partial_rotary_factor"] = rng.choice([1.0, 0.5])


def _rope_dict(draw: Draw, rng: random.Random, *, odd: bool) -> Hf | None:
    kinds = ["default", "linear", "llama3", "llama3", "yarn", "yarn", "yarn", None, *(["dynamic"] if odd else [])]
    kind = rng.choice(["default", None, *(["yarn", "llama3"] if odd else [])] if draw.family == "phi3" else kinds)
    if draw.family == "phi3" and kind not in ("default", None):
        draw.odd.add("rope_type")
    if kind is None:
        return rng.choice((None, {}))
    rope: Hf = {rng.choice(("rope_type", "rope_type", "type")): kind}

    def maybe(key: str, values: list[Any], odd_values: list[Any], p: float = 0.5) -> None:
        if rng.random() < p:
            use_odd = odd and rng.random() < 0.25
            rope[key] = rng.choice(odd_values if use_odd else values)
            if use_odd:
                draw.odd.add(key)

    maybe("rope_theta", [100.0, 30, 1e4], [None, "1e4", -3.0])
    if kind != "default":
        maybe("factor", [4.0, 2, 8.0, 1.0], [None, 0.5, -2.0, "4"], p=1.0)
    if kind in ("llama3", "yarn"):
        maybe("original_max_position_embeddings", [4, 16, 64, 256, 1000], [None, 0, 16.0], p=0.5)
    if kind == "llama3":
        maybe("low_freq_factor", [1.0, 0.5, 1], [None, 6.0, -1.0, 0.0], p=1.0)
        maybe("high_freq_factor", [4.0, 2.0, 3], [None, 0.1], p=1.0)
        maybe("mscale_all_dim", [0.7], [0.7], p=0.3 if odd else 0.0)
    if kind == "yarn":
        maybe("beta_fast", [4.0, 32, None, 2.0, 1.0], [0.2, -1.0])
        maybe("beta_slow", [0.5, 1, None], [5.0, -1.0])
        maybe("attention_factor", [None, 1.5, 2], ["1"], p=0.25)
        maybe("mscale", [None, 0.8, 1.0, 0.5, 0], ["1"], p=0.7)
        maybe("mscale_all_dim", [None, 0.6, 1.0, 2.0, 0], ["1"], p=0.7)
        maybe("truncate", [True, False], [None])
    if odd and kind == "dynamic":
        draw.odd.add("rope_type")
    if odd and rng.random() < 0.2:
        rope["type"] = rng.choice(("default", "yarn", "linear"))
        draw.odd.add("type")
    if kind == "llama3" and "mscale_all_dim" in rope:
        draw.odd.add("mscale_all_dim")
    draw.drawn |= rope.keys()
    return rope
