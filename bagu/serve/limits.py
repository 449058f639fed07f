"""The scheduler's limits, and the check that a request can run within them."""

from dataclasses import dataclass

from bagu.errors import ArgumentError
from bagu.serve.kv.blocks import Blocks
from bagu.serve.request import Request, Unservable


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step, with vLLM's names."""

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        minimum = {"max_model_len": 1, "max_num_seqs": 1, "max_num_batched_tokens": self.max_num_seqs}
        for name, low in minimum.items():
            value = getattr(self, name)
            if value < low:
                why = " (max_num_seqs: one token per sequence)" if name == "max_num_batched_tokens" else ""
                raise ArgumentError(f"scheduler: {name} = {value}", hint=f"{name} is {low}{why} or more")


def check_servable(request: Request, config: SchedulerConfig, blocks: Blocks) -> None:
    """Raise Unservable if the request cannot run even with the whole pool to itself."""
    sampling = request.sampling
    prompt, total = len(request.prompt), len(request.prompt) + sampling.max_tokens
    need = blocks.max_blocks(prompt + max(sampling.max_tokens - 1, 0))
    asked = f"a prompt of {prompt} tokens and max_tokens {sampling.max_tokens}"
    if total > config.max_model_len:
        raise Unservable(
            f"{asked} make {total} tokens, more than max_model_len = {config.max_model_len}",
            hint=f"shorten the prompt, or ask for at most {max(0, config.max_model_len - prompt)} tokens",
            param="max_tokens",
        )
    if need > blocks.num_blocks:
        raise Unservable(
            f"{asked} need {need} KV blocks of {blocks.block_size} tokens, and the pool has {blocks.num_blocks}",
            hint="ask for fewer tokens, or start the engine with a larger KV pool",
            param="max_tokens",
        )
    if sampling.n > config.max_num_seqs:
        raise Unservable(
            f"n = {sampling.n}, and {config.max_num_seqs} choices can run at once",
            hint="ask for fewer, or raise max_num_seqs (bagu serve --max-num-seqs)",
            param="n",
        )
