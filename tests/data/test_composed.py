"""Composed functions: what is held out is in no stage's training data, and running decides what is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagu.data.composed import LENGTHS, TRAINED, VERBS, Composed, broken, held_out, nearest, trains
from bagu.eval.tasks import built_in
from bagu.eval.tasks.compose import COMPOSE, LONG, of_length, same_code
from bagu.recipes.code_rewards import PythonReward
from bagu.recipes.demo_data import StageData
from bagu.train.rl.reward_function import Sample

DATA = [StageData.of(demonstrations=1500, pairs=600, questions=1500, seed=seed) for seed in (0, 1)]


def runs(verbs: tuple[int, ...]) -> set[tuple[int, ...]]:
    return {verbs[a:b] for a in range(len(verbs)) for b in range(a + 1, len(verbs) + 1)}


@pytest.mark.parametrize("stage", ["sft", "dpo", "grpo"])
@pytest.mark.parametrize("data", DATA, ids=["seed 0", "seed 1"])
def test_no_held_out_composition_or_name_is_in_the_training_data(data: StageData, stage: str) -> None:
    held, names = {item.composition for item in held_out()}, {item.name for item in held_out()}
    items: tuple[Composed, ...] = getattr(data, stage)
    assert len(items) > 500 and max(len(item.verbs) for item in items) == TRAINED
    for item in items:
        assert held.isdisjoint((item.argument, run) for run in runs(item.verbs)), item.question
        assert item.name not in names


def test_two_hundred_items_and_more_are_held_out_a_third_of_them_longer() -> None:
    items = held_out()
    assert len(items) >= 200 and len({item.composition for item in items}) == len(items)
    long = [item for item in items if len(item.verbs) > TRAINED]
    assert len(long) * 3 == len(items) and {len(item.verbs) for item in items} == set(LENGTHS)
    assert len(of_length(LONG, items)) == len(long) and not any(trains(item.composition) for item in items)


def test_every_verb_and_every_kind_of_argument_is_trained_and_asked() -> None:
    for items in (DATA[0].sft, held_out()):
        assert {(i.argument, v) for i in items for v in i.verbs} == {
            (a, v) for a, vs in VERBS.items() for v in range(len(vs))
        }


@pytest.mark.parametrize("task", [COMPOSE, LONG])
def test_the_expected_code_is_right_and_a_mistake_is_wrong(task: str) -> None:
    found, items = built_in(task, 256), of_length(task, held_out())[:24]
    wrong = [broken(item, seed="test") for item in items]
    assert found.grade is not None
    grades = found.grade(
        list(found.items())[:24], [[i.answer, w.answer, "def f(:"] for i, w in zip(items, wrong, strict=True)]
    )
    for item, other, (right, mistake, unparsed) in zip(items, wrong, grades, strict=True):
        assert (right, unparsed) == (1.0, 0.0) and mistake == float(other.calls == item.calls)


def test_an_answer_is_run_for_the_reward() -> None:
    item = next(i for i in held_out() if i.calls != broken(i, seed="r").calls)
    texts = (
        item.answer,
        f"```python\n{item.answer}\n```",
        broken(item, seed="r").answer,
        "def",
        replace(item, name="f").answer,
    )
    reward = PythonReward()
    try:
        scored = reward([Sample(prompt=item.question, completion=text, facts=item.facts) for text in texts])
    finally:
        reward.close()
    assert [s.reward for s in scored] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_without_a_sandbox_the_expected_code_is_asked_for() -> None:
    item = held_out()[0]
    assert same_code(item.answer + "\n\n# done", item.answer) and not same_code(
        broken(item, seed="").answer, item.answer
    )
    assert not same_code("def f(:", item.answer)


def test_copying_the_nearest_demonstration_is_a_low_bar() -> None:
    known = DATA[0].sft
    item = known[7]
    assert nearest(replace(item, name="other_name"), known).composition == item.composition
    assert 0 <= DATA[0].copying(COMPOSE, 40).mean < 0.2
