"""The latency metrics of a server's clients.

For one request, t0 is the time it was sent (including the connection), t1 .. tk are the arrival times of its k parts of
text, and n is the number of output tokens reported by the server:

    TTFT   t1 - t0                   time to first token
    E2EL   tk - t0                   end-to-end latency
    TPOT   (E2EL - TTFT) / (n - 1)   time per output token after the first; requests of one token have none
    ITL    t(i+1) - t(i)             inter-token latency: every gap of every request is one sample

A part may hold several tokens (k < n), because text waits until its characters are complete. Such an ITL is the time of
several tokens, and a first token that waits makes TTFT longer and TPOT shorter. A trained model has few such tokens;
random weights produce broken characters and have many.

The field names are those of `vllm bench serve`.

Goodput counts the requests that meet every limit (for ITL the longest gap of a request counts). No answered request is
left out of any number: an outlier is a sample above Q3 + 3 (Q3 - Q1), Tukey's outer fence; outliers are counted, and
the mean without them is given beside the mean with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bagu.bench.serve_client import Answer
from bagu.bench.units import parse_ms
from bagu.errors import ArgumentError, UnknownName

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}
PERCENTILES = (50, 90, 99)


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Milliseconds by metric of `ttft:300ms`, `tpot:0.03s` or `ttft:300,tpot:30`."""
    limits: dict[str, float] = {}
    for part in (p for text in texts for p in text.replace(",", " ").split()):
        name, colon, limit = part.partition(":")
        if not colon:
            raise ArgumentError(f"the limit {part!r} has no metric", hint="write ttft:300ms or tpot:30ms")
        UnknownName.check("goodput metric", name, METRICS)
        if name in limits:
            raise ArgumentError(f"goodput has two limits of {name}", hint="give one limit for a metric")
        limits[name] = parse_ms(limit)
    return limits


@dataclass(frozen=True, kw_only=True)
class Outliers:
    """The samples of a metric above Tukey's outer fence."""

    above_ms: float
    count: int
    mean_without_ms: float


def outliers(seconds: Sequence[float]) -> Outliers | None:
    """None for fewer than 8 samples: their quartiles say little."""
    if len(seconds) < 8:
        return None
    ms = 1e3 * np.array(seconds)
    low, high = np.percentile(ms, (25, 75))
    fence = float(high + 3 * (high - low))
    kept = ms[ms <= fence]
    return Outliers(above_ms=fence, count=len(ms) - len(kept), mean_without_ms=float(kept.mean()))


def samples(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """The samples of each metric in seconds; a failed request has none."""
    done = [a for a in answers if a.error is None and a.times]
    each = [_metrics(a) for a in done]
    gaps = [b - a for one in done for a, b in pairwise(one.times)]
    return {name: [m[name] for m in each if name in m] for name in ("ttft", "tpot", "e2el")} | {"itl": gaps}


def summary(answers: Sequence[Answer], duration: float, goodput: Mapping[str, float]) -> dict[str, Any]:
    """The fields of `vllm bench serve`; a metric without samples is None."""
    done = [a for a in answers if a.error is None]
    inputs, outputs = sum(a.input_tokens for a in done), sum(a.output_tokens for a in done)
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_concurrent_requests": _most_at_once(done),
        "request_goodput": sum(keeps(a, goodput) for a in done) / duration if goodput else None,
        "errors": sorted({a.error for a in answers if a.error is not None})[:8],
    }
    for name, seconds in samples(answers).items():
        ms = 1e3 * np.array(seconds)
        found[f"mean_{name}_ms"] = float(ms.mean()) if seconds else None
        found[f"median_{name}_ms"] = float(np.median(ms)) if seconds else None
        found[f"std_{name}_ms"] = float(ms.std()) if seconds else None
        for p in PERCENTILES:
            found[f"p{p}_{name}_ms"] = float(np.percentile(ms, p)) if seconds else None
        far = outliers(seconds)
        found[f"{name}_outliers"] = None if far is None else far.count
        found[f"{name}_outliers_above_ms"] = None if far is None else far.above_ms
        found[f"mean_{name}_without_outliers_ms"] = None if far is None else far.mean_without_ms
    return found


def _metrics(answer: Answer) -> dict[str, float]:
    """TTFT, E2EL and, for more than one token, TPOT of one request, in seconds."""
    first, last = answer.times[0] - answer.asked, answer.times[-1] - answer.asked
    found = {"ttft": first, "e2el": last}
    if answer.output_tokens > 1:
        found["tpot"] = (last - first) / (answer.output_tokens - 1)
    return found


def keeps(answer: Answer, goodput: Mapping[str, float]) -> bool:
    """Whether a request meets the goodput limits; for ITL its longest gap counts."""
    if not answer.times:
        return False
    gaps = [b - a for a, b in pairwise(answer.times)]
    found = _metrics(answer) | {"itl": max(gaps, default=0.0)}
    return all(1e3 * found.get(name, 0.0) <= limit for name, limit in goodput.items())


def _most_at_once(answers: Sequence[Answer]) -> int:
    ends = [(a.times[-1], -1) for a in answers if a.times]
    most = now = 0
    for _, change in sorted([(a.asked, 1) for a in answers if a.times] + ends):
        now += change
        most = max(most, now)
    return most
