"""BERT with its masked-LM head: bidirectional, a norm after each sublayer, token types, a layer before the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagu.nn.config import Learned, ModelConfig, NormConfig
from bagu.nn.families.core import Family, Rule, qkv

__all__ = ["BERT"]


def read(hf: Mapping[str, Any]) -> ModelConfig:
    """`hidden_dropout_prob` is the dropout; that of the attention weights is not known here."""
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
        norm=NormConfig(kind="layer", placement="post", eps=float(hf.get("layer_norm_eps", 1e-12)), bias=True),
        positions=Learned(),
        causal=False,
        qkv_bias=True,
        out_bias=True,
        ffn="gelu",
        ffn_bias=True,
        dropout=float(hf.get("hidden_dropout_prob", 0.1)),
        tie_embeddings=hf.get("tie_word_embeddings", True),
        embedding_norm=True,
        num_token_types=hf.get("type_vocab_size", 2),
        mlm_head=True,
        init_std=float(hf.get("initializer_range", 0.02)),
    )


def write(config: ModelConfig) -> dict[str, Any]:
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


LAYER = "bert.encoder.layer.{layer}"
BERT = Family(
    name="bert",
    architecture="BertForMaskedLM",
    read=read,
    write=write,
    rules=(
        Rule("embedding.weight", "bert.embeddings.word_embeddings.weight"),
        Rule("positions.weight", "bert.embeddings.position_embeddings.weight"),
        Rule("token_types.weight", "bert.embeddings.token_type_embeddings.weight"),
        Rule("embedding_norm.*", "bert.embeddings.LayerNorm.*"),
        Rule(
            "blocks.{layer}.attention.qkv.*",
            tuple(f"{LAYER}.attention.self.{name}.*" for name in ("query", "key", "value")),
            qkv,
        ),
        Rule("blocks.{layer}.attention.out.*", f"{LAYER}.attention.output.dense.*"),
        Rule("blocks.{layer}.attention_norm.*", f"{LAYER}.attention.output.LayerNorm.*"),
        Rule("blocks.{layer}.ffn.up.*", f"{LAYER}.intermediate.dense.*"),
        Rule("blocks.{layer}.ffn.down.*", f"{LAYER}.output.dense.*"),
        Rule("blocks.{layer}.ffn_norm.*", f"{LAYER}.output.LayerNorm.*"),
        Rule("mlm.dense.*", "cls.predictions.transform.dense.*"),
        Rule("mlm.norm.*", "cls.predictions.transform.LayerNorm.*"),
        Rule("head.weight", "cls.predictions.decoder.weight"),
        Rule("mlm.bias", "cls.predictions.bias"),
    ),
    wants={
        "hidden_act": "gelu",
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    },
    unused=(r"bert\.pooler\..*", r"cls\.seq_relationship\..*", r"bert\.embeddings\.position_ids"),
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
)
