"""The engine: requests in, tokens out. `Engine.step` is the architecture.

    plan    scheduler.py   which tokens of which sequences are computed now, and in which blocks
    run     runner.py      one forward over all of them
    sample  sample.py      a token for each sequence whose last one was among them
    commit  scheduler.py   tokens appended, ends found, blocks registered or released

On a GPU two steps overlap: the host plans step n + 1 and launches its forward before it reads what step n drew; the
tokens go from one step to the next on the device. So `step` returns the events of the step before.

The engine is not a thread and not a server: `step` is called by whoever wants progress. It satisfies `types.Generate`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from bagu import ops
from bagu.errors import ArgumentError
from bagu.nn.model import Transformer
from bagu.serve.completion import choices
from bagu.serve.config import EngineConfig
from bagu.serve.kv.blocks import Blocks, IntegrityError
from bagu.serve.kv.paged import PagedKV
from bagu.serve.kv.pool import size_pool
from bagu.serve.plan import Plan
from bagu.serve.request import Event, PromptLogprobs, Request, Sampling, TokenEvent
from bagu.serve.runner import Runner
from bagu.serve.sampler import Drawn, Sampler
from bagu.serve.scheduler import Scheduler, SchedulerConfig
from bagu.serve.stats import WINDOW_S, EngineStats
from bagu.types import Completion, Tokenizer

__all__ = ["Engine"]


class Flight(NamedTuple):
    """A step whose tokens are drawn, and not read yet."""

    plan: Plan
    drawn: Drawn
    tokens: torch.Tensor  # on the host, once `copied`
    copied: torch.cuda.Event | None
    began: float


class Engine:
    def __init__(self, model: Transformer, tokenizer: Tokenizer | None = None, config: EngineConfig | None = None):
        config = EngineConfig() if config is None else config
        model.eval()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        pool = size_pool(model, config)
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.max_model_len = pool.max_model_len
        windows = [model.config.window(i) for i in range(model.config.num_layers)]
        eos_ids = _eos_ids(model, tokenizer, config)
        self.blocks = Blocks(pool.num_blocks, pool.block_size, prefix_cache=config.prefix_cache)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=pool.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.step_tokens(model.embedding.weight.device.type),
                eos_ids=eos_ids,
                window=None if None in windows else max(w for w in windows if w is not None),
            ),
            self.blocks,
        )
        table = model.embedding.weight
        spare = int(table.is_cuda)  # a block that no table holds, for the rows that pad a CUDA graph
        kv = PagedKV(model.config, pool.num_blocks + spare, pool.block_size, device=table.device, dtype=table.dtype)
        self.runner = Runner(model, kv, config, pool.max_model_len)
        self.sampler = Sampler(self.runner, tokenizer, config.seed, eos_ids)
        self._overlaps = table.is_cuda if config.async_scheduling is None else config.async_scheduling
        self._flight: Flight | None = None
        self._held: list[Event] = []  # of a step that was read out of turn
        self._ids = itertools.count()
        self._drawn: deque[tuple[float, int]] = deque()  # (when, how many tokens) of the last steps
        self._steps = self._tokens = self._batch_size = 0
        self._last_step_s = 0.0

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Advance every running sequence; what came of it. Nothing where there is no work."""
        began = time.perf_counter()
        with torch.inference_mode(), self._arithmetic():
            plan = self.scheduler.plan()
            if plan is None and self._flight is None:
                return self._idle()
            step = None if plan is None else self.runner.run(plan, self._late())
            events = self._land()  # the step before, while this one runs; drawing may need what it drew
            if plan is not None and step is not None:
                self._flight = self._launched(plan, self.sampler.draw(plan, step), began)
            if not self._overlaps:
                events += self._land()
        return events

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._held)

    def submit(self, request: Request) -> None:
        """Queue a request; raises Unservable where it can never run, and ArgumentError where it makes no sense."""
        outside = [t for t in request.prompt if not 0 <= t < self.model.config.vocab_size]
        if outside:
            raise ArgumentError(
                f"request {request.id!r}: the prompt has token {outside[0]}, and the vocabulary is "
                f"{self.model.config.vocab_size}",
                hint="the prompt was made with another tokenizer",
            )
        if request.sampling.stop and self.tokenizer is None:
            raise ArgumentError(
                f"request {request.id!r}: stop strings, and the engine has no tokenizer", hint="use stop_token_ids"
            )
        self.scheduler.add(request)
        self.sampler.open(request)

    def abort(self, request_id: str) -> bool:
        """End a request now; False where it is not alive. Its blocks are free on return, or as soon as the step is read
        that is in flight."""
        self.sampler.close(request_id)
        return self.scheduler.abort(request_id)

    def update_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace weights in place, all or some by their names in the model's state dict. What was computed with the
        old ones is forgotten: the prefix cache is emptied, and running sequences are computed anew."""
        own = self.model.state_dict()
        for name, tensor in state.items():
            if name not in own or own[name].shape != tensor.shape:
                found = f"of shape {list(tensor.shape)}" if name in own else "which the model does not have"
                hint = f"it is {list(own[name].shape)} here" if name in own else "names are those of its state dict"
                raise ArgumentError(f"update_weights: {name}, {found}", hint=hint)
        self._held += self._land()
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)
        self.runner.prepare()
        self.scheduler.restart()

    # --- Generate -----------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> list[Completion]:
        """All choices of all prompts, prompt by prompt. `sampling` is one for all, or one a prompt."""
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        requests = [self._request(p, s) for p, s in zip(prompts, each, strict=True)]
        grown = {r.id: choices(r, i, self.tokenizer) for i, r in enumerate(requests)}
        for event in self._serve(requests):
            if isinstance(event, TokenEvent):
                grown[event.request_id][event.index].push(event)
        return [choice.whole() for r in requests for choice in grown[r.id]]

    def stream(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[Completion]:
        """The same as it grows: what each token added, the last of a choice with its finish. A caller that stops
        listening aborts the request."""
        request = self._request(prompt, sampling)
        grown = choices(request, 0, self.tokenizer)
        try:
            for event in self._serve([request]):
                if isinstance(event, TokenEvent):
                    yield grown[event.index].push(event)
        finally:
            self.abort(request.id)

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        """For each sequence the logprobs of ids[start:]. A prefix that several share is computed once, as far as it
        lies before their starts."""
        for ids, start in zip(sequences, starts, strict=True):
            if not 1 <= start < len(ids):
                hint = "the first token has nothing before it, and at least one is scored: 1 to length - 1"
                raise ArgumentError(f"score: start = {start} of {len(ids)} tokens", hint=hint)
        asks = Sampling(max_tokens=0, prompt_logprobs=0)
        requests = [self._request(ids, asks, score_start=s) for ids, s in zip(sequences, starts, strict=True)]
        found: dict[str, list[float]] = {}
        for event in self._serve(requests):
            if isinstance(event, PromptLogprobs):
                found[event.request_id] = [t.logprob for t in event.tokens]
        return [found[r.id] for r in requests]

    def stats(self) -> EngineStats:
        while self._drawn and self._drawn[0][0] < time.perf_counter() - WINDOW_S:
            self._drawn.popleft()
        scheduler, blocks = self.scheduler, self.blocks
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            batch_size=self._batch_size if scheduler.running else 0,
            blocks_total=blocks.num_blocks,
            blocks_used=blocks.used_count,
            blocks_cached=blocks.cached_count,
            block_map=blocks.map(),
            tokens_per_s=sum(n for _, n in self._drawn) / WINDOW_S,
            last_step_s=self._last_step_s,
            steps=self._steps,
            generated_tokens=self._tokens,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prompt_tokens,
            prefix_hits=scheduler.hit_tokens,
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _arithmetic(self) -> AbstractContextManager[None]:
        return ops.invariant() if self.config.invariant else nullcontext()

    def _idle(self) -> list[Event]:
        if self.scheduler.has_work:
            raise IntegrityError("requests wait, nothing runs, and nothing can be planned")
        return self._land()

    def _late(self) -> torch.Tensor | None:
        return None if self._flight is None else self._flight.drawn.tokens

    def _launched(self, plan: Plan, drawn: Drawn, began: float) -> Flight:
        """A step in flight: its tokens are on their way to the host."""
        if not drawn.tokens.is_cuda:
            return Flight(plan, drawn, drawn.tokens, None, began)
        tokens = drawn.tokens.to("cpu", non_blocking=True)  # pinned, and not to be read before the event
        copied = torch.cuda.Event()
        copied.record()
        return Flight(plan, drawn, tokens, copied, began)

    def _land(self) -> list[Event]:
        """Commit the step in flight, if there is one; what came of it."""
        held, self._held = self._held, []
        flight, self._flight = self._flight, None
        if flight is None:
            return held
        if flight.copied is not None:
            flight.copied.synchronize()
        events = self.scheduler.commit(flight.plan, flight.tokens.tolist(), flight.drawn.logprobs)
        self._count(flight)
        reads = self.sampler.reads
        read = (e if e.finish is None and not reads else self._read(e) for e in events)
        return [*held, *flight.drawn.prompts, *read]

    def _read(self, event: TokenEvent) -> TokenEvent:
        """An event as the scheduler made it, ended where its text ends."""
        read = self.sampler.read(event)
        if read.finish is not None and event.finish is None:
            self.scheduler.stop(event.request_id, event.index)
        return read

    def _count(self, flight: Flight) -> None:
        now, plan = time.perf_counter(), flight.plan
        self._last_step_s, self._batch_size = now - flight.began, len(plan.slices)
        self._steps += 1
        self._tokens += len(plan.sampled)
        self._drawn.append((now, len(plan.sampled)))

    def _request(self, prompt: Sequence[int], sampling: Sampling, *, score_start: int = 0) -> Request:
        return Request(
            id=f"engine-{next(self._ids)}", prompt=tuple(prompt), sampling=sampling, arrival=time.monotonic(),
            score_start=score_start,
        )  # fmt: skip

    def _serve(self, requests: Sequence[Request]) -> Iterator[Event]:
        """The events of these requests, until the last has ended. Others in the engine advance beside them, and their
        events are lost: one caller at a time, or `submit` and `step`."""
        try:
            for request in requests:
                self.submit(request)
            left = sum(r.sampling.n for r in requests)
            own = {r.id for r in requests}
            while left:
                for event in self.step():
                    if event.request_id in own:
                        left -= isinstance(event, TokenEvent) and event.finish is not None
                        yield event
        finally:
            for request in requests:
                self.abort(request.id)


def _eos_ids(model: Transformer, tokenizer: Tokenizer | None, config: EngineConfig) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's and the model's own, those that the vocabulary has."""
    own = () if tokenizer is None else (tokenizer.eos_id,)
    return tuple(id for id in dict.fromkeys((*own, *config.generation.eos_ids)) if id < model.config.vocab_size)
