"""A table of term vectors: trained, stored, used by an index; and how rankings are joined."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bagu.data.docstrings import docstring_pairs
from bagu.errors import BaguError
from bagu.recipes.token_table import TableConfig, read_pairs, train_table
from bagu.retrieve.core import search
from bagu.retrieve.fuse import fuse
from bagu.retrieve.store import Store
from bagu.retrieve.table import TableEmbedder, is_table, save
from bagu.retrieve.update import update

# the words of a question never occur in its passage
PAIRS = [
    (f"colour of fruit{i} {'apple' if i % 2 else 'plum'}", f"{'red' if i % 2 else 'blue'} thing{i}") for i in range(64)
]


def test_a_table_learns_words_that_the_passage_does_not_have(tmp_path: Path) -> None:
    config = TableConfig(steps=40, batch=64, size=16, lr=3e-2, rare=1, drop_passage=0.0, drop_query=0.0)
    losses: list[float] = []
    words, passages, queries = train_table(PAIRS, config, lambda step, loss: losses.append(loss))
    assert losses[-1] < 0.5 * losses[0]
    save(tmp_path / "table", words, passages, queries)
    assert is_table(tmp_path / "table")
    table = TableEmbedder(str(tmp_path / "table"))
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(PAIRS[i][1])
    with Store(tmp_path / "idx") as store:
        update(store, [tmp_path / f"{i}.txt" for i in range(6)], embedder=table)
        best = [search(store, PAIRS[i][0], 1, embedder=table)[0] for i in range(6)]
        assert [Path(hit.passage.file).name for hit in best] == [f"{i}.txt" for i in range(6)]
        assert all(hit.score == pytest.approx(1.0) and "red" not in hit.words for hit in best)
        assert search(store, "unknown words", 1, embedder=table) == []
    np.testing.assert_array_equal(table.embed([""]), np.zeros((1, 16)))


def test_a_broken_table_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "table.npz").write_bytes(b"PK\3\4 no")
    with pytest.raises(BaguError, match="is not a table of vectors"):
        TableEmbedder(str(tmp_path))


def test_rankings_are_joined_by_standard_scores() -> None:
    alive = np.array([True, True, True, True, False])
    words = np.array([9.0, 3.0, 0.0, 0.0, 50.0], dtype=np.float32)
    near = np.array([0.1, 0.9, 0.1, 0.1, -1.0], dtype=np.float32)
    both = {"words": 1.0, "vectors": 1.0}
    found = fuse({"words": words, "vectors": near}, both, np.array([0, 1, 2]), alive)
    assert [id for id, _ in found] == [1, 0, 2] and found[0][1] < 1.0
    assert fuse({"words": words}, both, np.array([0, 1]), alive)[0] == (0, 1.0)
    same = fuse({"words": 1000 * words, "vectors": near / 7}, both, np.array([0, 1, 2]), alive)
    assert [id for id, _ in same] == [1, 0, 2] and same[0][1] == pytest.approx(found[0][1], abs=1e-4)


def test_pairs_of_docstrings(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        'class A:\n    def f(self):\n        """Do it. More.\n        """\n        return 1\n'
    )
    (tmp_path / "bad.py").write_text('def """')
    (pair,) = docstring_pairs([tmp_path])
    assert (pair.query, pair.passage) == ("Do it.", "def f(self):\n    return 1")
    assert [p.query for p in read_pairs([str(tmp_path)])] == ["Do it."]
