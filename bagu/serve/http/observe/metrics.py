"""The server's metrics, in the Prometheus text format at `/metrics`.

Metrics that vLLM also has use its names, so that its dashboards work. Times are measured in the server's process: a
token's time is the arrival of its event from the engine process.
"""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bagu.serve.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# upper bounds of the buckets in seconds, as in vLLM
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

KEPT = 512  # last times to first token that are kept for quantiles


class Histogram:
    """A Prometheus histogram: counts by upper bound (written cumulatively), and the last `keep` values."""

    def __init__(self, name: str, help: str, bounds: Sequence[float], *, keep: int = 0) -> None:
        self.name, self.help, self.bounds = name, help, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.recent: deque[float] = deque(maxlen=keep)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.recent.append(value)

    def quantile(self, q: float, last: int | None = None) -> float | None:
        """The quantile, by nearest rank, of the `last` kept values or of all of them; None if there is no value."""
        recent = list(self.recent)
        ordered = sorted(recent if last is None else recent[max(0, len(recent) - last) :])
        return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else None

    def lines(self, labels: str) -> Iterator[str]:
        name, total = self.name, 0
        yield from _metric(name, "histogram", self.help)
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum!r}"
        yield f"{name}_count{{{labels}}} {total}"


@dataclass
class Metrics:
    """The metrics of an engine since the start of the server, and the counts of the HTTP server."""

    model: str
    version: int | None = None  # in a model repository
    errors: int = 0  # choices that the server failed to finish: the engine died, or was stopped
    prompt_tokens: int = 0
    engine_restarts: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # choices by finish reason
    # by (handler, method, status, version_label)
    http: Counter[tuple[str, str, int, str]] = field(default_factory=Counter)
    more_lines: Callable[[], Iterable[str]] = tuple  # of an engine that has replicas

    def __post_init__(self) -> None:
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN, keep=KEPT
        )
        self.engine_first_token = Histogram(
            "bagu:engine_time_to_first_token_seconds",
            "From the engine's queue to the first token, measured in the engine process.",
            FIRST_TOKEN,
            keep=KEPT,
        )
        self.between_tokens = Histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a choice.", BETWEEN_TOKENS
        )
        self.per_output_token = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "(last - first token) / (tokens - 1) of a choice.",
            BETWEEN_TOKENS,
        )
        self.end_to_end = Histogram("vllm:e2e_request_latency_seconds", "From arrival to the end of a choice.", REQUEST)
        self.queue_time = Histogram(
            "vllm:request_queue_time_seconds", "From the engine's queue to the first step of the request.", REQUEST
        )
        self.prefill_time = Histogram(
            "vllm:request_prefill_time_seconds", "From the first step of the request to its first token.", REQUEST
        )
        self.decode_time = Histogram(
            "vllm:request_decode_time_seconds", "From the first token of a choice to its last.", REQUEST
        )
        self.request_prompt = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.request_generation = Histogram("vllm:request_generation_tokens", "Tokens of a choice.", TOKENS)

    @property
    def generation_tokens(self) -> int:
        """Every token is counted in one of two histograms: the first token of a choice, or the others."""
        return sum(self.first_token.counts) + sum(self.between_tokens.counts)

    @property
    def names(self) -> dict[str, str]:
        return {"model_name": self.model, **({} if self.version is None else {"version": str(self.version)})}

    @property
    def label(self) -> str:
        return labels(**self.names)

    @property
    def version_label(self) -> str:
        """The labels of a version in a repository; empty for the only model of a server."""
        return "" if self.version is None else self.label

    def families(self, engine: EngineStats | None) -> Iterator[str]:
        """The lines of all metrics; `engine` None leaves out the engine's gauges."""
        yield from self._counters(self.label)
        for histogram in vars(self).values():
            if isinstance(histogram, Histogram):
                yield from histogram.lines(self.label)
        if engine is not None:
            yield from _gauges(engine, self.label)
        yield from self.more_lines()

    def _counters(self, label: str) -> Iterator[str]:
        reasons = [(f'{label},finished_reason="{r}"', self.finished[r]) for r in ("stop", "length", "abort", "error")]
        for name, help, values in (
            ("vllm:prompt_tokens_total", "Prompt tokens of accepted requests.", [(label, self.prompt_tokens)]),
            ("vllm:generation_tokens_total", "Tokens generated.", [(label, self.generation_tokens)]),
            ("vllm:request_success_total", "Choices finished, by reason.", reasons),
            ("bagu:engine_restarts_total", "Restarts of the engine process.", [(label, self.engine_restarts)]),
            ("bagu:request_errors_total", "Choices that the server failed to finish.", [(label, self.errors)]),
        ):
            yield from sample(name, "counter", help, values)

    def server_lines(self) -> Iterator[str]:
        """The metrics of the HTTP server's process."""
        yield from _metric(
            "process_cpu_seconds_total", "counter", "CPU time of the server's process, without the engine process."
        )
        yield f"process_cpu_seconds_total {time.process_time():.6f}"
        yield from _metric("http_requests_total", "counter", "HTTP requests answered.")
        for (handler, method, status, version), count in sorted(self.http.items()):
            label = labels(handler=handler, method=method, status=str(status)) + (version and f",{version}")
            yield f"http_requests_total{{{label}}} {count}"


