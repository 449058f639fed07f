"""Prompt lookup: propose what followed the last occurrence of the last n tokens, in the prompt or in the output
(https://github.com/apoorvumang/prompt-lookup-decoding). It needs no second model, and finds long drafts where a text
repeats its prompt: an edited file, a summary, an answer that quotes.

Each sequence has a dictionary from n-grams to the position after their last occurrence. A new token adds one entry, so
a step takes about a microsecond per sequence at any length. While the output follows its source token by token, the
position only advances: the source of a long match is kept although its last n tokens may also occur elsewhere. After
such a match up to four other tokens are taken for an edit, and the next token is searched nearby in the source.
"""

from collections.abc import Sequence as Seq
from itertools import count

from bagu.serve.plan import Sequence

NGRAM = 3  # shorter n-grams match by chance, longer ones find a repeated text later
SOURCE = 8  # tokens that were followed before an edit is assumed
PATIENCE = 4  # tokens of an edit
NEAR = 8  # tokens of the source in which its continuation is searched after an edit


class _Index:
    """The n-grams of one sequence."""

    __slots__ = ("after", "followed", "match", "patience", "read")

    def __init__(self, tokens: Seq[int]) -> None:
        ends = count(NGRAM)
        # All but the last n-gram, whose next token is not known yet.
        self.after = dict(zip(zip(*(tokens[i:-1] for i in range(NGRAM)), strict=False), ends, strict=False))
        self.read = len(tokens)  # tokens that are in the index
        self.match = self.after.get(tuple(tokens[-NGRAM:]))  # position of the token that is expected next
        self.followed = 0  # tokens that were as expected
        self.patience = 0  # other tokens that may still be an edit

    def advance(self, tokens: list[int]) -> None:
        """Read the tokens that are new since the last call."""
        for end in range(self.read, len(tokens)):
            if end >= NGRAM:
                self.after[tuple(tokens[end - NGRAM : end])] = end
            expected = self.match
            if expected is not None and tokens[expected] == tokens[end]:
                self.match, self.followed = expected + 1, self.followed + 1
                continue
            if self.followed >= SOURCE:
                self.patience = PATIENCE
            self.match = self.after.get(tuple(tokens[end - NGRAM + 1 : end + 1]))
            if self.match is None and expected is not None and self.patience:
                self.patience -= 1
                self.match = _near(tokens, expected, end)
            self.followed = 0
        self.read = len(tokens)


def _near(tokens: list[int], expected: int, end: int) -> int:
    """The position after token `end` in the source near position `expected`; if it is not there, it replaced one."""
    try:
        return tokens.index(tokens[end], max(expected - PATIENCE, 0), min(expected + NEAR, end)) + 1
    except ValueError:
        return expected + 1


class PromptLookup:
    """Satisfies `Proposer`."""

    free = True

    def __init__(self) -> None:
        self._indices: dict[Sequence, _Index] = {}

    def propose(self, sequences: Seq[Sequence], count: int) -> list[list[int]]:
        return [self._continuation(s, count) for s in sequences]

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)

    def _continuation(self, sequence: Sequence, count: int) -> list[int]:
        tokens, index = sequence.tokens, self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = _Index(tokens)
        elif index.read < len(tokens):
            index.advance(tokens)
        if index.match is None:
            return []
        found = tokens[index.match : index.match + count]
        while 0 < len(found) < count:  # the match reaches the end of the text: what repeats once may repeat again
            found += found[: count - len(found)]
        return found
