"""REWARD on the command line: a function of a file, a built-in name, or the folder of a trained reward model.

    my_file.py:score     score(prompt, completion, facts) -> float, or with lists; my_file.py alone means `score`
    python               a built-in reward (code_rewards.py)
    drill:softmax        a reward of another part, by its prefix: `cli` provides them (provided)
    runs/reward          a run of the objective `reward`, or a Hugging Face sequence classifier with one label

A file is code that runs with your rights, outside any sandbox. A sample that a reward cannot score (it raises, hangs,
or returns no finite number) has the default value, and its fault says why: the run goes on and counts them.

Several rewards are summed with their weights (`--reward python --reward short.py:score:0.2`).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from bagu.errors import BaguError, UnknownName
from bagu.recipes.code_rewards import BUILT_IN
from bagu.recipes.model_reward import ModelReward
from bagu.recipes.user_reward import UserReward
from bagu.train.rl.reward_function import RewardFunction, Sample, Scored, reward_specs

provided: dict[str, Callable[[str], RewardFunction]] = {}  # rewards of parts that recipes may not import, by prefix


def load_reward(
    reward: str | Sequence[str],
    *,
    default: float = 0.0,
    timeout_s: float = 10.0,
    device: torch.device | str = "cpu",
) -> RewardFunction:
    """The reward that is written as `reward`, or the weighted sum of several. `default` is the value of a sample that
    cannot be scored; `timeout_s` limits a call of a user's function; a reward model runs on `device`. Close the
    result."""
    specs = reward_specs(reward)
    if len(specs) == 1 and specs[0].weight == 1:
        return _loaded(specs[0].spec, default, timeout_s, device)
    opened: dict[str, tuple[RewardFunction, float]] = {}
    try:
        for one in specs:
            opened[one.name] = _loaded(one.spec, default, timeout_s, device), one.weight
    except BaseException:
        WeightedRewards(opened).close()
        raise
    return WeightedRewards(opened)


class WeightedRewards:
    """Σ weight × reward. The parts of a score are the rewards before their weights, and the parts of each of them."""

    def __init__(self, rewards: Mapping[str, tuple[RewardFunction, float]]) -> None:
        self.rewards = rewards

    @property
    def name(self) -> str:
        return " + ".join(f"{weight:g} {name}" for name, (_, weight) in self.rewards.items())

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        scored = {name: reward(samples) for name, (reward, _) in self.rewards.items()}
        for name, found in scored.items():
            if len(found) != len(samples):
                raise BaguError(f"the reward {name} returned {len(found)} scores for {len(samples)} answers")
        return [self._sum({name: found[i] for name, found in scored.items()}) for i in range(len(samples))]

    def close(self) -> None:
        for reward, _ in self.rewards.values():
            reward.close()

    def _sum(self, each: Mapping[str, Scored]) -> Scored:
        parts = {name: scored.reward for name, scored in each.items()}
        parts |= {f"{name}/{part}": value for name, scored in each.items() for part, value in scored.parts.items()}
        faults = [f"{scored.fault} in {name}" for name, scored in each.items() if scored.fault is not None]
        return Scored(
            reward=sum(weight * each[name].reward for name, (_, weight) in self.rewards.items()),
            fault="; ".join(faults) or None,
            partly=0 < len(faults) < len(each),
            parts=parts,
        )


def _loaded(spec: str, default: float, timeout_s: float, device: torch.device | str) -> RewardFunction:
    path, _, function = spec.rpartition(":") if ".py:" in spec else (spec, "", "score")
    if path.endswith(".py"):
        return UserReward(Path(path), function, default=default, timeout_s=timeout_s)
    prefix, _, name = spec.partition(":")
    if prefix in provided:
        return provided[prefix](name)
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    if Path(spec).is_dir():
        return ModelReward(spec, default=default, device=device)
    raise UnknownName.among("reward", spec, BUILT_IN)
