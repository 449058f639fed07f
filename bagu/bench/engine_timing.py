"""Run an engine step by step and time it, for `bagu bench engine`.

    throughput   a full workload, from the first submitted request to the last token: output tokens / seconds
    streams      requests of equal size, after the prefill: decode tokens / seconds

The engine's overhead of a step is its time minus the time inside the model (layers and head): planning, index tensors,
sampling, commit. It is measured on a CPU only; on a GPU the host works while the model runs.

Every repeat has different prompts, so that the prefix cache finds only intended prefixes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch

from bagu.bench.known_text import Text, known_workload
from bagu.bench.workload import TEMPERATURE, Lengths, Workload, random_workload, streams_workload
from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling, TokenEvent


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The time and tokens of an implementation; `facts` are added to its row."""

    seconds: float
    output_tokens: int
    input_tokens: int
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The measurement. `streams` empty: throughput of `requests`; else the decode rate at each number of streams.

    `requests`, `inputs` and `outputs` None are chosen for the device by `on`.
    """

    requests: int | None = None
    inputs: Lengths | None = None
    outputs: Lengths | None = None
    shared_prefix: int = 0
    streams: tuple[int, ...] = ()
    prompt: int = 64
    new: int = 128
    repeats: int = 3  # per number of streams; the median is reported
    passes: int = 0  # over `requests`, from the first one after the engine's own warm-up; 0: one, after a whole one
    seed: int = 0
    adapters: int = 0  # LoRA adapters; request i uses number i modulo this
    text: Text | None = None  # of the streams: known text that repeats or does not; None: random prompts

    def __post_init__(self) -> None:
        counts = {
            "requests": 1 if self.requests is None else self.requests,
            "streams": min(self.streams, default=1),
            "prompt": self.prompt,
            "new": self.new,
            "repeats": self.repeats,
        }
        for name, count in counts.items():
            if count < 1:
                raise ArgumentError(f"{name} is {count}", hint="use 1 or more")
        for name, count in {
            "shared prefix": self.shared_prefix,
            "adapters": self.adapters,
            "passes": self.passes,
        }.items():
            if count < 0:
                raise ArgumentError(f"{name} is {count}", hint="use 0 or more")
        if self.text not in (None, *get_args(Text)):
            raise UnknownName.among("text", str(self.text), get_args(Text))
        if self.passes and self.streams:
            raise ArgumentError("--passes with --streams", hint="passes are over --requests: leave one of them out")
        if (self.text is not None or self.adapters) and not self.streams:
            raise ArgumentError("--text or --adapters without --streams", hint="they time decoding: add --streams 1")

    def on(self, device: torch.device) -> Case:
        """The case on a device. What it leaves open is nano-vllm's workload on a GPU (256 requests, 100-1024 tokens in
        and out), and 32 requests of 16-128 tokens on a CPU."""
        requests, lengths = (256, Lengths(100, 1024)) if device.type == "cuda" else (32, Lengths(16, 128))
        return replace(
            self, requests=self.requests or requests, inputs=self.inputs or lengths, outputs=self.outputs or lengths
        )

    def workload(self, vocab_size: int, repeat: int) -> Workload:
        assert self.requests and self.inputs and self.outputs, "the case is on no device"
        return random_workload(
            self.requests,
            self.inputs,
            self.outputs,
            tokens=vocab_size,
            shared_prefix=self.shared_prefix,
            seed=self.seed + repeat,
        )

    def streams_workload(self, streams: int, vocab_size: int, repeat: int) -> Workload:
        seed = self.seed + 1000 * streams + repeat
        if self.text is not None:
            return known_workload(self.text, streams, self.prompt, self.new, vocab_size=vocab_size, seed=seed)
        return streams_workload(streams, self.prompt, self.new, tokens=vocab_size, seed=seed)

    def words(self) -> str:
        if self.streams:
            text = "" if self.text is None else f", text: {self.text}"
            adapters = f", {self.adapters} adapters" if self.adapters else ""
            return f"decode: {self.new} tokens per stream after a prompt of {self.prompt}, greedy{text}{adapters}"
        shared = f", after {self.shared_prefix} shared tokens" if self.shared_prefix else ""
        return f"{self.requests} requests, {self.inputs} tokens in{shared}, {self.outputs} out, seed {self.seed}"


class Meter:
    """Measures seconds inside the model: the forward and the logits of each step."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        engine.runner.launch = self._timed(engine.runner.launch)  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = call(*args, **options)
            self.seconds += time.perf_counter() - began
            return result

        return timed


