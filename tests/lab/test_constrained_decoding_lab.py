"""The lab of constrained decoding: its enumeration is exact, and the engine samples from its distribution."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from bagu.data import BpeTokenizer
from bagu.lab.core import Row
from bagu.lab.serve import constrained_decoding as lab
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.serve.config import EngineConfig
from bagu.serve.constrain.compiler import GrammarCompiler
from bagu.serve.engine import Engine
from bagu.serve.grammar import Grammar
from bagu.serve.request import Sampling

PROMPT = [40, 41, 42]


@pytest.fixture(scope="module")
def tokenizer() -> BpeTokenizer:
    return BpeTokenizer.train(["01 10 11 0110 01 010 11\n"] * 20, vocab_size=290)


@pytest.fixture(scope="module")
def model(tokenizer: BpeTokenizer) -> Transformer:
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16,
        intermediate_size=48, max_len=64, init_std=0.3,
    )  # fmt: skip
    return init_weights(Transformer(config, dtype=torch.float32), 0).eval()


def outputs_of(tokenizer: BpeTokenizer, grammar: Grammar) -> lab.Outputs:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))
    return lab.enumerate_outputs(compiler.matcher(grammar))


def test_every_valid_text_is_enumerated_in_every_split(tokenizer: BpeTokenizer, model: Transformer) -> None:
    outputs = outputs_of(tokenizer, Grammar.regex("[01]{2}\n"))
    texts = Counter(tokenizer.decode(tokens) for tokens in outputs.tokens)
    assert set(texts) == {"00\n", "01\n", "10\n", "11\n"} and texts["01\n"] > 1
    assert len({tuple(tokens) for tokens in outputs.tokens}) == len(outputs.tokens)
    masked, free = lab.both(lab.logprobs(model, PROMPT, outputs.tokens), outputs)
    assert math.isclose(float(np.exp(masked).sum()), 1.0, rel_tol=1e-12)
    assert 0 < float(np.exp(free).sum()) < 1 and (masked >= free).all()


def test_the_engine_samples_from_the_masked_distribution(tokenizer: BpeTokenizer, model: Transformer) -> None:
    """Chi-squared over the token sequences, with fixed seeds: 7 standard deviations above its mean at most."""
    outputs = outputs_of(tokenizer, Grammar.regex("[01]{2}\n"))
    expected = np.exp(lab.both(lab.logprobs(model, PROMPT, outputs.tokens), outputs)[0])
    engine = Engine(model, tokenizer, EngineConfig(num_blocks=512, block_size=4, max_num_seqs=64))
    drawn = Counter(
        completion.tokens[:-1]  # without end-of-text
        for seed in range(40)
        for completion in engine.generate(
            [PROMPT], Sampling(n=64, seed=seed, max_tokens=8, grammar=Grammar.regex("[01]{2}\n"))
        )
    )
    count = sum(drawn.values())
    found = np.array([drawn[tuple(tokens)] for tokens in outputs.tokens])
    assert found.sum() == count == 40 * 64
    chi = float(((found - count * expected) ** 2 / (count * expected)).sum())
    degrees = len(expected) - 1
    assert chi < degrees + 7 * math.sqrt(2 * degrees)


def test_greedy_is_the_engines(tokenizer: BpeTokenizer, model: Transformer) -> None:
    grammar = Grammar.regex("[01]{3}\n")
    outputs = outputs_of(tokenizer, grammar)
    texts = [tokenizer.decode(tokens) for tokens in outputs.tokens]
    engine = Engine(model, tokenizer, EngineConfig(num_blocks=64, block_size=4))
    (made,) = engine.generate([PROMPT], Sampling(temperature=0.0, max_tokens=8, grammar=grammar))
    assert lab.greedy(lab.logprobs(model, PROMPT, outputs.tokens), outputs, texts) == made.text


def rows_of(*variations: float) -> list[Row]:
    return [
        {
            "grammar": f"g{i}", "total_variation": v, "largest_variation": v, "valid_mass": 0.5,
            "greedy_is_best_percent": 100.0,
        }
        for i, v in enumerate(variations)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("variations", "kind"),
    [((0.0, 0.005), "held"), ((0.0, 0.2), "holds only where"), ((0.1, 0.2), "did not hold")],
)
def test_the_verdict_follows_the_distances(variations: tuple[float, ...], kind: str) -> None:
    found = lab.verdict(rows_of(*variations))
    assert found.kind == kind and f"{variations[-1]:.3f}" in found.sentence_en
