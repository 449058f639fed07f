"""What the replicas of a model report to operators; predicted stands beside measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from bagu.serve.http.observe.metrics import labels, sample
from bagu.serve.replicas.load import Ask
from bagu.serve.replicas.replica import Replica
from bagu.serve.stats import EngineStats


def summed(found: Sequence[EngineStats]) -> EngineStats:
    """The sums over the replicas; of the last step the longest."""
    values = {f.name: [getattr(s, f.name) for s in found] for f in fields(EngineStats)}
    made = {name: "".join(v) if name == "block_map" else sum(v) for name, v in values.items()}
    return EngineStats(**{**made, "last_step_s": max(values["last_step_s"])})


def replica_metrics(replicas: Sequence[Replica], names: Mapping[str, str], now: float) -> Iterator[str]:
    """The lines of /metrics that are about replicas. `names` are the labels of the model."""
    about = {r: {**names, "replica": str(r.number), "device": r.spec.name} for r in replicas}
    states = [(labels(**about[r], state=r.state), 1.0) for r in replicas]
    yield from sample("bagu:replica_state", "gauge", "1 for the state of each replica.", states)
    known = [(labels(**about[r]), r, load) for r in replicas if (load := r.load) is not None]
    for name, kind, help, values in (
        ("requests_total", "counter", "Requests sent to a replica.", [x.given for _, _, x in known]),
        ("restarts_total", "counter", "Restarts of a replica.", [r.restarts for _, r, _ in known]),
        ("open_choices", "gauge", "Choices that have not ended.", [x.choices for _, _, x in known]),
        ("predicted_wait_seconds", "gauge", "Predicted wait of a request that comes now.",
         [x.forecast(Ask("", 1, 1), 0, now).wait for _, _, x in known]),
        ("correction", "gauge", "Measured over profiled time of a step.",
         [x.correction.factor for _, _, x in known]),
        ("profile_error", "gauge", "Mean relative error of the profile on steps it had not seen.",
         [x.cost.error or 0.0 for _, _, x in known]),
        ("first_tokens_total", "counter", "Requests that had a token.", [r.answered for _, r, _ in known]),
        ("predicted_first_token_seconds_total", "counter", "Predicted time to their first tokens.",
         [r.predicted_s for _, r, _ in known]),
        ("measured_first_token_seconds_total", "counter", "Measured time to them.",
         [r.measured_s for _, r, _ in known]),
    ):  # fmt: skip
        pairs = [(label, float(value)) for (label, _, _), value in zip(known, values, strict=True)]
        yield from sample(f"bagu:replica_{name}", kind, help, pairs)
