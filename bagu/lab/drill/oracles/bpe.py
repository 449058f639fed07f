"""The truth of BPE: the `tokenizers` library with the same settings, where its ties agree; a plain second
implementation here decides ties; and the law that the pieces of a word, joined, are the word."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from bagu.lab.drill.answers import Answer, Reply
from bagu.lab.drill.core import Drill, Text
from bagu.lab.drill.trial import Trial, Wrong

Merge = tuple[bytes, bytes]


def true_merges(words: Sequence[bytes], count: int, *, mistake: str = "") -> list[Merge]:
    """The definition, by scanning everything each time; or what a typical mistake gives."""
    words = sorted(set(words)) if mistake == "ignored" else words
    texts = [[bytes([b]) for b in w] for w in words]
    merges: list[Merge] = []
    for _ in range(count):
        seen: dict[Merge, int] = {}
        for t in texts:
            for pair in pairwise(t):
                seen[pair] = seen.get(pair, 0) + 1
        best = min(seen, key=lambda p: (-seen[p], p), default=None)
        if seen and mistake == "ties":
            best = max(seen, key=lambda p: (seen[p], p))
        elif seen and mistake == "first":
            best = max(seen, key=lambda p: seen[p])
        if best is None or (seen[best] < 2 and mistake != "edge"):
            break
        merges.append(best)
        texts = [joined(t, best) for t in texts]
    return merges


def joined(pieces: list[bytes], pair: Merge) -> list[bytes]:
    out: list[bytes] = []
    rest = list(reversed(pieces))
    while rest:
        one = rest.pop()
        out.append(one + rest.pop() if rest and (one, rest[-1]) == pair else one)
    return out


def true_pieces(word: bytes, merges: Sequence[Merge]) -> list[bytes]:
    pieces = [bytes([b]) for b in word]
    while True:
        present = set(pairwise(pieces))
        pair = next((m for m in merges if m in present), None)
        if pair is None:
            return pieces
        pieces = joined(pieces, pair)


def trials(drill: Drill, level: str, seed: int) -> Iterator[Trial]:
    rng = random.Random(seed)
    text = [rng.choice([b"low", b"lower", b"lowest", b"newer", b"wider", b"new"]) for _ in range(60)]
    letters = [bytes(rng.choices(b"ab", k=rng.randint(1, 6))) for _ in range(40)]
    yield _train("words", Text("the most frequent pair wins", "次数最多的对先合并"), ["aaab", "aab", "ab"] * 3, 3, "")
    yield _train(
        "counts",
        Text("a word that occurs often counts each time", "重复的词每次都计数"),
        [b"xy"] * 5 + [b"ab", b"abc", b"abd"],
        1,
        "ignored",
    )
    yield _train("count", Text("exactly `count` merges", "恰好 count 次合并"), text, 4, "off_by_one")
    yield _train(
        "ties",
        Text("pairs with the same count: the smallest one", "次数相同取最小"),
        [b"zy", b"ba", b"qp"] * 4,
        3,
        "ties",
    )
    yield _train("many", Text("merges of merged pieces", "合并后的片段再合并"), text + letters, 20, "formula")
    merges = true_merges(text + letters, 20)
    for name, why, word, cause in (
        ("encode", Text("a word of the text", "训练文本中的词"), b"lowest", "formula"),
        ("pair", Text("a word of two bytes", "两个字节的词"), merges[0][0] + merges[0][1], "off_by_one"),
        ("order", Text("the merge that was learned first goes first", "先学到的合并先用"), b"newerlower", "order"),
        ("runs", Text("equal letters: from left to right", "相同字母：从左到右"), b"aaaaabab", "order"),
    ):
        yield _encode(name, why, word, merges, cause, edge=False)
    yield _train(
        "once", Text("a pair that occurs once is no merge", "只出现一次的对不合并"), [b"abcd"], 5, "edge", edge=True
    )
    yield _train("nothing", Text("an empty text has no merges", "空文本没有合并"), [], 5, "empty", edge=True)
    yield _train("none", Text("no merge is asked for", "合并次数为 0"), text, 0, "edge", edge=True)
    for name, word in (
        ("empty", b""),
        ("zero", b"\0\0ab\0"),
        ("emoji", "naïve 🙂🙂".encode()),
        ("broken", b"\xff\xfelow\xf0"),
    ):
        why = Text("any bytes, also none and no UTF-8, come back when joined", "任意字节（含空与非 UTF-8）拼回原文")
        yield _encode(name, why, word, merges, "empty" if not word else "special", edge=True)
    yield _library(seed)


def _train(name: str, why: Text, words: Sequence[Any], count: int, asked: str, *, edge: bool = False) -> Trial:
    given = [w.encode() if isinstance(w, str) else w for w in words]

    def judge(reply: Reply) -> None:
        want = true_merges(given, count)
        got = reply.value
        if not isinstance(got, list | tuple) or not all(isinstance(m, list | tuple) and len(m) == 2 for m in got):
            raise Wrong("train returned no list of pairs", cause="type")
        got = [tuple(m) for m in got]
        guessed = next(
            (m for m in ("ignored", "ties", "first", "edge") if got == true_merges(given, count, mistake=m)), ""
        )
        cause = "off_by_one" if got[:-1] == want else "ties" if guessed == "first" else guessed or asked
        at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        if at is not None:
            raise Wrong(
                f"merge {at} is {got[at]}, and should be {want[at]} (case {name})", got=got, want=want, cause=cause
            )
        if len(got) != len(want):
            raise Wrong(f"{len(got)} merges, and should be {len(want)} (case {name})", got=got, want=want, cause=cause)

    return Trial(
        name=name,
        why=why,
        edge=edge,
        judge=judge,
        cause=asked if edge else "",
        ask=lambda answer: answer.call("train", [list(given), count], seconds=20),
    )


def _encode(name: str, why: Text, word: bytes, merges: Sequence[Merge], cause: str, *, edge: bool) -> Trial:
    def judge(reply: Reply) -> None:
        got, want = reply.value, true_pieces(word, merges)
        if not isinstance(got, list | tuple) or not all(isinstance(p, bytes) for p in got):
            raise Wrong("encode returned no list of bytes", cause="type")
        if list(got) != want:
            raise Wrong(f"encode({word!r}) is {list(got)}, and should be {want}", got=got, want=want, cause=cause)

    return Trial(
        name=name,
        why=why,
        edge=edge,
        judge=judge,
        cause=cause if edge else "",
        ask=lambda answer: answer.call("encode", [word, list(merges)], seconds=20),
    )


def _library(seed: int) -> Trial:
    """The ids of Hugging Face's `tokenizers` with the answer's merges, on words of the standard library."""
    words = [w.encode() for w in (random.__doc__ or "").split()][:300]

    def ask(answer: Answer) -> Reply:
        merges = answer.call("train", [words, 60], seconds=30).value
        pieces = [answer.call("encode", [w, merges], seconds=20).value for w in words[:40]]
        return Reply(value=(merges, pieces))

    def judge(reply: Reply) -> None:
        from tokenizers.models import BPE

        merges, pieces = reply.value
        vocabulary = {chr(b): b for b in range(256)}  # a byte as the character of its number
        for left, right in merges:
            vocabulary.setdefault((left + right).decode("latin1"), len(vocabulary))
        model = BPE(vocab=vocabulary, merges=[(a.decode("latin1"), b.decode("latin1")) for a, b in merges])
        for word, got in zip(words[:40], pieces, strict=True):
            want = [t.value for t in model.tokenize(word.decode("latin1"))]
            if [p.decode("latin1") for p in got] != want:
                raise Wrong(f"encode({word!r}) is {got}, and the library's pieces are {want}", cause="formula")

    why = Text("the same pieces as Hugging Face's tokenizers", "与 Hugging Face tokenizers 的切分一致")
    return Trial(name="library", why=why, ask=ask, judge=judge)
