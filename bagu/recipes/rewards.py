"""REWARD on the command line: a function of a file, a built-in name, or the folder of a trained reward model.

    my_file.py:score     score(prompt, completion, facts) -> float, or with lists; my_file.py alone means `score`
    python               a built-in reward (code_rewards.py)
    runs/reward          a run of the objective `reward`, or a Hugging Face sequence classifier with one label

A file is code that runs with your rights, outside any sandbox. A sample that a reward cannot score (it raises, hangs,
or returns no finite number) has the default value, and its fault says why: the run goes on and counts them.
"""

from pathlib import Path

import torch

from bagu.errors import UnknownName
from bagu.recipes.code_rewards import BUILT_IN
from bagu.recipes.model_reward import ModelReward
from bagu.recipes.user_reward import UserReward
from bagu.train.rl.reward_function import RewardFunction


def load_reward(
    spec: str, *, default: float = 0.0, timeout_s: float = 10.0, device: torch.device | str = "cpu"
) -> RewardFunction:
    """The reward that `spec` names. `default` is the value of a sample that cannot be scored; `timeout_s` limits a call
    of a user's function; a reward model runs on `device`. Close the result."""
    path, _, function = spec.rpartition(":") if ".py:" in spec else (spec, "", "score")
    if path.endswith(".py"):
        return UserReward(Path(path), function, default=default, timeout_s=timeout_s)
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    if Path(spec).is_dir():
        return ModelReward(spec, default=default, device=device)
    raise UnknownName.among("reward", spec, BUILT_IN)
