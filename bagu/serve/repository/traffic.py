"""The traffic of a model: the weights of its versions, and the trial after they change.

With limits (`return_when`), a version that gets more traffic is on trial. The versions that had the traffic before stay
loaded until the trial ends, and get it back if a limit is exceeded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from bagu.serve.http.observe.metrics import KEPT, Metrics
from bagu.serve.repository.layout import ReturnLimits
from bagu.serve.repository.version import Version


@dataclass(frozen=True)
class Trial:
    """A version since it got more traffic. The counts are those of its metrics at that time."""

    limits: ReturnLimits
    metrics: Metrics
    errors: int
    finished: int
    first_tokens: int

    @classmethod
    def begin(cls, limits: ReturnLimits, metrics: Metrics) -> Trial:
        return cls(limits, metrics, metrics.errors, _finished(metrics), sum(metrics.first_token.counts))

    @property
    def requests(self) -> int:
        """Choices that have ended, with or without an error of the server. Those that a client aborted do not count."""
        return _finished(self.metrics) - self.finished + self.metrics.errors - self.errors

    @property
    def passed(self) -> bool:
        return self.requests >= self.limits.trial_requests

    def breach(self) -> str | None:
        """The limit that is exceeded, in words; None if there is none."""
        count, limits = self.requests, self.limits
        if count < limits.after_requests:
            return None
        percent = 100 * (self.metrics.errors - self.errors) / count
        if limits.error_percent is not None and percent > limits.error_percent:
            return f"{percent:.1f} % of {count} requests failed, and the limit is {limits.error_percent:g} %"
        tokens = min(sum(self.metrics.first_token.counts) - self.first_tokens, KEPT)
        seconds = self.metrics.first_token.quantile(0.99, tokens) if tokens else None
        if limits.ttft_p99_ms is not None and seconds is not None and 1e3 * seconds > limits.ttft_p99_ms:
            return f"the p99 TTFT is {1e3 * seconds:.0f} ms, and the limit is {limits.ttft_p99_ms:g} ms"
        return None


def _finished(metrics: Metrics) -> int:
    return metrics.finished["stop"] + metrics.finished["length"]


class Router:
    """Distributes the requests of a model over its versions.

    A request with a sticky key always goes to the same version: a hash of the key is a point in [0, 1), and every
    version has an interval of the length of its share. A change of the weights moves only the users between the old and
    the new bounds. Requests without a key are distributed in turn (nginx's smooth weighted round-robin), so that the
    shares are exact after every few requests.
    """

    def __init__(self, model: str, weights: Mapping[int, float]) -> None:
        self.model = model
        self.weights: dict[int, float] = {}
        self._credits: dict[int, float] = {}
        self.set(weights)

    def set(self, weights: Mapping[int, float]) -> None:
        self.weights = {version: weight for version, weight in sorted(weights.items()) if weight > 0}
        self._credits = dict.fromkeys(self.weights, 0.0)

    def choose(self, ready: Collection[int], sticky: str | None) -> int | None:
        """A version among those that are ready and have a weight; None if there is none. A version that is not ready
        leaves its share to the others."""
        weights = {version: weight for version, weight in self.weights.items() if version in ready}
        if not weights:
            return None
        if len(weights) == 1:
            return next(iter(weights))
        total = sum(weights.values())
        if sticky is None:
            for version, weight in weights.items():
                self._credits[version] += weight
            chosen = max(weights, key=lambda version: self._credits[version])
            self._credits[chosen] -= total
            return chosen
        left = self.point(sticky) * total
        for version, weight in weights.items():
            left -= weight
            if left < 0:
                return version
        return version  # the sum of the weights is rounded

    def point(self, sticky: str) -> float:
        """The point in [0, 1) of a key. It depends on the model, so that experiments on two models are independent."""
        digest = hashlib.blake2b(f"{self.model}\0{sticky}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big") / 2**56


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
