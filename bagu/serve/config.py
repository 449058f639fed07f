"""How an engine is set up: one frozen value, of plain types, that can cross to the engine's process."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from bagu.errors import ArgumentError
from bagu.serve.request import Sampling

__all__ = ["EngineConfig", "GenerationDefaults", "parse_bytes"]

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str) -> int:
    """`2GB` is 2 * 10**9, `512MiB` 512 * 2**20, `1000000` itself."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if found is None:
        raise ArgumentError(f"{text!r} is no size", hint="write 512MiB, 2GB, or a number of bytes")
    return int(float(found[1]) * UNITS[found[2] or ""])


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What holds where a request says nothing, as a model's generation_config.json gives it. None is the default of
    `Sampling`."""

    eos_ids: tuple[int, ...] = ()  # tokens that end an answer, beside the tokenizer's own
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        Sampling(**self.sampling)

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of `Sampling` that have a default of their own."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "eos_ids"}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def effective(self) -> dict[str, Any]:
        """What a chat that says nothing is sampled with. `max_tokens` is None where that is what fits."""
        sampling = Sampling(**self.sampling)
        names = (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        return {**{name: getattr(sampling, name) for name in names}, "max_tokens": self.max_tokens}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Names are vLLM's where they mean the same. `None` is "decide for this model and machine"."""

    block_size: int | None = None  # positions of a KV block; None: by pool.py
    num_blocks: int | None = None  # of the pool; None: as many as `kv_memory`, or the GPU's memory, holds
    kv_memory: int | None = None  # bytes of the pool; None: by pool.py
    gpu_memory_utilization: float = 0.9  # of the GPU's memory, weights and work space included
    max_model_len: int | None = None  # None: what the model was made for, as far as the pool holds it
    max_num_seqs: int = 256  # choices that run at once
    max_num_batched_tokens: int | None = None  # of a step, prefill and decode together; None: 2048, on a GPU 16384
    prefix_cache: bool = True
    quantization: Literal["int8"] | None = None  # of linear layers and head, on a CPU
    threads: int | None = None  # of a CPU; None leaves what torch has, and a server says cores - 1
    async_scheduling: bool | None = None  # plan a step while the one before runs; None: on a GPU
    cuda_graphs: bool = True  # replay decode steps; no effect on a CPU
    invariant: bool = False  # a row's bits do not depend on its batch (bagu.ops.invariant)
    seed: int = 0  # from which requests without a seed get theirs
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "kv_memory", "max_model_len", "max_num_seqs", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"engine: {name} = {value}", hint=f"{name} is 1 or more")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ArgumentError(
                f"engine: max_num_batched_tokens = {self.max_num_batched_tokens} is below "
                f"max_num_seqs = {self.max_num_seqs}",
                hint="each running sequence needs one token of a step: raise the first, or lower the second",
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ArgumentError(
                f"engine: gpu_memory_utilization = {self.gpu_memory_utilization}", hint="it is a share, above 0 up to 1"
            )
        if self.quantization not in (None, "int8"):
            raise ArgumentError(f"engine: quantization = {self.quantization!r}", hint="int8, or none")
        if self.quantization is not None and self.invariant:
            raise ArgumentError(
                "engine: invariant with quantization", hint="int8 logits are not the trainer's: choose one of the two"
            )

    def step_tokens(self, device: str) -> int:
        """Tokens of a step on this kind of device. A step with a prompt in it is not a graph on a GPU, so few and large
        ones are wanted there; on a CPU a step of 2048 already takes a second or two, and decodes wait for it."""
        return self.max_num_batched_tokens or max(16384 if device == "cuda" else 2048, self.max_num_seqs)
