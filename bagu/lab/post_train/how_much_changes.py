"""How much a stage changes a model: its weights and its behaviour after continued pretraining, SFT, DPO and GRPO.

All stages start from one writer of small functions and have as many steps.

    continued   more random functions, good and bad
    SFT         functions that pass all checks
    DPO         pairs of a function that passes and one that does not
    GRPO        the reward of the checks on the model's own answers
    weights     |ΔW| / |W|, and the share of weights that differ in bf16
    behaviour   the share of answers that pass; KL per token from the start, on the start's own answers
"""

import copy
import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from bagu.data import DataConfig, Document, in_memory, tokenize
from bagu.data.preference_loader import PreferenceLoader
from bagu.data.preference_rows import Preference
from bagu.data.preference_set import PreferenceSet
from bagu.data.preferences import PreferenceEncoder
from bagu.eval.function_checks import CHECKS, checks_passed
from bagu.lab.core import Claim, Row, Setting, Verdict, column, listed, names_in, say, share_met, where
from bagu.lab.parts.confidence import interval
from bagu.lab.parts.more_steps import go_on, hidden
from bagu.lab.parts.small_functions import (
    ANSWER_TOKENS,
    CONTEXT,
    NAMES,
    ROWS,
    Writer,
    function_text,
    new_writer,
    prompt_text,
)
from bagu.lab.plot import Line, Panel
from bagu.nn import Transformer
from bagu.recipes.code_rewards import PythonReward
from bagu.train import OptimizerConfig, TrainConfig, fit
from bagu.train.preference.dpo import PreferenceOptimization
from bagu.train.rl.grpo import GroupRelative

STEPS, START_STEPS = 24, 60
RATES = {"continued": 1e-3, "SFT": 1e-3, "DPO": 5e-4, "GRPO": 1e-3}
AFTER = ("DPO", "GRPO")  # post-training in the claim's words, beside SFT
EACH = 16  # answers to each prompt


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    seeds, steps, each = ((1, 2), 2, 1) if quick else ((1, 2, 3), STEPS, EACH)
    starts = {seed: new_writer(steps=2 if quick else START_STEPS, seed=seed, device=setting.device) for seed in seeds}
    for seed, stage in setting.track(list(product(seeds, RATES))):
        start = starts[seed]
        model = copy.deepcopy(start.model)
        after = Writer(model=model, tokenizer=start.tokenizer)
        trained(stage, after, steps, seed, samples=2 if quick else 8)
        before = start.answers(each)
        yield {
            "stage": stage,
            "seed": seed,
            "steps": steps,
            "parameters": sum(p.numel() for p in model.parameters()),
            "weights_percent": 100 * moved(start.model, model),
            "bf16_percent": 100 * differ(start.model, model),
            "kl_nats": kl(start.model, model.eval(), start, [p.text + text for p, text in before]),
            "gain_points": 100 * (passing(after.answers(each)) - passing(before)),
        }


def good(name: str, text: str) -> bool:
    return checks_passed(text, {"name": name}) == len(CHECKS)


def trained(stage: str, writer: Writer, steps: int, seed: int, *, samples: int) -> None:
    """Run a stage on the writer's model, in place."""
    draw = random.Random(seed)
    made = [(name := draw.choice(NAMES), function_text(name, draw)) for _ in range(40 * steps + 60)]
    data, rate = DataConfig(context=CONTEXT, rows=ROWS, seed=seed, packing="whole"), RATES[stage]
    config = TrainConfig(steps=steps, seed=seed, optimizer=OptimizerConfig(lr=rate, weight_decay=0.0))
    if stage in ("continued", "SFT"):
        kept = [pair for pair in made if stage == "continued" or good(*pair)]
        documents = [Document(id=str(i), text=prompt_text(n) + t) for i, (n, t) in enumerate(kept)]
        store = in_memory(tokenize(documents, writer.tokenizer), token_bytes=writer.tokenizer.token_bytes)
        go_on(writer.model, store, data, steps=steps, seed=seed, kind="adamw", lr=rate)
    elif stage == "DPO":
        encoder = PreferenceEncoder(writer.tokenizer, text=True)
        tokens = [d for p in preferences(made) for d in encoder.documents(p)]
        store = in_memory(tokens, token_bytes=writer.tokenizer.token_bytes)
        data = DataConfig(context=CONTEXT, rows=ROWS, seed=seed)
        pairs = PreferenceSet.of("functions", store, data, paired=True)
        dpo = PreferenceOptimization(reference="live")
        fit(config, writer.model, PreferenceLoader({"functions": pairs}, data), loss=dpo.loss(writer.model))
    else:
        grpo = GroupRelative(
            prompts=samples // 2, samples=samples, max_tokens=ANSWER_TOKENS, max_draws=2 if samples > 2 else 1
        )
        loss, reward = grpo.loss(writer.model), PythonReward()
        fit(config, writer.model, writer.rollouts(grpo, loss, reward, seed=seed), loss=loss)
        reward.close()


