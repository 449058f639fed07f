"""Whether a version that got more traffic stays within the limits of `ReturnLimits`."""

from __future__ import annotations

from dataclasses import dataclass

from bagu.serve.http.observe.metrics import KEPT, Metrics
from bagu.serve.repository.layout import ReturnLimits


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