def metrics_text(
    server: Metrics, engines: Sequence[tuple[Metrics, EngineStats | None]], more: Sequence[str] = ()
) -> str:
    """The text that Prometheus reads. The lines of all engines are sorted by metric, since Prometheus accepts a metric
    only once."""
    found: dict[str, list[str]] = {}
    for metrics, stats in engines:
        for line in metrics.families(stats):
            if line.startswith("# HELP"):
                name = line.split(" ", 3)[2]
                lines = found.setdefault(name, [line])
            elif not line.startswith("# TYPE") or line not in lines:
                lines.append(line)
    texts = [*(line for lines in found.values() for line in lines), *server.server_lines(), *more]
    return "\n".join(texts) + "\n"


def _gauges(engine: EngineStats, label: str) -> Iterator[str]:
    used = engine.blocks_used / engine.blocks_total if engine.blocks_total else 0.0
    for name, kind, help, value in (
        ("vllm:num_requests_running", "gauge", "Sequences in the batch.", engine.running),
        ("vllm:num_requests_waiting", "gauge", "Requests in the queue.", engine.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", "Fraction of KV blocks in use, 0 to 1.", used),
        ("vllm:num_preemptions_total", "counter", "Preempted sequences.", engine.preemptions),
        ("vllm:prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache.", engine.prefix_queries),
        ("vllm:prefix_cache_hits_total", "counter", "Tokens found in the prefix cache.", engine.prefix_hits),
        ("vllm:spec_decode_num_drafts_total", "counter", "Verified drafts, of one or more tokens.", engine.drafts),
        ("vllm:spec_decode_num_draft_tokens_total", "counter", "Drafted tokens verified.", engine.draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens accepted.", engine.accepted_tokens),
        ("bagu:images_encoded_total", "counter", "Images that the encoder has computed.", engine.images_encoded),
        ("bagu:images_reused_total", "counter", "Images in steps whose vectors were kept.", engine.images_reused),
        ("bagu:not_finite_total", "counter", "Choices whose adapter overflowed.", engine.not_finite),
        ("bagu:constrained_requests_total", "counter", "Requests with a grammar.", engine.constrained_requests),
        ("bagu:grammar_compilations_total", "counter", "Grammars compiled.", engine.grammar_compilations),
        ("bagu:grammar_compile_seconds_total", "counter", "Time to compile them.", engine.grammar_compile_s),
        ("bagu:grammar_forced_tokens_total", "counter", "Tokens that a grammar forced.", engine.forced_tokens),
        ("bagu:grammar_mask_seconds_total", "counter", "Time to compute token masks.", engine.mask_s),
        (
            "bagu:grammar_mask_wait_seconds_total",
            "counter",
            "The part of it in the engine's thread; the rest overlapped with the model.",
            engine.mask_wait_s,
        ),
    ):
        yield from sample(name, kind, help, [(label, value)])


def labels(**values: str) -> str:
    """Labels in Prometheus' syntax, without the braces."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


def sample(name: str, kind: str, help: str, values: Sequence[tuple[str, float]]) -> Iterator[str]:
    """The lines of a metric that has these (labels, value)."""
    yield from _metric(name, kind, help)
    for label, value in values:
        yield f"{name}{{{label}}} {value}"


def _metric(name: str, kind: str, help: str) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
