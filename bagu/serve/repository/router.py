"""Which version answers a request: shares by weight, the same version for the same user."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping


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
