"""Past the training length: each encoding is trained at L tokens and evaluated at 4 L.

A token far into a piece is predicted twice by the same weights: with all tokens before it in the piece, and with only
the last L/2 to L tokens, in a window that starts at position 0 as in training. The difference of the two losses is the
effect of the length: the targets, the weights and the nearby text are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch

from bagu import ops
from bagu.data import TokenStore
from bagu.errors import ArgumentError
from bagu.lab.core import Row
from bagu.lab.parts.byte_models import VOCAB, read_bytes, rows_of, train_on_bytes
from bagu.lab.parts.tiny import tiny
from bagu.nn import ModelConfig, Transformer
from bagu.nn.config import Alibi, Positions, Rope, Sinusoidal, T5Relative, YarnScaling
from bagu.nn.position_choices import Learned, NoPositions

L, LONGER = 64, 4
ROWS = 16
GROUP = L // 4  # number of positions averaged to one row

AS_TRAINED = "as trained"
ABSOLUTE, RELATIVE, NEITHER = "absolute", "relative", "neither"
TRAINED: dict[str, tuple[str, Positions]] = {
    "learned": (ABSOLUTE, Learned()),
    "sinusoidal": (ABSOLUTE, Sinusoidal()),
    "RoPE": (RELATIVE, Rope()),
    "ALiBi": (RELATIVE, Alibi()),
    # T5 trains at 512 tokens and has one bucket from a distance of 128 on: a quarter of the length, as here
    "T5": (RELATIVE, T5Relative(buckets=16, max_distance=L // 4)),
    "none": (NEITHER, NoPositions()),
}


def config(positions: Positions) -> ModelConfig:
    """Computed tables are as long as the evaluation; a learned table is as long as the training."""
    return tiny(
        VOCAB,
        64,
        heads=4,
        ffn=176,
        max_len=L if isinstance(positions, Learned) else LONGER * L,
        positions=positions,
        tie_embeddings=True,
    )


def readings(trained: ModelConfig) -> dict[str, ModelConfig]:
    """Ways to evaluate a trained model, without more training. With a window of L no token has an untrained distance,
    or more keys than in training; only its position is new."""
    found = {AS_TRAINED: trained}
    if trained.max_len > L:
        found["window"] = replace(trained, windows=(L,))
    if isinstance(trained.positions, Rope):
        found["YaRN"] = replace(trained, positions=Rope(scaling=YarnScaling(factor=LONGER, original_max_len=L)))
    return found


@dataclass(frozen=True, kw_only=True)
class Text:
    """Modules of the standard library for training, and pieces [N, 4 L + 1] of others; tokens are bytes."""

    train: TokenStore
    pieces: torch.Tensor

    @classmethod
    def read(cls, *, every: int, pieces: int) -> Text:
        train, held = read_bytes(every=every)
        found = torch.stack(list(islice(cut(held, LONGER * L + 1), pieces)))
        return cls(train=train, pieces=found)


def cut(store: TokenStore, size: int) -> Iterator[torch.Tensor]:
    """Pieces of exactly `size` tokens, one from each document in turn until all are used."""
    most = int(store.lengths.max()) // size
    for turn in range(most):
        for document in range(store.num_documents):
            tokens = store.tokens(document, turn * size, (turn + 1) * size)
            if len(tokens) == size:
                yield torch.from_numpy(tokens.astype("int64"))


def measure(encoding: str, seed: int, steps: int, text: Text, device: str) -> list[Row]:
    """Train one model; return a row for each way to evaluate it and each group of positions."""
    sort, positions = TRAINED[encoding]
    model = train_on_bytes(config(positions), text.train, rows_of(L, ROWS, seed), steps=steps, seed=seed, device=device)
    pieces = text.pieces.to(device)
    short = in_windows(model, pieces)
    rows: list[Row] = []
    for reading, read_as in readings(model.config).items():
        reader = Transformer(read_as, device=device)
        reader.load_state_dict(model.state_dict())
        loss = full_context(reader, pieces)
        for start in range(0, LONGER * L, GROUP):
            group = slice(start, start + GROUP)
            rows.append(
                {
                    "part": "length",
                    "encoding": encoding,
                    "sort": sort,
                    "reading": reading,
                    "seed": seed,
                    "steps": steps,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "train_length_tokens": L,
                    "position_from_tokens": start,
                    "position_to_tokens": start + GROUP,
                    "targets": pieces.shape[0] * GROUP,
                    "loss_nats": loss[:, group].mean().item() if start < loss.shape[1] else None,
                    "short_loss_nats": short[:, group].mean().item(),
                }
            )
    return rows


def full_context(model: Transformer, pieces: torch.Tensor) -> torch.Tensor:
    """[N, 4 L] nats with all earlier tokens of the piece; [N, L] for a model that refuses longer inputs."""
    try:
        return losses(model, pieces)
    except ArgumentError:
        return losses(model, pieces[:, : model.config.max_len + 1])


def in_windows(model: Transformer, pieces: torch.Tensor) -> torch.Tensor:
    """[N, 4 L] nats of the same tokens, from windows of L that start every L/2; the second half of each is used."""
    windows = pieces.unfold(1, L + 1, L // 2)  # [N, W, L + 1]
    found = losses(model, windows.flatten(0, 1)).unflatten(0, windows.shape[:2])
    return torch.cat((found[:, 0, : L // 2], found[:, :, L // 2 :].flatten(1)), 1)


@torch.no_grad()
def losses(model: Transformer, pieces: torch.Tensor, chunk: int = 4096) -> torch.Tensor:
    """[N, T] nats of tokens 1 to T of pieces[N, T + 1], each piece from position 0 on."""
    model.eval()
    T = pieces.shape[1] - 1
    found = []
    for part in pieces.split(max(chunk // T, 1)):
        ids, targets = part[:, :-1].flatten(), part[:, 1:].flatten()
        cu_seqlens = torch.arange(0, len(ids) + 1, T, dtype=torch.int32, device=ids.device)
        positions = torch.arange(T, device=ids.device).repeat(len(part))
        hidden = model(ids, positions, cu_seqlens, T).hidden
        logit, lse = ops.linear_cross_entropy(hidden, model.head_weight, targets)
        found.append((lse - logit).view(len(part), T))
    return torch.cat(found).double()
