"""The builder of the labs' small decoders."""

from typing import Any

from bagu.nn.config import ModelConfig


def tiny(
    vocab_size: int,
    width: int,
    *,
    heads: int,
    ffn: int,
    max_len: int,
    layers: int = 2,
    kv_heads: int | None = None,
    **more: Any,
) -> ModelConfig:
    """A Llama; a head has width / heads features, the FFN `ffn`. `more` are other fields of ModelConfig."""
    sizes = {"head_dim": width // heads, "num_kv_heads": kv_heads or heads} | more
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=ffn,
        max_len=max_len,
        **sizes,
    )
