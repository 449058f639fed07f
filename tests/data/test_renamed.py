"""Copies of functions under random names: what is renamed, and which names are not used."""

from __future__ import annotations

import ast
import keyword
from pathlib import Path

import pytest

from bagu.data.chat_corpus import ChatCorpus
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.corpus import STDLIB, Selection, SourceConfig
from bagu.data.document import Document
from bagu.data.loader import DataConfig
from bagu.data.preferences import PreferenceCorpus
from bagu.data.prompts import PromptCorpus
from bagu.data.renamed import renamed_copies
from bagu.data.stdlib import DEFINED, StdlibSource, documented_functions
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError
from bagu.nn.config import ModelConfig
from bagu.train.objectives.sft import SupervisedFineTuning

MODULE = '''
def fold(items):
    """Fold the items."""
    if not items:
        return 0
    return items[0] + fold(items[1:]) + items.fold
def get_size(x):
    """Size."""
    return x
'''


def test_a_copy_is_renamed_where_it_calls_itself_and_keeps_attributes_and_docstring() -> None:
    functions = list(documented_functions([Document(id="m.py", text=MODULE)]))
    real, copy, *_ = renamed_copies(functions, 1, taken=frozenset(), seed=0)
    assert real == functions[0] and copy.name != "fold" and copy.docstring == real.docstring
    assert copy.answer == real.answer.replace("def fold", f"def {copy.name}").replace("+ fold", f"+ {copy.name}")
    assert copy.answer.endswith("items.fold")
    assert copy.question == f"Write the Python function {copy.name}.\nFold the items."


def test_names_are_not_taken_not_keywords_and_hide_nothing() -> None:
    documents = [d for d in StdlibSource().documents() if d.id in ("shutil.py", "textwrap.py", "statistics.py")]
    functions = list(documented_functions(documents))
    first = {f.name for f in renamed_copies(functions, 3, taken=frozenset(), seed=0)} - {f.name for f in functions}
    taken = frozenset(sorted(first)[::2])
    found = list(renamed_copies(functions, 3, taken=taken, seed=0))
    assert len(found) == 4 * len(functions) and len({f.id for f in found}) > 3.9 * len(functions)
    for real, *copies in (found[i : i + 4] for i in range(0, len(found), 4)):
        used = {n.id for n in ast.walk(ast.parse(real.answer)) if isinstance(n, ast.Name)}
        for copy in copies:
            (tree,) = ast.parse(copy.answer).body
            assert isinstance(tree, ast.FunctionDef) and tree.name == copy.name
            assert copy.name not in taken | used and not keyword.iskeyword(copy.name)
    assert found == list(renamed_copies(functions, 3, taken=taken, seed=0))
    assert found != list(renamed_copies(functions, 3, taken=taken, seed=1))


def test_a_small_vocabulary_of_words_has_a_free_name_too() -> None:
    functions = list(documented_functions([Document(id="m.py", text=MODULE)]))
    taken = frozenset({"fold", "get", "size", "_fold", "_get", "_size"})
    names = [f.name for f in renamed_copies(functions, 40, taken=taken, seed=0)]
    assert not set(names) & taken - {"fold"}


def test_only_training_chats_have_copies_and_none_has_a_name_of_a_held_out_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = StdlibSource().folder / "email"  # a part of the library: reading all of it takes seconds
    monkeypatch.setattr("bagu.data.corpus.StdlibSource", lambda: StdlibSource(root))
    selection = Selection(dedup=None, validation=0.3, seed=0)
    plain, more = (ChatCorpus.of(STDLIB, SourceConfig(renamed=n), selection) for n in (0, 20))
    assert [c.id for c in plain.conversations("validation")] == [c.id for c in more.conversations("validation")]
    chats = list(more.conversations("train"))
    assert len(chats) == 21 * len(list(plain.conversations("train")))
    assert more.text is not None
    held = {name for d in more.text.documents("validation") for name in DEFINED.findall(d.text)}
    copied = {c.id.rsplit(":", 1)[1] for i, c in enumerate(chats) if i % 21}
    assert len(held) > 20 and len(copied) > 1000 and not copied & held
    assert {c.id.rsplit(":", 1)[1] for c in plain.conversations("train")} & held  # real names are kept as they are


@pytest.mark.parametrize("corpus", [PreferenceCorpus, PromptCorpus])
def test_preferences_and_prompts_have_no_copies(corpus: type[PreferenceCorpus] | type[PromptCorpus]) -> None:
    with pytest.raises(BaguError, match="only chats have renamed copies"):
        corpus.of(STDLIB, SourceConfig(renamed=2), Selection(dedup=None, validation=0.05, seed=0))


def test_chats_from_files_have_no_copies() -> None:
    chats = ChatCorpus.of(
        "mine", SourceConfig(path="mine.jsonl", renamed=2), Selection(dedup=None, validation=0.1, seed=0)
    )
    with pytest.raises(BaguError, match="renamed is set"):
        _ = chats.source


def test_tokens_with_and_without_copies_are_kept_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache of tokens is asked by what decides them."""
    monkeypatch.setenv("BAGU_CACHE", str(tmp_path))
    root = StdlibSource().folder / "json"
    monkeypatch.setattr("bagu.data.corpus.StdlibSource", lambda: StdlibSource(root))
    tokenizer = BpeTokenizer.train(["def f(x):\n    return x\n"] * 4, vocab_size=320, chat_template=DEFAULT_TEMPLATE)
    objective, selection = SupervisedFineTuning(), Selection(dedup=None, validation=0.3, seed=0)
    model = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16,
        intermediate_size=48, max_len=2048,
    )  # fmt: skip
    documents = []
    for copies in (0, 2, 0):
        corpora = {STDLIB: ChatCorpus.of(STDLIB, SourceConfig(renamed=copies), selection)}
        data = objective.read(corpora, tokenizer, DataConfig(context=2048, rows=1, packing="whole"), model)
        documents.append(data.sources[STDLIB].documents)
    assert documents == [documents[0], 3 * documents[0], documents[0]] and documents[0] > 0
