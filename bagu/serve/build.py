"""The parts of an engine, built from the model and the configuration."""

from dataclasses import replace
from typing import Any

from bagu.errors import ArgumentError
from bagu.nn.model import Transformer
from bagu.parallel.inference import local_heads
from bagu.serve.adapters.layers import AdapterWeights, GroupedLinear, StackedLinear
from bagu.serve.config import EngineConfig
from bagu.serve.images.encoder import ImageEncoder
from bagu.serve.kv.groups import layer_groups
from bagu.serve.kv.paged import PagedKV, cache_dtype
from bagu.serve.kv.pool import Pool
from bagu.serve.limits import SchedulerConfig
from bagu.serve.runner import Runner
from bagu.serve.speculation.draft_model import DraftModel, DraftSource, check_draft
from bagu.serve.speculation.ngram import PromptLookup
from bagu.serve.speculation.speculator import Speculator
from bagu.serve.tp.group import Ranks
from bagu.serve.tp.lead import LeadRunner
from bagu.types import Tokenizer


def eos_ids(model: Transformer, tokenizer: Tokenizer | None, config: EngineConfig) -> tuple[int, ...]:
    """The end-of-text tokens of the tokenizer and of generation_config.json that are in the vocabulary."""
    own = () if tokenizer is None else (tokenizer.eos_id,)
    return tuple(id for id in dict.fromkeys((*own, *config.generation.eos_ids)) if id < model.config.vocab_size)


def with_attention(model: Transformer, config: EngineConfig) -> Transformer:
    """The model with the attention that the engine's options ask for, which may be other than it was trained with."""
    own, window = model.config, config.window
    if config.attention is None and window is None:
        return model
    if own.attention == "linear":
        raise ArgumentError("engine: attention or window for linear attention", hint="it has no keys to choose from")
    changes: dict[str, Any] = {} if config.attention is None else {"attention": config.attention}
    if window is not None:
        if own.mla is not None or (config.attention or own.attention) == "blocks":
            what = "MLA" if own.mla is not None else "attention to blocks"
            raise ArgumentError(
                f"engine: window = {window} for a model with {what}", hint="use a model with softmax attention"
            )
        changes["windows"] = tuple(min(own.window(i) or window, window) for i in range(own.num_layers))
    return model.with_attention(replace(own, **changes))


def scheduler_config(model: Transformer, config: EngineConfig, pool: Pool, stops: tuple[int, ...]) -> SchedulerConfig:
    """`stops` are the end-of-text tokens."""
    return SchedulerConfig(
        max_model_len=pool.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_tokens(model.embedding.weight.device.type),
        eos_ids=stops,
    )


def build_runner(
    model: Transformer, config: EngineConfig, pool: Pool, ranks: Ranks | None, images: ImageEncoder | None = None
) -> Runner:
    table = model.embedding.weight
    spare = int(table.is_cuda)  # one more block, in no block table: the padding rows of CUDA graphs write to it
    dtype = cache_dtype(config.kv_dtype, table.dtype)
    heads, num_blocks = local_heads(model.config, config.tp), pool.num_blocks + spare
    groups = layer_groups(model.config, config.attention_sinks)
    kv = PagedKV(heads, num_blocks, pool.block_size, device=table.device, dtype=dtype, groups=groups)
    if ranks is not None:
        return LeadRunner(model, kv, config, pool.max_model_len, ranks)
    linear = StackedLinear if table.is_cuda else GroupedLinear
    weights = AdapterWeights(model, linear) if config.adapter_slots else None
    return Runner(model, kv, config, pool.max_model_len, adapters=weights, images=images)


def build_speculator(
    model: Transformer, tokenizer: Tokenizer | None, config: EngineConfig, pool: Pool, draft: DraftSource | None
) -> Speculator | None:
    """None without speculative decoding. `draft` is the model that `config.speculative` names, if that is a path."""
    if config.speculative is None:
        return None
    if config.draft_model is None:
        return Speculator(PromptLookup(), config.speculative_tokens, always=config.speculative_always)
    if draft is None:
        raise ArgumentError(
            f"engine: speculative = {config.speculative!r}, and no draft model was passed",
            hint="pass it as Engine(..., draft=DraftSource(model, tokenizer)), or use speculative='ngram'",
        )
    check_draft(model, tokenizer, draft)
    proposer = DraftModel(draft.model, config, pool)
    return Speculator(proposer, config.speculative_tokens, always=config.speculative_always)
