"""GPT-2: learned positions, LayerNorm before each sublayer, biases everywhere, weights stored [in, out]."""

from collections.abc import Mapping
from typing import Any

from bagu.nn.config import FFNKind, ModelConfig, NormConfig
from bagu.nn.families.core import Family, Rule, conv1d, gpt2_qkv
from bagu.nn.families.keys import DROPOUT, INIT_STD, SHARED, SIZE, UNUSED, Key, Only, Read, refuse_value
from bagu.nn.position_choices import Learned

ACTS: dict[str, FFNKind] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}
KEYS: dict[str, Key] = {
    **SHARED,
    **dict.fromkeys(("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"), SIZE),
    "n_inner": Read(int | None, None, least=1),
    "activation_function": Read(str, "gelu_new"),
    "layer_norm_epsilon": Read(float, 1e-5, above=0),
    "resid_pdrop": DROPOUT,
    "tie_word_embeddings": Read(bool, True),
    "initializer_range": INIT_STD,
    "scale_attn_weights": Only(True),
    "scale_attn_by_inverse_layer_idx": Only(False),
    "is_causal": Only(True),
    # dropout that bagu does not support, the head of another class, a length that n_positions repeats
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "is_decoder", "n_ctx", "n_special", "predict_special_tokens"), UNUSED),
    **dict.fromkeys(("summary_activation", "summary_first_dropout", "summary_proj_to_labels"), UNUSED),
    **dict.fromkeys(("summary_type", "summary_use_proj"), UNUSED),
    "reorder_and_upcast_attn": UNUSED,  # fp32 scores, as always in bagu
}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    """`resid_pdrop` is the dropout."""
    act, heads = hf["activation_function"], hf["n_head"]
    if act not in ACTS:
        refuse_value("config.json", "activation_function", act, ", ".join(ACTS))
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["n_embd"],
        num_layers=hf["n_layer"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hf["n_embd"] // heads,
        intermediate_size=hf["n_inner"] or 4 * hf["n_embd"],
        max_len=hf["n_positions"],
        norm=NormConfig(kind="layer", placement="pre", eps=float(hf["layer_norm_epsilon"]), bias=True),
        positions=Learned(),
        qkv_bias=True,
        out_bias=True,
        ffn=ACTS[act],
        ffn_bias=True,
        dropout=float(hf["resid_pdrop"]),
        tie_embeddings=hf["tie_word_embeddings"],
        init_std=float(hf["initializer_range"]),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    acts = {kind: act for act, kind in reversed(ACTS.items())}
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_len,
        "layer_norm_epsilon": config.norm.eps,
        "activation_function": acts.get(config.ffn, config.ffn),
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
    }


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    classifier="GPT2ForSequenceClassification",
    keys=KEYS,
    read=read,
    write=write,
    rules=(
        Rule("embedding.weight", "transformer.wte.weight"),
        Rule("positions.weight", "transformer.wpe.weight"),
        Rule("norm.*", "transformer.ln_f.*"),
        Rule("head.weight", "lm_head.weight"),
        Rule("score.weight", "score.weight"),
        Rule("blocks.{layer}.attention_norm.*", "transformer.h.{layer}.ln_1.*"),
        Rule("blocks.{layer}.attention.qkv.*", "transformer.h.{layer}.attn.c_attn.*", gpt2_qkv),
        Rule("blocks.{layer}.attention.out.*", "transformer.h.{layer}.attn.c_proj.*", conv1d),
        Rule("blocks.{layer}.ffn_norm.*", "transformer.h.{layer}.ln_2.*"),
        Rule("blocks.{layer}.ffn.up.*", "transformer.h.{layer}.mlp.c_fc.*", conv1d),
        Rule("blocks.{layer}.ffn.down.*", "transformer.h.{layer}.mlp.c_proj.*", conv1d),
    ),
    prefix="transformer.",
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    unused=(r".*\.attn\.(masked_)?bias",),  # the causal mask, a buffer in old versions of transformers
    copies={"lm_head.weight": "transformer.wte.weight"},
)
