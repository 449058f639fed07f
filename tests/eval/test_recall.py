"""The tasks that look for a needle in a long text."""

import pytest

from bagu.eval.task import TaskError
from bagu.eval.tasks import built_in


def test_needles_are_at_all_distances_and_only_their_value_counts() -> None:
    task = built_in("recall_2k", 2048)
    items = list(task.items())
    assert len(items) == 200 and len({item.id for item in items}) == 200
    assert all(f"_code = {item.answer}\n" in item.prompt and len(item.prompt) < 2048 * 2 for item in items)
    quarters = [sum(a <= item.facts["distance"] / item.facts["characters"] < a + 0.25 for item in items)
                for a in (0, 0.25, 0.5, 0.75)]  # fmt: skip
    assert min(quarters) > 30
    assert task.grade is not None
    answer = str(items[0].answer)
    assert task.grade(items[:1], [[f" {answer}", f"{answer}0", "", f" {answer} # right", "1"]]) == [[1, 0, 0, 1, 0]]


def test_a_model_that_is_too_short_is_told_which_length_fits() -> None:
    with pytest.raises(TaskError, match="needs a model of 8,192 positions, and this one has 4,096") as error:
        built_in("recall_8k", 4096)
    assert error.value.hint == "use recall_4k"
