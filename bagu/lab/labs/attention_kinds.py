"""Attention kinds: what MHA, GQA, MQA and MLA keep of a token, and the loss of each at equal parameters.

    MHA             a key and a value for each of H heads             2 H D numbers a token and layer
    GQA, MQA        a key and a value for 4 heads, for all heads      2 (H / 4) D, and 2 D
    MLA             one latent and one key with the position          4 D + D / 2, in DeepSeek-V2's proportions
    fewer heads     a control: MHA with the heads that GQA's cache pays for
    itself only     a control: a window of 1, so that a token sees no other. What attention is worth is the loss it adds

A kind that saves parameters in its attention has them back in a wider FFN. D = features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING

import torch

from bagu.data import (
    BpeTokenizer,
    DataConfig,
    Loader,
    StdlibSource,
    TokenStore,
    evaluation_batches,
    hold_out,
    in_memory,
    tokenize,
)
from bagu.lab.core import Kind, Lab, Row, Setting, Verdict, number
from bagu.lab.plot import COLOURS, INK, log_ticks
from bagu.lab.seeds import interval
from bagu.nn import ModelConfig, Transformer, count, init_weights
from bagu.nn.config import MLAConfig
from bagu.nn.kv import DenseKV
from bagu.train import OptimizerConfig, ScheduleConfig, TrainConfig, fit
from bagu.train.evaluate import held_out_loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGIN = 10.0  # percent of what attention is worth: a kind that loses no more gives MHA's loss
VOCAB, CONTEXT, ROWS = 262, 128, 8  # bytes and six control tokens
SMALL = ModelConfig(
    vocab_size=VOCAB, hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8, intermediate_size=176,
    max_len=CONTEXT, tie_embeddings=True,
)  # fmt: skip
LARGE_NAME, LARGE_CONTEXT = "Llama 3 8B", 131072
LARGE = ModelConfig(  # as it would be with MHA; it has GQA
    vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128,
    intermediate_size=14336, max_len=LARGE_CONTEXT,
)  # fmt: skip
MHA, NONE = "MHA", "itself only"
CLAIMED = ("GQA", "MQA", "MLA")
CONTROLS = ("fewer heads", NONE)


def kinds(mha: ModelConfig) -> dict[str, ModelConfig]:
    """Each kind of attention in the same model, with as many parameters in all."""
    H, D = mha.num_heads, mha.head_dim
    mla = MLAConfig(kv_rank=4 * D, nope_dim=D, rope_dim=D // 2, v_dim=D)
    found = {
        MHA: mha,
        "GQA": replace(mha, num_kv_heads=H // 4),
        "MQA": replace(mha, num_kv_heads=1),
        "MLA": replace(mha, mla=mla, head_dim=mla.nope_dim + mla.rope_dim),
        "fewer heads": replace(mha, num_heads=H // 4, num_kv_heads=H // 4),
        NONE: replace(mha, windows=(1,)),
    }
    parameters = count.parameters(mha).total
    return {name: widened(config, parameters) for name, config in found.items()}


def widened(config: ModelConfig, parameters: int) -> ModelConfig:
    """The config with the width of FFN that comes nearest to so many parameters."""
    narrow = count.parameters(replace(config, intermediate_size=1)).total
    a_feature = count.parameters(replace(config, intermediate_size=2)).total - narrow
    return replace(config, intermediate_size=1 + round((parameters - narrow) / a_feature))


@dataclass(frozen=True, kw_only=True)
class Text:
    """Bytes of modules of the standard library, and of others that are held out."""

    train: TokenStore
    held: TokenStore

    @classmethod
    def read(cls, every: int) -> Text:
        """Of every n-th module, the tables of `encodings` left out."""
        modules = (d for d in StdlibSource().documents() if not d.id.startswith("encodings/"))
        split = hold_out(islice(modules, 0, None, every), fraction=0.15)
        tokenizer = BpeTokenizer.train((), vocab_size=VOCAB)
        train, held = (in_memory(tokenize(part, tokenizer), token_bytes=tokenizer.token_bytes) for part in split)
        return cls(train=train, held=held)


def run(setting: Setting) -> list[Row]:
    quick = setting.quick
    text = Text.read(16 if quick else 4)
    seeds, steps = ((1, 2), 8) if quick else ((1, 2, 3), 300)
    points = [
        partial(trained, name, c, seed, steps, text, setting)
        for seed, (name, c) in product(seeds, kinds(SMALL).items())
    ]
    return [
        *(sized(name, config) for name, config in kinds(LARGE).items()),
        *(point() for point in setting.track(points)),
    ]


def sized(name: str, config: ModelConfig) -> Row:
    """What a large model of this kind would keep."""
    return {"part": "size", "model": LARGE_NAME, "context_tokens": LARGE_CONTEXT, **facts(name, config)}


def facts(name: str, config: ModelConfig) -> Row:
    """The KV cache in bf16; none where a token sees itself only."""
    return {
        "kind": name,
        "parameters": count.parameters(config).total,
        "intermediate_size": config.intermediate_size,
        "kv_bytes_per_token": 0 if name == NONE else count.kv_bytes(config, itemsize=2),
    }


def trained(name: str, config: ModelConfig, seed: int, steps: int, text: Text, setting: Setting) -> Row:
    """One model on the same batches as all others of this seed, and its loss on held-out modules."""
    model = init_weights(Transformer(config, device=setting.device), seed)
    train = TrainConfig(
        steps=steps, seed=seed, optimizer=OptimizerConfig(kind="muon", lr=0.02),
        schedule=ScheduleConfig(kind="wsd", warmup_steps=steps // 20, decay_share=0.5),
    )  # fmt: skip
    # whole: rows are shuffled, where a stream would show 300 steps a handful of modules
    data = DataConfig(context=CONTEXT, rows=ROWS, seed=seed, packing="whole")
    fit(train, model, Loader({"text": text.train}, data))
    model.eval()
    batches = partial(evaluation_batches, text.held, data, limit=4 if setting.quick else 60)
    cache = DenseKV(config, 1, CONTEXT, device="meta", dtype=torch.bfloat16)
    return {
        "part": "loss",
        **facts(name, config),
        "allocated_kv_bytes_per_token": 0 if name == NONE else cache.num_bytes // CONTEXT,
        "seed": seed,
        "steps": steps,
        "tokens": steps * data.tokens_per_step,
        "val_loss_nats": held_out_loss(batches)(model)["val_loss_nats"],
    }
