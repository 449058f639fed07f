"""The traffic of a model: the weights of its versions, and the trial after they change.

With limits (`return_when`), a version that gets more traffic is on trial. The versions that had the traffic before stay
loaded until the trial ends, and get it back if a limit is exceeded.
"""

from __future__ import annotations

from collections.abc import Mapping

from bagu.serve.repository.layout import ReturnLimits
from bagu.serve.repository.router import Router
from bagu.serve.repository.version import Version
from bagu.serve.repository.watch import Trial


class Traffic:
    """`returns` counts how often the traffic was given back; `last_return` is the reason of the last time."""

    def __init__(self, model: str, weights: Mapping[int, float]) -> None:
        self.router = Router(model, weights)
        self.returns = 0
        self.last_return: str | None = None
        self._trials: dict[int, Trial] = {}
        self._before: dict[int, float] = {}  # the weights before the trial

    @property
    def weights(self) -> dict[int, float]:
        return self.router.weights

    @property
    def kept(self) -> set[int]:
        """The versions that have traffic, and those that may get it back."""
        return {*self.weights, *self._before}

    def share(self, number: int) -> float:
        """The share of a version, 0 to 1."""
        total = sum(self.weights.values())
        return self.weights.get(number, 0.0) / total if total else 0.0

    def in_trial(self, number: int) -> bool:
        return number in self._trials

    def set(
        self, weights: Mapping[int, float], versions: Mapping[int, Version], limits: ReturnLimits | None
    ) -> list[int]:
        """Route new requests by these weights; with `limits`, begin a trial. Returns the versions that have lost their
        traffic and will not get it back."""
        kept, before = self.kept, self.weights
        shares = {number: self.share(number) for number in before}
        self._trials, self._before = {}, {}
        self.router.set(weights)
        if limits is not None and any(versions[n].is_ready for n in before):
            grown = [n for n in self.weights if self.share(n) > shares.get(n, 0.0)]
            self._trials = {n: Trial.begin(limits, versions[n].metrics) for n in grown}
            self._before = before if grown else {}
        return sorted(kept - self.kept)

    def check(self, versions: Mapping[int, Version]) -> list[int]:
        """Give the traffic back if a version on trial has exceeded a limit; end the trial if all are within them.
        Returns the versions that are not needed any more."""
        for number, trial in self._trials.items():
            version = versions[number]
            why = trial.breach() if version.is_ready else f"it is {version.state}"
            if why is not None:
                return self._return(number, why, versions)
        if self._trials and all(trial.passed for trial in self._trials.values()):
            return self._end(self.weights)
        return []

    def _return(self, number: int, why: str, versions: Mapping[int, Version]) -> list[int]:
        if not any(versions[n].is_ready for n in self._before):
            return []  # there is nothing to return to
        self.returns += 1
        self.last_return = f"version {number}: {why}"
        return self._end(self._before)

    def _end(self, weights: Mapping[int, float]) -> list[int]:
        """End the trial with these weights; returns the versions that are not needed any more."""
        kept = self.kept
        self._trials, self._before = {}, {}
        self.router.set(weights)
        return sorted(kept - self.kept)
