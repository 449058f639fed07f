"""Preferences: every usual form of a row, tokens and masks of both sides, held-out prompts, packed pairs."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagu.data.chat_corpus import ChatCorpus
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.corpus import PARTS, Selection, SourceConfig
from bagu.data.json_rows import Row
from bagu.data.loader import DataConfig
from bagu.data.mix import MixConfig
from bagu.data.preference_batch import PreferenceBatch
from bagu.data.preference_loader import PreferenceLoader, evaluation_batches
from bagu.data.preference_rows import Preference, preference
from bagu.data.preference_set import PreferenceSet
from bagu.data.preferences import PreferenceCorpus, PreferenceEncoder, preference_store
from bagu.data.prompts import PromptCorpus
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError
from bagu.types import IGNORE

USER = {"role": "user", "content": "2 + 2?"}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Be right."}


def read(**fields: Any) -> Preference:
    return preference(Row("file.jsonl:3", "data/file.jsonl:3", fields))


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, (USER,)),
        ({"question": "2 + 2?", "system": "Be right.", "chosen": "4", "rejected": "5"}, (SYSTEM, USER)),
        ({"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]}, (SYSTEM, USER)),
        ({"prompt": [USER], "chosen": GOOD, "rejected": "5"}, (USER,)),
        ({"prompt": "2 + 2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, (USER,)),
        ({"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, (SYSTEM, USER)),
        ({"chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5"}, (USER,)),
        ({"prompt": "\n\nHuman: 2 + 2?\n\nAssistant:", "chosen": "4", "rejected": "5"}, (USER,)),
        ({"prompt": "\n\nHuman: 2 + 2?\n\nAssistant: ", "chosen": "4", "rejected": "5"}, (USER,)),
        (
            {
                "conversations": [{"from": "human", "value": "2 + 2?"}],
                "chosen": {"from": "gpt", "value": "4"}, "rejected": {"from": "gpt", "value": "5"},
            },
            (USER,),
        ),
        ({"instruction": "2 +", "input": "2?", "chosen": "4", "rejected": "5", "prompt": None}, None),
    ],
)  # fmt: skip
def test_pairs_are_read_in_every_usual_form(fields: dict[str, Any], prompt: tuple[Any, ...] | None) -> None:
    found = read(**fields)
    assert (found.chosen, found.rejected) == (GOOD, BAD)
    assert found.prompt == (prompt or ({"role": "user", "content": "2 +\n2?"},))


def test_kto_rows_have_one_answer() -> None:
    good = read(prompt="2 + 2?", completion="4", label=True)
    bad = read(prompt=[USER], completion=[BAD], label=0)
    assert (good.prompt, good.chosen, good.rejected) == ((USER,), GOOD, None)
    assert (bad.prompt, bad.chosen, bad.rejected) == ((USER,), None, BAD)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are equal"),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "'chosen' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "'rejected' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "not a preference: expected"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "the prompt is empty"),
        ({"chosen": "b", "rejected": "c"}, "there is no prompt: 'chosen' and 'rejected' begin differently"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "there is no prompt"),
        ({"prompt": "a", "chosen": [USER], "rejected": [BAD]}, "'chosen' must have one assistant message .* has user"),
        ({"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD]}, "has assistant, user, assistant"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "'chosen' is not a text or a list of messages"),
        ({"prompt": "a", "chosen": [{"role": "assistant"}], "rejected": "c"}, r"no content \(in 'chosen'"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "'label' is 'yes'"),
        ({"completion": "b", "label": True}, "there is no prompt"),
        ({"text": "a"}, "not a preference: expected"),
    ],
)  # fmt: skip
def test_an_error_names_the_file_and_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BaguError, match=rf"^data/file.jsonl:3: .*{said}"):
        read(**fields)


@pytest.fixture(scope="module")
def tokenizer() -> BpeTokenizer:
    return BpeTokenizer.train(["please go"], vocab_size=270, chat_template=DEFAULT_TEMPLATE)


def text_of(tokenizer: BpeTokenizer, ids: Any, mask: Any, value: int) -> str:
    return tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m == value])


def test_the_mask_covers_the_answer_and_the_token_that_ends_it(tokenizer: BpeTokenizer) -> None:
    chosen, rejected = PreferenceEncoder(tokenizer).documents(read(prompt="2 + 2?", chosen="4", rejected="five"))
    assert (chosen.id, rejected.id) == ("file.jsonl:3+", "file.jsonl:3-")
    for document, answer in ((chosen, "4"), (rejected, "five")):
        assert text_of(tokenizer, document.tokens, document.mask, 0) == "<|user|>2 + 2?<|end|><|assistant|>"
        assert text_of(tokenizer, document.tokens, document.mask, 1) == f"{answer}<|end|>"


def test_earlier_assistant_turns_are_part_of_the_prompt(tokenizer: BpeTokenizer) -> None:
    row = read(chosen=[USER, GOOD, USER, GOOD], rejected=[USER, GOOD, USER, BAD])
    chosen, _ = PreferenceEncoder(tokenizer).documents(row)
    assert text_of(tokenizer, chosen.tokens, chosen.mask, 1) == "4<|end|>"
    assert "4<|end|>" in text_of(tokenizer, chosen.tokens, chosen.mask, 0)


def test_plain_text_ends_with_the_end_of_text(tokenizer: BpeTokenizer) -> None:
    encoder = PreferenceEncoder(tokenizer, text=True)
    chosen, _ = encoder.documents(read(prompt="2 + 2 =", chosen=" 4", rejected=" 5"))
    assert tokenizer.decode(chosen.tokens) == "2 + 2 = 4<|endoftext|>"
    with pytest.raises(BaguError, match=r"data/file.jsonl:3: objective.text is set, and this row has messages"):
        list(encoder.documents(read(prompt=[SYSTEM, USER], chosen=[GOOD], rejected=[BAD])))


def test_the_facts_of_tokens_have_the_variables_of_the_template(tokenizer: BpeTokenizer) -> None:
    """A template may write eos_token, and plain text ends with it: another one gives other tokens."""
    other = replace(tokenizer, eos_token="<|end|>")
    for text in (False, True):
        assert PreferenceEncoder(other, text=text).token_facts != PreferenceEncoder(tokenizer, text=text).token_facts


def test_a_template_without_an_assistant_turn_is_refused(tokenizer: BpeTokenizer) -> None:
    silent = "{% for m in messages if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    without = BpeTokenizer(spec=tokenizer.spec, eos_token=tokenizer.eos_token, chat_template=silent)
    with pytest.raises(BaguError, match=r"data/file.jsonl:3: .*assistant"):
        list(PreferenceEncoder(without).documents(read(prompt="a", chosen="b", rejected="c")))


def rows_of(n: int, *, kto: bool = False) -> list[dict[str, Any]]:
    if kto:
        return [{"prompt": f"{i}?", "completion": "x" * (i % 7 + 1), "label": i % 2 == 0} for i in range(n)]
    return [{"prompt": f"{i % 20}?", "chosen": "x" * (i % 7 + 1), "rejected": f"{i} no"} for i in range(n)]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SELECTION = Selection(dedup=None, validation=0.2, seed=0)
CONFIG = DataConfig(context=24, rows=4, micro_batches=2)


def corpus_of(path: Path) -> PreferenceCorpus:
    return PreferenceCorpus.of("pairs", SourceConfig(path=str(path)), SELECTION)


def sets_of(path: Path, tokenizer: BpeTokenizer, *, paired: bool = True, config: DataConfig = CONFIG) -> Any:
    corpus, encoder = corpus_of(path), PreferenceEncoder(tokenizer)
    stores = [preference_store(corpus, part, encoder, path.parent / "cache") for part in PARTS]
    return [PreferenceSet.of("pairs", store, config, paired=paired) for store in stores]


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_prompts_are_held_out_whole(name: str, tmp_path: Path) -> None:
    corpus = corpus_of(written(tmp_path / name, rows_of(60)))
    train, held = (list(corpus.preferences(part)) for part in PARTS)
    assert len(train) + len(held) == 60 and held
    assert {p.prompt[0]["content"] for p in train}.isdisjoint(p.prompt[0]["content"] for p in held)
    assert [p.id for p in corpus.without_text().preferences("train")] == [p.id for p in train]


@pytest.mark.parametrize("kind", [ChatCorpus, PreferenceCorpus, PromptCorpus])
def test_a_similarity_for_rows_that_are_not_compared_is_refused(kind: Any) -> None:
    """It was the default of every run and had no effect: `auto` removes copies of text, and only text."""
    auto = Selection(dedup="auto", validation=0.2, seed=0)
    assert auto.threshold == 0.8
    kind.of("mine", SourceConfig(path="mine.jsonl"), auto)
    kind.of("mine", SourceConfig(), replace(auto, dedup=0.5))  # functions of the standard library, which is text
    with pytest.raises(BaguError, match=r"dedup is 0\.8, and source 'mine' is not text"):
        kind.of("mine", SourceConfig(path="mine.jsonl"), replace(auto, dedup=0.8))


def test_pairs_of_the_standard_library_are_the_real_function_over_a_broken_one(tmp_path: Path) -> None:
    corpus = PreferenceCorpus.of("code", SourceConfig(max_bytes=200), Selection(dedup=None, validation=0.02, seed=0))
    assert corpus.library is not None
    files = {document.id for document in corpus.library.documents("validation")}
    held = list(corpus.preferences("validation"))
    assert len(held) > 5 and {p.place.rsplit(":", 1)[0] for p in held} <= files
    for pair in held:
        assert pair.chosen is not None and pair.rejected is not None and pair.chosen != pair.rejected
        assert pair.chosen["content"].startswith("def ") and pair.prompt[0]["content"].startswith("Write the Python")
    assert held == list(corpus.without_text().preferences("validation"))


def sequences(batch: PreferenceBatch) -> list[tuple[list[int], list[int]]]:
    """Ids and targets of each sequence."""
    ends = batch.batch.cu_seqlens.tolist()
    return [
        (batch.batch.ids[a:b].tolist(), [t for t in batch.batch.targets[a:b].tolist() if t != IGNORE])
        for a, b in itertools.pairwise(ends[: batch.num_sequences + 1])
    ]


def test_an_epoch_has_every_pair_once_and_both_sides_together(tokenizer: BpeTokenizer, tmp_path: Path) -> None:
    train, _ = sets_of(written(tmp_path / "pairs.jsonl", rows_of(60)), tokenizer)
    loader = PreferenceLoader({"pairs": train}, CONFIG)
    rows = loader.report(1)["sources"]["pairs"]["rows"]
    seen: list[tuple[Any, ...]] = []
    shapes = set()
    for step in range(rows // 2):
        for batch in loader.batch(step):
            shapes.add((batch.batch.ids.shape, batch.batch.cu_seqlens.shape, batch.batch.max_len))
            found = sequences(batch)
            assert batch.chosen.tolist() == [True, False] * (len(found) // 2)
            assert batch.lengths.tolist() == [len(targets) for _, targets in found]
            for (a, a_targets), (b, b_targets) in zip(found[::2], found[1::2], strict=True):
                assert a[: len(a) - len(a_targets)] == b[: len(b) - len(b_targets)], "both sides have one prompt"
                seen.append((*a, -1, *b))
    assert len(shapes) == 1
    assert len(set(seen)) == len(seen) >= len(train.units) - 8  # an odd last micro-batch begins the next epoch's step
    again = PreferenceLoader({"pairs": train}, CONFIG).batch(3)
    assert [sequences(b) for b in again] == [sequences(b) for b in loader.batch(3)]
    assert [sequences(b) for b in loader.batch(rows)] != [sequences(b) for b in loader.batch(0)]
    assert loader.cursor(2)["sources"]["pairs"]["rows_before"] == 4


def test_long_pairs_are_left_out_and_counted(tokenizer: BpeTokenizer, tmp_path: Path) -> None:
    rows = [*rows_of(40), {"prompt": "long?", "chosen": "x " * 40, "rejected": "y"}]
    path = written(tmp_path / "pairs.jsonl", rows)
    sets = sets_of(path, tokenizer)
    assert sorted(s.left_out for s in sets) == [0, 1]
    loader = PreferenceLoader({"pairs": sets[0]}, CONFIG)
    assert loader.report(5)["sources"]["pairs"]["pairs_left_out"] == sets[0].left_out
    with pytest.raises(BaguError, match=r"none of the \d+ pairs of source 'pairs' fits in data.context = 4 tokens"):
        sets_of(path, tokenizer, config=DataConfig(context=4, rows=8))


def test_a_validation_pass_has_every_pair_once(tokenizer: BpeTokenizer, tmp_path: Path) -> None:
    _, held = sets_of(written(tmp_path / "pairs.jsonl", rows_of(60)), tokenizer)
    batches = list(evaluation_batches(held, CONFIG))
    assert sum(b.num_sequences for b in batches) == 2 * len(held.units)
    assert sequences(next(evaluation_batches(held, CONFIG, limit=1))) == sequences(batches[0])


def test_kto_pairs_each_prompt_with_the_answer_of_the_next(tokenizer: BpeTokenizer, tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", rows_of(30, kto=True))
    train, _ = sets_of(path, tokenizer, paired=False)
    batches = PreferenceLoader({"pairs": train}, CONFIG, mismatched=True).batch(0)
    own = [s for b in batches for s in sequences(b)]
    other = [s for b in batches if b.mismatched is not None
             for s in sequences(PreferenceBatch(batch=b.mismatched, num_sequences=b.num_sequences, num_chosen=0,
                                                chosen=b.chosen, lengths=b.lengths))]  # fmt: skip
    assert len(other) == len(own)
    for (ids, targets), (mixed, _), (_, following) in zip(own, other, [*own[1:], own[0]], strict=True):
        assert mixed == ids[: len(ids) - len(targets)] + following
    assert {bool(c) for b in batches for c in b.chosen} == {True, False}
    with pytest.raises(BaguError, match=r"rows.jsonl:.* has one answer, and this objective compares two"):
        sets_of(path, tokenizer)


def test_sources_are_mixed_by_their_weights(tokenizer: BpeTokenizer, tmp_path: Path) -> None:
    first, _ = sets_of(written(tmp_path / "a.jsonl", rows_of(60)), tokenizer)
    second, _ = sets_of(written(tmp_path / "b.jsonl", rows_of(80)), tokenizer)
    config = DataConfig(context=24, rows=4, micro_batches=2, mix=MixConfig(weights={"a": 1.0, "b": 3.0}))
    report = PreferenceLoader({"a": first, "b": second}, config).report(8)["sources"]
    assert (report["a"]["rows_used"], report["b"]["rows_used"]) == (4, 12)


def test_cached_reference_values_follow_their_sequences(tokenizer: BpeTokenizer, tmp_path: Path) -> None:
    train, _ = sets_of(written(tmp_path / "pairs.jsonl", rows_of(40)), tokenizer)
    known = replace(train, reference=train.store.lengths.astype(np.float32))
    for batch in PreferenceLoader({"pairs": known}, CONFIG).batch(1):
        assert batch.reference is not None
        assert batch.reference.tolist() == [len(ids) for ids, _ in sequences(batch)]
