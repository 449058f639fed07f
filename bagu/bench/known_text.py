"""Text whose continuation is known, to time speculation at a chosen acceptance with random weights.

The speed of a step does not depend on the values of the weights, but the acceptance of drafts does, and greedy text of
random weights falls into loops. Here the head is set so that token t is followed by token t + 1, whatever the layers
compute: the output is a known text of tokens that are all different, and the prompt decides what a lookup finds in it.

    edit   the prompt is the output with an edit every 24 tokens: none to three tokens in the place of one. A lookup is
           right up to the next edit, and finds its place again a few tokens after it.
    new    the prompt has every eighth trigram of the output, followed by another token: text that does not repeat, in
           which each match of the lookup is wrong.
"""

import random
from typing import Literal

import torch

from bagu.bench.workload import Workload
from bagu.errors import ArgumentError
from bagu.nn.model import Transformer

Text = Literal["edit", "new"]
EDIT_EVERY, TRIGRAM_EVERY = 24, 8


@torch.no_grad()
def counts_upwards(model: Transformer) -> Transformer:
    """Set weights, in place, so that the most probable token after t is t + 1. The layers compute as much as before."""
    if model.head is None:
        raise ArgumentError("the head of this model is its embedding", hint="use a model with tie_embeddings=False")
    table = model.embedding.weight
    table.copy_(torch.randn(table.shape, generator=torch.Generator().manual_seed(0)))
    model.head.weight.copy_(table.roll(1, 0))
    for name, weight in model.named_parameters():  # what a layer adds to the embedding stays small beside it
        if weight.ndim == 2 and weight is not table and weight is not model.head.weight:
            weight.mul_(0.02)
        elif weight.ndim == 1 and name.endswith("bias"):
            weight.zero_()
    return model


def known_workload(text: Text, streams: int, prompt: int, new: int, *, vocab_size: int, seed: int = 0) -> Workload:
    """Requests whose greedy output has `new` + 1 tokens and is known. Their outputs differ."""
    draw = random.Random(seed)
    prompts = []
    for _ in range(streams):
        first = draw.randrange(vocab_size)
        output = [(first + i) % vocab_size for i in range(max(prompt, new + 2))]
        prompts.append(
            (*_source(text, output, draw, vocab_size)[: prompt - 4], *draw.choices(range(vocab_size), k=3), first)
        )
    return Workload(prompts=tuple(prompts), max_tokens=(new + 1,) * streams)


def _source(text: Text, output: list[int], draw: random.Random, vocab_size: int) -> list[int]:
    if text == "edit":
        starts = range(0, len(output), EDIT_EVERY)
        edits = [draw.choices(range(vocab_size), k=draw.randrange(4)) for _ in starts]
        return [t for i, edit in zip(starts, edits, strict=True) for t in (*output[i : i + EDIT_EVERY - 1], *edit)]
    pieces = [(*output[i : i + 3], draw.randrange(vocab_size)) for i in range(0, len(output), TRIGRAM_EVERY)]
    draw.shuffle(pieces)
    return [t for piece in pieces for t in piece]
