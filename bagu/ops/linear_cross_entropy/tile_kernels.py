"""The scores of a head without its logits: a GEMM that reduces every row of a tile before it drops the tile.

    per tile     base[m] = max_v x[m, v]        total[m] = sum_v exp(x[m, v] - base[m])        x = hidden @ weight.T
    per row      lse = log(sum over tiles of exp(base) * total)        target_logit = hidden[m] . weight[t[m]]

For gradients the tile's exps are kept in 16 bits, and `_scale_exps` turns them into the gradient of the logits. An exp
has the same relative error for large logits as for small ones, which a logit in 16 bits has not. The gradient at the
target, where the softmax and 1 may cancel, is computed from the fp32 scores.

At 1,024 features the exps of a tile would take a quarter of the time of its products. Two programs run on a
multiprocessor, so that one computes exps while the other multiplies.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.cross_entropy.triton_backend import exp
from bagu.ops.kernels.gemm import tile_of
from bagu.ops.kernels.launch import as_rows, num_sms
from bagu.ops.linear_cross_entropy.loss_kernels import weighted_loss_host
from bagu.ops.matmul.triton_backend import PERSISTENT, by_tma
from bagu.ops.replay.launcher import available_launcher, with_scratch_memory
from bagu.ops.replay.plan import Results
from bagu.ops.replay.replay import Replayed

# 102 us at 1,024 x 1,024 x 32,768 on an H200, and cuBLAS 101 for the logits alone. At 8,192 tokens 802 us; the tile of
# 128 x 256, whose exps no other program hides, takes 868. With exps stored 114 and 911.
TILE = PERSISTENT[1]
BK = 64
IGNORED = tl.constexpr(-2)  # the word of an ignored row; -1 is a word outside the vocabulary
ROWS = 8  # rows per program of `_row_scores`
SEGMENT = 8192  # columns per program of `_scale_exps`


@triton.jit
def _base(high):
    """The value to subtract before exp: the maximum, or 0 if it is infinite (inf - inf is NaN)."""
    return tl.where(tl.abs(high) == float("inf"), 0.0, high)


@triton.jit
def _logits(x_rows, w_rows, m, n, D, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The tile of hidden @ weight.T that begins at row m and column n."""
    x = tl.zeros([BM, BN], tl.float32)
    for k in range(tl.cdiv(D, BK)):
        x = tl.dot(x_rows.load([m, k * BK]), w_rows.load([n, k * BK]).T, x)
    return x


@triton.jit
def _store(rows, m, n, y):
    """Store a tile in halves, which need half the shared memory."""
    HALF: tl.constexpr = y.shape[1] // 2
    left, right = y.reshape([y.shape[0], 2, HALF]).permute(0, 2, 1).split()
    rows.store([m, n], left)
    rows.store([m, n + HALF], right)


