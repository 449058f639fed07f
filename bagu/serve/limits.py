"""The scheduler's limits, and the check that a request can run within them."""

from dataclasses import dataclass

from bagu.errors import ArgumentError
from bagu.serve.request import Request, Unservable


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step, with vLLM's names."""

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    eos_ids: tuple[int, ...] = ()
    window: int | None = None  # widest sliding window; None if a layer has full attention and so needs all positions

    def __post_init__(self) -> None:
        minimum = {"max_model_len": 1, "max_num_seqs": 1, "max_num_batched_tokens": self.max_num_seqs, "window": 1}
        for name, low in minimum.items():
            value = getattr(self, name)
            if value is not None and value < low:
                why = " (max_num_seqs: one token per sequence)" if name == "max_num_batched_tokens" else ""
                raise ArgumentError(f"scheduler: {name} = {value}", hint=f"{name} is {low}{why} or more")

    def dead_blocks(self, computed: int, block_size: int) -> int:
        """Number of leading blocks outside the window of every token from position `computed` on: a token attends to
        at most `window - 1` earlier positions."""
        return 0 if self.window is None else max(0, computed - self.window + 1) // block_size

    def max_blocks(self, positions: int, block_size: int) -> int:
        """The most blocks that a sequence of `positions` positions holds at one time, advancing token by token."""
        blocks = -(-positions // block_size)
        return blocks if self.window is None else min(blocks, (self.window + block_size - 2) // block_size + 1)


def check_servable(request: Request, config: SchedulerConfig, *, num_blocks: int, block_size: int) -> None:
    """Raise Unservable if the request cannot run even with the whole pool to itself."""
    sampling = request.sampling
    prompt, total = len(request.prompt), len(request.prompt) + sampling.max_tokens
    need = config.max_blocks(prompt + max(sampling.max_tokens - 1, 0), block_size)
    asked = f"a prompt of {prompt} tokens and max_tokens {sampling.max_tokens}"
    if total > config.max_model_len:
        raise Unservable(
            f"{asked} make {total} tokens, more than max_model_len = {config.max_model_len}",
            hint=f"shorten the prompt, or ask for at most {max(0, config.max_model_len - prompt)} tokens",
            param="max_tokens",
        )
    if need > num_blocks:
        raise Unservable(
            f"{asked} need {need} KV blocks of {block_size} tokens, and the pool has {num_blocks}",
            hint="ask for fewer tokens, or start the engine with a larger KV pool",
            param="max_tokens",
        )
    if sampling.n > config.max_num_seqs:
        raise Unservable(
            f"n = {sampling.n}, and {config.max_num_seqs} choices can run at once",
            hint="ask for fewer, or raise max_num_seqs (bagu serve --max-num-seqs)",
            param="n",
        )
