"""BERT, with its masked-LM head or without a head (BertModel): bidirectional, a norm after each sublayer."""

from collections.abc import Mapping
from typing import Any

from bagu.nn.config import ModelConfig, NormConfig
from bagu.nn.families.core import Family, Rule, qkv
from bagu.nn.families.keys import DROPOUT, INIT_STD, SHARED, SIZE, UNUSED, Key, Only, Read
from bagu.nn.position_choices import Learned

POOLER = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")  # in Google's multilingual files
KEYS: dict[str, Key] = {
    **SHARED,
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), SIZE),
    **dict.fromkeys(("intermediate_size", "max_position_embeddings"), SIZE),
    "type_vocab_size": Read(int, 2, least=1),
    "layer_norm_eps": Read(float, 1e-12, above=0),
    "hidden_dropout_prob": DROPOUT,
    "tie_word_embeddings": Read(bool, True),
    "initializer_range": INIT_STD,
    "hidden_act": Only("gelu"),
    "is_decoder": Only(False),
    "position_embedding_type": Only("absolute"),
    # dropout that bagu does not support, and the heads of other classes
    **dict.fromkeys(("attention_probs_dropout_prob", "classifier_dropout", "directionality"), UNUSED),
    **{f"pooler_{name}": UNUSED for name in POOLER},
}


def read_encoder(hf: Mapping[str, Any]) -> ModelConfig:
    """`hidden_dropout_prob` is the dropout."""
    heads = hf["num_attention_heads"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hf["hidden_size"] // heads,
        intermediate_size=hf["intermediate_size"],
        max_len=hf["max_position_embeddings"],
        norm=NormConfig(kind="layer", placement="post", eps=float(hf["layer_norm_eps"]), bias=True),
        positions=Learned(),
        causal=False,
        qkv_bias=True,
        out_bias=True,
        ffn="gelu",
        ffn_bias=True,
        dropout=float(hf["hidden_dropout_prob"]),
        tie_embeddings=hf["tie_word_embeddings"],
        embedding_norm=True,
        num_token_types=hf["type_vocab_size"],
        mlm_head=True,
        init_std=float(hf["initializer_range"]),
    )


def write_encoder(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_len,
        "type_vocab_size": config.num_token_types,
        "layer_norm_eps": config.norm.eps,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
    }


def encoder_rules(prefix: str) -> tuple[Rule, ...]:
    """The names of everything below the head."""
    layer = f"{prefix}.encoder.layer.{{layer}}"
    return (
        Rule("embedding.weight", f"{prefix}.embeddings.word_embeddings.weight"),
        Rule("positions.weight", f"{prefix}.embeddings.position_embeddings.weight"),
        Rule("token_types.weight", f"{prefix}.embeddings.token_type_embeddings.weight"),
        Rule("embedding_norm.*", f"{prefix}.embeddings.LayerNorm.*"),
        Rule(
            "blocks.{layer}.attention.qkv.*",
            tuple(f"{layer}.attention.self.{name}.*" for name in ("query", "key", "value")),
            qkv,
        ),
        Rule("blocks.{layer}.attention.out.*", f"{layer}.attention.output.dense.*"),
        Rule("blocks.{layer}.attention_norm.*", f"{layer}.attention.output.LayerNorm.*"),
        Rule("blocks.{layer}.ffn.up.*", f"{layer}.intermediate.dense.*"),
        Rule("blocks.{layer}.ffn.down.*", f"{layer}.output.dense.*"),
        Rule("blocks.{layer}.ffn_norm.*", f"{layer}.output.LayerNorm.*"),
    )


BERT = Family(
    name="bert",
    architecture="BertForMaskedLM",
    headless="BertModel",
    keys=KEYS,
    read=read_encoder,
    write=write_encoder,
    rules=(
        *encoder_rules("bert"),
        Rule("mlm.dense.*", "cls.predictions.transform.dense.*"),
        Rule("mlm.norm.*", "cls.predictions.transform.LayerNorm.*"),
        Rule("head.weight", "cls.predictions.decoder.weight"),
        Rule("mlm.bias", "cls.predictions.bias", tied=True),
        Rule("mlm.bias", "cls.predictions.decoder.bias", tied=False),
    ),
    prefix="bert.",
    unused=(r"bert\.pooler\..*", r"cls\.seq_relationship\..*", r"bert\.embeddings\.position_ids"),
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    spares={"cls.predictions.bias": "cls.predictions.decoder.bias"},
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
)