@triton.jit(do_not_specialize=["M"])
def _tile_scores(
    x_ptr, w_ptr, e_ptr, base_ptr, total_ptr, M, V, D, x_stride, w_stride, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    x_rows = tl.make_tensor_descriptor(x_ptr, [M, D], [x_stride, 1], [BM, BK])
    w_rows = tl.make_tensor_descriptor(w_ptr, [V, D], [w_stride, 1], [BN, BK])
    if e_ptr is not None:
        e_rows = tl.make_tensor_descriptor(e_ptr, [M, width], [width, 1], [BM, BN // 2])
    tiles = tl.cdiv(M, BM) * tl.cdiv(V, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        down, across = tile_of(tile, M, V, BM, BN, GROUP)
        m, n = down * BM, across * BN
        x = _logits(x_rows, w_rows, m, n, D, BM, BN, BK)
        if not EVEN:
            x = tl.where((n + tl.arange(0, BN) < V)[None, :], x, float("-inf"))
        base = _base(tl.max(x, axis=1))
        e = exp(x - base[:, None])
        row = m + tl.arange(0, BM)
        at = across.to(tl.int64) * M + row
        tl.store(base_ptr + at, base, row < M)
        tl.store(total_ptr + at, tl.sum(e, axis=1), row < M)
        if e_ptr is not None:
            _store(e_rows, m, n, e.to(e_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["M"])
def _row_scores(
    x_ptr, w_ptr, t_ptr, base_ptr, total_ptr, target_logit_ptr, lse_ptr, M, V, D, x_stride, w_stride, tiles,
    ignore_index, ROWS: tl.constexpr, TILES: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = m < M
    t = tl.load(t_ptr + m, real, 0)
    kept, inside = t != ignore_index, (t >= 0) & (t < V)
    high, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)[:, None]
        at, there = tile.to(tl.int64) * M + m[None, :], (tile < tiles) & real[None, :]
        base, part = tl.load(base_ptr + at, there, float("-inf")), tl.load(total_ptr + at, there, 0.0)
        higher = _base(tl.maximum(high, tl.max(base, axis=0)))
        total = total * exp(high - higher) + tl.sum(part * exp(base - higher[None, :]), axis=0)
        high = higher
    products = tl.zeros([ROWS, BD], tl.float32)
    word, read = t.to(tl.int64), real & inside
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)[None, :]
        there = read[:, None] & (d < D)
        x = tl.load(x_ptr + m[:, None] * x_stride + d, there, 0.0).to(tl.float32)
        products += x * tl.load(w_ptr + word[:, None] * w_stride + d, there, 0.0).to(tl.float32)
    target_logit = tl.where(inside, tl.sum(products, axis=1), float("nan"))
    tl.store(target_logit_ptr + m, tl.where(kept, target_logit, 0.0), real)
    tl.store(lse_ptr + m, tl.where(kept, high + tl.log(total), 0.0), real)


@triton.jit(do_not_specialize=["M"])
def _scale_exps(
    e_ptr, t_ptr, weight_ptr, target_logit_ptr, lse_ptr, base_ptr, M, V, width, ignore_index, z_loss,
    BN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dlse * exp(x - lse), minus the weight at the target, in the memory of the exps; 0 in an ignored row."""
    segments = tl.cdiv(width, TILES * BN)
    m, segment = (tl.program_id(0) // segments).to(tl.int64), tl.program_id(0) % segments
    t = tl.load(t_ptr + m)
    kept = t != ignore_index
    word = tl.where(kept & (t >= 0) & (t < V), t, -1).to(tl.int32)
    lse = tl.load(lse_ptr + m)
    weight = tl.load(weight_ptr + m)
    dlse = weight
    if z_loss != 0.0:  # 0 * inf is NaN
        dlse += weight * 2.0 * z_loss * lse
    tile = segment * TILES + tl.arange(0, TILES)
    base = tl.load(base_ptr + tile.to(tl.int64) * M + m, tile * BN < V, float("-inf"))
    factor = tl.where(kept, dlse * exp(base - lse), 0.0)
    v = tile[:, None] * BN + tl.arange(0, BN)[None, :]
    e = tl.load(e_ptr + m * width + v, ((v < width) & kept) != 0, 0.0).to(tl.float32)
    at_target = dlse * exp(tl.load(target_logit_ptr + m) - lse) - weight
    tl.store(e_ptr + m * width + v, tl.where(v == word, at_target, e * factor[:, None]), v < width)


@triton.jit(do_not_specialize=["M"])
def _tile_slopes(
    x_ptr, w_ptr, y_ptr, t_ptr, lse_ptr, dt_ptr, dlse_ptr, M, V, D, x_stride, w_stride, width, ignore_index,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y = dlse * exp(x - lse) + dt at the target; 0 in an ignored row and after the last word."""
    x_rows = tl.make_tensor_descriptor(x_ptr, [M, D], [x_stride, 1], [BM, BK])
    w_rows = tl.make_tensor_descriptor(w_ptr, [V, D], [w_stride, 1], [BN, BK])
    y_rows = tl.make_tensor_descriptor(y_ptr, [M, width], [width, 1], [BM, BN // 2])
    tiles = tl.cdiv(M, BM) * tl.cdiv(V, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        down, across = tile_of(tile, M, V, BM, BN, GROUP)
        m, n = down * BM, across * BN
        x = _logits(x_rows, w_rows, m, n, D, BM, BN, BK)
        row, v = m + tl.arange(0, BM), (n + tl.arange(0, BN))[None, :]
        t = tl.load(t_ptr + row, row < M, ignore_index)
        word = tl.where((t >= 0) & (t < V), t, -1)
        word = tl.where(t == ignore_index, IGNORED, word).to(tl.int32)  # 32 bits: 64 do not fit twice on an SM
        lse, dlse = tl.load(lse_ptr + row, row < M, 0.0), tl.load(dlse_ptr + row, row < M, 0.0)
        y = dlse[:, None] * exp(x - lse[:, None])
        y = tl.where(v == word[:, None], y + tl.load(dt_ptr + row, row < M, 0.0)[:, None], y)
        y = tl.where((word != IGNORED)[:, None] & (v < V), y, 0.0)
        _store(y_rows, m, n, y.to(y_ptr.dtype.element_ty))


def fits(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels can read the operands: 16-bit rows that TMA reads."""
    rows, words = as_rows(hidden), as_rows(weight)
    # Triton assumes nothing of strides that are no multiple of 16, and then needs more shared memory than there is
    aligned = rows.stride(0) % 16 == 0 and words.stride(0) % 16 == 0
    return hidden.element_size() == 2 and rows.shape[0] > 0 and aligned and by_tma(rows) and by_tma(words)


def _programs(M: int, V: int, device: torch.device) -> int:
    return min(triton.cdiv(M, TILE.M) * triton.cdiv(V, TILE.N), TILE.per_sm * num_sms(device))


def _columns(weight: torch.Tensor) -> int:
    """The length of rows of exps or slopes: a multiple of 16, so that TMA can store them."""
    return triton.cdiv(len(weight), 16) * 16


def _scores_host(values: Sequence[Any]) -> Results:
    """target_logit, lse, the exps if they are wanted, and the bases of their tiles."""
    hidden, weight, targets, V, ignore_index, wants_exps = values
    (M, D), across = hidden.shape, triton.cdiv(V, TILE.N)
    fp32 = {"dtype": torch.float32, "device": hidden.device}
    base, total = torch.empty(2, across, M, **fp32).unbind()
    width = _columns(weight)
    exps = torch.empty(M, width, dtype=hidden.dtype, device=hidden.device) if wants_exps else None
    with_scratch_memory(_tile_scores[(_programs(M, V, hidden.device),)])(
        hidden, weight, exps, base, total, M, V, D, hidden.stride(0), weight.stride(0), width,
        BM=TILE.M, BN=TILE.N, BK=BK, GROUP=TILE.group, EVEN=V % TILE.N == 0,
        num_warps=TILE.warps, num_stages=TILE.stages,
    )  # fmt: skip
    target_logit, lse = torch.empty(M, **fp32), torch.empty(M, **fp32)
    _row_scores[(triton.cdiv(M, ROWS),)](
        hidden, weight, targets, base, total, target_logit, lse, M, V, D, hidden.stride(0), weight.stride(0), across,
        ignore_index, ROWS=ROWS, TILES=256, BD=1024, num_warps=4,
    )  # fmt: skip
    return target_logit, lse, exps, base


def _loss_host(values: Sequence[Any]) -> Results:
    hidden, weight, targets, weights, V, z_loss, ignore_index = values
    target_logit, lse, exps, base = _scores_host((hidden, weight, targets, V, ignore_index, True))
    width = _columns(weight)
    _scale_exps[(len(hidden) * triton.cdiv(width, SEGMENT),)](
        exps, targets, weights, target_logit, lse, base, len(hidden), V, width, ignore_index, z_loss,
        BN=TILE.N, TILES=SEGMENT // TILE.N, num_warps=8,
    )  # fmt: skip
    (loss,) = weighted_loss_host((target_logit, lse, weights, targets, z_loss, ignore_index))
    return target_logit, lse, loss, exps


def _slope_host(values: Sequence[Any]) -> Results:
    hidden, weight, targets, lse, dtarget_logit, dlse, V, ignore_index = values
    (M, D), width = hidden.shape, _columns(weight)
    y = torch.empty(M, width, dtype=hidden.dtype, device=hidden.device)
    with_scratch_memory(_tile_slopes[(_programs(M, V, hidden.device),)])(
        hidden, weight, y, targets, lse, dtarget_logit, dlse, M, V, D, hidden.stride(0), weight.stride(0), width,
        ignore_index, BM=TILE.M, BN=TILE.N, BK=BK, GROUP=TILE.group, num_warps=TILE.warps, num_stages=TILE.stages,
    )  # fmt: skip
    return (y,)


_replayed_loss = Replayed(_loss_host, available_launcher)
_replayed_slope = Replayed(_slope_host, available_launcher)


def scores(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """target_logit and lse of every token."""
    words = targets.reshape(-1).contiguous()
    made: Any = _scores_host((as_rows(hidden), as_rows(weight), words, len(weight), ignore_index, False))
    return made[0].view(targets.shape), made[1].view(targets.shape)


def loss_and_slope(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    V: int,
    targets: torch.Tensor,
    weights: torch.Tensor,
    z_loss: float,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """target_logit, lse, the weighted loss, and its gradient by the logits, whose columns from V on are zeros."""
    own = targets.contiguous(), weights.contiguous()
    made: Any = _replayed_loss(as_rows(hidden), as_rows(weight), *own, V, float(z_loss), ignore_index)
    target_logit, lse, loss, slope = made
    return target_logit, lse, loss, slope


def slope(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    V: int,
    targets: torch.Tensor,
    lse: torch.Tensor,
    dtarget_logit: torch.Tensor,
    dlse: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    """The gradient of the logits from those of the scores; its columns from V on are zeros."""
    own = (x.contiguous() for x in (targets, lse, dtarget_logit, dlse))
    made: Any = _replayed_slope(as_rows(hidden), as_rows(weight), *own, V, ignore_index)
    dlogits: torch.Tensor = made[0]
    return dlogits
