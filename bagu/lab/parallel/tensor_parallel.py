"""Tensor or data parallelism: which sends more bytes per layer, against tokens and width.

    tensor parallel   8 T D (n - 1) / n     activations: four collectives of [T, D] in each direction
    data parallel     2 P (n - 1) / n       gradients: one all-reduce of the P parameters of the layer

for a global batch of T tokens on n ranks, in numbers. Both run bagu's own code (bagu.parallel) and count every
collective. The ranks are simulated: this process is rank 0 of a group whose collectives move no data, so bytes are
exact and results are meaningless. A layer is the difference between models of two layers and of one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import torch
import torch.distributed as dist

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, numbers_in, where
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Panel
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.parallel.collectives import all_reduce
from bagu.parallel.mesh import Mesh, MeshConfig, open_mesh
from bagu.parallel.tensor import sum_replicated, tensor_parallel

RANKS = 4


def run(setting: Setting) -> Iterator[Row]:
    widths = (64, 128) if setting.quick else (64, 128, 256)
    tokens = (64, 512) if setting.quick else (64, 128, 256, 512, 1024)
    with simulated_ranks(RANKS):
        for width, count in setting.track(list(product(widths, tokens))):
            config = layers(width, count)
            one, two = (tensor_bytes(replace(config, num_layers=n), count) for n in (1, 2))
            less, more = (data_bytes(replace(config, num_layers=n)) for n in (1, 2))
            parameters = sum(p.numel() for p in Transformer(config, device="meta").blocks[0].parameters())
            yield {
                "width": width,
                "tokens": count,
                "ranks": RANKS,
                "layer_parameters": parameters,
                "tensor_bytes": two - one,
                "data_bytes": more - less,
                "tensor_formula_bytes": 4 * 8 * count * width * (RANKS - 1) // RANKS,
                "equal_at_tokens": parameters / (4 * width),
            }


def layers(width: int, tokens: int) -> ModelConfig:
    """A Llama of one layer, with heads of 16 and a feed-forward network of 2.75 times the width."""
    return tiny(64, width, layers=1, heads=width // 16, ffn=width * 11 // 4, max_len=tokens)


@contextmanager
def simulated_ranks(ranks: int) -> Iterator[None]:
    """This process as rank 0 of `ranks`, whose collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # what torch's own memory tools use

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def tensor_bytes(config: ModelConfig, tokens: int) -> int:
    """What one rank sends for forward and backward of a divided model, up to the hidden states."""
    mesh: Mesh = open_mesh(MeshConfig(tp=RANKS), torch.device("cpu"))
    model = init_weights(Transformer(config), 0)
    places = tensor_parallel(model, mesh)
    ids, offsets = torch.zeros(tokens, dtype=torch.int64), torch.tensor([0, tokens], dtype=torch.int32)
    model(ids, torch.arange(tokens), offsets, tokens).hidden.sum().backward()
    sum_replicated({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, places, mesh)
    return mesh.traffic.sent


def data_bytes(config: ModelConfig) -> int:
    """What one rank sends to sum the gradients of a model."""
    mesh = open_mesh(MeshConfig(dp=RANKS), torch.device("cpu"))
    for p in Transformer(config, device="meta").parameters():
        all_reduce(mesh, torch.empty(p.shape), "dp")
    return mesh.traffic.sent


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if tensor parallelism sends more at every point, did not hold if nowhere."""
    ratio = {i: number(r, "tensor_bytes") / number(r, "data_bytes") for i, r in enumerate(rows)}
    size = {i: number(r, "tokens") / number(r, "width") for i, r in enumerate(rows)}  # tokens per unit of width
    more, less = [size[i] for i in ratio if ratio[i] > 1], [size[i] for i in ratio if ratio[i] <= 1]
    kind: Kind = "held" if not less else "holds only where" if more else "did not hold"
    low, high = min(ratio.values()), max(ratio.values())
    en = f"Tensor parallelism sends {low:.2f} to {high:.2f} times the bytes of data parallelism."
    zh = f"张量并行的字节数是数据并行的 {low:.2f} 至 {high:.2f} 倍。"
    if more and less:
        en += f" It sends more from {min(more):g} tokens per unit of width, and less up to {max(less):g}."
        zh += f"每步 token 数达到宽度的 {min(more):g} 倍起发送得更多，到 {max(less):g} 倍为止更少。"
    return Verdict(kind=kind, sentence_en=en, sentence_zh=zh)


def plot(rows: Sequence[Row]) -> list[Panel]:
    marks = []
    for i, width in enumerate(numbers_in(rows, "width")):
        own = where(rows, width=width)
        marks.append(Line.of(own, "tokens", "tensor_bytes", f"tensor, width {width:g}", "o-", i))
        marks.append(Line.of(own, "tokens", "data_bytes", f"data, width {width:g}", "--", i))
    return [Panel(marks, "", "tokens of the global batch", "bytes sent by a rank, per layer", "log", "log")]


LAB = Claim(
    title_en="Tensor or data parallelism",
    title_zh="张量并行与数据并行",
    claim_en="Tensor parallelism sends more bytes than data parallelism.",
    claim_zh="张量并行的通信量大于数据并行。",
    regime="One layer of a Llama in fp32 on 4 simulated ranks; one step of a global batch.",
    varies="tokens of the global batch, width of the model",
    measures="bytes that one rank sends per layer, counted at every collective, and the formula",
)
