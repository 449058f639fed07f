"""bagu's own solutions get the best grade, planted wrong answers do not, and their causes are guessed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bagu.lab.drill.answers import Answers
from bagu.lab.drill.catalogue import drill, ops, written
from bagu.lab.drill.core import Drill, Planted
from bagu.lab.drill.diagnose import CAUSES
from bagu.lab.drill.grade import grade

SOLUTIONS = [(name, level) for name, d in written().items() for level in d.solutions]
# flash_attention's takes 10 s; a planted answer of it is graded, and its memory in test_cheats.py
SOLUTIONS = [(name, level) for name, level in SOLUTIONS if level != "cuda"]  # test_levels.py, on a GPU
GRAD = ("swiglu", "triton_grad")
SAMPLE = [
    (n, lv) for n, lv in SOLUTIONS
    if (n, lv) in (("softmax", "triton"), GRAD) or (lv not in ("triton", "triton_grad") and n != "flash_attention")
]  # fmt: skip
PLANTED = [(name, p) for name, d in written().items() for p in d.planted if p.level != "cuda"]
ONE_EACH = [(name, next(p for p in d.planted if p.level != "triton")) for name, d in written().items()]


@pytest.mark.parametrize(("name", "level"), SAMPLE)
def test_own_solution_is_right(answers: Answers, name: str, level: str) -> None:
    found = drill(name)
    graded = grade(found, found.solutions[level], level, seed=5, answers=answers)
    assert graded.letter == "A", [str(f) for f in graded.failures]
    assert graded.passed >= 5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "level"), [s for s in SOLUTIONS if s not in SAMPLE])
def test_own_kernel_is_right(answers: Answers, name: str, level: str) -> None:
    test_own_solution_is_right(answers, name, level)


@pytest.mark.parametrize(("name", "planted"), ONE_EACH, ids=[n for n, _ in ONE_EACH])
def test_a_planted_answer_is_wrong(answers: Answers, name: str, planted: Planted) -> None:
    found = drill(name)
    graded = grade(found, found.wrong(planted), planted.level, seed=5, answers=answers, stop=True)
    assert graded.letter in "DE"


@pytest.mark.slow
def test_every_planted_answer_is_wrong_and_most_causes_are_guessed(answers: Answers) -> None:
    passed, guessed = [], 0
    for name, planted in PLANTED:
        found = drill(name)
        graded = grade(found, found.wrong(planted), planted.level, seed=5, answers=answers, stop=True)
        if graded.right:
            passed.append((name, planted.new))
        else:
            guessed += graded.failures[0].cause in planted.cause.split("|")
    assert passed == []
    assert guessed >= 0.6 * len(PLANTED)


@pytest.mark.parametrize("found", written().values(), ids=list(written()))
def test_a_drill_is_complete(found: Drill) -> None:
    assert len(found.planted) >= 12
    assert len({p[:3] for p in found.planted}) == len(found.planted)
    for planted in found.planted:
        assert found.wrong(planted) != found.solutions[planted.level]
        assert set(planted.cause.split("|")) <= CAUSES.keys()
    assert found.solutions.keys() == set(found.levels)
    assert len(found.hints) == 3 and len(found.questions) >= 2
    for text in (found.title, found.task, *found.hints, *((q.en, q.zh) for q in found.questions)):
        assert text[0].strip() and text[1].strip()
    assert any("一" <= c <= "鿿" for text in (found.task, *found.hints) for c in text[1])


def test_every_op_is_a_drill() -> None:
    from bagu.ops.catalogue import SPECS

    assert {d.op for d in written().values() if d.op} | set(ops()) == set(SPECS)
    for name in ops():
        head = f"def forward({', '.join(SPECS[name].names)}):\n    raise NotImplementedError"
        assert head in drill(name).stubs["triton"]
    assert "gelu" in Drill.of(SPECS["gelu"]).task.en.lower()


def test_list_start_and_hint_need_no_torch() -> None:
    code = (
        "import sys, os, tempfile; os.chdir(tempfile.mkdtemp()); from bagu.cli.app import main\n"
        "for line in (['list'], ['start', 'softmax'], ['hint', 'softmax']):\n"
        "    try: main(['drill', *line])\n"
        "    except SystemExit as stop: assert not stop.code, stop.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
