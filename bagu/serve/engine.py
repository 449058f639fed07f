"""The engine: it takes requests and produces tokens. `Engine.step` shows the architecture.

    plan    scheduler.py   choose the tokens to compute in this step, and their KV blocks
    stage   runner.py      their inputs on the device
    launch  runner.py      one forward pass over all of them
    sample  sampler.py     one token for every sequence whose last known token was computed
    commit  scheduler.py   append the tokens, detect finished choices, register or release blocks

On a GPU two steps overlap. Between two calls of `step` the forward of step n runs. `step` plans and stages n + 1,
samples n, launches n + 1, which gets the tokens of n on the device, and then reads them and commits n. So it returns
the events of n, and commit, the caller's work and the next plan run on the host while the device computes n + 1. Other
threads compute the masks of constrained requests in that time.

The engine starts no thread: the caller runs `step` in a loop. `generate`, `stream` and `score` (generate.py) do so for
the requests of one caller. With `tp` > 1 the model is divided over processes of this machine (tp/lead.py), which
`close` ends.
"""

import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from bagu import ops
from bagu.errors import ArgumentError
from bagu.machine.busy import ThreadCount
from bagu.machine.device import named_device
from bagu.nn.model import Transformer
from bagu.nn.peft import Adapter
from bagu.nn.vision.vlm import VLM
from bagu.serve.adapters.info import AdapterInfo
from bagu.serve.adapters.registry import AdapterRegistry
from bagu.serve.build import build_runner, build_speculator, eos_ids, scheduler_config, with_attention
from bagu.serve.config import EngineConfig
from bagu.serve.constrain.compiler import GrammarCompiler
from bagu.serve.generate import GenerationMixin
from bagu.serve.images.encoder import ImageEncoder
from bagu.serve.kv.blocks import Blocks, IntegrityError
from bagu.serve.kv.groups import layer_groups
from bagu.serve.kv.pool import size_pool
from bagu.serve.pending import LaunchedStep, SampledStep
from bagu.serve.plan import Sequence
from bagu.serve.request import Event, Request, TokenEvent
from bagu.serve.sampler import Sampler
from bagu.serve.scheduler import Scheduler
from bagu.serve.speculation.draft_model import DraftSource
from bagu.serve.stats import EngineStats, StepCounter
from bagu.serve.tp.group import Ranks
from bagu.serve.tp.lead import start_ranks
from bagu.serve.ways import Staged
from bagu.types import Tokenizer

# Tokens per KV block of a model with images on a CPU. An image of 16 tokens and a question are 26: of blocks of 16 a
# second request finds 62 %, of blocks of 1 96 %. Decoding 16 sequences takes 10 % more CPU time than with blocks of 16.
IMAGE_BLOCK = 1


