"""Cold start: the time of the first requests of a new process, and what a rehearsal before them takes away.

Each measurement is a process of its own: it builds a model and an engine, rehearses or not, and then answers requests
one after the other. On a GPU the rehearsal is `WarmUp`, which also captures graphs; on a CPU one short request.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median

import torch

from bagu.errors import BaguError
from bagu.lab.core import Claim, Row, Setting, Verdict, number, numbers_in, share_met, where
from bagu.lab.parts.engine_load import MODEL
from bagu.lab.plot import Line, Panel, Rule
from bagu.nn import Transformer, init_weights
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling
from bagu.serve.warm_up import WarmUp

REQUESTS, PROMPT, ANSWER = 12, 48, 8  # tokens
SLOW, GONE = 1.5, 1.2  # times the median of the later requests
WAYS = ("cold", "rehearsed")


def serve_new(way: str, device: str, requests: int) -> list[float]:
    """Seconds of each request of a new engine; called in a process of its own."""
    torch.set_num_threads(1)
    model = init_weights(Transformer(MODEL, device=device), 0).eval()
    engine = Engine(model, None, EngineConfig(num_blocks=256, max_num_seqs=4, prefix_cache=False))
    if way == "rehearsed":
        WarmUp(engine).run(60.0)
        answer(engine, "rehearsal", 5)
    times = []
    for i in range(requests):
        began = time.perf_counter()
        answer(engine, str(i), i)
        times.append(time.perf_counter() - began)
    return times


def answer(engine: Engine, name: str, token: int) -> None:
    sampling = Sampling(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    engine.submit(Request(id=name, prompt=(token,) * PROMPT, sampling=sampling))
    while engine.has_work:
        engine.step()


def run(setting: Setting) -> Iterator[Row]:
    rounds, requests = (1, 6) if setting.quick else (5, REQUESTS)
    code = f"import json; from {__name__} import serve_new; print(json.dumps(serve_new({{!r}}, {{!r}}, {{}})))"
    for number_of, way in setting.track(list(product(range(rounds), WAYS))):
        command = [sys.executable, "-c", code.format(way, setting.device, requests)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BaguError(f"the engine of its own process ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        for i, seconds in enumerate(json.loads(done.stdout.splitlines()[-1])):
            yield {"way": way, "round": number_of, "request": i + 1, "time_ms": 1e3 * seconds}


def first_to_later(rows: Sequence[Row], way: str) -> float:
    """The first request's time over the median of the second half, the median over rounds."""
    found = []
    for number_of in numbers_in(rows, "round"):
        own = [number(r, "time_ms") for r in where(rows, way=way, round=int(number_of))]
        found.append(own[0] / median(own[len(own) // 2 :]))
    return median(found)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the first request is slow without a rehearsal, and not with one."""
    cold, warm = (first_to_later(rows, way) for way in WAYS)
    half = max(numbers_in(rows, "request")) / 2
    later = median([number(r, "time_ms") for r in rows if number(r, "request") > half])
    return Verdict.say(
        share_met([cold >= SLOW, cold >= SLOW and warm <= GONE]),
        "The first request takes ×{cold:.1f} the time of the later ones ({later:.1f} ms), after a rehearsal "
        "×{warm:.1f}.",
        "第一个请求用时是后来的 {cold:.1f} 倍（后来 {later:.1f} 毫秒），预热之后 {warm:.1f} 倍。",
        cold=cold,
        warm=warm,
        later=later,
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    requests = numbers_in(rows, "request")
    lines = [
        Line(
            requests,
            [median([number(r, "time_ms") for r in where(rows, way=way, request=int(i))]) for i in requests],
            way,
        )
        for way in WAYS
    ]
    late = median([number(r, "time_ms") for r in rows if number(r, "request") > len(requests) // 2])
    marks = [*lines, Rule(late, "later ones")]
    return [Panel(marks, "Requests of a new process", "request", "time, ms", yscale="log")]


LAB = Claim(
    title_en="Cold start",
    title_zh="冷启动",
    claim_en="The first request of a server is slow, and a warm-up removes that.",
    claim_zh="服务的第一个请求很慢，预热可以消除。",
    regime=f"A model of 2 layers, width 128, in a new process each time; requests of {PROMPT} tokens and {ANSWER} "
    "answered, one after the other; one thread on a CPU; kernels on disk are kept between processes.",
    varies="Without anything before, or after a rehearsal (on a GPU `WarmUp`, on a CPU one request).",
    measures=f"The first request's time over the median of the later ones; from ×{SLOW:g} on it is slow, up to "
    f"×{GONE:g} it is not; median of 5 processes.",
    evidence="timing",
)
