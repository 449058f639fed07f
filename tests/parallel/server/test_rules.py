"""The update rules of servers are those of the trainer, in numpy; a server does without torch."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from bagu.parallel.server import rules
from bagu.parallel.server.keys import ranges_of
from bagu.train.optim import OptimizerConfig
from bagu.train.optim.optimizer import RULES, update_elements
from bagu.train.optim.rules import Now

SIZE = 3 * rules.BLOCK + 5  # blocks, and a part of one


@pytest.mark.parametrize("kind", sorted(rules.RULES))
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_rule_equals_that_of_the_trainer(kind: str, decay: float) -> None:
    """Five updates of two segments, of which the second does not decay, in fp64."""
    config = OptimizerConfig(kind=kind, lr=0.01, weight_decay=decay)  # type: ignore[arg-type]
    cut = SIZE // 3
    segments = [[0, cut, config.options()], [cut, SIZE, {**config.options(), "weight_decay": 0.0}]]
    update = rules.update_of({"kind": kind, "servers": 1, "segments": segments}, 0)
    (mine,) = ranges_of([(0, cut), (cut, SIZE)], 1)
    rng = np.random.default_rng(0)
    whole = np.zeros((1 + len(RULES[kind][1]), SIZE))
    whole[0] = rng.standard_normal(SIZE)
    expected = torch.from_numpy(whole.copy())
    memory = np.stack([mine.take(row) for row in whole])
    for step in range(1, 6):
        gradient = rng.standard_normal(SIZE)
        kept = mine.take(gradient)
        update(memory, kept, {"lr": 0.01 / step, "step": step, "scale": 0.5})
        assert (kept == mine.take(gradient)).all()  # copies get it after the first holder
        for start, stop, options in segments:
            p, *state = (row[start:stop] for row in expected)
            g = torch.from_numpy(gradient[start:stop].copy())
            update_elements(kind, options, p, g, state, Now(lr=0.01 / step, step=step), scale=0.5, fused=False)
    found = np.empty_like(whole)
    for into, row in zip(found, memory, strict=True):
        mine.put(into, row)
    assert np.allclose(found, expected.numpy(), rtol=1e-12, atol=1e-12)


def test_all_elementwise_rules_of_the_trainer_are_there() -> None:
    assert set(rules.RULES) == set(RULES) - {"muon"}


def test_a_server_does_without_torch() -> None:
    code = "import sys, bagu.parallel.server.__main__, bagu.parallel.server.on_ray; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
