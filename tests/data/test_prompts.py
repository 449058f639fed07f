"""Prompts with facts from JSON, Parquet and Python files; errors name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bagu.data import DEFAULT_TEMPLATE, BpeTokenizer, ChatEncoder, PromptCorpus
from bagu.data.corpus import PARTS, Selection, SourceConfig, TextCorpus
from bagu.data.loader import DataConfig
from bagu.data.prompts import Question, fitting
from bagu.errors import BaguError
from bagu.train.rl.grpo import GroupRelative
from bagu.train.rl.loader import PromptLoader, _scores
from bagu.train.rl.prompt_data import prompt_data
from bagu.train.rl.reward_function import Sample, Scored
from bagu.types import Completion

SELECTION = Selection(dedup=None, validation=0.3, seed=0)


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder(BpeTokenizer.train(["what is"], vocab_size=270, chat_template=DEFAULT_TEMPLATE))


def corpus(path: Path, **options: Any) -> PromptCorpus:
    return PromptCorpus.of("mine", SourceConfig(path=str(path), **options), SELECTION)


def written(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def every(prompts: PromptCorpus) -> dict[str, Question]:
    return {q.id: q for part in PARTS for q in prompts.questions(part)}


ROWS = [{"prompt": f"What is {i} + 2?", "answer": i + 2, "level": "easy"} for i in range(12)]


def test_the_other_columns_are_facts(tmp_path: Path, encoder: ChatEncoder) -> None:
    prompts = corpus(written(tmp_path, *ROWS))
    train, held = (prompts.prompts(part, encoder) for part in PARTS)
    assert len(train) + len(held) == 12 and held and len(train) > len(held)
    assert not {p.id for p in train} & {p.id for p in held}
    for prompt in (*train, *held):
        number = int(prompt.id.rpartition(":")[2]) - 1
        assert prompt.text == f"What is {number} + 2?" and prompt.facts == {"answer": number + 2, "level": "easy"}
        assert encoder.tokenizer.decode(prompt.ids) == f"<|user|>{prompt.text}<|end|><|assistant|>"


def test_a_chat_is_rendered_whole_and_its_last_message_is_the_text(tmp_path: Path, encoder: ChatEncoder) -> None:
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
    prompts = corpus(written(tmp_path, {"prompt": chat, "answer": 4}, ROWS[0]))
    found = {p.id: p for part in PARTS for p in prompts.prompts(part, encoder)}["prompts.jsonl:1"]
    assert encoder.tokenizer.decode(found.ids) == "<|system|>Be short.<|end|><|user|>2 + 2?<|end|><|assistant|>"
    assert found.text == "2 + 2?" and found.facts == {"prompt": chat, "answer": 4}


def test_parquet_has_the_same_prompts_and_facts(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    for rows in (ROWS, chats):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
        table = list(every(corpus(tmp_path / "prompts.parquet")).values())
        lines = list(every(corpus(written(tmp_path, *rows))).values())
        key = lambda q: q.text  # noqa: E731
        assert [(q.text, q.messages, q.facts) for q in sorted(table, key=key)] == [
            (q.text, q.messages, q.facts) for q in sorted(lines, key=key)
        ]
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}, {"prompt": None}]), tmp_path / "prompts.parquet")
    with pytest.raises(BaguError, match=r"prompts\.parquet: row 2: field 'prompt' is a NoneType, not a string"):
        every(corpus(tmp_path / "prompts.parquet"))


def test_another_column_may_hold_the_prompt(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "prompt": "not this"} for i in range(3)]
    found = every(corpus(written(tmp_path, *rows), field="question")).values()
    assert {q.text for q in found} == {"0?", "1?", "2?"} and {q.facts["prompt"] for q in found} == {"not this"}


def test_a_reward_gets_the_chat_of_a_prompt_in_any_column(tmp_path: Path, encoder: ChatEncoder) -> None:
    """A reward model looked for it in the column `prompt`, and scored the last message alone, or another column."""
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
    rows = [{"question": chat, "prompt": [{"role": "user", "content": "not this"}]}] * 4
    (prompt, *_) = corpus(written(tmp_path, *rows), field="question").prompts("train", encoder)
    seen: list[Sample] = []

    class Watching:
        name = "watching"

        def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
            seen.extend(samples)
            return [Scored(reward=0.0) for _ in samples]

        def close(self) -> None: ...

    _scores(Watching(), [prompt], [Completion(prompt=0, choice=0, tokens=(1,), text="4", finish="stop")])
    assert [dict(message) for message in seen[0].messages] == chat


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "2 + 2?"}, "no field 'prompt'"),
        ({"prompt": 4}, "field 'prompt' is a int, not a string"),
        ({"prompt": " \n"}, "the prompt is empty"),
        ({"prompt": []}, "'messages' is not a list of messages"),
        ({"prompt": [{"content": "2 + 2?"}]}, "message 0 has no role"),
        (
            {"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}]},
            "the last message of the prompt is of role 'assistant'",
        ),
    ],
)
def test_an_error_names_the_file_and_the_line(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(BaguError, match=rf"prompts\.jsonl:2: {said}"):
        every(corpus(written(tmp_path, ROWS[0], row)))


def test_a_role_that_the_template_rejects_names_the_line(tmp_path: Path, encoder: ChatEncoder) -> None:
    rows = [{"prompt": [{"role": "narrator", "content": "Once."}, {"role": "user", "content": "?"}]}] * 2
    with pytest.raises(BaguError, match=r"prompts\.jsonl:\d: the chat template rejects this chat"):
        corpus(written(tmp_path, *rows)).prompts("train", encoder)


def test_text_and_unused_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("2 + 2?")
    with pytest.raises(BaguError, match="is not JSON or Parquet"):
        every(corpus(tmp_path / "prompts.txt"))
    with pytest.raises(BaguError, match="max_bytes is set"):
        every(corpus(written(tmp_path, *ROWS), max_bytes=100))
    with pytest.raises(BaguError, match="no document with text"):
        every(corpus(written(tmp_path)))


def test_long_prompts_are_left_out_and_counted(tmp_path: Path, encoder: ChatEncoder) -> None:
    rows = [{"prompt": "a" * n} for n in range(1, 11)]
    prompts = corpus(written(tmp_path, *rows)).prompts("train", encoder)
    room = len(encoder.prompt([{"role": "user", "content": "a" * 5}]))
    fit, longer = fitting(prompts, room=room)
    assert {p.text for p in fit} == {p.text for p in prompts if len(p.text) <= 5} and fit
    assert longer == len(prompts) - len(fit) > 0
    with pytest.raises(BaguError, match=r"no prompt fits in 3 tokens: the shortest of \d+ prompts has \d+ tokens"):
        fitting(prompts, room=3)


MODULE = '''
class Box:
    def close(self):
        """Close it.

        More words.
        """
        self.closed = True

def twice_{n}(x, *rest, scale=1, **options):
    """Return x two times.

    >>> twice_{n}("a")
    'aa'
    """
    return x + x
'''


@pytest.fixture
def library(tmp_path: Path) -> PromptCorpus:
    """Eight modules that all define `close`, and each a function of its own."""
    for n in range(8):
        (tmp_path / f"m{n}.py").write_text(MODULE.format(n=n))
    files = TextCorpus("library", SourceConfig(path=str(tmp_path), glob="*.py"), SELECTION)
    return PromptCorpus("library", SourceConfig(), SELECTION, files)


def test_functions_are_asked_for_by_name_and_summary(library: PromptCorpus) -> None:
    for question in library.questions("train"):
        n = question.id[1]
        assert question.text == f"Write the Python function twice_{n}.\nReturn x two times."
        assert question.facts["name"] == f"twice_{n}" and question.facts["args"] == ["x", "rest", "scale", "options"]
        assert question.facts["doctests"] == [{"source": f'twice_{n}("a")\n', "want": "'aa'\n"}]
        assert question.facts["answer"] == f"def twice_{n}(x, *rest, scale=1, **options):\n    return x + x"
    close = next(q for q in library.questions("validation") if q.facts["name"] == "close")
    assert close.facts["docstring"] == "Close it.\n\nMore words." and "doctests" not in close.facts


def test_files_and_names_are_held_out(library: PromptCorpus) -> None:
    train, held = (library.questions(part) for part in PARTS)
    files = [{q.id.split(":")[0] for q in part} for part in (train, held)]
    names = [{q.facts["name"] for q in part} for part in (train, held)]
    assert train and held and not files[0] & files[1]
    assert "close" in names[1] and not names[0] & names[1]


def test_the_first_held_out_prompts_are_of_every_source(tmp_path: Path, encoder: ChatEncoder) -> None:
    """An evaluation uses the first ones. In the order of the files, a second source would never be evaluated."""
    corpora = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        path = written(tmp_path / name, *({"prompt": f"{name} {i}?"} for i in range(60)))
        corpora[name] = PromptCorpus.of(name, SourceConfig(path=str(path)), SELECTION)
    config = GroupRelative(prompts=4, max_tokens=8, reward="x").rollout_config(0)
    data = prompt_data(corpora, encoder.tokenizer, DataConfig(context=64, rows=4), config)
    assert isinstance(data.loader, PromptLoader)
    first = [prompt.text.split()[0] for prompt in data.loader.held_out_prompts[:8]]
    assert {"one", "two"} == set(first)
