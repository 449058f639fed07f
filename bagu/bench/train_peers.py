"""The same training step with other libraries, for the benchmark. Each is written as its users write it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from bagu.bench.train_shapes import Shape
from bagu.errors import BaguError
from bagu.nn.config import ModelConfig, Rope

Implementation = Callable[[Shape, torch.device, torch.dtype], AbstractContextManager[Callable[[], float]]]


def llama_config(config: ModelConfig) -> Any:
    """The transformers config of the same model, if it is a Llama."""
    from transformers import LlamaConfig

    rope, plain = config.positions, config.ffn == "swiglu" and config.norm.kind == "rms" and not config.qk_norm
    if not isinstance(rope, Rope) or not plain or config.moe is not None or config.mla is not None:
        raise BaguError("the transformers peer supports only Llama shapes", hint="leave the peer out")
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_len,
        tie_word_embeddings=config.tie_embeddings,
        use_cache=False,
    )


@contextmanager
def _transformers(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, compiled: bool
) -> Iterator[Callable[[], float]]:
    """LlamaForCausalLM with SDPA, its own loss, fused AdamW on the parameters in their dtype, and clipping."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(llama_config(shape.model)).to(dtype)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if len(set(shape.lengths)) > 1:
        raise BaguError("the transformers peer needs documents of equal length", hint="leave the peer out")
    rows, length = len(shape.lengths), shape.lengths[0]
    ids = torch.randint(shape.model.vocab_size, (rows, length), device=device)
    run = torch.compile(model) if compiled else model

    def one_step() -> float:
        optimizer.zero_grad()
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.item())

    yield one_step


def _eager(shape: Shape, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Callable[[], float]]:
    return _transformers(shape, device, dtype, compiled=False)


def _compiled(shape: Shape, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Callable[[], float]]:
    return _transformers(shape, device, dtype, compiled=True)


PEERS: dict[str, Implementation] = {"transformers": _eager, "transformers-compile": _compiled}
