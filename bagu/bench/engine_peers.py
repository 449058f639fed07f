"""The same offline workload with other libraries, for `bagu bench engine`. Each is written as its users write it."""

import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from bagu.bench.engine_timing import Case, Measured
from bagu.bench.harness import script_rates
from bagu.bench.workload import TEMPERATURE, Workload
from bagu.errors import ArgumentError, BaguError
from bagu.machine.openmp import settings
from bagu.nn import ModelConfig, Transformer
from bagu.nn.families import family_for

Run = Callable[[Workload], Measured]
Implementation = Callable[[ModelConfig, torch.device, torch.dtype, int], AbstractContextManager[Run]]


def _model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """The transformers model of the same configuration, with random weights and without an end-of-text token."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise BaguError(f"the peer needs transformers: {error}", hint="pip install 'transformers>=5'") from error
    family = family_for(config)
    theirs = AutoConfig.for_model(family.name, **{k: v for k, v in family.write(config).items() if k != "model_type"})
    theirs.eos_token_id = theirs.bos_token_id = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    model.generation_config.eos_token_id = None
    return model


@contextmanager
def _generate(config: ModelConfig, device: torch.device, dtype: torch.dtype, batch: int) -> Iterator[Run]:
    """`generate` on left-padded batches in the order of arrival. A batch runs until its longest output is done; only
    the requested tokens count."""
    model = _model(config, device, dtype)

    def run(workload: Workload) -> Measured:
        began = time.perf_counter()
        for first in range(0, len(workload.prompts), batch):
            prompts = workload.prompts[first : first + batch]
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
            seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
            with torch.inference_mode():
                made = model.generate(
                    ids,
                    attention_mask=seen,
                    max_new_tokens=max(workload.max_tokens[first : first + batch]),
                    do_sample=True,
                    temperature=TEMPERATURE,
                    top_k=0,
                    pad_token_id=0,
                )
            made.cpu()  # waits until the tokens are computed
        seconds = time.perf_counter() - began
        return Measured(seconds=seconds, output_tokens=workload.output_tokens, input_tokens=workload.input_tokens)

    yield run


@contextmanager
def _generate_batch(config: ModelConfig, device: torch.device, dtype: torch.dtype, batch: int) -> Iterator[Run]:
    """Continuous batching as in `generate_batch`, through its manager, because `generate_batch` accepts only one
    max_new_tokens for all requests. It chooses its own batch size; `batch` is not used."""
    model = _model(config, device, dtype)
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, eos_token_id=-1, pad_token_id=0, use_cache=True
    )

    def run(workload: Workload) -> Measured:
        with model.continuous_batching_context_manager(generation_config=settings) as manager:
            began, made = time.perf_counter(), 0
            for prompt, count in zip(workload.prompts, workload.max_tokens, strict=True):
                manager.add_request(list(prompt), max_new_tokens=count, eos_token_id=-1)
            for _ in workload.prompts:
                made += _answer(manager)
            seconds = time.perf_counter() - began
        if made != workload.output_tokens:
            raise BaguError(f"generate_batch generated {made} of {workload.output_tokens} tokens")
        return Measured(seconds=seconds, output_tokens=made, input_tokens=workload.input_tokens)

    yield run


def _answer(manager: Any) -> int:
    """The number of tokens of the next request that finishes."""
    while True:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise BaguError("generate_batch stopped before its requests finished", hint="its error is printed above")
        if result is not None and result.is_finished():
            if result.error is not None:
                raise BaguError(f"generate_batch failed a request: {result.error}")
            return len(result.generated_tokens)


PEERS: dict[str, Implementation] = {"generate": _generate, "generate_batch": _generate_batch}


def scripted(path: Path, environ: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The rates that a peer's script prints. A line is for a number of streams if it has `streams`, or names it in
    `what`."""
    common = {"implementation": path.name, "openmp": settings(os.environ if environ is None else environ)}
    return [
        common | {"streams": _streams(found), "tokens_per_s": float(found["tokens_per_s"]), "reported": found}
        for found in script_rates(path, environ)
    ]


def _streams(found: dict[str, Any]) -> int | None:
    match = re.search(r"(\d+) streams?\b", str(found.get("what", "")))
    if "streams" in found:
        return int(found["streams"])
    return int(match[1]) if match else None


# The model's plain forward as a peer of `bagu bench engine --streams 1`: the whole prompt in eager PyTorch, without an
# engine and without a KV cache. It shows what the engine gains on prompts.
EAGER = "eager"


def check_eager(case: Case, device: torch.device) -> None:
    """Raise before anything is timed if the peer cannot run this measurement."""
    if case.streams != (1,) or device.type != "cpu":
        raise ArgumentError("the peer eager measures one prompt on a CPU", hint="add --streams 1 --device cpu")


def eager_row(model: Transformer, case: Case) -> dict[str, Any]:
    """The median of the repeats, after one warmup. Without a cache every token needs a forward of all tokens before it,
    so the decode rate is that of the first token after the prompt."""
    seconds = statistics.median([_seconds(model, case, repeat) for repeat in range(case.repeats + 1)][1:])
    return {
        "implementation": EAGER,
        "streams": 1,
        "tokens_per_s": 1 / seconds,
        "prompt_tokens_per_s": case.prompt / seconds,
        "openmp": settings(os.environ),
    }


@torch.inference_mode()
def _seconds(model: Transformer, case: Case, repeat: int) -> float:
    (prompt,) = case.streams_workload(1, model.config.vocab_size, repeat).prompts
    began = time.perf_counter()
    ids, positions = torch.tensor(prompt), torch.arange(case.prompt)
    hidden = model(ids, positions, torch.tensor([0, case.prompt], dtype=torch.int32), case.prompt).hidden
    model.logits(hidden[-1:]).argmax().item()
    return time.perf_counter() - began
