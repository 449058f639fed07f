"""PPO and GRPO: what the critic buys, at the same number of sampled answers.

    bandit     answers of one letter; the reward is 1 for the right one
    sequence   answers of up to 8 letters; the reward is the share of the right letter
    offsets    the same, plus a constant for each prompt that a baseline must remove: 0, 2, 4, …

PPO samples one answer to each prompt and learns a baseline for every token (the critic, a second model). GRPO samples
eight answers to each prompt and takes their mean as the baseline. Each has the best of several learning rates.
"""

import statistics
import time
from collections.abc import Sequence
from itertools import product

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, names_in, number, numbers_in, where
from bagu.lab.parts.confidence import interval
from bagu.lab.parts.letters import policy, rollouts
from bagu.lab.plot import Line, Panel
from bagu.train import OptimizerConfig, TrainConfig, fit
from bagu.train.rl.grpo import GroupRelative
from bagu.train.rl.policy_loss import PolicyLoss
from bagu.train.rl.ppo import ProximalPolicy
from bagu.train.rl.reward_function import Sample, Scored

ANSWERS, GROUP, EPOCHS = 32, 8, 2
ROLLOUTS, SEEDS = 18, (1, 2, 3, 4)
RATES = (0.003, 0.01, 0.03)
TASKS = {"bandit": 1, "sequence": 8, "offsets": 8}  # the most letters of an answer
ALGORITHMS = ("PPO", "GRPO")


class Letter:
    """The share of the letter c, plus `step` for each number of the prompt. Keeps the mean share of each rollout."""

    name = "share of c"

    def __init__(self, step: float) -> None:
        self.step = step
        self.shares: list[float] = []

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        shares = [s.completion.count("c") / max(len(s.completion), 1) for s in samples]
        self.shares.append(statistics.fmean(shares))
        return [Scored(reward=x + self.step * s.facts["number"]) for x, s in zip(shares, samples, strict=True)]

    def close(self) -> None:
        pass


def run(setting: Setting) -> list[Row]:
    quick = setting.quick
    rounds, seeds, rates = (2, SEEDS[:2], RATES[-1:]) if quick else (ROLLOUTS, SEEDS, RATES)
    points = list(product(TASKS, ALGORITHMS, rates, seeds))
    return [
        row
        for task, algorithm, rate, seed in setting.track(points)
        for row in curve(task, algorithm, rate, seed, rounds)
    ]


