"""KL estimators: bias and standard deviation of k1, k2 and k3 as a policy drifts away from its reference.

    d  = log reference(x) - log policy(x) of a token x that the policy sampled
    k1 = -d             k2 = d² / 2             k3 = exp(d) - 1 - d

With both distributions known over the whole vocabulary, the mean and the variance of an estimator are sums over the
vocabulary: bias and standard deviation here are exact up to fp64, not sampled. A batch has one sampled token per
position; many batches show what a training step would see.

    model         a language model, and the same model trained further on a few modules
    categorical   random logits, and the same logits with Gaussian noise added
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import get_args

import torch

from bagu.data import DataConfig, evaluation_batches
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, where
from bagu.lab.parts.library_models import CONTEXT, STEP_TOKENS, VOCAB, Library, new_model, read_library, sized, train
from bagu.lab.plot import Line, Panel, Rule
from bagu.nn import Transformer
from bagu.train.rl.formulas import Estimator, kl_estimate

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
MODEL, CATEGORICAL = "model", "categorical"
STEPS, WIDTH = 200, 64
DRIFTS = (1, 2, 4, 8, 16, 32, 64)  # further training steps
MODULES = 4  # that the policy is trained further on
NOISES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # standard deviation of the noise
SPREAD = 2.0  # standard deviation of the random logits
POSITIONS, BATCHES = 1024, 400


def run(setting: Setting) -> list[Row]:
    quick = setting.quick
    positions, batches = (64, 20) if quick else (POSITIONS, BATCHES)
    drifts, noises = ((1, 3), NOISES[::3]) if quick else (DRIFTS, NOISES)
    library = read_library(quick=quick)

    @cache
    def models() -> tuple[Transformer, dict[int, Transformer]]:
        return train_both(library, drifts, 3 if quick else STEPS, setting.device)

    def drifted(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        reference, policies = models()
        return logprobs(policies[steps], library, positions), logprobs(reference, library, positions)

    points: list[tuple[str, float, Callable[[], tuple[torch.Tensor, torch.Tensor]]]] = [
        *((MODEL, steps, partial(drifted, steps)) for steps in drifts),
        *((CATEGORICAL, noise, partial(random_pair, noise, positions)) for noise in noises),
    ]
    rows = [row for source, drift, make in setting.track(points) for row in measure(source, drift, *make(), batches)]
    return sized(rows, models()[0], 3 if quick else STEPS)


def train_both(
    library: Library, drifts: Sequence[int], steps: int, device: str
) -> tuple[Transformer, dict[int, Transformer]]:
    """The reference, and policies by the number of further training steps."""
    model = new_model(width=WIDTH, seed=1, device=device)
    train(model, library.train_tokens, steps=steps, seed=1)
    reference = new_model(width=WIDTH, seed=1, device=device)
    reference.load_state_dict(model.state_dict())
    longest = sorted(library.train, key=lambda d: len(d.text))[-MODULES:]
    policies = train(model, library.store(longest), steps=drifts[-1], seed=2, checkpoints=drifts)
    return reference, dict(zip(drifts, policies, strict=True))


@torch.no_grad()
def logprobs(model: Transformer, library: Library, positions: int) -> torch.Tensor:
    """[positions, V] in fp64 on the CPU, every second position of held-out text, so that contexts differ more."""
    found, rows = [], DataConfig(context=CONTEXT, rows=1)
    model.eval()
    for batch in evaluation_batches(library.held_tokens, rows, limit=-(-2 * positions // CONTEXT)):
        b = batch.to(next(model.parameters()).device)
        hidden = model(b.ids, b.positions, b.cu_seqlens, b.max_len).hidden
        found.append(model.logits(hidden[::2]).cpu().double().log_softmax(-1))
    return torch.cat(found)[:positions]


def random_pair(noise: float, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Policy and reference, [positions, V] logprobs of random categorical distributions."""
    stream = torch.Generator().manual_seed(0)
    logits, moved = (torch.randn(positions, VOCAB, generator=stream, dtype=torch.float64) for _ in range(2))
    return (SPREAD * logits + noise * moved).log_softmax(-1), (SPREAD * logits).log_softmax(-1)


