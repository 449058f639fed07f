"""The protocol of a proposer: it guesses the next tokens of sequences.

A proposal is a deterministic function of the known tokens. The engine samples a token at every position of the proposal
with the random number of that position, as it does without speculation, and keeps the sampled tokens up to the first
that differs from the proposal. So no proposal changes the output (docs/decisions, "A draft is compared, not weighed").
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from bagu.serve.plan import Sequence


class Proposer(Protocol):
    @property
    def free(self) -> bool:
        """Whether proposals cost so little that they are made for every sequence in every step. Those that are not
        verified still show whether verification would pay: they are compared with the tokens that come."""
        ...

    def propose(self, sequences: Seq[Sequence], count: int) -> list[list[int]]:
        """For each sequence up to `count` tokens that may follow its known tokens (`Sequence.tokens`)."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Release what is kept for a sequence that has ended. It may be one that was never seen."""
        ...
