"""The engine's configuration: frozen dataclasses of plain types, which can be pickled to the engine process."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from bagu.config.options import INVARIANT, KV_DTYPE, PREFIX_CACHING, QUANTIZATION, TENSOR_PARALLEL, Option
from bagu.errors import ArgumentError, UnknownName
from bagu.serve.message.format import REASONING_PARSERS
from bagu.serve.message.forms import find_form
from bagu.serve.request import Sampling

Quantization = Literal["int8", "int4", "fp8"]
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)

DEFAULT_ADAPTERS = 8  # slots of a server that loads adapters by request
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str) -> int:
    """Parse a size in bytes: `2GB` is 2 * 10**9, `512MiB` is 512 * 2**20, `1000000` is 10**6."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if found is None:
        raise ArgumentError(f"{text!r} is not a size", hint="write 512MiB, 2GB, or a number of bytes")
    return int(float(found[1]) * UNITS[found[2] or ""])


def name_and_path(text: str) -> tuple[str, str]:
    """The value of `--adapter NAME=PATH`."""
    name, _, path = text.partition("=")
    if not (name and path):
        raise ArgumentError(f"--adapter {text!r}", hint="write NAME=PATH, the name for requests and the folder")
    return name, path


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Defaults for fields that a request leaves out. None means the default of `Sampling`."""

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
        """The fields that are set."""
        given = {field.name: getattr(self, field.name) for field in fields(SamplingDefaults)}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults(SamplingDefaults):
    """The defaults in the model's generation_config.json."""

    eos_ids: tuple[int, ...] = ()  # end-of-text tokens in addition to the tokenizer's
    suggested_prompts: tuple[str, ...] = ()  # that the chat page offers

    @property
    def effective(self) -> dict[str, Any]:
        """The sampling of a chat request that sets no field. `max_tokens` None: limited only by the context."""
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
    """Options of an engine, with vLLM's names for the same options. None means: chosen for this model and machine.
    What has an `Option` is an option of `bagu serve` too."""

    quantization: Annotated[Quantization | None, QUANTIZATION] = None  # on a CPU of the head too (quantization.py)
    tp: Annotated[int, TENSOR_PARALLEL] = 1
    # None: the model's maximum, or the size of the pool if that is smaller
    max_model_len: Annotated[int | None, Option("Maximum tokens of a prompt plus its output.")] = None
    max_num_seqs: Annotated[int, Option("Maximum number of sequences that run at once.")] = 256
    max_num_batched_tokens: Annotated[int | None, Option("Maximum tokens per step. Default: 2048, on a GPU 16384.")] = (
        None
    )
    # on a GPU: kv/pool.py; for images: engine.py
    block_size: Annotated[int | None, Option("Tokens per KV block. Default: 16; 1 for images on a CPU.")] = None
    # of each rank; None: torch's (`bagu serve` sets the number of cores - 1)
    threads: Annotated[int | None, Option("CPU threads of the engine. Default: one fewer than cores.")] = None
    kv_dtype: Annotated[Literal["auto", "int8", "fp8"], KV_DTYPE] = "auto"
    # for weights, KV pool and workspace
    gpu_memory_utilization: Annotated[float, Option("Fraction of the GPU's memory to use.")] = 0.9
    # with tp > 1 of each rank; None: chosen in kv/pool.py
    kv_memory: Annotated[
        int | None, Option("KV cache size, e.g. 2GB. Default: free memory, on a CPU up to 1GiB.", parse=parse_bytes)
    ] = None
    num_blocks: Annotated[int | None, Option("Size of the KV cache in blocks, instead of bytes.")] = None
    prefix_cache: Annotated[bool, PREFIX_CACHING] = True
    # None: as the model is
    attention: Annotated[
        Literal["softmax", "blocks"] | None, Option("Attend to all tokens (softmax) or to chosen blocks of them.")
    ] = None
    window: Annotated[
        int | None, Option("Attend to this many last tokens in all layers; the model forgets others.")
    ] = None
    attention_sinks: Annotated[int, Option("With a window: attend to this many first tokens too.")] = 0
    speculative: Annotated[
        str | None, Option("Draft tokens by prompt lookup (ngram), or by the model at this path.")
    ] = None
    speculative_tokens: Annotated[int, Option("Maximum drafted tokens per sequence and step.")] = 7
    adapters: Annotated[  # (name, path), loaded at the start
        tuple[tuple[str, str], ...],
        Option(
            "A LoRA adapter (PEFT, or a LoRA run); repeatable.",
            flags=("--adapter",),
            metavar="NAME=PATH",
            parse=name_and_path,
        ),
    ] = ()
    max_adapters: Annotated[
        int | None, Option("Maximum adapters at once. Default: the given ones; 8 if requests load them.")
    ] = None
    max_adapter_rank: Annotated[int, Option("Maximum rank of an adapter.")] = 16
    adapter_root: Annotated[
        Path | None, Option("Let requests (with keys: of an admin) load adapters from folders below this one.")
    ] = None
    embeddings: Annotated[
        bool, Option("Serve a decoder's embeddings (its last token's state), not its text.", flags=("--embeddings",))
    ] = False
    invariant: Annotated[bool, INVARIANT] = False  # bagu.ops.invariant
    warm_up: Annotated[
        float,
        Option("GPU: seconds to compile and capture before the server is ready; the rest follows when it is idle."),
    ] = 15.0
    seed: Annotated[int, Option("Seed for the requests that do not set one.")] = 0
    tool_parser: Annotated[  # auto: by the chat template
        str, Option("Form of tool calls: auto, none, hermes, llama3, mistral, deepseek_v3, ...")
    ] = "auto"
    reasoning_parser: Annotated[str, Option("Reasoning in <think> tags: auto, none or think.")] = "auto"
    # the rest is not set by the command line
    device: str | None = None  # where the engine runs: cpu, cuda or auto (a GPU if there is one); None: with the model
    is_replica: bool = False  # one of several engines: it measures its speed and reports its prefix cache
    cores: tuple[int, ...] | None = None  # the CPU cores that the engine process may use; None: all
    memory_share: float | None = None  # fraction of the device's memory for this engine alone, beside other engines
    async_scheduling: bool | None = None  # plan the next step while one runs; None: only on a GPU
    speculative_always: bool = False  # verify every draft, also where it is measured to lose time
    adjust_threads: bool = True  # decode with fewer threads while other processes use the CPU's cores
    cuda_graphs: bool = True  # run decode steps as CUDA graphs; no effect on a CPU
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    warmup_prompts: tuple[str, ...] = ()  # run before the server takes requests; one that fails stops the start

    def __post_init__(self) -> None:
        at_least_one = ("block_size", "num_blocks", "kv_memory", "max_model_len", "max_num_seqs", "threads", "tp",
                        "speculative_tokens", "max_adapter_rank", "window")  # fmt: skip
        for name in at_least_one:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"engine: {name} = {value}", hint=f"{name} is 1 or more")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ArgumentError(
                f"engine: max_num_batched_tokens = {self.max_num_batched_tokens} is below "
                f"max_num_seqs = {self.max_num_seqs}",
                hint="every running sequence needs one token per step: raise the first, or lower the second",
            )
        if self.attention not in (None, "softmax", "blocks"):
            raise ArgumentError(f"engine: attention = {self.attention!r}", hint="use softmax or blocks")
        if self.attention_sinks < 0 or (self.attention_sinks and self.window is None):
            raise ArgumentError(
                f"engine: attention_sinks = {self.attention_sinks}, window = {self.window}",
                hint="sinks are 0 or more first tokens beside a window: give --window too",
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ArgumentError(
                f"engine: gpu_memory_utilization = {self.gpu_memory_utilization}",
                hint="it is a fraction: above 0 and at most 1",
            )
        if not self.warm_up >= 0:
            raise ArgumentError(f"engine: warm_up = {self.warm_up}", hint="it is a number of seconds, 0 or more")
        if self.memory_share is not None and not 0.0 < self.memory_share <= 1.0:
            raise ArgumentError(
                f"engine: memory_share = {self.memory_share}", hint="it is a fraction: above 0 and at most 1"
            )
        if self.quantization not in (None, *QUANTIZATIONS):
            raise UnknownName.among("quantization", str(self.quantization), QUANTIZATIONS)
        find_form("", self.tool_parser)  # raises for an unknown name
        if self.reasoning_parser not in REASONING_PARSERS:
            raise UnknownName.among("reasoning parser", self.reasoning_parser, REASONING_PARSERS)
        if self.kv_dtype not in ("auto", "int8", "fp8"):
            raise ArgumentError(f"engine: kv_dtype = {self.kv_dtype!r}", hint="use auto, int8 or fp8")
        if self.kv_dtype != "auto" and self.invariant:
            raise ArgumentError(
                f"engine: invariant cannot be combined with kv_dtype = {self.kv_dtype}",
                hint="the training forward does not round keys and values: use kv_dtype=auto, or leave out invariant",
            )
        if self.quantization is not None and self.invariant:
            raise ArgumentError(
                "engine: invariant cannot be combined with quantization",
                hint="logits of quantized weights differ from the trainer's: choose one of the two",
            )
        self._check_adapters()
        for option, used in (
            ("invariant", self.invariant),  # the order of the sum over ranks depends on the size of the batch
            (f"quantization = {self.quantization}", self.quantization is not None),  # rounds and packs whole matrices
            (f"speculative = {self.speculative!r}", self.speculative is not None),  # the other ranks verify no drafts
        ):
            if self.tp > 1 and used:
                raise ArgumentError(
                    f"engine: tp = {self.tp} cannot be combined with {option}", hint="choose one of the two"
                )

    def _check_adapters(self) -> None:
        if not len(self.adapters) <= self.adapter_slots:
            raise ArgumentError(
                f"engine: {len(self.adapters)} adapters, and max_adapters = {self.max_adapters}",
                hint="raise max_adapters, or load fewer",
            )
        if self.adapter_root is not None and not self.adapter_slots:
            raise ArgumentError("--adapter-root with --max-adapters 0", hint="allow 1 or more, or leave one out")
        names = [name for name, _ in self.adapters]
        if len(set(names)) < len(names):
            raise ArgumentError(
                f"engine: two adapters are named {max(names, key=names.count)!r}", hint="a name is used once"
            )
        for option, used, reason in (
            ("invariant", self.invariant, "the bits of an adapter's products may depend on its slot"),
            (f"tp = {self.tp}", self.tp > 1, "the other ranks hold no adapters"),
        ):
            if self.adapter_slots and used:
                raise ArgumentError(
                    f"engine: adapters cannot be combined with {option}: {reason}",
                    hint="merge the adapter (bagu export) and serve the merged model, or choose one of the two",
                )

    @property
    def adapter_slots(self) -> int:
        """How many LoRA adapters can be loaded at the same time."""
        if self.max_adapters is not None:
            return self.max_adapters
        return max(len(self.adapters), 0 if self.adapter_root is None else DEFAULT_ADAPTERS)

    @property
    def draft_model(self) -> str | None:
        """The path of the draft model, if there is one."""
        return None if self.speculative == "ngram" else self.speculative

    def step_tokens(self, device: str) -> int:
        """The token budget of a step on this device type. On a GPU a step with prefill tokens runs without a CUDA
        graph, so few large steps are better. On a CPU 2048 tokens already take one or two seconds, and decodes wait."""
        return self.max_num_batched_tokens or max(16384 if device == "cuda" else 2048, self.max_num_seqs)
