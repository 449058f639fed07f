"""The loader of a rollout objective: it samples answers, scores them, and serves them for several steps.

    draw      the next prompts, in an order that the seed shuffles for each pass over them
    sample    several answers to each, by the inference engine that shares the weights of the model
    reward    a number for each answer
    select    groups that teach nothing are left out and counted (GRPO: all rewards equal)
    prepare   the columns of the loss: logprobs of the trainer and of the reference, values, advantages
    steps     `epochs` passes over the answers in `minibatches` steps each

Everything is a function of the weights, the seed, and the numbers in the cursor. If no group of a rollout is left, the
next prompts are drawn, at most `max_draws` times; then one step is counted without an update.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bagu.data.mix import Mixture
from bagu.data.prompts import Prompt
from bagu.data.sequences import Tokens, micro_batches
from bagu.errors import ArgumentError, BaguError
from bagu.nn.model import Transformer
from bagu.train.rl.reward_function import RewardFunction, Sample, Scored
from bagu.train.rl.rollout import Answer, PackShape, Rollout, RolloutBatch, Sampler
from bagu.train.rl.tally import Tally
from bagu.types import Completion

TRAIN, HELD_OUT = 0, 1  # parts of a seed


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """A rollout has `samples` answers of at most `max_tokens` tokens to each of `prompts` prompts. With `fill`, groups
    that were left out are replaced by groups of other prompts (DAPO's dynamic sampling), in at most `max_draws` draws.
    """

    prompts: int
    samples: int
    max_tokens: int
    epochs: int
    minibatches: int
    max_draws: int
    fill: bool
    seed: int


@runtime_checkable
class Learner(Protocol):
    """The part of a loss that turns sampled answers into something to train on."""

    def useful(self, rewards: Sequence[float]) -> bool:
        """Whether answers to one prompt with these rewards have a gradient."""
        ...

    def prepare(self, model: Transformer, answers: Sequence[Answer], shape: PackShape) -> list[Answer]:
        """Add the columns of the loss, with the weights that sampled the answers."""
        ...

    def rollout_metrics(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Metrics of a rollout, from the answers of `prepare`, at least one."""
        ...

    def weights(self, lengths: Sequence[int]) -> list[float]:
        """The weight of each token of each answer in the loss of a step, for the answers of that step."""
        ...


@dataclass(frozen=True, kw_only=True)
class PromptLoader:
    """The prompts of a run by source, before there is an engine that answers them."""

    sources: Mapping[str, Sequence[Prompt]]
    held_out_prompts: Sequence[Prompt]
    config: RolloutConfig
    shape: PackShape
    mixture: Mixture | None = None  # the source of each prompt in turn; None: one order of all prompts

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for prompts in self.sources.values() for prompt in prompts]

    def drawn(self, start: int, stop: int) -> list[Prompt]:
        """The prompts `start` to `stop` of a run. Each pass over the prompts, or over those of a source, has its own
        order."""
        if self.mixture is None:
            return _passes(self.prompts, range(start, stop), self.config.seed)
        found = []
        for i in range(start, stop):
            before, after = self.mixture.counts(i), self.mixture.counts(i + 1)
            own = next(s for s, (was, now) in enumerate(zip(before, after, strict=True)) if now > was)
            name = self.mixture.names[own]
            found += _passes(self.sources[name], range(before[own], after[own]), self.config.seed, own)
        return found

    def report(self, steps: int) -> dict[str, Any]:
        """The passes over the prompts if no further prompts are drawn, and the tokens of a step at most: every answer
        as long as it may be."""
        c = self.config
        drawn = math.ceil(steps / (c.epochs * c.minibatches)) * c.prompts
        prompt = sum(len(p.ids) for p in self.prompts) / len(self.prompts)
        counts = dict.fromkeys(self.sources, drawn / len(self.prompts))
        if self.mixture is not None:
            of = dict(zip(self.mixture.names, self.mixture.counts(drawn), strict=True))
            counts = {name: of[name] / len(prompts) for name, prompts in self.sources.items()}
        return {
            "sources": {name: {"prompts": len(p), "epochs": counts[name]} for name, p in self.sources.items()},
            "tokens_per_step": round(c.prompts * c.samples * (prompt + c.max_tokens) / c.minibatches),
        }

    def prefetch(self, start: int) -> contextlib.AbstractContextManager[Iterator[Sequence[RolloutBatch]]]:
        raise _unanswered()

    def held_out(self, limit: int | None) -> Iterable[RolloutBatch]:
        raise _unanswered()

    def cursor(self, step: int) -> dict[str, Any]:
        return {"step": step}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Nothing to do."""


def _passes(prompts: Sequence[Prompt], places: range, seed: int, *source: int) -> list[Prompt]:
    """The prompts at these places of endless passes over them."""
    n = len(prompts)
    orders = {e: np.random.default_rng([seed, *source, e]).permutation(n) for e in {i // n for i in places}}
    return [prompts[orders[i // n][i % n]] for i in places]


class RolloutLoader:
    """Rollouts on the prompts of `source`. `model` is the policy, and `sampler` samples with its weights. Without a
    reward, answers have reward 0, and no metric shows it.
    """

    def __init__(
        self,
        source: PromptLoader,
        *,
        model: Transformer,
        sampler: Sampler,
        reward: RewardFunction | None,
        learner: Learner,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.source, self.prompts = source, source.prompts
        self.config, self.shape = source.config, source.shape
        self.model, self.sampler, self.reward, self.learner, self.decode = model, sampler, reward, learner, decode
        self._step = 0  # the next global step
        self._rollouts = 0  # rollouts made so far
        self._drawn = 0  # prompts drawn so far
        self._index = 0  # the next step of `_rollout`
        self._rollout: Rollout | None = None
        self._answers, self._faults = 0, list[str]()  # answers that were scored by this loader, and how scoring failed

    # --- the interface of fit -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def prefetch(self, start: int) -> Iterator[Iterator[tuple[RolloutBatch, ...]]]:
        """Steps from `start` on, which is where the last iterator ended or `restore` set this loader."""
        if start != self._step:
            raise ArgumentError(
                f"step {start} of rollouts was asked for, and the next one is {self._step}",
                hint="rollouts depend on the weights and are made in order; restore a cursor to continue at its step",
            )
        yield iter(self._next, None)

    def _next(self) -> tuple[RolloutBatch, ...]:
        if self._rollout is None or self._index == self._steps(self._rollout):
            self._rollout = None  # frees it before the next one is made
            self._rollout, self._index = self._make(self._rollouts), 0
            self._rollouts += 1
        batches = self._batches(self._rollout, self._index)
        self._index += 1
        self._step += 1
        return batches

    def cursor(self, step: int) -> dict[str, Any]:
        assert step == self._step, "the position of a rollout loader is known only at its next step"
        unfinished = self._rollout is not None and self._index < self._steps(self._rollout)
        return {
            "step": step,
            "rollouts": self._rollouts,
            "drawn": self._drawn,
            "index": self._index,
            "rollout": self._rollout.to_json() if unfinished and self._rollout is not None else None,
        }

    def restore(self, cursor: Mapping[str, Any]) -> None:
        self._step, self._rollouts, self._drawn = cursor["step"], cursor["rollouts"], cursor["drawn"]
        self._index = cursor["index"]
        self._rollout = None if cursor["rollout"] is None else Rollout.from_json(cursor["rollout"])

    def report(self, steps: int) -> dict[str, Any]:
        return self.source.report(steps)

    # --- a rollout ----------------------------------------------------------------------------------------------------

    def _make(self, number: int) -> Rollout:
        self.sampler.weights_changed()
        tally, kept, groups, asked = Tally(), list[Answer](), 0, 0
        for _ in range(self.config.max_draws):
            prompts = self._draw(self.config.prompts - groups)
            for answers in self._sampled(prompts, number, asked, tally):
                if self.learner.useful([a.reward for a in answers]):
                    kept += answers
                    groups += 1
                else:
                    tally.skipped_groups += 1
            asked += len(prompts)
            if groups == self.config.prompts or (groups and not self.config.fill):
                break
        began = time.perf_counter()
        ready = self.learner.prepare(self.model, kept, self.shape) if kept else []
        metrics = {**tally.metrics(), "prepare_s": time.perf_counter() - began}
        if ready:
            metrics |= self.learner.rollout_metrics(ready)
        return Rollout(number=number, answers=tuple(ready), metrics=metrics)

    def _draw(self, count: int) -> list[Prompt]:
        self._drawn += count
        return self.source.drawn(self._drawn - count, self._drawn)

    def _sampled(self, prompts: Sequence[Prompt], number: int, first: int, tally: Tally) -> list[list[Answer]]:
        """The answers to each prompt, with their rewards. `first` is the number of the first prompt in the rollout."""
        c = self.config
        began = time.perf_counter()
        seeds = [_seed(c.seed, TRAIN, number, first + i) for i in range(len(prompts))]
        drawn = self.sampler.sample([p.ids for p in prompts], n=c.samples, max_tokens=c.max_tokens, seeds=seeds)
        tally.rollout_s += time.perf_counter() - began
        began = time.perf_counter()
        scored = _scores(self.reward, prompts, drawn)
        self._answers += len(scored)
        self._faults += [s.fault for s in scored if s.fault is not None and not s.partly]
        tally.reward_s += time.perf_counter() - began
        tally.add(drawn, scored)
        groups: list[list[Answer]] = [[] for _ in prompts]
        for i, completion in enumerate(drawn):
            reward = scored[i].reward if scored else 0.0
            answer = _answer(prompts[completion.prompt], completion, number=first + completion.prompt, reward=reward)
            groups[completion.prompt].append(answer)
        return groups

    # --- its steps ----------------------------------------------------------------------------------------------------

    def _steps(self, rollout: Rollout) -> int:
        return self.config.epochs * min(self.config.minibatches, len(rollout.answers)) or 1

    def _batches(self, rollout: Rollout, index: int) -> tuple[RolloutBatch, ...]:
        """The micro-batches of step `index` of a rollout. Each epoch divides the answers in its own order."""
        metrics = rollout.metrics if index == 0 else {}
        if not rollout.answers:
            return (RolloutBatch(batch=None, columns={}, rollout=metrics),)
        epoch, part = divmod(index, min(self.config.minibatches, len(rollout.answers)))
        order = np.random.default_rng([self.config.seed, rollout.number, epoch]).permutation(len(rollout.answers))
        chosen = sorted(np.array_split(order, self._steps(rollout) // self.config.epochs)[part].tolist())
        answers = [rollout.answers[i] for i in chosen]
        weights = self.learner.weights([a.tokens.num_targets for a in answers])
        answers = [a.plus(weights=np.full(a.tokens.num_targets, w)) for a, w in zip(answers, weights, strict=True)]
        plan = micro_batches([len(a.tokens.ids) for a in answers], capacity=self.shape.tokens)
        return tuple(RolloutBatch.of([answers[i] for i in part], self.shape, rollout=metrics) for part in plan)

    def taught_nothing(self, updates: int) -> str | None:
        """Why a run that made `updates` updates with this loader has learned nothing; None if it may have."""
        if self._faults and len(self._faults) == self._answers:
            return f"the reward failed for all {self._answers} answers: it {self._faults[-1]}"
        if self._answers and updates == 0:
            failed = f"; it {self._faults[-1]} for {len(self._faults)} of {self._answers}" if self._faults else ""
            return f"in all {self._step} steps the reward was equal for the answers to each prompt{failed}"
        return None

    # --- what it shows ------------------------------------------------------------------------------------------------

    def texts(self, limit: int = 4) -> list[str]:
        """Answers of the last rollout with their prompts and rewards, the first of each prompt."""
        rollout, seen = self._rollout, dict[int, Answer]()
        for answer in rollout.answers if rollout is not None else ():
            seen.setdefault(answer.prompt, answer)
        score = "" if self.reward is None else "\n[reward {:g}]"
        return [self.decode(a.tokens.ids) + score.format(a.reward) for a in list(seen.values())[:limit]]

    def held_out(self, limit: int | None) -> Iterable[RolloutBatch]:
        """One answer to each held-out prompt, at most `limit` times the prompts of a rollout, and the metrics of all.
        The seeds are the same each time."""
        prompts = self.source.held_out_prompts
        chosen = prompts if limit is None else prompts[: limit * self.config.prompts]
        if not chosen:
            raise BaguError("there is no held-out prompt to evaluate on", hint="hold out more prompts")
        tally = Tally()
        self.sampler.weights_changed()
        seeds = [_seed(self.config.seed, HELD_OUT, i) for i in range(len(chosen))]
        drawn = self.sampler.sample([p.ids for p in chosen], n=1, max_tokens=self.config.max_tokens, seeds=seeds)
        tally.add(drawn, _scores(self.reward, chosen, drawn))
        metrics = tally.answer_metrics()
        answers = [_answer(chosen[c.prompt], c, number=c.prompt, reward=0.0) for c in drawn]
        for at in range(0, len(answers), self.shape.segments):
            some = answers[at : at + self.shape.segments]
            for part in micro_batches([len(a.tokens.ids) for a in some], capacity=self.shape.tokens):
                yield RolloutBatch.of([some[i] for i in part], self.shape, rollout=metrics)


def _unanswered() -> ArgumentError:
    return ArgumentError("these prompts have no answers yet", hint="make a RolloutLoader of them, as recipes do")


def _answer(prompt: Prompt, completion: Completion, *, number: int, reward: float) -> Answer:
    assert completion.logprobs is not None
    tokens = Tokens(ids=(*prompt.ids, *completion.tokens), start=len(prompt.ids))
    return Answer(tokens=tokens, prompt=number, reward=reward).plus(engine=np.array(completion.logprobs))


def _scores(reward: RewardFunction | None, prompts: Sequence[Prompt], drawn: Sequence[Completion]) -> list[Scored]:
    if reward is None:
        return []
    asked = [prompts[c.prompt] for c in drawn]
    samples = [
        Sample(prompt=p.text, completion=c.text or "", facts=p.facts, messages=p.messages)
        for p, c in zip(asked, drawn, strict=True)
    ]
    scored = reward(samples)
    wrong = [s.reward for s in scored if not math.isfinite(s.reward)]
    if len(scored) != len(samples) or wrong:
        found = f"{wrong[0]} for an answer" if wrong else f"{len(scored)} scores for {len(samples)} answers"
        raise BaguError(f"the reward {reward.name} returned {found}", hint="it returns a finite number for each answer")
    return scored


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 2)