def curve(task: str, algorithm: str, rate: float, seed: int, rounds: int) -> list[Row]:
    """A row for each rollout: the share of the right letter before its updates."""
    model, reward = policy(seed), Letter(2.0 if task == "offsets" else 0.0)
    objective: ProximalPolicy | GroupRelative
    if algorithm == "PPO":
        objective = ProximalPolicy(prompts=ANSWERS, max_tokens=TASKS[task], epochs=EPOCHS, kl=0.0, value_weight=0.5)
    else:
        objective = GroupRelative(prompts=ANSWERS // GROUP, samples=GROUP, max_tokens=TASKS[task], epochs=EPOCHS)
    loss: PolicyLoss = objective.loss(model)
    parameters = sum(p.numel() for p in model.parameters())  # with the critic, which the loss attached
    config = TrainConfig(steps=rounds * EPOCHS, optimizer=OptimizerConfig(lr=rate, weight_decay=0.0))
    began = time.perf_counter()
    fit(config, model, rollouts(model, objective, loss, reward, seed=seed), loss=loss)
    seconds = (time.perf_counter() - began) / rounds
    return [
        {
            "task": task,
            "algorithm": algorithm,
            "rate": rate,
            "seed": seed,
            "answers": ANSWERS * i,
            "share": share,
            "rollout_s": seconds,
            "parameters": parameters,
            "steps": config.steps,
        }
        for i, share in enumerate(reward.shares[:rounds])
    ]


def learned(rows: Sequence[Row], task: str, algorithm: str) -> tuple[float, dict[int, float]]:
    """The best learning rate, and with it the mean share over the whole run, for each seed."""
    best: tuple[float, float, dict[int, float]] | None = None
    own = [r for r in rows if (r["task"], r["algorithm"]) == (task, algorithm)]
    for rate in sorted({number(r, "rate") for r in own}):
        seeds: dict[int, list[float]] = {}
        for r in own:
            if r["rate"] == rate:
                seeds.setdefault(int(number(r, "seed")), []).append(number(r, "share"))
        means = {seed: statistics.fmean(shares) for seed, shares in seeds.items()}
        area = statistics.fmean(means.values())
        if best is None or area > best[0]:
            best = area, rate, means
    assert best is not None, f"no rows of {algorithm} on {task}"
    return best[1], best[2]


def difference(rows: Sequence[Row], task: str) -> tuple[float, float]:
    """PPO minus GRPO of the mean share, paired by seed, and half the width of its 95 % interval."""
    (_, ppo), (_, grpo) = (learned(rows, task, name) for name in ALGORITHMS)
    return interval([ppo[seed] - grpo[seed] for seed in ppo])


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if PPO's share is above GRPO's by more than its interval on every task."""
    found = {task: difference(rows, task) for task in dict.fromkeys(str(r["task"]) for r in rows)}
    better = [task for task, (mean, half) in found.items() if mean > half]
    kind: Kind = "held" if len(better) == len(found) else "holds only where" if better else "did not hold"
    sizes = {str(r["algorithm"]): number(r, "parameters") for r in rows}
    en = [f"{task}: PPO {mean:+.3f} ± {half:.3f} of the mean share" for task, (mean, half) in found.items()]
    zh = [f"{task}：PPO 的平均比例高 {mean:+.3f} ± {half:.3f}" for task, (mean, half) in found.items()]
    more = sizes["PPO"] / sizes["GRPO"]
    decided = Verdict(
        kind=kind,
        sentence_en=f"Against GRPO with as many answers, {'; '.join(en)}. PPO trains {more:.1f} times the parameters.",
        sentence_zh=f"在相同的采样数下与 GRPO 相比，{'；'.join(zh)}。PPO 训练的参数是 {more:.1f} 倍。",
    )
    if not better and not any(mean < -half for mean, half in found.values()):
        return decided.undecided(
            "more seeds: no difference is larger than its interval.", "更多种子：没有一个差值大于其区间。"
        )
    return decided


def plot(rows: Sequence[Row]) -> list[Panel]:
    panels: list[Panel] = []
    for task in names_in(rows, "task"):
        marks = []
        for i, name in enumerate(ALGORITHMS):
            rate, seeds = learned(rows, task, name)
            own = where(rows, task=task, algorithm=name, rate=rate)
            x, curves = numbers_in(own, "answers"), [column(where(own, seed=seed), "share") for seed in seeds]
            marks += [Line(x, one, "", "-", i, alpha=0.25) for one in curves]
            mean = [statistics.fmean(at) for at in zip(*curves, strict=True)]
            marks.append(Line(x, mean, f"{name}, learning rate {rate:g}", "-", i))
        y = "" if panels else "share of the right letter"
        panels.append(Panel(marks, task, "answers", y, ylim=(0, 1)))
    return panels


LAB = Claim(
    title_en="PPO and GRPO",
    title_zh="PPO 与 GRPO",
    claim_en="A critic pays: PPO needs fewer answers than GRPO's mean of a group.",
    claim_zh="评论家（critic）是值得的：PPO 比用组均值的 GRPO 需要更少的采样。",
    regime="A decoder with one layer of width 32 over eight letters and six prompts, trained on rollouts of its own "
    f"engine: {ROLLOUTS} rollouts of {ANSWERS} answers, {EPOCHS} epochs each, AdamW; the best of the learning rates "
    f"{', '.join(f'{r:g}' for r in RATES)} for each algorithm.",
    varies="The algorithm, the task, the learning rate, the seed.",
    measures="The share of the right letter in the answers of each rollout; its mean over the run, paired by "
    "seed, with a 95 % interval.",
    evidence="training",
)
