"""Scores on a real engine: against one forward, at any batch size, after a kill, with examples, over windows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bagu.eval import score
from bagu.eval.choice import answers, continuation
from bagu.eval.compare import compare_folders
from bagu.eval.grades import each
from bagu.eval.loss import windows
from bagu.eval.model import Decoding
from bagu.eval.score import evaluate
from bagu.eval.task import Item, Task, TaskError
from tests.eval.real_model import naive_logprobs, real_model

WORDS = ["quick", "brown", "lazy", "red", "answer", "question", "colour", "add", "return", "over", "the", "dog"]
ITEMS = [
    Item(
        id=str(i), prompt=f"the {word} fox jumps over", choices=(" the lazy dog", " red", f" {word} colour answer"),
        answer=i % 3, cluster=str(i // 4),
    )
    for i, word in enumerate(WORDS)
]  # fmt: skip


def choice_task(**changes: object) -> Task:
    fields = {"name": "t", "kind": "choice", "items": lambda: ITEMS, "limits": "none", "delimiter": ""} | changes
    return Task(**fields)  # type: ignore[arg-type]


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "t/items.jsonl").read_text().splitlines()][1:]


def test_log_likelihoods_are_those_of_one_forward(tmp_path: Path) -> None:
    model = real_model()
    evaluate(model, choice_task(), out=tmp_path)
    for item, row in zip(ITEMS, rows_of(tmp_path), strict=True):
        for choice, found in zip(item.choices, row["loglikelihood"], strict=True):
            ids, start = continuation(model, item.prompt, choice)
            assert found == pytest.approx(math.fsum(naive_logprobs(model, ids, start)), abs=1e-4)


def test_normalisations_select_by_their_own_score() -> None:
    row = {"loglikelihood": [-4.0, -5.0, -9.0], "tokens": [1, 2, 9], "characters": [4, 9, 10],
           "unconditional": [-1.0, -4.0, -9.5], "answer": 0}  # fmt: skip
    assert answers(row) == {"raw": 0, "characters": 1, "tokens": 2, "pmi": 2}


@pytest.mark.parametrize("batch, seqs", [(1, 1), (5, 3)])
def test_invariant_mode_gives_the_same_bits_at_any_batch_size(
    batch: int, seqs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(real_model(invariant=True), choice_task(), out=tmp_path / "a")
    monkeypatch.setattr(score, "BATCH", batch)
    other = real_model(invariant=True, max_num_seqs=seqs, max_num_batched_tokens=16)
    evaluate(other, choice_task(), out=tmp_path / "b")
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


def test_an_evaluation_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "BATCH", 4)
    whole = evaluate(real_model(invariant=True), choice_task(), out=tmp_path / "whole")
    file = tmp_path / "cut/t/items.jsonl"
    file.parent.mkdir(parents=True)
    lines = (tmp_path / "whole/t/items.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:6]) + lines[6][:20])  # a kill within a line
    asked: list[int] = []
    model = real_model(invariant=True)
    original = model.score
    model.score = lambda ids, starts: asked.append(len(ids)) or original(ids, starts)  # type: ignore[method-assign, func-returns-value]
    again = evaluate(model, choice_task(), out=tmp_path / "cut")
    assert sum(asked) == 3 * (len(ITEMS) - 5)
    assert again.metrics == whole.metrics and file.read_text() == "".join(lines)


def test_results_of_another_model_or_setting_are_not_mixed(tmp_path: Path) -> None:
    evaluate(real_model(), choice_task(), out=tmp_path)
    with pytest.raises(TaskError, match=r"another evaluation \(model differ\)"):
        evaluate(real_model(1), choice_task(), out=tmp_path)
    with pytest.raises(TaskError, match="settings differ"):
        evaluate(real_model(), choice_task(normalization="pmi"), out=tmp_path)
    for change in ({"cluster": "one"}, {"facts": {"test": "assert True"}}):
        changed = [replace(item, **change) for item in ITEMS]  # type: ignore[arg-type]
        with pytest.raises(TaskError, match="items differ"):
            evaluate(real_model(), choice_task(items=lambda changed=changed: changed), out=tmp_path)


def test_only_results_of_the_same_questions_in_the_same_way_are_compared(tmp_path: Path) -> None:
    others = [replace(item, prompt=f"{item.prompt} and") for item in ITEMS]  # the same lines of another file
    evaluate(real_model(), choice_task(), out=tmp_path / "a")
    evaluate(real_model(), choice_task(items=lambda: others), out=tmp_path / "b")
    evaluate(real_model(), choice_task(normalization="pmi"), out=tmp_path / "c")
    evaluate(real_model(), choice_task(items=lambda: [*others[:5], *ITEMS[5:]]), out=tmp_path / "d")
    with pytest.raises(TaskError, match="the two results of t have no item in common"):
        compare_folders(tmp_path / "a", tmp_path / "b")
    assert compare_folders(tmp_path / "a", tmp_path / "d")[0].difference.items == len(ITEMS) - 5
    for one, other in (("a", "c"), ("c", "a")):
        with pytest.raises(TaskError, match=r"scored by \w+ and by \w+"):
            compare_folders(tmp_path / one, tmp_path / other)


def test_few_shot_examples_stand_before_every_question_and_are_not_asked() -> None:
    task = choice_task(few_shot=2, example=lambda item: item.prompt + item.choices[item.answer])
    prefix, items = score.few_shot(task, ITEMS, seed=3)
    assert len(items) == len(ITEMS) - 2 and prefix.count("\n\n") == 2
    assert (prefix, items) == score.few_shot(task, ITEMS, seed=3) != score.few_shot(task, ITEMS, seed=4)
    asked = {item.prompt for item in items}
    assert not any(example.split(" over")[0] + " over" in asked for example in prefix.split("\n\n"))


@pytest.mark.parametrize("length, longest, step", [(1, 8, 4), (5, 8, 4), (8, 8, 4), (9, 8, 4), (40, 8, 4), (41, 8, 3)])
def test_windows_score_every_token_but_the_first_once(length: int, longest: int, step: int) -> None:
    scored = []
    for begin, end, first in windows(length, longest, step):
        assert 0 <= begin < first < end <= min(length, begin + longest)
        assert first - begin >= min(first, longest - step)  # tokens before the first that is scored
        scored += range(first, end)
    assert scored == list(range(1, length))


def test_bits_per_byte_of_a_document_that_fits_is_that_of_one_forward() -> None:
    model, text = real_model(), "the quick brown fox jumps over the lazy dog"
    task = Task(name="d", kind="loss", items=lambda: [Item(id="a", prompt=text)], limits="none")
    found = evaluate(model, task).metrics["bits_per_byte"]
    nats = -math.fsum(naive_logprobs(model, model.encode(text), 1))
    assert found.mean == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)


def test_long_documents_are_scored_in_windows() -> None:
    text = "the quick brown fox jumps over the lazy dog " * 12
    short, long = real_model(max_len=64), real_model(max_len=128)
    task = Task(name="d", kind="loss", items=lambda: [Item(id="a", prompt=text)], limits="none", stride=0.25)
    ids = short.encode(text)
    assert len(ids) > 128
    total = 0.0
    for begin, end, first in windows(len(ids), 64, 16):
        total -= math.fsum(naive_logprobs(short, ids[begin:end], first - begin))
    assert evaluate(short, task).metrics["bits_per_byte"].mean == pytest.approx(
        total / math.log(2) / len(text), rel=1e-5
    )
    assert evaluate(long, task).metrics["bits_per_byte"].mean > 0


def test_pass_at_k_counts_samples() -> None:
    grade = each(lambda item, text: float(hash_of(text) % 2))
    task = Task(
        name="g", kind="generation", items=lambda: ITEMS[:6], limits="none", grade=grade, k=(1, 3), metric="pass",
        decoding=Decoding(max_tokens=5, temperature=1.0, samples=4),
    )  # fmt: skip
    found = evaluate(real_model(), task).metrics
    assert list(found) == ["pass", "pass_pass@3"] and found["pass"].mean < found["pass_pass@3"].mean


def test_answers_to_different_prompts_are_drawn_independently() -> None:
    """At this temperature all tokens are about equally probable after any prompt: with the same random numbers for all
    prompts, the answers would be equal. The answers to a prompt do not depend on the other prompts."""
    model, drawn = real_model(), Decoding(max_tokens=3, temperature=1000.0)
    prompts = [model.encode(word) for word in WORDS]
    texts = model.generate(prompts, drawn)
    assert len({text for (text,) in texts}) == len(WORDS)
    assert model.generate(prompts[5:7], drawn) == texts[5:7]


def hash_of(text: str) -> int:
    return sum(text.encode())


def test_bad_tasks_are_refused_in_one_sentence() -> None:
    def items(**changes: object) -> Task:
        fields = {"id": "x", "prompt": "p", "choices": ("a", "b"), "answer": 0, "place": "f.jsonl:3"} | changes
        return choice_task(items=lambda: [Item(**fields)])  # type: ignore[arg-type]

    for task, message in (
        (items(choices=("a", "a")), "f.jsonl:3: two choices are equal: 'a'"),
        (items(answer=2), "f.jsonl:3: the answer 2 is none of the 2 choices"),
        (items(answer="c"), "f.jsonl:3: the answer 'c' is none"),
        (items(choices=("a",)), "f.jsonl:3: 1 choices"),
        (choice_task(items=list), "task t has no items"),
        (items(prompt="word " * 300), "f.jsonl:3: prompt and choice have"),
        (items(prompt=""), "f.jsonl:3: the prompt is empty"),
        (choice_task(few_shot=1), "no form for few-shot examples"),
        (choice_task(kind="loss", items=lambda: [*ITEMS, Item(id="z")]), "task t, item z: the document is empty"),
    ):
        with pytest.raises(TaskError, match=message):
            evaluate(real_model(), task)


def test_an_answer_ends_with_the_turn_of_the_assistant() -> None:
    """Random weights sample the token that ends a turn about once in 320 tokens."""
    model = real_model()
    drawn = Decoding(max_tokens=100, temperature=1.0, samples=8)
    prompts = [model.encode_chat([{"role": "user", "content": word}]) for word in WORDS[:4]]
    assert not any("<|end|>" in text for texts in model.generate(prompts, drawn) for text in texts)
    model.chat = None
    assert any("<|end|>" in text for texts in model.generate(prompts, drawn) for text in texts)
