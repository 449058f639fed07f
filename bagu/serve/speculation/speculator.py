"""Which sequences get how many drafts in the next step: as many as make the most tokens per second.

    tokens per second = (sequences + expected accepted drafts) / time of a step with these drafts

Acceptance is measured for each sequence (acceptance.py), times of steps for the engine (step_times.py). A sequence
whose text does not repeat has no expected drafts and runs as without speculation; a batch so large that verification
costs more than it brings verifies nothing.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from bagu.serve.plan import Plan, Sequence
from bagu.serve.speculation.acceptance import Acceptance
from bagu.serve.speculation.step_times import StepTimes

MARGIN = 1.05  # speculate for an expected gain of 5 % or more: estimates are noisy, and a plain step is never a loss
REST, LONGEST_REST = 32, 1024  # tokens until a costly proposer is tried again; doubles with every failure


class Proposer(Protocol):
    """Guesses the next tokens of sequences, as a deterministic function of the known tokens. The engine samples a token
    at every position of the proposal with the random number of that position, as it does without speculation, and keeps
    the sampled tokens up to the first that differs. So no proposal changes the output (docs/decisions/020)."""

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


class Candidate(NamedTuple):
    """A sequence that may get drafts in the next plan."""

    sequence: Sequence
    room: int  # for at most this many


class _Offer(NamedTuple):
    """A sequence that has room for drafts, and for which a proposal was or would be made."""

    sequence: Sequence
    acceptance: Acceptance
    most: int  # drafts


class _Rest:
    """When a costly proposer may try again for a sequence."""

    def __init__(self) -> None:
        self.until = 0  # tokens of the sequence
        self.length = REST


class Speculator:
    def __init__(self, proposer: Proposer, count: int, *, always: bool = False) -> None:
        self.proposer, self.count, self.always = proposer, count, always
        self.times = StepTimes()
        self.drafts_verified = 0  # slices with drafts
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        # a costly proposer is tried first; a free one shows its acceptance without a trial
        self._assumed = 0.0 if proposer.free else 2.0
        self._acceptance: dict[Sequence, Acceptance] = {}
        self._rests: dict[Sequence, _Rest] = {}

    def drafts(self, candidates: Seq[Candidate], running: int, spare: int) -> Mapping[Sequence, Seq[int]]:
        """The drafts of the next plan, at most `spare` in all. `running` sequences get a token each."""
        if self.proposer.free:
            return self._free_drafts(candidates, running, spare)
        return self._costly_drafts(candidates, running, spare)

    def record(self, plan: Plan, seconds: float) -> None:
        """Count a plan that was committed, and its time."""
        if plan.num_drafts:
            self.drafts_verified += sum(1 for piece in plan.slices if piece.drafts)
            self.drafted_tokens += plan.num_drafts
        if not plan.num_prompts:
            self.times.record(plan.num_tokens, plan.num_drafts > 0, seconds)

    def forget(self, sequence: Sequence) -> None:
        self.proposer.forget(sequence)
        self._acceptance.pop(sequence, None)
        self._rests.pop(sequence, None)

    def _free_drafts(self, candidates: Seq[Candidate], running: int, spare: int) -> Mapping[Sequence, Seq[int]]:
        """Propose for all, and verify where it pays."""
        wanted = self.count + max((c.sequence.pending for c in candidates), default=0)
        proposals = self.proposer.propose([c.sequence for c in candidates], wanted)
        offers, found = [], {}
        for candidate, proposal in zip(candidates, proposals, strict=True):
            sequence = candidate.sequence
            acceptance = self._compared(sequence)
            if not proposal:
                continue
            acceptance.propose(proposal, len(sequence.tokens))
            found[sequence] = proposal[sequence.pending :]
            most = min(candidate.room, self.count, len(found[sequence]))
            if most > 0 and speculates(sequence):
                offers.append(_Offer(sequence, acceptance, most))
        chosen = self._choose(offers, running, spare)
        return {s: found[s][:count] for s, count in chosen.items()}

    def _costly_drafts(self, candidates: Seq[Candidate], running: int, spare: int) -> Mapping[Sequence, Seq[int]]:
        """Choose where it pays by the acceptance so far, then propose for those."""
        offers = []
        for candidate in candidates:
            sequence, most = candidate.sequence, min(candidate.room, self.count)
            if most > 0 and speculates(sequence) and self._awake(sequence):
                offers.append(_Offer(sequence, self._compared(sequence), most))
        chosen = self._choose(offers, running, spare)
        for offer in offers:
            if offer.sequence not in chosen:
                self._rest(offer.sequence)
        if not chosen:
            return {}
        wanted = max(count + s.pending for s, count in chosen.items())
        drafts = {}
        for sequence, proposal in zip(chosen, self.proposer.propose(list(chosen), wanted), strict=True):
            proposal = proposal[: chosen[sequence] + sequence.pending]
            self._acceptance[sequence].propose(proposal, len(sequence.tokens))
            drafts[sequence] = proposal[sequence.pending :]
        return drafts

    def _choose(self, offers: Seq[_Offer], running: int, spare: int) -> dict[Sequence, int]:
        """The number of drafts of each sequence that makes the most tokens per second."""
        if self.always:
            return _within(spare, [(o.sequence, o.most) for o in offers])
        plain = self.times.plain(running) if offers else None
        if plain is None:
            return {}
        ranked = sorted(offers, key=lambda o: -o.acceptance.expected(o.most))
        best: dict[Sequence, int] = {}
        best_rate = MARGIN * running / plain
        length = self.count
        while length:
            size = 1
            while size < 2 * len(ranked):  # the likeliest 1, 2, 4, … of them, and all
                some = ranked[:size]
                size *= 2
                drafted = sum(min(o.most, length) for o in some)
                accepted = sum(o.acceptance.expected(min(o.most, length)) for o in some)
                rate = (running + accepted) / self.times.drafted(running + drafted, plain)
                if drafted <= spare and rate > best_rate:
                    best, best_rate = {o.sequence: min(o.most, length) for o in some}, rate
            length //= 2
        return best

    def _compared(self, sequence: Sequence) -> Acceptance:
        """The acceptance of a sequence, with the tokens that are new."""
        found = self._acceptance.get(sequence)
        if found is None:
            found = self._acceptance[sequence] = Acceptance(self.count, assumed=self._assumed)
        found.compare(sequence.tokens)
        return found

    def _awake(self, sequence: Sequence) -> bool:
        rest = self._rests.get(sequence)
        if rest is None:
            return True
        if len(sequence.tokens) < rest.until:
            return False
        if rest.until:  # try again, as if it were new
            self._acceptance[sequence] = Acceptance(self.count, assumed=self._assumed)
            rest.until = 0
        return True

    def _rest(self, sequence: Sequence) -> None:
        rest = self._rests.setdefault(sequence, _Rest())
        rest.until = len(sequence.tokens) + rest.length
        rest.length = min(2 * rest.length, LONGEST_REST)


def speculates(sequence: Sequence) -> bool:
    """Whether drafts of this sequence can be verified. The mask of a grammar after a draft depends on that draft, and
    the grammar advances with sampled tokens only."""
    return sequence.request.sampling.grammar is None


def _within(spare: int, wanted: Seq[tuple[Sequence, int]]) -> dict[Sequence, int]:
    """These numbers of drafts, the first ones first, as long as they fit."""
    chosen: dict[Sequence, int] = {}
    for sequence, count in wanted:
        count = min(count, spare)
        if count > 0:
            chosen[sequence] = count
            spare -= count
    return chosen
