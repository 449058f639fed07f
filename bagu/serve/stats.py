"""The engine at one moment, as it tells the server's process, which has no torch: hence a file without it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WINDOW_S", "EngineStats"]

WINDOW_S = 2.0  # over which tokens/s are taken


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The engine at one moment; counters are since it was made."""

    running: int  # choices
    waiting: int  # requests, and choices that were preempted
    batch_size: int  # sequences of the last step
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    block_map: str  # one character a block: u used, c cached, . free
    tokens_per_s: float  # drawn (of an encoder: read), over the last WINDOW_S
    last_step_s: float  # how long the last step took
    steps: int
    generated_tokens: int
    preemptions: int
    prefix_queries: int  # tokens looked for in the prefix cache
    prefix_hits: int  # tokens found there
