"""Near-duplicates against the definition, and the split that follows."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.data import Document, StdlibSource, deduplicate, hold_out
from bagu.data.dedup import BINS, SHINGLE, Shingler, jaccard
from bagu.data.split import held_ids, place, sample
from bagu.errors import BaguError


def shingle_set(text: str) -> set[bytes]:
    data = re.sub(r"\s+", " ", text).encode()
    return {data[i : i + SHINGLE] for i in range(max(1, len(data) - SHINGLE + 1))}


def similarity(a: str, b: str) -> float:
    """The definition, without hashing."""
    x, y = shingle_set(a), shingle_set(b)
    return len(x & y) / len(x | y)


def words(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefgh", k=rng.randint(2, 8))) for _ in range(count)]


def edited(text: list[str], edits: int, seed: int) -> str:
    rng, out = random.Random(seed), list(text)
    for at in rng.sample(range(len(out)), min(edits, len(out))):
        out[at] = "EDIT"
    return " ".join(out)


@settings(max_examples=40, derandomize=True)
@given(st.text(alphabet="ab \n", max_size=80), st.text(alphabet="ab \n", max_size=80), st.integers(0, 9))
def test_similarity_is_the_jaccard_similarity_of_shingles(a: str, b: str, seed: int) -> None:
    shingler = Shingler(seed)
    assert jaccard(*(next(shingler.hashes([text])) for text in (a, b))) == pytest.approx(similarity(a, b), abs=1e-12)


@settings(max_examples=25, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=2, max_size=12),
    st.sampled_from([15, 120, 600]),
    st.integers(0, 3),
)
def test_kept_documents_have_no_duplicates_and_removed_ones_do(
    recipe: list[tuple[int, int]], length: int, seed: int
) -> None:
    """Documents are edited copies of four texts; pairs are checked one by one against the definition."""
    texts = [edited(words(base, length), edits, seed=i) for i, (base, edits) in enumerate(recipe)]
    documents = [Document(id=str(i), text=text) for i, text in enumerate(texts)]
    kept, report = deduplicate(documents, seed=seed)
    assert report.documents == len(documents) == len(kept) + len(report.removed)
    ids = kept
    assert ids == sorted(ids)
    assert not [(i, j) for i in ids for j in ids if i < j and similarity(texts[i], texts[j]) >= 0.8]
    for pair in report.removed:
        assert int(pair.kept) in ids
        assert int(pair.kept) < int(pair.removed)
        assert pair.similarity == pytest.approx(similarity(texts[int(pair.kept)], texts[int(pair.removed)]), abs=1e-12)
        assert pair.similarity >= 0.8


@pytest.mark.parametrize("length", [8, 60, 1000])
def test_the_fraction_of_equal_bins_estimates_similarity(length: int) -> None:
    """Averaged over seeds the estimate has no bias, even if most of the 128 bins are empty."""
    a, b = " ".join(words(1, length)), edited(words(1, length), max(1, length // 30), seed=2)
    shares = []
    for seed in range(60):
        shingler = Shingler(seed)
        x, y = (shingler.signature(shingler.hashes([text])) for text in (a, b))
        shares.append((x == y).mean())
    # One seed's deviation is at most 0.5 / sqrt(shingles); 60 seeds and four deviations.
    bound = 4 * 0.5 / min(BINS, len(shingle_set(a))) ** 0.5 / 60**0.5
    assert abs(sum(shares) / 60 - similarity(a, b)) < bound


def test_copies_are_duplicates_and_different_short_texts_are_not() -> None:
    texts = ["x = 1\n", "x = 1\n", "x  =  1\n", "x = 2\n", "\n", " \n\n", "y"]
    kept, report = deduplicate([Document(id=str(i), text=t) for i, t in enumerate(texts)])
    assert kept == [0, 3, 4, 6]
    assert [(p.removed, p.kept, p.similarity) for p in report.removed] == [("1", "0", 1), ("2", "0", 1), ("5", "4", 1)]
    assert report.removed_bytes == len("x = 1\n") + len("x  =  1\n") + 3


def test_the_standard_library_has_near_duplicates() -> None:
    wanted = ("encodings/cp", "encodings/iso8859", "json/")
    documents = [d for d in StdlibSource().documents() if d.id.startswith(wanted)]
    kept, report = deduplicate(documents)
    removed = {p.removed: p for p in report.removed}
    assert removed["encodings/cp1140.py"].kept == "encodings/cp037.py"  # they differ in the euro sign
    assert {d.id for d in documents if d.id.startswith("json/")} <= {documents[i].id for i in kept}
    assert (
        deduplicate(documents, seed=5)[1].removed == report.removed
    )  # pairs are compared exactly: the seed changes nothing


def test_a_threshold_below_the_reach_of_lsh_is_refused() -> None:
    with pytest.raises(BaguError, match=r"threshold is 0\.2"):
        deduplicate([], threshold=0.2)


def documents(count: int, prefix: str = "d") -> list[Document]:
    return [Document(id=f"{prefix}{i}", text="x" * 100) for i in range(count)]


def test_a_split_is_about_the_fraction_and_adding_documents_moves_none() -> None:
    few, many = hold_out(documents(1000), fraction=0.1), hold_out(documents(3000), fraction=0.1)
    assert 60 < len(few.validation) < 140
    assert {d.id for d in few.validation} == {d.id for d in many.validation if int(d.id[1:]) < 1000}
    assert len(few.train) + len(few.validation) == 1000
    assert [d.id for d in few.train] == sorted((d.id for d in few.train), key=lambda i: int(i[1:]))
    other = hold_out(documents(1000), fraction=0.1, seed=1)
    assert {d.id for d in other.validation} != {d.id for d in few.validation}


@settings(derandomize=True)
@given(st.integers(2, 6), st.floats(0.0001, 0.9999), st.integers(0, 50))
def test_neither_side_of_a_split_is_empty(count: int, fraction: float, seed: int) -> None:
    train, validation = hold_out(documents(count), fraction=fraction, seed=seed)
    assert train
    assert validation
    assert len(train) + len(validation) == count


def test_the_end_of_a_single_document_is_held_out() -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    train, validation = hold_out([Document(id="a.txt", text=text)], fraction=0.05)
    assert [d.id for d in (*train, *validation)] == ["a.txt", "a.txt:end"]
    assert train[0].text + validation[0].text == text
    assert train[0].text.endswith("\n") and 0.05 <= len(validation[0].text) / len(text) < 0.052


@settings(derandomize=True)
@given(st.text(alphabet="ab\n", min_size=2, max_size=40), st.floats(0.0001, 0.9999))
def test_both_parts_of_a_single_document_have_text(text: str, fraction: float) -> None:
    train, validation = hold_out([Document(id="a", text=text)], fraction=fraction)
    assert train[0].text and validation[0].text
    assert train[0].text + validation[0].text == text
    least = round(len(text) * fraction)
    assert len(validation[0].text) <= max(2 * least, 2) + 1


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(BaguError, match="2 with 1 different ids"):
        hold_out(documents(1) * 2, fraction=0.1)
    with pytest.raises(BaguError, match="1 with 1 different ids"):
        held_ids(["a"], fraction=0.1)
    with pytest.raises(BaguError, match=r"one\.txt has 1 characters"):
        hold_out([Document(id="one.txt", text="x")], fraction=0.1)
    with pytest.raises(BaguError, match="fraction is 1"):
        hold_out(documents(3), fraction=1)


def test_a_sample_is_spread_out_bounded_and_independent_of_the_split() -> None:
    corpus = [*documents(2000), Document(id="long", text="y" * 2_000_000)]
    assert "".join(sample(corpus, max_bytes=10**7, total_bytes=2_200_000)) == "".join(d.text for d in corpus)
    texts = list(sample(corpus, max_bytes=500_000, total_bytes=2_200_000))
    assert 250_000 < sum(map(len, texts)) < 500_000 + 65_536
    assert 300 < sum(t[0] == "x" for t in texts) < 600
    assert any(t[0] == "y" for t in texts)
    held = [d.id for d in documents(2000) if place(d.id, seed=0) < 0.2]
    assert 0.1 < sum(place(i, seed=0, purpose="sample") < 0.2 for i in held) / len(held) < 0.3
