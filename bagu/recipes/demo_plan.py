"""The time plan of a demo: measure a few training steps, choose a size, and compute how many steps fit.

    1. `measured`    the pace of each size that may be fast enough, the largest first, until one sees enough tokens
    2. `Plan.of`     size and steps from these rates; both are in the run's config before its first step
    3. `revised`     after an eighth and three eighths of pretraining, the number of steps that fits the real pace
    4. `sft_steps`, `dpo_steps`, `rl_steps`   before each later stage, the number of steps that fits what is left, and
       again inside the stage, by the time of its own steps (demo_pace.py)

The warm-up of the learning rate has a number of steps that is fixed before the first, and the rate stays at its peak
for the first half of a run (for all of reinforcement). So a run whose number of steps changes before has made the same
updates as a run with the new number from the start: running the final config again gives the same model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bagu.data.random_batches import random_batches
from bagu.machine.fast_dtype import compute_dtype
from bagu.nn import count
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.recipes.demo_sizes import COOLDOWN, DPO_COST, Demo
from bagu.train.prepare import prepared
from bagu.train.state import TrainState
from bagu.train.step import step

# Seconds on two Neoverse-N1 cores, the slowest machine tested. The measured time of the first corrects the others.
PREPARE_S = 22.0  # read and deduplicate the library, train the tokenizer, tokenise
COMPRESS_S = 15.0  # gzip and xz, after pretraining
ENDING_S = 17.0  # report, a server that starts
COMPOSE_S = 6.0  # of an evaluation after one stage: `compose` and `compose_long`
TASKS_S, WRITE_ITEM_S = 4.0, 0.25  # with the library: its tasks, and an item of `write` in addition
LIBRARY_S = 600.0  # a demo of this time or more trains on functions of the library too
EVALUATIONS = 4  # after pretraining, fine-tuning, preferences, reinforcement
HELD_OUT_TOKENS = 170_000  # of Debian's Python 3.11; known exactly after the text is read
FEWEST_ITEMS, ALL_ITEMS = 4, 128  # of `write`; the second is more than there are
FORWARD_SHARE = 1 / 3  # the time of a forward as a fraction of a training step
OVERHEAD = 1.08  # validation, samples and checkpoints, relative to the steps
FEWEST_STEPS = 8  # of pretraining and of fine-tuning: enough for warm-up and cooldown, and to show every stage
FEWEST_LATER = 2  # of the stages after them
ANSWER_TOKENS = 60  # of a prompt, 31 on average, and its answer, 20 to 40: for the time of an update
MOST_GAIN = 8.0  # most FLOP/s of a larger size relative to the smallest; 3.3 on two Xeon cores
PROBE_ROWS = 4  # for the probe of a CPU: a second of the largest model on a slow machine
TOLERANCE = 0.1  # a plan that differs from the real pace by less is kept


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The training rate of a size on this machine."""

    size: Demo
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen size and the reason. `seconds` is the estimate for the whole demo."""

    size: Demo  # with the chosen numbers of steps
    rate: Rate
    budget_s: float
    seconds: float
    reason: str

    @classmethod
    def of(cls, rates: Sequence[Rate], budget_s: float, fill: bool) -> Plan:
        """The first of `rates` whose size sees enough tokens in the time, else the last. With `fill` its steps fill
        the budget; otherwise they are at most the size's default.
        """
        chosen = next((r for r in rates if _fitting(r, budget_s) >= r.size.enough_tokens), rates[-1])
        size = _with_items(chosen.size, budget_s)
        fits = max(FEWEST_STEPS, int(_fitting(chosen, budget_s) / size.tokens_per_step))
        steps = fits if fill else min(fits, size.pretrain_steps)
        tokens = steps * size.tokens_per_step
        spent = (1 + size.later_share) * OVERHEAD * tokens / chosen.tokens_per_s + _held_out_s(chosen.tokens_per_s)
        seconds, reasons = PREPARE_S + _after_s(size, EVALUATIONS) + spent, [_tried(r, budget_s) for r in rates]
        if seconds > budget_s:
            reasons.append(f"no smaller one is there, and with the fewest steps, {steps}, it takes longer than asked")
        return cls(
            size=with_steps(size, steps), rate=chosen, budget_s=budget_s, seconds=seconds, reason="; ".join(reasons)
        )


def with_steps(size: Demo, steps: int) -> Demo:
    """The size with this many pretraining steps, and the steps of the later stages in proportion."""
    scaled = {
        name: max(1, round(getattr(size, name) * steps / size.pretrain_steps))
        for name in ("sft_steps", "dpo_steps", "rl_steps")
    }
    return replace(size, pretrain_steps=steps, **scaled)


def _fitting(rate: Rate, budget_s: float) -> float:
    """The number of pretraining tokens that fit into a demo of `budget_s` seconds."""
    size = _with_items(rate.size, budget_s)
    after_s = _after_s(size, EVALUATIONS)
    left = max(0.0, budget_s - PREPARE_S - after_s - _held_out_s(rate.tokens_per_s))
    return left / ((1 + size.later_share) * OVERHEAD) * rate.tokens_per_s


def _with_items(size: Demo, budget_s: float) -> Demo:
    """The size for a demo of this time: a longer one has the tasks of the library, and more items of `write`, whose
    interval should be smaller than what is gained."""
    items = max(FEWEST_ITEMS, min(ALL_ITEMS, round(size.write_items * budget_s / 300)))
    return replace(size, write_items=items, library=size.library or budget_s >= LIBRARY_S)


def _after_s(size: Demo, evaluations: int) -> float:
    """The time of what is neither preparation nor training, with this many evaluations, on the slowest machine."""
    library_s = TASKS_S + WRITE_ITEM_S * size.write_items if size.library else 0.0
    compress_s = COMPRESS_S if evaluations == EVALUATIONS else 0.0
    return compress_s + ENDING_S + evaluations * (COMPOSE_S + library_s)


def _held_out_s(tokens_per_s: float, tokens: int = HELD_OUT_TOKENS) -> float:
    """The time to score all held-out text with a model that trains at `tokens_per_s`."""
    return FORWARD_SHARE * tokens / tokens_per_s


def _tried(rate: Rate, budget_s: float) -> str:
    """One line about the measurement of a size."""
    seen, needs = _fitting(rate, budget_s), rate.size.enough_tokens
    words = f"{rate.size.name} trains at {rate.tokens_per_s:,.0f} tokens/s and sees {seen / 1e6:.2f} M in the time"
    return f"{words}, too few of {needs / 1e6:.2f} M" if seen < needs else words


def measured(sizes: Sequence[Demo], budget_s: float, device: torch.device) -> list[Rate]:
    """The rates of `sizes` (the largest first) up to the first that sees enough tokens in the time.

    The smallest size is measured first, and its rate excludes sizes that cannot be fast enough: if the large size
    trains at 32 tokens/s, three of its steps take a minute and a half.
    """
    *larger, smallest = sizes
    least = Rate(size=smallest, tokens_per_s=_tokens_per_s(smallest, device))
    rates: list[Rate] = []
    for size in larger:
        most = least.tokens_per_s * MOST_GAIN * _parameters(smallest) / _parameters(size)
        if _fitting(Rate(size=size, tokens_per_s=most), budget_s) < size.enough_tokens:
            continue
        rates.append(Rate(size=size, tokens_per_s=_tokens_per_s(size, device)))
        if _fitting(rates[-1], budget_s) >= size.enough_tokens:
            return rates
    return [*rates, least]


def _parameters(size: Demo) -> int:
    return count.parameters(size.model()).total


def _tokens_per_s(size: Demo, device: torch.device) -> float:
    """The best of some steps after one warm-up step, on random tokens; a GPU replays a graph from the fourth on."""
    config = size.pretrain().train
    rows = size.rows if device.type == "cuda" else min(size.rows, PROBE_ROWS)
    model = init_weights(Transformer(size.model(), device=device, dtype=compute_dtype(device)), config.seed)
    state = TrainState(model, config)
    batches, seconds = random_batches(size.vocab_size, (size.context,) * rows, device=device), []
    with prepared(model, config, device):
        for _ in range(6 if device.type == "cuda" else 3):
            began = time.perf_counter()
            step(state, batches)  # waits for the device, because it reads the loss
            seconds.append(time.perf_counter() - began)
    state.close()
    return rows * size.context / min(seconds[1:])


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The measured pace of a demo: its training rate, the seconds left, the preparation time, the held-out tokens, and
    the time of one evaluation (None: none was made yet)."""

    tokens_per_s: float
    left_s: float
    prepared_s: float
    held_out_tokens: int
    evaluation_s: float | None = None

    def after_s(self, size: Demo, evaluations: int) -> float:
        """The time of what is not training, with this many evaluations to come: an estimate, scaled like the
        preparation time relative to PREPARE_S (0.5 to 4 times), or as long as the last evaluation took."""
        scale = min(4.0, max(0.5, self.prepared_s / PREPARE_S))
        if self.evaluation_s is None:
            return scale * _after_s(size, evaluations)
        return scale * ENDING_S + evaluations * self.evaluation_s

    def training_s(self, size: Demo, evaluations: int) -> float:
        """The time that is left for training."""
        return max(0.0, self.left_s - self.after_s(size, evaluations)) / OVERHEAD


