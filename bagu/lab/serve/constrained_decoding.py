"""Constrained decoding: what a mask costs, and what it does to the distribution of outputs.

    masked        q(x) = prod_t p(x_t | x_<t) / sum of p over the tokens that the grammar allows at t
    conditioned   p(x | valid) = prod_t p(x_t | x_<t) / sum of this over all valid outputs

Both give valid outputs only. They differ because a mask looks one token ahead: it keeps a first token that is probable
but continues badly. The grammars are small enough to enumerate every valid output, in every way to split it into
tokens, so both distributions are exact. Their distance is the total variation: half the sum of |q - p|, the largest
difference in the probability of any set of outputs. 1 / valid mass is the number of free samples per valid one: the
cost of exact sampling by rejection.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from bagu.bench.constrained import PEOPLE
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, names_in, number
from bagu.lab.parts.library_models import STEP_TOKENS, VOCAB, Library, new_model, read_library, sized, train
from bagu.lab.plot import Bars, Line, Panel
from bagu.nn import Transformer
from bagu.serve.constrain.compiler import GrammarCompiler
from bagu.serve.grammar import Grammar

STEPS, WIDTH = 600, 64
CONTEXTS, CONTEXT = 24, 32  # number and tokens of the prompts
BITS = (1, 2, 3, 4, 5)  # lengths of a string of 0 and 1
VALUES = ("None", "True", "False", "self", "[]", "0", "1", "not self", "len(self)")
SMALL = 0.01  # a total variation that counts as equal
MASKS = 200  # timed masks per grammar


class Outputs(NamedTuple):
    """The valid outputs of a grammar as token sequences, with the tokens that were allowed at each position."""

    tokens: list[list[int]]
    allowed: list[list[np.ndarray]]


def run(setting: Setting) -> list[Row]:
    library = read_library(quick=setting.quick)
    model = new_model(width=WIDTH, seed=1, device=setting.device)
    steps = 3 if setting.quick else STEPS
    train(model, library.train_tokens, steps=steps, seed=1)
    compiler = GrammarCompiler(library.tokenizer, VOCAB, (library.tokenizer.eos_id,))
    bits = BITS[:2] if setting.quick else BITS
    grammars = {f"{n} bit{'s' * (n > 1)}": Grammar.regex(f" [01]{{{n}}}\n") for n in bits}
    grammars["a value"] = Grammar.choice([f" {value}\n" for value in VALUES])
    prompts = contexts(library, 3 if setting.quick else CONTEXTS)
    rows = [
        distances(name, model, enumerate_outputs(compiler.matcher(grammar)), prompts, library)
        for name, grammar in setting.track(list(grammars.items()))
    ]
    rows += [cost(name, grammar, library, MASKS // 20 if setting.quick else MASKS) for name, grammar in TIMED]
    return sized(rows, model, steps)


def contexts(library: Library, count: int) -> list[list[int]]:
    """The last tokens before a blank and a value: after ` return` or ` =` in held-out modules."""
    found = []
    for document in library.held:
        for mark in (" return", " ="):
            at = document.text.find(f"{mark} ", 200)
            ids = library.tokenizer.encode(document.text[: at + len(mark)])
            if at > 0 and len(ids) >= CONTEXT:
                found.append(ids[-CONTEXT:])
    return found[:count]


def allowed_tokens(matcher: Any) -> np.ndarray:
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


def enumerate_outputs(matcher: Any) -> Outputs:
    """All outputs of a finite grammar that no longer text extends; without the end-of-text token."""

    def walk(matcher: Any) -> Iterator[tuple[list[int], list[np.ndarray]]]:
        if matcher.is_stopped():
            yield [], []
            return
        allowed = allowed_tokens(matcher)
        for token in allowed.tolist():
            after = matcher.deep_copy()
            after.consume_token(token)
            for tokens, masks in walk(after):
                yield [token, *tokens], [allowed, *masks]

    pairs = list(walk(matcher))
    return Outputs([tokens for tokens, _ in pairs], [masks for _, masks in pairs])


@torch.no_grad()
def logprobs(model: Transformer, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """For each output, the logprobs [tokens, V] from which its tokens are sampled, in fp64."""
    device, found = next(model.parameters()).device, []
    model.eval()
    lengths = [len(prompt) + len(tokens) - 1 for tokens in outputs]
    ids = torch.tensor([id for tokens in outputs for id in (*prompt, *tokens[:-1])], device=device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    hidden = model(ids, positions, ends.to(device, torch.int32), max(lengths)).hidden
    for end, tokens in zip(ends[1:].tolist(), outputs, strict=True):
        found.append(model.logits(hidden[end - len(tokens) : end]).cpu().double().log_softmax(-1))
    return found


def both(predicted: Sequence[torch.Tensor], outputs: Outputs) -> tuple[np.ndarray, np.ndarray]:
    """Of each output: the logprob under masked sampling, and that of the model, from its `logprobs`."""
    masked, free = [], []
    for rows, tokens, allowed in zip(predicted, *outputs, strict=True):
        own = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
        kept = torch.stack([row[torch.from_numpy(a)].logsumexp(0) for row, a in zip(rows, allowed, strict=True)])
        masked.append(float((own - kept).sum()))
        free.append(float(own.sum()))
    return np.array(masked), np.array(free)


def distances(
    name: str, model: Transformer, outputs: Outputs, prompts: Sequence[Sequence[int]], library: Library
) -> Row:
    """Medians over the prompts. The distributions are over texts: the probabilities of its splits are added."""
    texts = [library.tokenizer.decode(tokens) for tokens in outputs.tokens]
    names = sorted(set(texts))
    which = np.array([names.index(text) for text in texts])
    variations, masses, agreements = [], [], []
    for prompt in prompts:
        predicted = logprobs(model, prompt, outputs.tokens)
        masked, free = both(predicted, outputs)
        q, p = (np.bincount(which, weights=np.exp(x), minlength=len(names)) for x in (masked, free))
        variations.append(float(np.abs(q - p / p.sum()).sum() / 2))
        masses.append(float(p.sum()))
        agreements.append(greedy(predicted, outputs, texts) == names[int(p.argmax())])
    return {
        "grammar": name,
        "prompts": len(prompts),
        "valid_texts": len(names),
        "token_sequences": len(texts),
        "total_variation": statistics.median(variations),
        "largest_variation": max(variations),
        "valid_mass": statistics.median(masses),
        "greedy_is_best_percent": 100 * statistics.mean(agreements),
    }


def greedy(predicted: Sequence[torch.Tensor], outputs: Outputs, texts: Sequence[str]) -> str:
    """The text of masked greedy decoding."""
    alive = list(range(len(texts)))
    while len(alive) > 1:
        t = next(t for t in range(99) if len({tuple(outputs.tokens[i][: t + 1]) for i in alive}) > 1)
        allowed = outputs.allowed[alive[0]][t]
        best = int(allowed[int(predicted[alive[0]][t][torch.from_numpy(allowed)].argmax())])
        alive = [i for i in alive if outputs.tokens[i][t] == best]
    return texts[alive[0]]


TIMED = (
    ("a value", Grammar.choice(VALUES)),
    ("regex", Grammar.regex(r"[a-z]{3,12}@[a-z]{3,12}\.(com|org)")),
    ("schema", Grammar.json_schema(PEOPLE)),
    ("any object", Grammar.json_object()),
)


def cost(name: str, grammar: Grammar, library: Library, masks: int) -> Row:
    """Milliseconds to compile the grammar, and microseconds per mask along random outputs."""
    compiler = GrammarCompiler(library.tokenizer, VOCAB, (library.tokenizer.eos_id,))
    compiler.matcher(Grammar.choice(["x"]))  # builds the trie of the vocabulary
    before = compiler.compile_s
    start = compiler.matcher(grammar)
    rng, matcher = np.random.default_rng(0), start.deep_copy()
    times: list[float] = []
    while len(times) < masks:
        began = time.perf_counter()
        matcher.compute_bitmask()
        times.append(time.perf_counter() - began)
        matcher.consume_token(int(rng.choice(allowed_tokens(matcher))))
        if matcher.is_stopped():
            matcher = start.deep_copy()
    compile_s = compiler.compile_s - before
    return {"grammar": name, "compile_ms": 1e3 * compile_s, "mask_us": 1e6 * statistics.median(times)}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if masked sampling is the conditioned model for every grammar, up to a total variation of SMALL."""
    measured = [row for row in rows if "total_variation" in row]
    equal = [number(row, "total_variation") <= SMALL for row in measured]
    kind: Kind = "held" if all(equal) else "holds only where" if any(equal) else "did not hold"
    worst = max(measured, key=lambda row: number(row, "total_variation"))
    mass = min(number(row, "valid_mass") for row in measured)
    each = ", ".join(f"{row['grammar']} {number(row, 'total_variation'):.3f}" for row in measured)
    best = ", ".join(f"{row['grammar']} {number(row, 'greedy_is_best_percent'):.0f} %" for row in measured)
    times = [row for row in rows if "mask_us" in row]
    paid = ", ".join(
        f"{r['grammar']} {number(r, 'compile_ms'):.1f} ms and {number(r, 'mask_us'):.0f} µs" for r in times
    )
    return Verdict(
        kind=kind,
        sentence_en=f"Total variation between masked sampling and the model conditioned on a valid output, medians: "
        f"{each}; the largest of any prompt for {worst['grammar']} is {number(worst, 'largest_variation'):.2f}. Greedy "
        f"decoding with a mask finds the most probable valid output for: {best}. The valid mass goes down to "
        f"{mass:.1e}, so rejection sampling would take {1 / mass:.1e} samples. To compile, and per mask: {paid}.",
        sentence_zh=f"掩码采样与以输出合法为条件的模型之间的总变差（中位数）：{each}；"
        f"{worst['grammar']} 在单个提示上最大 {number(worst, 'largest_variation'):.2f}。"
        f"带掩码的贪心解码得到最可能的合法输出的比例：{best}。"
        f"合法输出的概率最低为 {mass:.1e}，拒绝采样需要 {1 / mass:.1e} 个样本。编译时间与每个掩码的时间：{paid}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    measured, times = ([row for row in rows if key in row] for key in ("total_variation", "mask_us"))
    largest = Line(range(len(measured)), column(measured, "largest_variation"), "largest", "o", 1)
    variation = [Bars(column(measured, "total_variation"), "median", 0), largest]
    best = [Bars(column(measured, "greedy_is_best_percent"), colour=2)]
    names, title = names_in(measured, "grammar"), "Masked greedy is the best valid output"
    return [
        Panel(variation, "Total variation, masked to conditioned", ylim=(0, 1), xnames=names),
        Panel(best, title, y="% of prompts", xnames=names),
        Panel([Bars(column(times, "mask_us"), colour=3)], "Time of a mask", y="µs", xnames=names_in(times, "grammar")),
    ]


LAB = Claim(
    title_en="Constrained decoding",
    title_zh="约束解码",
    claim_en="A grammar's mask gives the model's own distribution over the valid outputs.",
    claim_zh="语法掩码得到的就是模型在合法输出上的分布。",
    regime=f"A decoder of width {WIDTH} with 2 layers and a vocabulary of {VOCAB:,}, trained on "
    f"{STEPS * STEP_TOKENS:,} tokens of the standard library; {CONTEXTS} prompts of {CONTEXT} tokens of held-out text, "
    "each of which ends before a blank and a value.",
    varies="The grammar: strings of 1 to 5 bits, and nine Python values, each with the end of the line.",
    measures="The total variation between the two distributions, the probability that free text is valid, and whether "
    "greedy decoding finds the most probable valid text, all by enumeration; the time to compile a grammar and to "
    "compute a mask.",
    evidence="model",
)
