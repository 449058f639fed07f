"""Byte pair encoding: train merges, encode a text."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""Byte pair encoding over bytes.

train(words, count) -> merges
    `words` is a list of bytes, the pieces of a text (no merge crosses two of them). Start from single bytes. Repeat: take
    the pair of neighbouring pieces that is most frequent over all words, add it to `merges` as (left, right), two bytes
    objects, and replace it everywhere, from left to right. Of pairs with the same count take the smallest (left, right).
    Stop after `count` merges, or when no pair occurs at least twice.

encode(word, merges) -> list of bytes
    Apply the merges to one word (bytes): always the pair that comes first in `merges`, everywhere in the word, from left
    to right, until no pair is in `merges`. Joined, the pieces are the word.
"""


def train(words, count):
    raise NotImplementedError


def encode(word, merges):
    raise NotImplementedError
'''
SOLUTION = """from collections import Counter


def merge(pieces, left, right):
    out, i = [], 0
    while i < len(pieces):
        if i + 1 < len(pieces) and pieces[i] == left and pieces[i + 1] == right:
            out.append(left + right)
            i += 2
        else:
            out.append(pieces[i])
            i += 1
    return out


def train(words, count):
    times = Counter(words)
    split = {w: [w[i : i + 1] for i in range(len(w))] for w in times}
    merges = []
    while len(merges) < count:
        pairs = Counter()
        for w, pieces in split.items():
            for pair in zip(pieces, pieces[1:]):
                pairs[pair] += times[w]
        if not pairs or max(pairs.values()) < 2:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        split = {w: merge(pieces, *best) for w, pieces in split.items()}
    return merges


def encode(word, merges):
    rank = {tuple(m): i for i, m in enumerate(merges)}
    pieces = [word[i : i + 1] for i in range(len(word))]
    while len(pieces) > 1:
        pair = min(zip(pieces, pieces[1:]), key=lambda p: rank.get(p, len(rank)))
        if pair not in rank:
            break
        pieces = merge(pieces, *pair)
    return pieces
"""

DRILL = Drill(
    name="bpe",
    topic="data",
    difficulty=3,
    title=Text("byte pair encoding: train and encode", "BPE：训练与编码"),
    task=Text(STUB.split('"""')[1], "按字节的 BPE。\n" + STUB.split('"""')[1].replace(
        "Byte pair encoding over bytes.\n",
        "train(words, count)：从单字节开始，反复合并出现次数最多的相邻对（次数相同取字典序最小），直到 count 次或没有对出现两次。\n"
        "encode(word, merges)：总是先用最靠前的合并，从左到右，直到不能再合并。\n",
    )),
    stubs={"python": STUB},
    solutions={"python": SOLUTION},
    oracle="bpe",
    functions=("train", "encode"),
    modules=("tokenizers", "transformers", "sentencepiece", "tiktoken"),
    hints=(
        Text("Count words once, pairs by the counts of their words.", "先统计词频，再按词频累计相邻对。"),
        Text("After a merge, 'aaa' with (a, a) is 'aa', 'a': scan from the left and skip two.", "合并 (a, a) 后 'aaa' 是 'aa','a'：从左扫描，命中后跳两格。"),
        Text("encode: look for the pair with the lowest rank, merge all of its places, repeat. Ties in train: min of (-count, pair).",
             "encode：找排名最靠前的对，合并其全部位置，重复。train 的并列：取 (-次数, 对) 的最小值。"),
    ),
    questions=(
        Question("Why does byte-level BPE never meet an unknown token?", "为什么字节级 BPE 不会遇到未知词？", "bagu tokenizer train --help"),
        Question("What does the vocabulary's size cost, and what does it save?", "词表大小的代价与收益？", "bagu plan --help"),
    ),
    planted=(
        Planted("python", "key=lambda p: (-pairs[p], p))", "key=lambda p: -pairs[p])", "ties"),
        Planted("python", "min(pairs, key=lambda p: (-pairs[p], p))", "max(pairs, key=lambda p: (pairs[p], p))", "ties"),
        Planted("python", "pairs[pair] += times[w]", "pairs[pair] += 1", "ignored"),
        Planted("python", "if not pairs or max(pairs.values()) < 2:", "if not pairs:", "edge"),
        Planted("python", "if not pairs or max(pairs.values()) < 2:", "if max(pairs.values()) < 2:", "empty"),
        Planted("python", "            i += 2", "            i += 1", "hangs|formula|order"),
        Planted("python", "while len(merges) < count:", "while len(merges) <= count:", "off_by_one"),
        Planted("python", "key=lambda p: rank.get(p, len(rank))", "key=lambda p: -rank.get(p, -1)", "order"),
        Planted("python", "while len(pieces) > 1:", "while len(pieces) > 2:", "off_by_one|edge"),
        Planted("python", "pieces = [word[i : i + 1] for i in range(len(word))]", "pieces = [c.encode() for c in word.decode('utf-8', 'replace')]", "special|type"),
        Planted("python", "    return pieces", "    return [p.decode() for p in pieces]", "type"),
        Planted("python", "        pieces = merge(pieces, *pair)", "        i = [*zip(pieces, pieces[1:])].index(pair)\n        return pieces[:i] + [pair[0] + pair[1]] + pieces[i + 2 :]", "formula|order"),
        Planted("python", "if i + 1 < len(pieces) and pieces[i]", "if i + 2 < len(pieces) and pieces[i]", "tail|hangs|off_by_one"),
    ),
)  # fmt: skip
