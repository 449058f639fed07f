"""Model configurations by name, used by recipes, benchmarks and labs.

Published models have the shapes of their checkpoints; `cpu_*` are small enough for a laptop.
"""

from dataclasses import replace

from bagu.errors import UnknownName
from bagu.nn.config import ModelConfig, NormConfig, Rope
from bagu.nn.position_choices import Learned

_LAYER_NORM = NormConfig(kind="layer", eps=1e-5, bias=True)
_CPU_6M = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=704,
    max_len=256,
    tie_embeddings=True,
)

PRESETS: dict[str, ModelConfig] = {
    "cpu_1m": replace(  # 1M with a vocabulary of 768: for texts of a few hundred words
        _CPU_6M, vocab_size=768, hidden_size=128, num_layers=4, head_dim=32, intermediate_size=384, max_len=512
    ),
    "cpu_6m": _CPU_6M,  # 5.9M: learns a few megabytes of text on two CPU cores in minutes
    "cpu_8m": replace(_CPU_6M, vocab_size=8192, num_layers=8, max_len=4096),  # a variant for inference
    "bert_6m": ModelConfig(
        vocab_size=4096, hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=4, head_dim=64,
        intermediate_size=1024, max_len=256, causal=False, positions=Learned(), ffn="gelu", tie_embeddings=True,
        norm=replace(_LAYER_NORM, placement="post", eps=1e-12), qkv_bias=True, out_bias=True, ffn_bias=True,
        embedding_norm=True, num_token_types=2, mlm_head=True,
    ),
    "gpt2_124m": ModelConfig(  # GPT-2 small with a vocabulary of 32,768
        vocab_size=32768, hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=12, head_dim=64,
        intermediate_size=3072, max_len=1024, ffn="gelu_tanh", positions=Learned(), tie_embeddings=True,
        norm=_LAYER_NORM, qkv_bias=True, out_bias=True, ffn_bias=True,
    ),
    "smollm_135m": ModelConfig(  # SmolLM2-135M
        vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
        intermediate_size=1536, max_len=8192, tie_embeddings=True, positions=Rope(base=100_000.0),
    ),
    "gpt_d20": ModelConfig(  # nanochat's depth 20: 480M
        vocab_size=32768, hidden_size=1280, num_layers=20, num_heads=10, num_kv_heads=10, head_dim=128,
        intermediate_size=5120, max_len=2048, ffn="relu2", qk_norm=True,
    ),
    "qwen3_0_6b": ModelConfig(
        vocab_size=151_936, hidden_size=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128,
        intermediate_size=3072, max_len=40_960, tie_embeddings=True, qk_norm=True, positions=Rope(base=1e6),
        norm=NormConfig(eps=1e-6),
    ),
    "llama_1b": ModelConfig(  # TinyLlama: 1.1B
        vocab_size=32000, hidden_size=2048, num_layers=22, num_heads=32, num_kv_heads=4, head_dim=64,
        intermediate_size=5632, max_len=2048,
    ),
    "llama_8b": ModelConfig(  # Llama 3 8B
        vocab_size=128_256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=14_336, max_len=8192, positions=Rope(base=500_000.0),
    ),
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    UnknownName.check("model preset", name, PRESETS)
    return PRESETS[name]