class Engine(GenerationMixin):
    def __init__(
        self,
        model: Transformer | VLM,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        draft: DraftSource | None = None,
    ) -> None:
        """`draft` is the model that `config.speculative` names, if that is a path. The decoder of a VLM generates, and
        its other parts encode the images of requests."""
        config = EngineConfig() if config is None else config
        self.images: ImageEncoder | None = None
        if isinstance(model, VLM):
            if config.tp > 1:
                raise ArgumentError(f"tp = {config.tp} with a model that takes images", hint="use tp=1")
            self.images, model = ImageEncoder(model), model.decoder
        if model.score is not None:
            raise ArgumentError("the model has a score head and predicts no tokens", hint="use a language model")
        model = with_attention(model.eval().for_length(config.max_model_len), config)
        if (scaling := model.config.longrope) is not None:
            warnings.warn(
                f"the engine takes sequences of {model.config.max_len} tokens, so it uses the long factors of longrope "
                f"for all texts, as vLLM does; transformers uses the short ones for texts of up to "
                f"{scaling.original_max_len} tokens, and so does max_model_len = {scaling.original_max_len}",
                stacklevel=2,
            )
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = model.embedding.weight.device
        if config.device is not None:
            device = named_device(None if config.device == "auto" else config.device)
        self.ranks: Ranks | None = None
        self._threads: ThreadCount | None = None  # none: their number stays
        if config.tp > 1:
            self.ranks, model = start_ranks(model, config, device)
        else:
            model.to(device)
        if self.images is not None:
            self.images.model.to(device)
            if config.block_size is None and device.type == "cpu":
                config = replace(config, block_size=IMAGE_BLOCK)
        try:
            self._build(model, tokenizer, config, draft)
        except BaseException:
            self.close()
            raise

    def _build(
        self, model: Transformer, tokenizer: Tokenizer | None, config: EngineConfig, draft: DraftSource | None
    ) -> None:
        pool = size_pool(model, config, None if draft is None else draft.model)
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.max_model_len = pool.max_model_len
        stops = eos_ids(model, tokenizer, config)
        groups = layer_groups(model.config, config.attention_sinks)
        self.blocks = Blocks(pool.num_blocks, pool.block_size, prefix_cache=config.prefix_cache, groups=groups)
        self.speculator = build_speculator(model, tokenizer, config, pool, draft)
        encoding = None if self.images is None else self.images.budget
        limits = scheduler_config(model, config, pool, stops)
        self.scheduler = Scheduler(limits, self.blocks, self.speculator, encoding)
        self.adapters = AdapterRegistry(model, max_adapters=config.adapter_slots, max_rank=config.max_adapter_rank)
        self.runner = build_runner(model, config, pool, self.ranks, self.images)
        self.sampler = Sampler(self.runner, tokenizer, config.seed, stops)
        vocab_size = model.config.vocab_size
        self.grammars: GrammarCompiler | None = None
        if tokenizer is not None and stops:
            self.grammars = GrammarCompiler(tokenizer, vocab_size, stops, self.sampler.masks.threads)
        self._overlaps = model.embedding.weight.is_cuda if config.async_scheduling is None else config.async_scheduling
        self._launched: LaunchedStep | None = None
        self._unreturned: list[Event] = []  # events of a step that `load_adapter` committed
        self._counter = StepCounter()
        if config.adjust_threads and self.ranks is None and self.runner.device.type == "cpu":
            self._threads = ThreadCount()
        self._said_busy = False
        for name, path in config.adapters:
            self.load_adapter(name, path)

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Run one step for every running sequence and return its events; an empty list if there is nothing to run.
        With overlapping steps, the events are those of the previous step."""
        self._adjust_threads()
        began = time.perf_counter()
        with self.computing():
            plan = self.scheduler.plan()
            if plan is None and self._launched is None:
                return self._idle()
            sampled: SampledStep | None = None
            try:
                staged = None if plan is None else self.runner.stage(plan)
                sampled = self._sample()  # the previous step, if steps overlap
                self._launch(staged, sampled, began)
                if not self._overlaps:
                    sampled = self._sample()
            except torch.OutOfMemoryError as error:
                events = self._commit(sampled or self._sample())  # before the one that failed
                self._shrink_steps(error)
                return events
            return self._commit(sampled)

    @property
    def has_work(self) -> bool:
        return self.scheduler.queues.has_work or bool(self._unreturned)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Unservable if it can never run here, and ArgumentError if it is invalid."""
        outside = [t for t in request.prompt if not 0 <= t < self.model.config.vocab_size]
        if outside:
            raise ArgumentError(
                f"request {request.id!r}: the prompt has token {outside[0]}, and the vocabulary has "
                f"{self.model.config.vocab_size} tokens",
                hint="tokenize the prompt with the model's own tokenizer",
            )
        if request.sampling.stop and self.tokenizer is None:
            raise ArgumentError(
                f"request {request.id!r}: stop strings need a tokenizer, and the engine has none",
                hint="use stop_token_ids, or pass a tokenizer to Engine",
            )
        if request.images:
            if self.images is None:
                hint = "serve a vision-language model"
                raise ArgumentError(f"request {request.id!r} has images, and the model takes text only", hint=hint)
            self.images.check(request)
        adapter = None if request.adapter is None else self.adapters.find(request.adapter)
        matchers = self._matchers(request)
        self.scheduler.queues.add(request, adapter)
        self.sampler.add(request, matchers)

    def abort(self, request_id: str) -> bool:
        """End a request now; False if there is no unfinished request of this id. Its blocks are free on return, or when
        the step that uses them is committed."""
        self.sampler.remove(request_id)
        return self.scheduler.queues.abort(request_id)

    def update_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace weights in place, all or some of them, by their names in the model's state dict, and drop what was
        computed with the old ones."""
        self._check_updatable()
        own = self.model.state_dict()
        for name, tensor in state.items():
            if name not in own or own[name].shape != tensor.shape:
                found = f"has shape {list(tensor.shape)}" if name in own else "is not in the model's state dict"
                hint = f"its shape is {list(own[name].shape)}" if name in own else "use the names of model.state_dict()"
                raise ArgumentError(f"update_weights: {name} {found}", hint=hint)
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Drop what was computed with old weights, after other code (a trainer of the same model) has changed them in
        place: the prefix cache is emptied, running sequences are recomputed, and packed weights are packed again. A
        step that is not sampled yet is computed again too, so that its logprobs are those of the weights that sampled
        it."""
        self._check_updatable()
        self._drop_steps()
        if self.images is not None:
            self.images.clear()
        self.runner.prepare()

    def load_adapter(self, name: str, path: str, adapter: Adapter | None = None) -> AdapterInfo:
        """Load a LoRA adapter, so that requests can name it. `adapter` is what was read from `path`, if another thread
        has done that (`adapters.read`). Raises BaguError, and changes nothing, if it cannot be served."""
        adapter = self.adapters.read(path) if adapter is None else adapter
        self.adapters.check(adapter)
        with self.computing():
            self._unreturned = self._commit(self._sample())
        resident = self.adapters.install(name, path, adapter, self.scheduler.queues.busy_slots())
        self.runner.install_adapter(resident.slot, adapter)
        return resident.info

    def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away. Requests that use it finish with it; its memory is used again after that."""
        self.adapters.remove(name)

    def release_source(self) -> None:
        """Free the weights that were quantized, if no other code holds the model; only their quantized form is left,
        and `update_weights` and `weights_changed` raise. Without quantization, and with slots for adapters, nothing is
        freed."""
        self.runner.release_source()
        self.model = self.adapters.model = self.runner.source

    def rehearse(self, requests: Iterable[Request]) -> None:
        """Run requests without counting their steps. The engine has no others."""
        counter, self._counter = self._counter, StepCounter()
        for request in requests:
            self.submit(request)
        while self.has_work:
            self.step()
        self._counter = counter

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Where the model runs: without gradients, in the engine's arithmetic."""
        with torch.inference_mode(), ops.invariant() if self.config.invariant else nullcontext():
            yield

    def stats(self) -> EngineStats:
        scheduler, blocks, counter = self.scheduler, self.blocks, self._counter
        return EngineStats(
            running=len(scheduler.queues.running),
            waiting=len(scheduler.queues.waiting),
            batch_size=counter.batch_size if scheduler.queues.running else 0,
            blocks_total=blocks.num_blocks,
            blocks_used=blocks.used_count,
            blocks_cached=blocks.cached_count,
            block_map=blocks.map(),
            tokens_per_s=counter.tokens_per_s(),
            last_step_s=counter.last_step_s,
            steps=counter.steps,
            generated_tokens=counter.tokens,
            preemptions=scheduler.queues.preemptions,
            prefix_queries=scheduler.queues.looked_up_tokens,
            prefix_hits=scheduler.queues.hit_tokens,
            drafts=0 if self.speculator is None else self.speculator.drafts_verified,
            draft_tokens=0 if self.speculator is None else self.speculator.drafted_tokens,
            accepted_tokens=0 if self.speculator is None else self.speculator.accepted_tokens,
            constrained_requests=self.sampler.masks.requests,
            grammar_compilations=0 if self.grammars is None else self.grammars.compilations,
            grammar_compile_s=0.0 if self.grammars is None else self.grammars.compile_s,
            mask_s=self.sampler.masks.mask_s,
            mask_wait_s=self.sampler.masks.wait_s,
            forced_tokens=counter.forced_tokens,
            not_finite=self.sampler.not_finite,
            images_encoded=0 if self.images is None else self.images.encoded,
            images_reused=0 if self.images is None else self.images.reused,
        )

    def check_ranks(self) -> None:
        """Raise `RankLost` if the process of another rank has ended. A step does so too; call it while idle."""
        if self.ranks is not None:
            self.ranks.check()

    def close(self) -> None:
        """End the processes of the other ranks, if tp > 1. The engine cannot be used afterwards."""
        if self._threads is not None:
            self._threads.close()
        if self.ranks is not None:
            self.ranks.close()

    def _adjust_threads(self) -> None:
        """Go on with fewer threads while other processes use the cores, and with all of them again."""
        threads = None if self._threads is None else self._threads.adjust()
        if threads is None or self._threads is None or self._said_busy:
            return
        self._said_busy = True
        warnings.warn(
            f"other processes use the CPU: the engine goes on with {threads} of {self._threads.most} threads, and with "
            "all of them when cores are idle",
            RuntimeWarning,
            stacklevel=3,
        )

    # --- internals ----------------------------------------------------------------------------------------------------

    def _matchers(self, request: Request) -> list[tuple[int, Any]]:
        """The compiled grammar of a request, for each choice; empty if it has none. A grammar that is not compiled yet
        is compiled here."""
        if request.sampling.grammar is None:
            return []
        if self.grammars is None:
            raise ArgumentError(
                f"request {request.id!r}: a grammar needs a tokenizer whose end-of-text token is in the model's "
                "vocabulary",
                hint="pass the model's tokenizer to Engine",
            )
        return self.grammars.matchers(request.sampling.grammar, request.sampling.n)

    def _check_updatable(self) -> None:
        self.runner.check_updatable()
        if self.ranks is not None:
            raise ArgumentError(
                f"engine: the weights of an engine with tp = {self.config.tp} cannot be replaced",
                hint="create a new engine, or use tp=1",
            )

    def _idle(self) -> list[Event]:
        if self.scheduler.queues.has_work:
            raise IntegrityError("requests are waiting, but none is running and none can be planned")
        return self._commit(None)

    def _launch(self, staged: Staged | None, previous: SampledStep | None, began: float) -> None:
        """Launch the forward of a plan, if there is one. It reads the tokens of `previous` on the device."""
        if staged is not None:
            self.sampler.start_masks(staged.plan)
            output = self.runner.launch(staged, None if previous is None else previous.output.tokens)
            self._launched = LaunchedStep(staged.plan, output, began)

    def _sample(self) -> SampledStep | None:
        """Sample the tokens of the step that is launched, if there is one."""
        launched, self._launched = self._launched, None
        if launched is None:
            return None
        return SampledStep.of(launched.plan, self.sampler.sample(launched.plan, launched.output), launched.began)

    def _commit(self, sampled: SampledStep | None) -> list[Event]:
        """Commit a step, if there is one, and return its events."""
        earlier, self._unreturned = self._unreturned, []
        if sampled is None:
            return earlier
        tokens, logprobs = sampled.wait()
        if sampled.sums is not None:
            self.sampler.check_finite(sampled.plan, sampled.sums.tolist())
        forced = self.sampler.advance(sampled.plan, tokens)
        events = self._check_stops(self.scheduler.commit(sampled.plan, tokens, logprobs, forced))
        seconds = self._counter.add(sampled.began, len(sampled.plan.slices), sum(e.token is not None for e in events))
        if forced:
            self._counter.forced_tokens += _forced_tokens(events, forced)
        if self.speculator is not None:
            self.speculator.record(sampled.plan, seconds)
        return [*earlier, *sampled.output.prompts, *events]

    def _drop_steps(self) -> None:
        """Drop the steps that are not committed. All running sequences are computed again."""
        self._launched = None
        for plan in self.scheduler.queues.in_flight:
            self.sampler.cancel(plan)
        self.scheduler.cancel()

    def _shrink_steps(self, error: torch.OutOfMemoryError) -> None:
        """After a step that did not fit the device's memory, the oldest that is not committed: plan steps of half as
        many tokens from now on."""
        tokens = self.scheduler.queues.in_flight[0].num_tokens
        if tokens == 1 or self.ranks is not None:  # other ranks wait in a collective
            raise error
        self._drop_steps()
        limit = self.scheduler.limit_step(tokens // 2)
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()
        warnings.warn(
            f"a step of {tokens} tokens ran out of memory; steps now have at most {limit} ({error})",
            RuntimeWarning,
            stacklevel=2,
        )

    def _check_stops(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Finish the choices whose text contains a stop string, and drop what they sampled after it in this step."""
        check_all, checked, stopped = self.sampler.checks_every_event, [], set()
        for event in events:
            choice = (event.request_id, event.index)
            if choice in stopped:
                continue
            if check_all or event.finish is not None:
                ends = event.finish is not None
                event = self.sampler.check_stop(event)
                if event.finish is not None:
                    stopped.add(choice)
                    if not ends:
                        self.scheduler.queues.stop(*choice)
            checked.append(event)
        return checked


def _forced_tokens(events: Iterable[TokenEvent], forced: Iterable[Sequence]) -> int:
    """How many of these tokens were forced: of each sequence in `forced` all but the first, which was sampled. Forced
    tokens after the end of a choice have no event."""
    tokens = Counter((event.request_id, event.index) for event in events)
    return sum(tokens[sequence.request.id, sequence.index] - 1 for sequence in forced)
