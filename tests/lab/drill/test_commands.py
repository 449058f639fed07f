"""What surrounds a grade: stubs and progress, bugs, predictions, the page, the swap of ops, the reward, the clock."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bagu.ops
from bagu.errors import ArgumentError, ConformanceError
from bagu.lab.drill import bugs, page, words
from bagu.lab.drill.answers import Answers
from bagu.lab.drill.catalogue import drill, of_file, written
from bagu.lab.drill.grade import grade
from bagu.lab.drill.mutations import mutants
from bagu.lab.drill.predict import KINDS, puzzle
from bagu.lab.drill.progress import DAY, Attempt, Progress


def module(source: str) -> types.ModuleType:
    made = types.ModuleType("answer")
    exec(source, made.__dict__)
    return made


def test_start_writes_a_stub_and_never_over_work(tmp_path: Path) -> None:
    found = drill("softmax")
    file = words.start(found, "triton", tmp_path, "en")
    assert of_file(file, file.read_text()) == (found, "triton")
    assert words.start(found, "triton", tmp_path, "en") == file  # unchanged: written again
    file.write_text("# mine\n")
    with pytest.raises(ArgumentError, match="has your work in it"):
        words.start(found, "triton", tmp_path, "en")
    assert file.read_text() == "# mine\n"
    assert "权重" in words.start(found, "torch", tmp_path, "zh").read_text(encoding="utf-8")


def test_drills_come_again(tmp_path: Path) -> None:
    record = Progress()
    for days in (0, 0.1, 1.2, 5):
        attempt = Attempt(drill="gae", level="torch", letter="A", when=100 * DAY + days * DAY)
        record = replace(record, attempts=(*record.attempts, attempt))
    record.write(tmp_path / "p.json")
    record = Progress.read(tmp_path / "p.json")
    assert record.due("gae") == 105 * DAY + 7 * DAY  # solved on three days
    assert record.is_due("gae", 113 * DAY) and not record.is_due("gae", 111 * DAY)
    assert record.due("bpe") is None
    text = page.render(record, "zh", 113 * DAY)
    assert "手撕代码" in text and "现在" in text and "1 / 24" in text


def test_a_bug_is_mended_in_few_lines(answers: Answers) -> None:
    found = drill("rms_norm")
    given = bugs.wrong(found, "torch", 4, answers)
    assert not grade(found, given, "torch", seed=1, answers=answers, stop=True).right
    head = given.splitlines()[0]
    assert bugs.changed_lines(found, given) == 0
    mended = f"{head}\n{found.solutions['torch']}"
    assert 1 <= (bugs.changed_lines(found, mended) or 0) <= bugs.MOST_LINES
    assert (bugs.changed_lines(found, head + "\n" + "x = 1\n" * 30) or 0) > bugs.MOST_LINES
    assert bugs.changed_lines(found, found.solutions["torch"]) is None


def test_expressions_of_every_kernel_can_be_changed() -> None:
    for found in written().values():
        for source in (found.solutions[level] for level in found.levels if level == "triton"):
            made = list(mutants(source))
            assert {kind for kind, _ in made} >= {"zero", "short"}
            assert all(changed != source for _, changed in made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prediction_has_one_answer(kind: str) -> None:
    asked = puzzle(kind, 3)
    assert asked == puzzle(kind, 3) and asked.answer
    assert asked.right(f" {asked.answer} ") and not asked.right("no")


def test_an_answer_takes_the_place_of_an_op() -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    want = torch.autograd.grad(bagu.ops.rms_norm(x, w, 1e-6).sum(), (x, w))
    with bagu.ops.swap("rms_norm", module(drill("rms_norm").solutions["torch"])) as placed:
        y = bagu.ops.rms_norm(x, w, 1e-6)
        got = torch.autograd.grad(y.sum(), (x, w))
        bagu.ops.rms_norm(x, w, 1e-6, backend="torch")  # a named backend is bagu's own
    bagu.ops.rms_norm(x, w, 1e-6)
    assert placed.calls == 1
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))


def test_a_wrong_answer_takes_no_place() -> None:
    wrong = "def forward(x, w, eps):\n    return x * w\n"
    with pytest.raises(ConformanceError), bagu.ops.swap("rms_norm", module(wrong)):
        pass


@pytest.mark.slow
def test_a_drill_is_a_reward() -> None:
    from bagu.lab.drill.reward import DrillReward
    from bagu.recipes.rewards import load_reward, provided
    from bagu.train.rl.reward_function import Sample

    provided["drill"] = DrillReward
    reward = load_reward("drill:gae")
    solution = drill("gae").solutions["torch"]
    texts = [
        f"Here:\n```python\n{solution}```",
        solution.replace("decay * alive", "alive"),
        "no code",
        "import bagu\n" + solution,
    ]
    values = [s.reward for s in reward([Sample(prompt="", completion=t) for t in texts])]
    reward.close()
    assert values[0] == 1.0 and 0 < values[1] < 0.5 and values[2] == 0.0 and values[3] == 0.0


def test_the_clock_is_in_another_process(tmp_path: Path) -> None:
    from bagu.lab.drill.speed import letter, time_answer
    from bagu.machine.ceilings import Ceilings
    from bagu.ops.catalogue import SPECS

    file = tmp_path / "rms_norm.py"
    file.write_text(drill("rms_norm").solutions["torch"])
    case = next(c for c in SPECS["rms_norm"].cases if c.name == "crowd")
    low = Ceilings(device="cpu", dtype="float32", read=1e3, write=1e3, copy=1e3, matmul=1e3)
    (row,) = time_answer(drill("rms_norm"), file, device="cpu", dtype=torch.float32, ceilings=low, cases=[case])
    assert row.answer_s > 0 and row.fault and letter([row]) == "?"
    assert letter([replace(row, fault=False, floor_s=row.answer_s / 2, bagu_s=row.answer_s / 2)]) == "B"