def revised(plan: Plan, done: int, pace: Pace, *, fill: bool) -> Demo:
    """The size with the number of steps that fits the remaining time, for a run that has made `done` of them.

    `done` is before the cooldown, so that the first steps equal those of a run of the new length.
    """
    size, own = plan.size, plan.rate.size.pretrain_steps
    held_out_s = _held_out_s(pace.tokens_per_s, pace.held_out_tokens)
    seconds = (pace.left_s - pace.after_s(size, EVALUATIONS) - held_out_s) / OVERHEAD
    left = seconds * pace.tokens_per_s / size.tokens_per_step  # steps of all kinds
    fits = done + int((left - size.later_share * done) / (1 + size.later_share))
    steps = max(FEWEST_STEPS, math.ceil(done / (1 - COOLDOWN)), fits if fill else min(fits, own))
    near = abs(steps - size.pretrain_steps) < TOLERANCE * size.pretrain_steps
    return size if near else with_steps(size, steps)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of a stage that have been made, and the measured time of one."""

    done: int
    step_s: float


def sft_steps(size: Demo, most: int | None, pace: Pace, made: Steps | None = None) -> int:
    """The number of fine-tuning steps that fits its share of the remaining time, at most `most`. The shares are those
    of `size`, with its planned numbers of steps."""
    share = size.sft_share / size.later_share
    made = made or Steps(done=0, step_s=size.tokens_per_step / pace.tokens_per_s)
    fits = _fits(share, pace.training_s(size, EVALUATIONS - 1), made, most, FEWEST_STEPS)
    return max(fits, math.ceil(made.done / (1 - COOLDOWN)))


def dpo_steps(size: Demo, most: int | None, pace: Pace) -> int:
    """The number of steps of DPO that fits its share of the remaining time, at most `most`."""
    share = size.dpo_share / (size.later_share - size.sft_share)
    made = Steps(done=0, step_s=DPO_COST * size.tokens_per_step / pace.tokens_per_s)
    return _fits(share, pace.training_s(size, EVALUATIONS - 2), made, most, FEWEST_LATER)


def rl_steps(size: Demo, most: int | None, pace: Pace, answer_s: float, made: Steps | None = None) -> int:
    """The number of steps of reinforcement that fits the remaining time, at most `most`. `answer_s` is the time of
    an answer of `rl_tokens` tokens, sampled with many others: the estimate before the first step."""
    answers = size.rl_prompts * size.rl_samples
    made = made or Steps(done=0, step_s=answers * (answer_s + ANSWER_TOKENS / pace.tokens_per_s))
    return max(made.done, _fits(1.0, pace.training_s(size, 1), made, most, FEWEST_LATER))


def _fits(share: float, left_s: float, made: Steps, most: int | None, fewest: int) -> int:
    """The steps of a stage that has `share` of the time left and of the time that its own steps took."""
    fits = max(fewest, int(share * (left_s / made.step_s + made.done)))
    return fits if most is None else min(fits, most)
