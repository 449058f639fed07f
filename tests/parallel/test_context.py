"""Context parallelism gives the loss and gradients of one process."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from shared_models import EXACT, IGNORE, batch_of, config_of, gradients, loss_of, model_of, one_process, open_cpu, worst
from test_pipeline import as_batch

from bagu import ops
from bagu.errors import ArgumentError
from bagu.nn.choices import MLAConfig, MoEConfig
from bagu.nn.position_choices import Alibi, Learned, T5Relative
from bagu.parallel.context import Method, check_context_parallel, context_parallel, split_batch
from bagu.parallel.mesh import Mesh
from bagu.parallel.ring_attention import _block_backward, _Chunks
from bagu.types import Batch

LENGTHS = (13, 1, 17, 8, 0, 9)  # one token, an empty document, and lengths that 2c does not divide
RING: dict[str, dict[str, Any]] = {
    "gqa": {"num_heads": 8},
    "learned": {"positions": Learned(), "tie_embeddings": True},
    "mla": {"mla": MLAConfig(kv_rank=12, nope_dim=6, rope_dim=4, v_dim=8, q_rank=10), "head_dim": 10},
}
ULYSSES: dict[str, dict[str, Any]] = {
    **RING,
    "alibi, window": {"positions": Alibi(), "windows": (None, 5)},
    "t5, bidirectional": {"positions": T5Relative(), "causal": False},
}


def compare(method: Method, cp: int) -> dict[str, tuple[float, float, int]]:
    """The differences of loss and gradients, and the bytes that attention sent."""
    found = {}
    for name, changes in (RING if method == "ring" else ULYSSES).items():
        mesh = open_cpu(cp=cp, dp=dist.get_world_size() // cp)
        config, (packed, targets) = config_of(**changes), batch_of(LENGTHS)
        wanted_loss, wanted = one_process(model_of(config), [(packed, targets)])
        model = model_of(config)
        context_parallel(model, mesh, method)
        batch = as_batch(packed, targets)
        part = split_batch(batch, mesh, method)
        hidden = model(part.ids, part.positions, part.cu_seqlens, part.max_len).hidden
        loss = loss_of(hidden, model.head_weight, part.targets, batch.num_targets, ops.linear_cross_entropy)
        loss.backward()
        grads, sent = gradients(model), mesh.traffic.sent
        total = loss.detach()
        for x in (total, *grads.values()):
            dist.all_reduce(x, group=mesh.group("cp"))
        found[name] = abs(float(total) - wanted_loss), worst(grads, wanted), sent
    return found


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_loss_and_gradients_are_those_of_one_process(four: Ranks, method: Method) -> None:
    for cp in (2, 4):
        for found in four.run(compare, method, cp):
            assert all(max(loss, gradient) < EXACT for loss, gradient, _ in found.values()), (cp, found)
            assert found["gqa"][2] == predicted_bytes(method, cp)


def predicted_bytes(method: Method, c: int) -> int:
    """What a rank sends for two layers of H = 8, G = 4 heads of 8 in fp64, forward and backward."""
    if method == "ring":  # keys and values c - 1 times in the forward; in the backward again, and their gradients
        tokens = sum(2 * -(-n // (2 * c)) for n in LENGTHS)  # with padding
        return 2 * 3 * (c - 1) * tokens * 2 * (4 * 8) * 8
    tokens = sum(LENGTHS) // c  # q, k, v and out, of which a part stays here
    return 2 * 2 * (tokens * (2 * 8 + 2 * 4) * 8 * 8) * (c - 1) // c


@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        ("cpu", torch.float64, 1e-12),
        pytest.param("cuda", torch.float64, 1e-12, marks=pytest.mark.gpu),
        # Sums of products of rounded numbers: a few spacings of the largest gradient.
        pytest.param("cuda", torch.bfloat16, 4 * torch.finfo(torch.bfloat16).eps, marks=pytest.mark.gpu),
    ],
)
def test_the_gradients_of_blocks_sum_to_those_of_the_whole(device: str, dtype: torch.dtype, bound: float) -> None:
    """What the ring needs of a backend: a block's backward takes out and lse of all keys, not of the block's own."""
    lengths, generator = (64, 6, 40), torch.Generator().manual_seed(0)
    T = sum(lengths)
    q, k, v, dout = (
        torch.randn(T, heads, 32, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for heads in (4, 2, 2, 4)
    )
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    out, lse = ops.attention(q, k, v, offsets, 64, scale=0.2)
    wanted = torch.autograd.grad(out, (q, k, v), dout.detach())
    chunks = _Chunks.of(offsets, 64, T)
    early, late = chunks.early, chunks.late
    q, k, v, dout, out = (x.detach() for x in (q, k, v, dout, out))
    own = _block_backward(dout, q, k, v, out, lse, chunks.halves, 32, causal=True, scale=0.2)
    cross = _block_backward(
        dout[late], q[late], k[early], v[early], out[late], lse[late], chunks.halves, 32, causal=False, scale=0.2
    )  # each pair of chunks twice: once in the rows of the early chunk, once in those of the late one
    is_late = chunks.is_late[:, None, None]
    dq = own[0] + cross[0].masked_fill(~is_late, 0.0)
    dk, dv = (a + b.masked_fill(is_late, 0.0) for a, b in zip(own[1:], cross[1:], strict=True))
    for a, b in zip((dq, dk, dv), wanted, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < bound


class Place:
    """A rank's place in a mesh, without processes."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.coordinate, self.size = lambda _: rank, lambda _: ranks


def test_ranks_of_the_ring_have_equal_tokens_and_pairs() -> None:
    packed, targets = batch_of((40, 8, 24))
    parts: list[Batch] = [split_batch(as_batch(packed, targets), cast(Mesh, Place(r, 4)), "ring") for r in range(4)]
    assert {p.num_tokens for p in parts} == {18}
    assert {int((p.positions + 1).sum()) for p in parts} == {sum(n * (n + 1) // 2 for n in (40, 8, 24)) // 4}
    assert sum(p.num_targets for p in parts) == int((targets != IGNORE).sum())
    assert torch.equal(torch.cat([p.ids for p in parts]).sort().values, packed[0].sort().values)


def test_padding_has_no_target_and_a_valid_position() -> None:
    packed, targets = batch_of((1, 5))
    parts: list[Batch] = [split_batch(as_batch(packed, targets), cast(Mesh, Place(r, 2)), "ring") for r in range(2)]
    assert [p.cu_seqlens.tolist() for p in parts] == [[0, 2, 6]] * 2
    assert sum(p.num_padding for p in parts) == 3 + 3
    assert sum(p.num_targets for p in parts) == int((targets != IGNORE).sum())
    assert max(int(p.positions.max()) for p in parts) == 4


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("ulysses", {"num_kv_heads": 2}, "cp=4 by ulysses with tp=1 does not divide 2 KV heads"),
        ("ring", {"windows": (3,)}, "cp=4 by ring with a window"),
        ("ring", {"positions": Alibi()}, "cp=4 by ring with a bias by distance"),
        ("ring", {"causal": False}, "cp=4 by ring with bidirectional attention"),
        ("ulysses", {"attention": "linear"}, "cp=4 by ulysses with linear attention"),
        ("ulysses", {"dropout": 0.1}, "cp=4 by ulysses with dropout"),
        ("ring", {"moe": MoEConfig(num_experts=4, top_k=2, expert_size=8, aux_weight=0.1)}, "the balance loss"),
    ],
)
def test_what_cannot_be_divided_is_refused(method: Method, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        check_context_parallel(config_of(**changes), method, cp=4)
