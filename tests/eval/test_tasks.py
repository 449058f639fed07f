"""Task files, public benchmarks from files, built-in tasks, grades, contamination."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bagu.data.document import Document
from bagu.errors import BaguError, UnknownName
from bagu.eval.benchmarks import benchmark
from bagu.eval.contamination import check_contamination
from bagu.eval.files import read_task
from bagu.eval.grades import exact_match, first_code, program_grade
from bagu.eval.task import Item, Task, TaskError, checked_items
from bagu.eval.tasks import TASKS, built_in
from bagu.eval.tasks.complete import complete, cut_to_function
from bagu.eval.tasks.continue4 import continue4
from bagu.eval.tasks.library import HELD_SHARE, SEED, held_out_modules
from bagu.eval.tasks.recall import LENGTHS
from bagu.eval.tasks.signature import signature
from bagu.recipes.catalogue import recipe

CHOICE = """
name = "capitals"
kind = "choice"
data = "capitals.jsonl"
prompt = "The capital of {{ country }} is"
choices = "{{ cities }}"
answer = "{{ label }}"
cluster = "{{ continent }}"
"""
GENERATION = CHOICE.replace('"choice"', '"generation"').replace('choices = "{{ cities }}"\n', "")
ROWS = [
    {"country": "France", "cities": ["Paris", "Rome"], "label": 0, "continent": "Europe"},
    {"country": "Italy", "cities": ["Paris", "Rome"], "label": "B", "continent": "Europe"},
    {"country": "Japan", "cities": ["Lima", "Tokyo", "Oslo"], "label": "Tokyo", "continent": "Asia"},
]


def task_file(folder: Path, text: str = CHOICE, rows: list[dict] | None = None) -> Path:
    (folder / "capitals.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (ROWS if rows is None else rows)))
    (folder / "task.toml").write_text(text)
    return folder / "task.toml"


def test_a_task_file_describes_its_items(tmp_path: Path) -> None:
    items = checked_items(read_task(task_file(tmp_path)))
    assert [(i.prompt, i.choices[i.answer], i.cluster) for i in items] == [  # type: ignore[index]
        ("The capital of France is", "Paris", "Europe"),
        ("The capital of Italy is", "Rome", "Europe"),
        ("The capital of Japan is", "Tokyo", "Asia"),
    ]
    example = read_task(tmp_path / "task.toml").example
    assert example is not None and example(items[2]) == "The capital of Japan is Tokyo"


@pytest.mark.parametrize(
    ("label", "right"),
    [("2", "2"), (2, "4"), ("0", "1"), ("B", "2"), ("None", "None"), ("4", "4"), (" 4 ", "4")],
)
def test_an_answer_in_text_is_the_choice_with_this_text(label: object, right: str, tmp_path: Path) -> None:
    """A number is an index, and so is text that is none of the choices."""
    row = ROWS[0] | {"cities": ["1", "2", "4", "None"], "label": label}
    (item,) = checked_items(read_task(task_file(tmp_path, CHOICE, [row])))
    assert item.choices[item.answer] == right  # type: ignore[index]


@pytest.mark.parametrize(
    "text, rows, message",
    [
        (CHOICE.replace('prompt = "The capital of {{ country }} is"', ""), None, "the key 'prompt' is missing"),
        (CHOICE + "colour = 1\n", None, "there is no task key"),
        (CHOICE, [{"cities": ["a", "b"], "label": 0, "continent": ""}], r"capitals.jsonl:1: 'country' is undefined"),
        (CHOICE, [ROWS[0] | {"cities": "Paris"}], "capitals.jsonl:1: the choices are a str"),
        (CHOICE, [ROWS[0] | {"label": "Lyon"}], "capitals.jsonl:1: the answer 'Lyon' is none of the 2 choices"),
        (CHOICE, [ROWS[0] | {"label": "²"}], "capitals.jsonl:1: the answer '²' is none of the 2 choices"),
        (CHOICE.replace("{{ label }}", "{{ label - 1 }}"), [ROWS[1]], "capitals.jsonl:1: the template .* fails: unsup"),
        (CHOICE, [ROWS[0] | {"country": None}], "capitals.jsonl:1: a value of the template is null"),
        (CHOICE, [ROWS[0] | {"cities": ["Paris", None]}], "capitals.jsonl:1: a choice is null"),
        (CHOICE, [], "has no items"),
        (CHOICE.replace("capitals.jsonl", "none.jsonl"), None, "there is no data at"),
        ("name = [", None, "task.toml: not TOML"),
        (CHOICE.replace('"choice"', '"chioce"'), None, "there is no kind of task 'chioce'"),
        (CHOICE.replace('"capitals.jsonl"', "3"), None, "task.toml: data is 3"),
        (CHOICE.replace('"capitals"', '"../capitals"'), None, "task.toml: name is '../capitals'"),
        (CHOICE + 'few_shot = "two"', None, "task.toml: few_shot is 'two'"),
        (CHOICE + "few_shot = true", None, "task.toml: few_shot is True"),
        (CHOICE + "few_shot = -1", None, "task capitals: -1 examples"),
        (CHOICE + "chat = true", None, "task capitals: a chat with kind 'choice'"),
        (GENERATION + 'stop = "ab"', None, "task.toml: stop is 'ab'"),
        (GENERATION + "k = []", None, "pass@k of 1 samples"),
        (GENERATION + 'normalization = "raw"', None, "normalization has no effect on a task of kind 'generation'"),
        (CHOICE + "max_tokens = 4", None, "max_tokens has no effect on a task of kind 'choice'"),
        (GENERATION + "judge_best = 4", None, "judge_best has no effect without judge"),
        (GENERATION + 'judge = "x"\nextract = "y"', None, "extract has no effect with judge"),
        (GENERATION + "k = [1.5]", None, r"task.toml: k is \[1.5\]"),
        (GENERATION + 'extract = "("', None, "'\\(' is no regular expression"),
    ],
)
def test_a_wrong_task_file_is_refused(text: str, rows: list[dict] | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(BaguError, match=message):
        checked_items(read_task(task_file(tmp_path, text, rows)))


BENCHMARK_ROWS = {
    "mmlu": {"question": "2 + 2?", "choices": ["3", "4", "5", "6"], "answer": 1, "subject": "math"},
    "ceval": {"question": "二加二？", "A": "3", "B": "4", "C": "5", "D": "6", "answer": "B"},
    "arc": {"question": "2 + 2?", "choices": {"text": ["3", "4"], "label": ["A", "B"]}, "answerKey": "B"},
    "hellaswag": {"activity_label": "Sum", "ctx": "two [step] plus", "endings": ["a", "b", "c", "d"], "label": "1"},
    "gsm8k": {"question": "1,000 + 2?", "answer": "It is 1,000 + 2 = 1,002.\n#### 1,002"},
    "humaneval": {
        "task_id": "H/0", "prompt": "def add(a, b):\n", "entry_point": "add",
        "test": "def check(f):\n    assert f(2, 2) == 4\n",
    },
}  # fmt: skip


NUMBERS = ["so 1002", "1,002, I think.", "x 1,002.", "so 1,003", "in 1002, 1003"]


@pytest.mark.parametrize("name", BENCHMARK_ROWS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_public_benchmark_is_read_from_its_usual_files(name: str, kind: str, tmp_path: Path) -> None:
    row = BENCHMARK_ROWS[name]
    file = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        file.write_text(json.dumps(row) + "\n")
    else:
        table = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(table.Table.from_pylist([row]), file)
    task = benchmark(name, tmp_path)
    (item,) = checked_items(task)
    if task.kind == "choice":
        assert item.answer == 1
    elif name == "gsm8k":
        assert task.grade is not None and task.grade([item], [NUMBERS]) == [[1.0, 1.0, 1.0, 0.0, 0.0]]
    missing = dict(row)
    missing.pop("question" if "question" in row else "test" if "test" in row else "ctx")
    (tmp_path / "data.jsonl").write_text(json.dumps(missing) + "\n")
    (tmp_path / "data.parquet").unlink(missing_ok=True)
    with pytest.raises(TaskError, match=r"data.jsonl:1: there is no field"):
        checked_items(benchmark(name, tmp_path))


@pytest.mark.parametrize("name", BENCHMARK_ROWS)
@pytest.mark.parametrize("value", [None, [1], {"a": 1}])
def test_a_field_that_is_no_text_is_refused(name: str, value: object, tmp_path: Path) -> None:
    """A null would be asked as "None", and an answer without a number can never be right."""
    for field in BENCHMARK_ROWS[name].keys() - {"subject", "task_id", "source_id"}:
        (tmp_path / "data.jsonl").write_text(json.dumps(BENCHMARK_ROWS[name] | {field: value}) + "\n")
        with pytest.raises(TaskError, match=r"data.jsonl:1: "):
            checked_items(benchmark(name, tmp_path))


@pytest.mark.parametrize(("name", "field"), [("mmlu", "choices"), ("hellaswag", "endings")])
def test_choices_in_one_text_are_refused(name: str, field: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(BENCHMARK_ROWS[name] | {field: "['3', '4']"}) + "\n")
    with pytest.raises(TaskError, match=r"data.jsonl:1: the choices are a text, not a list"):
        checked_items(benchmark(name, tmp_path))


@pytest.mark.parametrize("name", ["mmlu", "ceval"])
@pytest.mark.parametrize("answer", ["", "BC", "E", "b"])  # C-Eval's test split has empty answers
def test_an_answer_that_is_no_letter_of_a_choice_is_refused(name: str, answer: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(BENCHMARK_ROWS[name] | {"answer": answer}) + "\n")
    with pytest.raises(TaskError, match=rf"data.jsonl:1: the answer '{answer}' is none of A, B, C, D"):
        checked_items(benchmark(name, tmp_path))


def test_files_of_one_name_in_two_folders_have_different_items(tmp_path: Path) -> None:
    for subject in ("algebra", "anatomy"):  # MMLU has a folder for each subject
        (tmp_path / subject).mkdir()
        (tmp_path / subject / "test.jsonl").write_text(json.dumps(BENCHMARK_ROWS["mmlu"]) + "\n")
    items = checked_items(benchmark("mmlu", tmp_path))
    assert [item.id for item in items] == ["algebra/test.jsonl:1", "anatomy/test.jsonl:1"]


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "data.parquet").write_bytes(b"not Parquet")
    with pytest.raises(BaguError, match=r"cannot read .*data.parquet as Parquet"):
        checked_items(benchmark("mmlu", tmp_path))


def test_humaneval_runs_the_tests_of_the_data_set(tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_text(json.dumps(BENCHMARK_ROWS["humaneval"]) + "\n")
    task = benchmark("humaneval", tmp_path)
    (item,) = checked_items(task)
    assert task.grade is not None
    good, wrong, fenced = "    return a + b\n", "    return a - b\n", "```python\ndef add(a, b):\n    return b + a\n```"
    assert task.grade([item], [[good, wrong, fenced, "    return ("]]) == [[1.0, 0.0, 1.0, 0.0]]


@pytest.mark.parametrize("name", TASKS)
def test_built_in_tasks_have_items_with_one_right_answer(name: str) -> None:
    task = built_in(name, max(LENGTHS.get(name, 0), 256))
    items = checked_items(task)
    # a Python of a Linux distribution, without idlelib, tkinter and lib2to3, holds out 24 modules (3.12) or more
    assert len(items) >= 20 and task.limits
    assert items == checked_items(task)  # the same each time
    if task.kind == "choice":
        places = [item.answer for item in items]
        assert all(places.count(i) > len(items) / 10 for i in range(4))  # no place is right more often


def test_built_in_tasks_are_made_of_files_that_runs_hold_out() -> None:
    run = recipe("small")
    assert (run.validation, run.data.seed) == (HELD_SHARE, SEED)
    held = {d.id for d in held_out_modules()}
    clusters = {
        i.cluster for name in ("continue4", "signature", "complete") for i in checked_items(built_in(name, 256))
    }
    assert clusters <= held


@pytest.mark.parametrize("task", [continue4, signature])
def test_a_task_can_be_made_of_other_modules(task: Callable[..., Task]) -> None:
    chosen = held_out_modules()[:12]
    items = list(task(512, lambda: chosen).items())
    assert items and {i.cluster for i in items} <= {d.id for d in chosen}
    assert len(items) < len(list(task(512).items()))


def test_a_prompt_of_blank_lines_is_no_item_of_continue4() -> None:
    """With a short context the lines before the choices may be blank: the line above them is too long to keep."""
    blocks = [f"# {'x' * (90 * i % 180)}\n\nfirst_{i} = {i}\nsecond_{i} = {i}\nthird_{i} = {i}" for i in range(40)]
    items = list(continue4(128, lambda: [Document(id="long_lines.py", text="\n".join(blocks))]).items())
    assert items and all(item.prompt.strip() for item in items)


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(UnknownName, match="there is no task 'continu4'"):
        built_in("continu4", 256)


def test_a_completion_is_cut_where_the_function_ends() -> None:
    head = "def f(x):\n    '''Double.'''"
    code = cut_to_function(head, "    return 2 * x\nthis is no Python at all")
    assert ast.parse(code) and code.endswith("return 2 * x")


def test_the_real_bodies_pass_the_completion_task() -> None:
    task = built_in("complete", 256)
    items = checked_items(task)
    assert task.grade is not None
    assert [g for (g,) in task.grade(items, [[str(item.answer)] for item in items])] == [1.0] * len(items)
    assert [g for (g,) in task.grade(items[:3], [[""], ["    return ("], ["):"]])] == [0.0] * 3


def test_a_function_that_does_not_pass_alone_is_no_item_of_the_completion_task() -> None:
    text = '''
BASE = 2
def own(n):
    """Double.

    >>> own(2)
    4
    """
    return 2 * n
def default(n, base=BASE):
    """Multiply."""
    return base * n
def example(n):
    """Multiply.

    >>> example(BASE)
    4
    """
    return 2 * n
'''
    task = complete(256, lambda: [Document(id="module.py", text=text)])
    assert [item.facts["name"] for item in checked_items(task)] == ["own"]


def test_exact_match_takes_the_last_match() -> None:
    grade = exact_match(pattern=r"\d+")
    assert grade([Item(id="a", answer="42")], [["first 7, then 42", "42, then 7", "none"]]) == [[1.0, 0.0, 0.0]]


def test_the_pattern_of_a_task_file_identifies_its_grades(tmp_path: Path) -> None:
    """Rows that were graded with another pattern are not resumed: `judged` is in the header of the results."""
    text = GENERATION + 'extract = "{}"'
    one, other = (read_task(task_file(tmp_path, text.format(pattern))) for pattern in ("[a-z]+", "[0-9]+"))
    assert one.judged != other.judged


def test_exact_match_needs_the_group_of_a_match() -> None:
    grade = exact_match(pattern=r"answer: (\d+)|unknown")
    assert grade([Item(id="a", answer="answer: 42")], [["answer: 42", "unknown"]]) == [[1.0, 0.0]]


def test_code_is_taken_from_a_fence() -> None:
    assert first_code("Here:\n```python\nx = 1\n```\nDone") == "x = 1\n"
    assert first_code("x = 1") == "x = 1"


def test_programs_are_graded_in_the_sandbox() -> None:
    grade = program_grade(lambda item, text: text)
    assert grade([Item(id="a")], [["assert 1", "assert 0", "while", "import os; os.fork()"]])[0][:3] == [1.0, 0.0, 0.0]


def test_contamination_finds_copies_and_no_others() -> None:
    words = [f"word{i}" for i in range(200)]
    items = [Item(id=str(i), prompt=" ".join(words[20 * i : 20 * i + 20])) for i in range(10)]
    training = ["# Word40,  word41\n" + ", ".join(words[42:60]), " ".join(words[100:108])]
    found = check_contamination(items, training)
    assert found.found == ("2",) and found.share == 0.1


def test_contamination_in_scripts_without_spaces() -> None:
    texts = {
        "zh": "下列哪一座城市是中华人民共和国的首都并且位于华北平原的北部边缘",
        "ja": "にほんのしゅとはどこですか、それはとうきょうですとこたえました",
        "th": "เมืองหลวงของประเทศไทยคือกรุงเทพมหานครและตั้งอยู่ริมแม่น้ำเจ้าพระยา",
    }
    items = [Item(id=id, prompt=text) for id, text in texts.items()]
    items += [Item(id=f"other {id}", prompt=text[::-1]) for id, text in texts.items()]
    training = [f"前文很长。{text[:9]}，{text[9:]}\n后文" for text in texts.values()]
    assert check_contamination(items, training).found == ("zh", "ja", "th")


def test_a_short_item_is_not_called_contaminated() -> None:
    items = [Item(id="a", prompt="What is 2 + 2?", answer="4"), Item(id="b", prompt="首都是哪里", answer="北京")]
    found = check_contamination(items, ["what is 2 + 2? 4 首都是哪里 北京"])
    assert (found.found, found.short) == ((), 2)


def test_a_generation_task_needs_a_grade() -> None:
    with pytest.raises(TaskError, match="needs a way to grade"):
        Task(name="t", kind="generation", items=list, limits="")


def test_a_program_that_exits_before_its_end_has_not_passed() -> None:
    grade = program_grade(lambda item, text: f"{text}\nassert False")
    exits = ["raise SystemExit", "import sys; sys.exit(0)", "import os; os._exit(0)"]
    assert grade([Item(id="a")], [exits]) == [[0.0] * 3]
