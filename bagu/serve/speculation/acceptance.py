"""How many guesses of a proposal are right, measured for each sequence over its last proposals.

A proposal is compared with the tokens that were sampled, up to the first wrong guess. For this it does not matter
whether it was verified: a proposal that was only kept is compared with the tokens that plain steps sample later. So
where proposals are free, the acceptance is known before the first verification, and is still measured while
speculation is off.

The share of right guesses is kept for each position of a proposal, because text repeats in long runs: after a wrong
guess at the beginning nothing follows, and after five right ones the sixth is almost certain.
"""

from collections.abc import Sequence as Seq

DECAY = 0.8  # of a proposal with every later one: the last five count
DOUBT = 0.5  # proposals that were wrong from the beginning, assumed before the first


class Acceptance:
    __slots__ = ("_at", "_compared", "_proposal", "_right", "_total")

    def __init__(self, count: int, *, assumed: float = 0.0) -> None:
        """For proposals of up to `count` tokens. `assumed` proposals were right, before the first."""
        self._right, self._total = [assumed] * count, [assumed] * count
        self._proposal: Seq[int] = ()  # the one that is compared now; others meanwhile are ignored
        self._at = self._compared = 0  # where it begins, and how many of its guesses were right

    def expected(self, count: int) -> float:
        """The mean number of accepted drafts of a proposal of `count`."""
        pairs = zip(self._right[:count], self._total, strict=False)
        return sum(right / (total + DOUBT) for right, total in pairs)

    def propose(self, proposal: Seq[int], at: int) -> None:
        """A guess of the tokens from position `at` on."""
        if not self._proposal:
            self._proposal, self._at, self._compared = proposal, at, 0

    def compare(self, tokens: Seq[int]) -> None:
        """Count the guesses whose tokens are known now."""
        while self._proposal and self._at + self._compared < len(tokens):
            place = self._compared
            if self._proposal[place] != tokens[self._at + place]:
                for later in range(place, len(self._right)):
                    self._count(later, 0.0)
                self._proposal = ()
                return
            self._count(place, 1.0)
            self._compared += 1
            if self._compared == min(len(self._proposal), len(self._right)):
                self._proposal = ()

    def _count(self, place: int, right: float) -> None:
        self._right[place] = DECAY * self._right[place] + right
        self._total[place] = DECAY * self._total[place] + 1.0
