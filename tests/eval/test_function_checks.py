"""The checks of an asked function: what passes which, and that the cheapest answers do not pass all."""

from __future__ import annotations

import pytest

from bagu.eval.diversity import diversity
from bagu.eval.function_checks import CHECKS, checks_passed, name_share
from bagu.eval.task import checked_items
from bagu.eval.tasks import built_in
from bagu.eval.tasks.library import library

FACTS = {"name": "f", "args": ["x"]}


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("", 0),
        ("# only a comment", 0),
        ("def f(x:\n    return", 0),
        ("x = 1", 0),
        ("def g(x):\n    y = x + 1\n    return y", 1),
        ("class f:\n    pass", 0),
        ("class C:\n    def f(self, x):\n        y = x + 1\n        return y", 0),
        ("def f(): pass", 2),
        ("def f(x):\n    return x + 1", 2),
        ("def f(x):\n    '''Add.'''\n    return x + 1", 2),
        ("def f(x):\n    pass\n    ...\n    x\n    x = x\n    return x + 1", 2),
        ("def f(x):\n    print(x)\n    print(x)", 2),
        ("def f(x):\n    def g():\n        y = 1\n        return y", 2),
        ("def f():\n    y = g() + 1\n    return y", 3),
        ("def f(x):\n    y = g() + 1\n    return y", 3),
        ("def f(x, z):\n    y = x + 1\n    return y", 3),
        ("def f(self, x):\n    y = self.y + 1\n    return y", 3),
        ("def f(x):\n    x = g() + 1\n    y = 2", 3),
        ("def f(x):\n    y = x\n    return y", 4),
        ("def f(x):\n    y = [x, 1]\n    return y", 4),
        ("def f(x):\n    y = x + 1\n    return y", 5),
        ("def f(x, *rest, key=1, **more):\n    y = x + key\n    return y, rest, more", 5),
        ("def f(self):\n    self.y = 1\n    return self.y", 5),
        ("def f(x):\n    if x.ready:\n        return x", 5),
        ("async def f(x):\n    y = await x\n    return y", 5),
        ("import os\n\ndef f(x):\n    y = os.stat(x)\n    return y", 5),
        ("```python\ndef f(x):\n    y = x + 1\n    return y\n```", 5),
        ("def f(x):\n    y = x + 1\n    return y\ndef f(): pass", 2),
    ],
)
def test_an_answer_passes_the_first_checks(text: str, passed: int) -> None:
    assert checks_passed(text, FACTS) == passed, CHECKS[: checks_passed(text, FACTS)]


def test_a_name_that_begins_like_the_asked_one_has_a_share() -> None:
    texts = ("def read_all(): pass", "def read(): pass", "def read_line(): pass", "def write(): pass", "x = 1", "(")
    assert [name_share(text, "read_all") for text in texts] == [1.0, 4 / 8, 5 / 9, 0.0, 0.0, 0.0]


def test_a_function_without_arguments_needs_none() -> None:
    text = "def f():\n    y = g() + 1\n    return y"
    assert checks_passed(text, {"name": "f", "args": []}) == 5 and checks_passed(text, {"name": "f"}) == 3


@pytest.mark.parametrize("deep", ["(" * 5000 + ")" * 5000, "+".join("x" * 20_000), "x" + ".y" * 20_000])
def test_deep_nesting_is_a_failed_check_and_no_error(deep: str) -> None:
    text = f"def f(x):\n    y = {deep}\n    return y"
    assert checks_passed(text, FACTS) in (0, 2)
    assert diversity([text]).answers == 1


def test_diversity_is_low_for_one_body_under_many_names() -> None:
    bodies = ["y = x + 1\n    return y", "return x", "for z in x:\n        yield z"]
    same = [f"def f{i}(x):\n    {bodies[0]}" for i in range(12)]
    varied = [f"def f{i}(x):\n    {bodies[i % 3]}" for i in range(12)]
    assert diversity(same).bodies == pytest.approx(1 / 12) and diversity(varied).bodies == pytest.approx(3 / 12)
    assert diversity(["a b c d e"] * 3).ngrams == pytest.approx(2 / 6)
    assert diversity([]).bodies == diversity(["not code"]).ngrams == 0


def test_the_write_task_asks_for_names_that_training_files_do_not_define() -> None:
    items = checked_items(built_in("write", 256))
    known = library().training_names
    assert {"close", "__init__"} <= known and not {item.facts["name"] for item in items} & known
    assert {item.cluster for item in items} <= {d.id for d in library().held_out}
    grade = built_in("write", 256).grade
    assert grade is not None
    answers = [[str(item.answer), f"def {item.facts['name']}(): pass", ""] for item in items]
    assert grade(items, answers) == [[1.0, 0.0, 0.0]] * len(items)