class Clocked:
    """An engine whose steps are timed individually."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.meter = Meter(engine) if engine.runner.device.type == "cpu" else None
        self.reset()

    def submit(self, workload: Workload, temperature: float, name: str) -> None:
        loaded: list[str | None] = [*self.engine.adapters.named] or [None]
        for i, (prompt, count) in enumerate(zip(workload.prompts, workload.max_tokens, strict=True)):
            sampling = Sampling(max_tokens=count, temperature=temperature, ignore_eos=True)
            adapter = loaded[i % len(loaded)]
            self.engine.submit(
                Request(id=f"{name}-{i}", prompt=prompt, sampling=sampling, arrival=float(i), adapter=adapter)
            )

    def step(self) -> int:
        """Run one step of the engine and return the number of new tokens. A failed request raises."""
        inside, began = self.meter.seconds if self.meter else 0.0, time.perf_counter()
        events = self.engine.step()
        took = time.perf_counter() - began
        self.steps.append(took)
        if self.meter is not None:
            self.overheads.append(took - (self.meter.seconds - inside))
        tokens = [e for e in events if isinstance(e, TokenEvent)]
        broken = next((e for e in tokens if e.finish in ("abort", "error")), None)
        if broken is not None:
            raise BaguError(f"request {broken.request_id} ended with {broken.finish}: {broken.stop_reason}")
        return len(tokens)

    def reset(self) -> None:
        """Restart the counts."""
        self.steps: list[float] = []
        self.overheads: list[float] = []
        self._before = self.engine.stats()

    def facts(self) -> dict[str, Any]:
        stats, before = self.engine.stats(), self._before
        return {
            "steps": len(self.steps),
            "step_s": statistics.median(self.steps),
            "overhead_s": statistics.median(self.overheads) if self.overheads else None,
            "preemptions": stats.preemptions - before.preemptions,
            "prefix_queries": stats.prefix_queries - before.prefix_queries,
            "prefix_hits": stats.prefix_hits - before.prefix_hits,
            "blocks": stats.blocks_total,
            "drafts": stats.drafts - before.drafts,
            "draft_tokens": stats.draft_tokens - before.draft_tokens,
            "accepted_tokens": stats.accepted_tokens - before.accepted_tokens,
        }


def measure_throughput(engine: Engine, workloads: Sequence[Workload]) -> list[Measured]:
    """Measure workloads one after another: their times, and the engine's statistics."""
    clocked, found = Clocked(engine), []
    for number, work in enumerate(workloads):
        clocked.reset()
        began, made = time.perf_counter(), 0
        clocked.submit(work, TEMPERATURE, f"bench-{number}")
        while engine.has_work:
            made += clocked.step()
        seconds = time.perf_counter() - began
        if made != work.output_tokens:
            raise BaguError(f"the engine generated {made} of {work.output_tokens} tokens")
        facts = clocked.facts()
        found.append(Measured(seconds=seconds, output_tokens=made, input_tokens=work.input_tokens, facts=facts))
    return found


def measure_streams(engine: Engine, case: Case) -> list[tuple[int, Measured]]:
    """For each number of streams, the repeat with the median rate, after one warmup. Timing starts when every prompt
    has its first token, and counts the tokens after that. `prompt_tokens_per_s` is the rate up to that moment."""
    return [(streams, measured) for streams, (measured,) in measure_in_turn([engine], case)]


def measure_in_turn(engines: Sequence[Engine], case: Case) -> list[tuple[int, list[Measured]]]:
    """`measure_streams` of several engines, which take turns in every repeat."""
    clocks, found = [Clocked(engine) for engine in engines], []
    for streams in case.streams:
        runs: list[list[Measured]] = [[] for _ in engines]
        for repeat in range(case.repeats + 1):
            for clocked, into in zip(clocks, runs, strict=True):
                into.append(_decode_run(clocked, case, streams, repeat))
        ordered = [sorted(r[1:], key=lambda run: run.output_tokens / run.seconds) for r in runs]
        found.append((streams, [counted[len(counted) // 2] for counted in ordered]))
    return found


def _decode_run(clocked: Clocked, case: Case, streams: int, repeat: int) -> Measured:
    engine = clocked.engine
    clocked.reset()
    work = case.streams_workload(streams, engine.model.config.vocab_size, repeat)
    began = time.perf_counter()
    clocked.submit(work, 0.0, f"{streams}-{repeat}")
    while engine.stats().waiting or any(len(s.tokens) == s.num_prompt for s in engine.scheduler.queues.running):
        clocked.step()
    prompts = {"prompt_tokens_per_s": streams * case.prompt / (time.perf_counter() - began)}
    clocked.reset()
    began, made = time.perf_counter(), 0
    while engine.has_work:
        made += clocked.step()
    took = time.perf_counter() - began
    return Measured(seconds=took, output_tokens=made, input_tokens=0, facts=clocked.facts() | prompts)