def preferences(made: Sequence[tuple[str, str]]) -> Iterator[Preference]:
    """A function that passes with one of the same name that does not."""
    for name in NAMES:
        own = [text for n, text in made if n == name]
        kinds = [[t for t in own if good(name, t) == passes] for passes in (True, False)]
        for i, (chosen, rejected) in enumerate(zip(*kinds, strict=False)):
            yield Preference(
                id=f"{name}{i}:",
                place=name,
                prompt=({"role": "user", "content": prompt_text(name)},),
                chosen={"role": "assistant", "content": chosen},
                rejected={"role": "assistant", "content": rejected},
                strings=True,
            )


def passing(answers: Sequence[tuple[Any, str]]) -> float:
    return sum(good(p.facts["name"], text) for p, text in answers) / len(answers)


def _pairs(a: Transformer, b: Transformer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip((p.detach() for p in a.parameters()), (p.detach() for p in b.parameters()), strict=True)


def moved(a: Transformer, b: Transformer) -> float:
    """|ΔW| / |W| over all weights."""
    change, size = (
        sum(float(x.square().sum()) for x in xs)
        for xs in ([y - x for x, y in _pairs(a, b)], [x for x, _ in _pairs(a, a)])
    )
    return float((change / size) ** 0.5)


def differ(a: Transformer, b: Transformer) -> float:
    """The share of weights whose bf16 values differ."""
    found = [(x.bfloat16() != y.bfloat16()).double() for x, y in _pairs(a, b)]
    return float(torch.cat([f.flatten() for f in found]).mean())


@torch.no_grad()
def kl(a: Transformer, b: Transformer, writer: Writer, texts: Sequence[str]) -> float:
    """KL(a ‖ b) per token of the texts, in nats."""
    total, tokens = 0.0, 0
    a.eval()
    for text in texts:
        ids = torch.tensor([writer.tokenizer.encode(text)[:CONTEXT]], device=a.embedding.weight.device)
        if ids.shape[1] == 0:
            continue
        p, q = ((hidden(m, ids) @ m.head_weight.t()).log_softmax(-1) for m in (a, b))
        total, tokens = total + float((p.exp() * (p - q)).sum()), tokens + ids.shape[1]
    return total / max(tokens, 1)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if DPO and GRPO change both the weights and the behaviour (points of answers that pass) less than SFT."""
    mean = {
        s: {k: interval(column(where(rows, stage=s), k)) for k in ("weights_percent", "kl_nats", "gain_points")}
        for s in names_in(rows, "stage")
    }
    sft = mean["SFT"]
    less = [
        all(mean[s]["weights_percent"][0] < sft["weights_percent"][0] for s in AFTER),
        all(abs(mean[s]["gain_points"][0]) < abs(sft["gain_points"][0]) for s in AFTER),
    ]
    told = [
        say(
            "{stage} {w:.2f} % of the weights, KL {k:.3f}, {g:+.0f} ± {h:.0f} points",
            "{stage} 权重 {w:.2f} %，KL {k:.3f}，{g:+.0f} ± {h:.0f} 个百分点",
            stage=s if s != "continued" else say("continued pretraining", "继续预训练"),
            w=m["weights_percent"][0],
            k=m["kl_nats"][0],
            g=m["gain_points"][0],
            h=m["gain_points"][1],
        )
        for s, m in mean.items()
    ]
    said = Verdict.say(
        share_met(less),
        "After as many steps, change of the weights, KL per token, answers that pass: {told}.",
        "步数相同，权重的改变、每 token 的 KL、通过检查的回答：{told}。",
        told=listed(told, "; ", "；"),
    )
    if any(abs(m["gain_points"][0]) > m["gain_points"][1] for m in (sft, *(mean[s] for s in AFTER))):
        return said
    return said.undecided(
        "more steps or answers: no stage changes the share that passes beyond its interval.",
        "更多步数或回答：没有一个阶段使通过比例的变化超出区间。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    stages = names_in(rows, "stage")
    panels = []
    measures = {
        "weights_percent": "|ΔW| / |W|, %",
        "bf16_percent": "bf16 weights that differ, %",
        "kl_nats": "KL, nats a token",
        "gain_points": "answers that pass, points",
    }
    for key, y in measures.items():
        found = [interval(column(where(rows, stage=s), key)) for s in stages]
        ends = [(m - h, m + h) for m, h in found]
        panels.append(
            Panel([Line(list(range(len(stages))), [m for m, _ in found], "", "o", 0, ends)], y, xnames=stages)
        )
    return panels


LAB = Claim(
    title_en="How much a stage changes",
    title_zh="各阶段改变多少",
    claim_en="Post-training changes a model less than supervised fine-tuning does.",
    claim_zh="后训练对模型的改变小于监督微调。",
    regime=f"A model of 2 layers, width 64, that writes small functions; {STEPS} steps of each stage from the same "
    "start, with usual learning rates; 3 seeds.",
    varies="The stage: continued pretraining, SFT on functions that pass the checks, DPO, GRPO on the checks.",
    measures=f"|ΔW| / |W|, bf16 values that differ, KL per token from the start, and the share of {EACH} answers to "
    "each prompt that pass.",
    evidence="training",
    published_en="Reinforcement learning changes 5 to 30 % of the parameters of ten models by seven algorithms, in "
    "nearly full-rank updates (Mukherjee et al. 2025, arXiv:2505.11711).",
    published_zh="七种强化学习算法在十个模型上只改变 5 至 30 % 的参数，而更新接近满秩"
    "（Mukherjee 等，2025，arXiv:2505.11711）。",
)
