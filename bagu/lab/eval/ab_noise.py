"""A/B noise: how many requests until a difference between two versions is real.

The latencies are those of real requests to an engine. Version A draws from them; version B draws from the same ones,
multiplied by 1 + difference. A test compares the means with Welch's z statistic:

    fixed     one look, after the planned number of requests
    peeking   a look after every twentieth of them; the test stops at the first look with |z| > 1.96

    requests of each version that find a difference d in 80 % of the tests: 2 (1.96 + 0.84)² (cv / d)²

where cv is the standard deviation of the latencies divided by their mean.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence

import torch

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Bars, Line, Panel, Rule
from bagu.nn import Transformer, init_weights
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling

CRITICAL, POWER_Z = 1.96, 0.8416  # two-sided 5 %, and 80 % power
LOOKS = 20
DIFFERENCES = (0.05, 0.1, 0.2, 0.4)
LONGEST = 64  # output tokens of a request, 1 to this many


def latencies(count: int, device: str) -> list[float]:
    """Seconds from submission to the last token of `count` requests of different lengths, one after the other."""
    config = tiny(512, 64, heads=4, kv_heads=2, ffn=128, max_len=256)
    model = init_weights(Transformer(config, dtype=torch.float32, device=device), 0)
    engine = Engine(model, None, EngineConfig(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=256))
    rng, found = random.Random(0), []
    for i in range(count + 1):
        sampling = Sampling(max_tokens=rng.randint(1, LONGEST), ignore_eos=True)
        prompt = tuple(rng.randrange(512) for _ in range(rng.randint(1, LONGEST)))
        began = time.perf_counter()
        engine.submit(Request(id=str(i), prompt=prompt, sampling=sampling))
        while engine.has_work:
            engine.step()
        found.append(time.perf_counter() - began)
    return found[1:]  # the first one initializes buffers


def requests_needed(cv: float, difference: float) -> int:
    """Requests of each version for 80 % power, by the normal approximation."""
    return math.ceil(2 * (CRITICAL + POWER_Z) ** 2 * (cv / difference) ** 2)


def found_shares(pool: torch.Tensor, difference: float, requests: int, tests: int, seed: int) -> tuple[float, float]:
    """The percentage of tests that report a difference: at the end, and at any of the looks."""
    generator = torch.Generator().manual_seed(seed)
    at_end = at_any = 0
    looks = torch.tensor(sorted({max(2, requests * (i + 1) // LOOKS) for i in range(LOOKS)}))
    for _ in range(tests):
        z = _statistics(pool, difference, requests, looks, generator).abs() > CRITICAL
        at_end += int(z[-1])
        at_any += int(z.any())
    return 100 * at_end / tests, 100 * at_any / tests


def _statistics(
    pool: torch.Tensor, difference: float, requests: int, looks: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Welch's z after each number of requests in `looks`."""
    a, b = (pool[torch.randint(len(pool), (requests,), generator=generator)] for _ in range(2))
    b = b * (1 + difference)
    means, variances = [], []
    for values in (a, b):
        total, squares = values.cumsum(0)[looks - 1], (values * values).cumsum(0)[looks - 1]
        mean = total / looks
        means.append(mean)
        variances.append((squares - looks * mean * mean) / (looks - 1) / looks)
    return (means[1] - means[0]) / (variances[0] + variances[1]).clamp_min(1e-300).sqrt()


def run(setting: Setting) -> Iterator[Row]:
    count, tests = (40, 200) if setting.quick else (1000, 2000)
    pool = torch.tensor(latencies(count, setting.device), dtype=torch.float64)
    pool /= pool.mean()
    cv = float(pool.std())
    for seed, difference in enumerate(setting.track((0.0, *DIFFERENCES))):
        needed = requests_needed(cv, difference or min(DIFFERENCES))
        fixed, peeking = found_shares(pool, difference, needed, tests, seed)
        yield {
            "difference_percent": 100 * difference,
            "requests": needed,
            "cv_percent": 100 * cv,
            "tests": tests,
            "found_fixed_percent": fixed,
            "found_peeking_percent": peeking,
        }


def verdict(rows: Sequence[Row]) -> Verdict:
    """The claim has two parts: the rule gives the power it promises, and peeking breaks the 5 % of false alarms."""
    same, *others = rows
    noise = 3 * 100 * math.sqrt(0.05 * 0.95 / number(same, "tests"))  # three standard errors of a 5 % rate
    spread = 3 * 100 * math.sqrt(0.8 * 0.2 / number(same, "tests"))
    powers = [number(row, "found_fixed_percent") for row in others]
    rule = min(powers) >= 80 - spread - 5  # 5: the approximation, since latencies are skewed
    fixed, peeking = number(same, "found_fixed_percent"), number(same, "found_peeking_percent")
    breaks = peeking > 10 and fixed <= 5 + noise
    kind: Kind = "held" if rule and breaks else "did not hold" if not (rule or breaks) else "holds only where"
    smallest, needed = number(others[0], "difference_percent"), number(others[0], "requests")
    en = (
        f"A difference of {smallest:.0f} % needs {needed:,.0f} requests of each version (the latencies vary by "
        f"{number(same, 'cv_percent'):.0f} %); the rule's power is {min(powers):.0f} to {max(powers):.0f} %. Without a "
        f"difference, {fixed:.1f} % of the tests with one look report one, and {peeking:.1f} % with {LOOKS} looks."
    )
    zh = (
        f"{smallest:.0f}% 的差异需要每个版本 {needed:,.0f} 个请求"
        f"（延迟的变异系数为 {number(same, 'cv_percent'):.0f}%）；"
        f"按公式取样的检验功效为 {min(powers):.0f}% 到 {max(powers):.0f}%。"
        f"没有差异时，只看一次的检验有 {fixed:.1f}% 误报，看 {LOOKS} 次的有 {peeking:.1f}%。"
    )
    return Verdict(kind=kind, sentence_en=en, sentence_zh=zh)


def plot(rows: Sequence[Row]) -> list[Panel]:
    same, *others = rows
    shares = [number(same, "found_fixed_percent"), number(same, "found_peeking_percent")]
    looks = ("one look", f"{LOOKS} looks")
    needed = Line.of(others, "difference_percent", "requests")
    return [
        Panel([needed], "Requests", "difference, %", "requests of each version, for 80 % power", "log", "log"),
        Panel([Bars(shares, colour="each"), Rule(5)], "No difference", y="false alarms, % of the tests", xnames=looks),
    ]


LAB = Claim(
    title_en="A/B noise",
    title_zh="A/B 测试的噪声",
    claim_en="The requests needed to see a difference grow with the inverse square of it: twice as small a difference "
    "needs four times the requests. Stopping at the first look with p < 0.05 reports differences that do not exist in "
    "far more than 5 % of the tests.",
    claim_zh="看出一个差异所需的请求数与差异的平方成反比：差异减半，请求数要四倍。"
    "一见到 p < 0.05 就停止，会在远多于 5% 的测试里报告并不存在的差异。",
    regime="latencies of real requests with 1 to 64 prompt and output tokens; two versions, means compared",
    varies="the difference between the versions; one look or twenty",
    measures="the share of tests that report a difference",
)
