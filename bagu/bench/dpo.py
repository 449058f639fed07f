"""`bagu bench dpo`: the speed of a DPO step on random pairs, beside a plain transformers loop on the same pairs.

Both have a live reference, AdamW and clipping. bagu packs whole sequences; the plain loop pads them to the longest, as
its users do. A pair is a prompt with two answers of different lengths.
"""

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch.nn import functional as F

from bagu.bench.harness import Place, Rows, table, time_steps
from bagu.bench.options import BenchSetting, DpoBench
from bagu.bench.train_peers import llama_config
from bagu.data.preference_batch import PreferenceBatch
from bagu.data.sequences import Tokens, micro_batches, pack
from bagu.errors import ArgumentError, UnknownName
from bagu.nn import ModelConfig, Transformer, init_weights, preset
from bagu.train import OptimizerConfig, TrainConfig, TrainState, step
from bagu.train.preference.dpo import PreferenceOptimization
from bagu.train.prepare import prepared

BETA = 0.1
PEERS = {"transformers": False, "transformers-compile": True}  # name: compiled
MICRO_BATCH = 16384  # tokens, at most


def random_pairs(pairs: int, prompt: int, answer: int, vocabulary: int) -> list[Tokens]:
    """2 * `pairs` sequences, chosen and rejected in turn. Answers have from a quarter of `answer` tokens to all."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(pairs):
        asked = draw.integers(vocabulary, size=prompt)
        for length in draw.integers(max(1, answer // 4), answer + 1, size=2):
            ids = (*asked.tolist(), *draw.integers(vocabulary, size=length).tolist())
            found.append(Tokens(ids=ids, start=prompt))
    return found


@contextmanager
def bagu_step(
    model: ModelConfig, pairs: Sequence[Tokens], device: torch.device, dtype: torch.dtype
) -> Iterator[Callable[[], float]]:
    """One step of bagu's trainer with the objective `dpo`."""
    config = TrainConfig(steps=10**6, optimizer=OptimizerConfig(kind="adamw", lr=1e-6))
    policy = init_weights(Transformer(model, device=device, dtype=dtype), seed=0)
    state = TrainState(policy, config, PreferenceOptimization(beta=BETA, reference="live").loss(policy))
    batches = _packed(pairs, device)
    with prepared(policy, config, device):
        yield lambda: step(state, batches).loss
    state.close()


def _packed(sequences: Sequence[Tokens], device: torch.device) -> list[PreferenceBatch]:
    """The pairs in micro-batches of one size; both sides of a pair are in one."""
    sizes = [len(a.ids) + len(b.ids) for a, b in zip(sequences[::2], sequences[1::2], strict=True)]
    groups = micro_batches(sizes, capacity=max(MICRO_BATCH, max(sizes)))
    tokens = max(sum(sizes[i] for i in group) for group in groups)
    longest = max(len(s.ids) for s in sequences)
    found = []
    for group in groups:
        own = [s for i in group for s in sequences[2 * i : 2 * i + 2]]
        found.append(
            PreferenceBatch(
                batch=pack(own, tokens=tokens, max_segments=2 * max(map(len, groups)), context=longest),
                num_sequences=len(own),
                num_chosen=len(group),
                chosen=torch.tensor([True, False] * len(group)),
                lengths=torch.tensor([float(s.num_targets) for s in own]),
            ).to(device)
        )
    return found


@contextmanager
def plain_step(
    model: ModelConfig, pairs: Sequence[Tokens], device: torch.device, dtype: torch.dtype, *, compiled: bool
) -> Iterator[Callable[[], float]]:
    """LlamaForCausalLM with SDPA and a frozen copy: log-softmax of the logits, gathered at the answer's tokens."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        policy: Any = LlamaForCausalLM(llama_config(model)).to(dtype)
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=device.type == "cuda")
    run, run_reference = (torch.compile(m) if compiled else m for m in (policy, reference))
    parts = _padded(pairs, device)

    def sums(net: Any, ids: torch.Tensor, there: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        logits = net(input_ids=ids, attention_mask=there).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return (logprobs * answer[:, 1:]).sum(1)

    def one_step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in parts:
            with torch.no_grad():
                before = sums(run_reference, *part)
            ratios = sums(run, *part) - before
            loss = -F.logsigmoid(BETA * (ratios[0::2] - ratios[1::2])).sum() / (len(pairs) // 2)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return total

    yield one_step


def _padded(sequences: Sequence[Tokens], device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """(ids, mask of tokens, mask of answers) [2 * pairs, longest], in parts of at most MICRO_BATCH tokens."""
    longest = max(len(s.ids) for s in sequences)
    ids, there, answer = (torch.zeros(len(sequences), longest, dtype=torch.int64) for _ in range(3))
    for i, s in enumerate(sequences):
        ids[i, : len(s.ids)] = torch.tensor(s.ids)
        there[i, : len(s.ids)] = 1
        answer[i, s.start : len(s.ids)] = 1
    rows = max(2, MICRO_BATCH // longest // 2 * 2)
    return [tuple(x[i : i + rows].to(device) for x in (ids, there, answer)) for i in range(0, len(sequences), rows)]


def main(given: DpoBench, setting: BenchSetting) -> int:
    """Time a DPO step of bagu and of the peers on the same pairs; print a table and append the rows to the record."""
    place, steps = Place.of(setting), given.steps
    defaults = (32, 256, 768) if place.on_gpu else (4, 32, 96)
    sizes = zip((given.pairs, given.prompt, given.answer), defaults, strict=True)
    pairs, prompt, answer = (default if value is None else value for value, default in sizes)
    if min(pairs, prompt, answer, steps) < 1:
        raise ArgumentError(
            f"{pairs} pairs with prompts of {prompt} and answers of {answer} tokens, {steps} steps",
            hint="each must be 1 or more",
        )
    for peer in given.peer:
        UnknownName.check("peer", peer, PEERS)
    shape = given.shape or ("llama_1b" if place.on_gpu else "cpu_6m")
    model, rows = preset(shape), Rows.of(setting, "dpo")
    made = random_pairs(pairs, prompt, answer, model.vocab_size)
    facts = {
        "system": "dpo",
        "model": shape,
        **place.facts,
        "pairs": pairs,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "tokens": sum(len(s.ids) for s in made),
    }
    for name in ("bagu", *given.peer):
        create = bagu_step if name == "bagu" else partial(plain_step, compiled=PEERS[name])
        samples, peak = time_steps(partial(create, model, made, place.device, place.dtype), place.device, steps=steps)
        median = statistics.median(samples)
        rows.add([{
            **facts, "implementation": name, "step_s": median, "low_s": min(samples), "high_s": max(samples),
            "pairs_per_s": pairs / median, "peak_bytes": peak,
        }])  # fmt: skip
    rows.finish(_table(facts, rows.all))
    return 0


def _table(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Table:
    best = min((r["step_s"] for r in rows if r["implementation"] != "bagu"), default=None)
    where = ", ".join(facts[name] for name in ("model", "dtype", "device"))
    title = f"DPO, {where}: {facts['pairs']} pairs, {facts['tokens']:,} tokens"
    lines = [
        (
            row["implementation"],
            f"{1e3 * row['step_s']:,.1f} ms",
            f"{row['pairs_per_s']:,.1f}",
            f"{row['peak_bytes'] / 2**30:.1f} GiB" if row["peak_bytes"] else "–",
            f"{best / row['step_s']:.2f}×" if best else "–",
        )
        for row in rows
    ]
    return table(title, ("implementation", "step", "pairs/s", "peak memory", "against the fastest peer"), lines)
