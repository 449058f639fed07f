"""Tensor parallelism for inference: a rank has all tokens, H / t heads, F / t features and V / t rows of the head.

    embedding                     all-reduce   each rank looks up its rows of the table
    attention, ffn of each layer  all-reduce   of the sums over this rank's heads or features
    logits                        all-gather   of V / t columns

Training (tensor.py) also divides the tokens between sublayers, which needs a number of tokens that t divides; a decode
step may have a single one. The parameters are divided by the same table, sharding.TENSOR.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bagu.nn.change import around, place
from bagu.nn.config import Alibi, ModelConfig
from bagu.nn.model import Embedding, Transformer
from bagu.nn.positions import RopeEncoding, Signals
from bagu.parallel.collectives import all_gather, all_reduce
from bagu.parallel.mesh import Mesh
from bagu.parallel.sharding import TENSOR, Placement, placements
from bagu.parallel.tensor import check_sizes, divide_heads
from bagu.parallel.vocab_loss import vocab_range


def local_heads(config: ModelConfig, ranks: int) -> ModelConfig:
    """The config with one rank's share of the heads: the KV cache of a rank has these. MLA's latent is not divided."""
    return replace(config, num_heads=config.num_heads // ranks, num_kv_heads=config.num_kv_heads // ranks)


def divide(model: Transformer, mesh: Mesh) -> dict[str, Placement]:
    """Divide the model over tp, in place, for forwards without a backward. Returns the placement of each parameter.

    All ranks call it with the same weights (or on the meta device), and the model with the same batch. It returns the
    same hidden states on all ranks; `head_weight` is this rank's rows.
    """
    config, rank, ranks = model.config, mesh.coordinate("tp"), mesh.size("tp")
    check_sizes(config, ranks)
    places = placements([name for name, _ in model.named_parameters()], TENSOR, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            place(p, places[name].cut(p.data, rank, ranks).clone())

    def summed(_: nn.Module, __: tuple[Any, ...], out: Any) -> Any:
        all_reduce(mesh, out if isinstance(out, torch.Tensor) else out[0], "tp")  # in place
        return out

    for block in divide_heads(model, ranks):
        around(block.attention, after=summed)
        around(block.ffn, after=summed)
    start, _ = vocab_range(config.vocab_size, rank, ranks)
    model.embedding = RowsEmbedding(model.embedding.weight, start, mesh)
    _divide_positions(model.positions, config, rank, ranks)
    return places


class RowsEmbedding(Embedding):
    """The rows of a table from `start`. Tokens of other ranks' rows are zeros here; the sum over ranks has them all."""

    def __init__(self, weight: nn.Parameter, start: int, mesh: Mesh) -> None:
        nn.Module.__init__(self)  # the weight exists
        self.weight, self.start, self.mesh = weight, start, mesh

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mine = (ids >= self.start) & (ids < self.start + len(self.weight))
        x = F.embedding(torch.where(mine, ids - self.start, 0), self.weight).masked_fill(~mine.unsqueeze(1), 0.0)
        all_reduce(self.mesh, x, "tp")
        return x


def _divide_positions(positions: Any, config: ModelConfig, rank: int, ranks: int) -> None:
    """Give attention the positions of this rank's heads."""
    if isinstance(positions, RopeEncoding) and positions.num_groups is not None:
        positions.num_groups //= ranks
    if isinstance(config.positions, Alibi):
        signals = positions.signals
        positions.signals = lambda *at: Signals(slopes=signals(*at).slopes.tensor_split(ranks)[rank])


def gather_logits(part: torch.Tensor, vocab_size: int, mesh: Mesh) -> torch.Tensor:
    """The logits [N, V] on every rank, from this rank's columns of them."""
    ranks = mesh.size("tp")
    widest = -(-vocab_size // ranks)  # the shares of the vocabulary differ by at most one row
    if not len(part):
        return part.new_empty(0, vocab_size)
    padded = F.pad(part, (0, widest - part.shape[1])).contiguous()
    whole = padded.new_empty(ranks * len(part), widest)
    all_gather(mesh, whole, padded, "tp")
    pieces = whole.view(ranks, len(part), widest)
    sizes = [stop - start for start, stop in (vocab_range(vocab_size, rank, ranks) for rank in range(ranks))]
    return torch.cat([piece[:, :size] for piece, size in zip(pieces, sizes, strict=True)], 1)