def measure(source: str, drift: float, policy: torch.Tensor, reference: torch.Tensor, batches: int) -> list[Row]:
    """A row for each estimator."""
    p = policy.exp()
    kl = float((p * (policy - reference)).sum(-1).mean())
    tokens = torch.multinomial(p, batches, replacement=True, generator=torch.Generator().manual_seed(1))
    rows: list[Row] = []
    for name in ESTIMATORS:
        values = kl_estimate(policy, reference, name)
        mean = (p * values).sum(-1)  # of each position
        variance = (p * (values - mean[:, None]).square()).sum(-1)
        sampled = values.gather(1, tokens).mean(0)  # one estimate per batch
        low, middle, high = torch.quantile(sampled, torch.tensor((0.025, 0.5, 0.975), dtype=torch.float64)).tolist()
        rows.append(
            {
                "source": source,
                "drift": drift,  # training steps, or standard deviation of the noise
                "estimator": name,
                "positions": len(p),
                "kl_nats": kl,
                "bias_nats": float(mean.mean()) - kl,
                "deviation_nats": float(variance.mean().sqrt()),  # of one token
                "batch_deviation_nats": float(variance.mean().sqrt()) / len(p) ** 0.5,
                "batches": batches,
                "batch_low_nats": low,
                "batch_median_nats": middle,
                "batch_high_nats": high,
            }
        )
    return rows


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if k3 has a smaller standard deviation than k1 in every case. Its bias is 0 by definition."""
    better = {key: value(rows, key, "k3") < value(rows, key, "k1") for key in cases(rows)}
    kind: Kind = "held" if all(better.values()) else "holds only where" if any(better.values()) else "did not hold"
    en, zh = [], []
    for source in dict.fromkeys(source for source, _ in better):
        own = sorted(
            (case for case in better if case[0] == source), key=lambda case: value(rows, case, "k1", "kl_nats")
        )
        good = [value(rows, case, "k1", "kl_nats") for case in own if better[case]]
        bad = [value(rows, case, "k1", "kl_nats") for case in own if not better[case]]
        near, far = own[0], own[-1]
        where = (f"smaller than k1's at {nats(good)}" if good else "") + (" and " if good and bad else "")
        where += f"larger at {nats(bad)}" if bad else ""
        en.append(
            f"{source}: the standard deviation of k3 is {where}. Of one token, relative to a KL of "
            f"{value(rows, near, 'k1', 'kl_nats'):.2g} nats: {relative(rows, near)}; to "
            f"{value(rows, far, 'k1', 'kl_nats'):.2g} nats: {relative(rows, far)}. Bias of k2: "
            f"{bias(rows, near):+.0f} % and {bias(rows, far):+.0f} %"
        )
        where = (f"KL 为 {nats(good)} 时小于 k1" if good else "") + ("，" if good and bad else "")
        where += f"KL 为 {nats(bad)} 时大于 k1" if bad else ""
        zh.append(
            f"{source}：k3 的标准差在 {where.replace(' to ', ' 至 ')}。单个 token 的标准差与 KL 之比，KL 为 "
            f"{value(rows, near, 'k1', 'kl_nats'):.2g} nats 时：{relative(rows, near)}；"
            f"{value(rows, far, 'k1', 'kl_nats'):.2g} nats 时：{relative(rows, far)}。"
            f"k2 的偏差：{bias(rows, near):+.0f} % 与 {bias(rows, far):+.0f} %"
        )
    worst = max(abs(value(rows, case, "k3", "bias_nats")) / value(rows, case, "k3", "kl_nats") for case in cases(rows))
    return Verdict(
        kind=kind,
        sentence_en=f"{'. '.join(en)}. k3 is unbiased to {worst:.0e} of the KL.",
        sentence_zh=f"{'。'.join(zh)}。k3 的偏差不超过 KL 的 {worst:.0e}。",
    )


def cases(rows: Sequence[Row]) -> list[tuple[str, float]]:
    return list(dict.fromkeys((str(row["source"]), number(row, "drift")) for row in rows))


def value(rows: Sequence[Row], case: tuple[str, float], estimator: str, key: str = "deviation_nats") -> float:
    return next(number(r, key) for r in rows if (r["source"], r["drift"], r["estimator"]) == (*case, estimator))


def relative(rows: Sequence[Row], case: tuple[str, float]) -> str:
    kl = value(rows, case, "k1", "kl_nats")
    return ", ".join(f"{name} {value(rows, case, name) / kl:.2g}" for name in ESTIMATORS)


def bias(rows: Sequence[Row], case: tuple[str, float]) -> float:
    """Of k2, in percent of the KL."""
    return 100 * value(rows, case, "k2", "bias_nats") / value(rows, case, "k2", "kl_nats")


def nats(kls: Sequence[float]) -> str:
    return f"{kls[0]:.2g} nats" if len(kls) == 1 else f"{kls[0]:.2g} to {kls[-1]:.2g} nats"


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Relative to the KL, by the KL; and the estimates of batches of the language model, with the range of 95 %."""
    deviation: list[Line] = []
    biases: list[Line] = []
    batches = []
    for (source, style), (i, name) in product(((MODEL, "o-"), (CATEGORICAL, "s:")), enumerate(ESTIMATORS)):
        own = sorted(where(rows, source=source, estimator=name), key=lambda r: number(r, "kl_nats"))
        for lines, key in ((deviation, "deviation_nats"), (biases, "bias_nats")):
            lines.append(Line.of(own, "kl_nats", partial(over_kl, key), f"{name}, {source}", style, i))
        if source == MODEL:
            low, median, high = ([over_kl(f"batch_{w}_nats", r) for r in own] for w in ("low", "median", "high"))
            x = [number(r, "kl_nats") * 1.12 ** (i - 1) for r in own]
            batches.append(Line(x, median, name, "o", i, list(zip(low, high, strict=True))))
    kl, y = "KL(policy || reference), nats per token", "relative to the KL"
    title = f"Batches of {rows[0]['positions']:,} tokens (model)"
    return [
        Panel(deviation, "Standard deviation of one token", kl, y, "log", "log"),
        Panel(biases, "Bias", kl, y, "log", legend="none"),
        Panel([*batches, Rule(1)], title, kl, "estimate relative to the KL", "log"),
    ]


def over_kl(key: str, row: Row) -> float:
    return number(row, key) / number(row, "kl_nats")


LAB = Claim(
    title_en="KL estimators",
    title_zh="KL 估计量",
    claim_en="k3 estimates the KL divergence without bias and with a smaller variance than k1.",
    claim_zh="k3 是 KL 散度的无偏估计，而且方差比 k1 小。",
    regime=f"A decoder of width {WIDTH} with 2 layers and a vocabulary of {VOCAB:,}, trained on "
    f"{STEPS * STEP_TOKENS:,} tokens of the standard library, and the same model trained further; "
    f"{POSITIONS:,} positions of held-out text. Random categorical distributions of the same size.",
    varies="How far the policy is from the reference: 1 to 64 further training steps, or noise on the logits; "
    "the estimator.",
    measures="Bias and standard deviation of one sampled token, exactly, by sums over the vocabulary in fp64; median "
    f"and 95 % range of the mean over a batch of {POSITIONS:,} tokens in {BATCHES} draws.",
    evidence="model",
)
