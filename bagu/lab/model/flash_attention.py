"""FlashAttention: time and memory against length, and what making the scores again in the backward costs.

    scores              softmax(Q K^T) V with all scores in memory; autograd keeps the weights for the backward
    scores, made again  the same inside torch.utils.checkpoint: inputs alone are kept, the backward runs it anew
    SDPA                PyTorch's scaled_dot_product_attention
    bagu                ops.attention: on a GPU its Triton kernels, on a CPU PyTorch's blocked kernel

The last two never have a row of scores whole: the forward keeps one number for each query, the logsumexp, and the
backward makes each block of weights again from it. That is 5 products of matrices where the scores in memory need 4.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from bagu import ops
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number
from bagu.lab.model.attention_complexity import peak_bytes
from bagu.lab.parts.interleaved import best_times
from bagu.lab.plot import MIB, Panel, by_length
from bagu.ops.attention import dense
from bagu.ops.attention.shape import Shape

HEADS, HEAD_SIZE = 2, 64
WAYS = ("scores", "scores, made again", "SDPA", "bagu")
BLOCKED = ("SDPA", "bagu")
NEAR = 0.35  # an exponent that is above a claimed 1, or below a claimed 2, by no more than this meets it


def run(setting: Setting) -> Iterator[Row]:
    lengths = [128, 256, 512] if setting.quick else [512, 1024, 2048, 4096]
    lengths = lengths if setting.device == "cpu" else [4 * n for n in lengths]
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    for L in setting.track(lengths):
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, L, HEADS, HEAD_SIZE, generator=generator).to(setting.device, dtype).unbind()
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        calls = ways(*leaves, backend=None if setting.device == "cpu" else "triton")
        both = {way: _with_backward(call, leaves) for way, call in calls.items()}
        seconds = 0.02 if setting.quick else 0.3
        forward, whole = (best_times(c, setting.device, seconds=seconds) for c in (calls, both))
        for way in WAYS:
            yield {
                "way": way,
                "device": setting.device,
                "length_tokens": L,
                "forward_ms": forward[way] * 1e3,
                "forward_and_backward_ms": whole[way] * 1e3,
                "peak_bytes": peak_bytes(both[way], setting.device),
                "kept_bytes": kept_bytes(calls[way]),
            }


def ways(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backend: str | None
) -> dict[str, Callable[[], torch.Tensor]]:
    """The ways to attend in one causal segment; all give out[L, H, E] with a graph."""
    L, like = q.shape[0], q.new_empty(0, dtype=torch.float32)
    cu_seqlens = torch.tensor([0, L], dtype=torch.int32, device=q.device)

    def scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        added = Shape(causal=True).additive(L, like)
        return dense.forward(added, HEAD_SIZE**-0.5, q[None], k[None], v[None])[0][0]

    def sdpa() -> torch.Tensor:
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)[0].transpose(0, 1)

    return {
        "scores": lambda: scores(q, k, v),
        "scores, made again": lambda: checkpoint(scores, q, k, v, use_reentrant=False),
        "SDPA": sdpa,
        "bagu": lambda: ops.attention(q, k, v, cu_seqlens, L, backend=backend)[0],
    }


def _with_backward(call: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor]) -> Callable[[], object]:
    def both() -> object:
        out = call()
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return both


def kept_bytes(call: Callable[[], object]) -> int:
    """The memory that a forward keeps for its backward."""
    storages: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        call()
    return sum(storages.values())


def exponent(rows: Sequence[Row], way: str, key: str) -> float:
    """The slope over the last two lengths."""
    a, b = [row for row in rows if row["way"] == way][-2:]
    grows = [number(b, name) / number(a, name) for name in (key, "length_tokens")]
    return math.log(grows[0]) / math.log(grows[1])


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held when memory is square with the scores in it and linear without, and every blocked way is the faster one."""
    last = rows[-1]["length_tokens"]
    at = {str(row["way"]): row for row in rows if row["length_tokens"] == last}
    memory = {way: exponent(rows, way, "peak_bytes") for way in WAYS}
    faster = {w: _ratio(at["scores"], at[w], "forward_and_backward_ms") for w in BLOCKED}
    met = {
        "the memory of all scores is square": memory["scores"] >= 2 - NEAR,
        **{f"the memory of {way} is linear": memory[way] <= 1 + NEAR for way in BLOCKED},
        **{f"{way} is faster": faster[way] > 1 for way in BLOCKED},
    }
    kind: Kind = "held" if all(met.values()) else "holds only where" if any(met.values()) else "did not hold"
    again = _ratio(at["scores, made again"], at["scores"], "forward_and_backward_ms")
    kept, kept_again, kept_ours = (number(at[way], "kept_bytes") / MIB for way in (*WAYS[:2], "bagu"))
    backward = number(at["bagu"], "forward_and_backward_ms") / number(at["bagu"], "forward_ms") - 1
    each = "; ".join(f"{way} ×{faster[way]:.1f} as fast, memory L^{memory[way]:.1f}" for way in BLOCKED)
    each_zh = "；".join(f"{way} 快 ×{faster[way]:.1f}，内存 L^{memory[way]:.1f}" for way in BLOCKED)
    missing = ", ".join(words for words, good in met.items() if not good) or "nothing"
    where, where_zh = ("a CPU", "CPU") if at["bagu"]["device"] == "cpu" else ("a GPU", "GPU")
    return Verdict(
        kind=kind,
        sentence_en=f"On {where}, {last:,} tokens, forward and backward, against all scores (memory "
        f"L^{memory['scores']:.1f}): {each}. Running the forward anew in the backward takes ×{again:.2f} the time and "
        f"keeps {kept_again:.1f} MiB between the passes instead of {kept:.1f}. The op keeps {kept_ours:.1f} MiB; its "
        f"backward, which makes the weights again, takes ×{backward:.1f} its forward (4 products for 2 would be 2.0, "
        f"and 5 are 2.5). Not as claimed: {missing}.",
        sentence_zh=f"在 {where_zh} 上，{last:,} 个 token，前向加反向，与保存全部分数（内存 L^{memory['scores']:.1f}）"
        f"相比：{each_zh}。反向时重算整个前向，耗时 ×{again:.2f}，两遍之间保存 {kept_again:.1f} MiB，"
        f"而不是 {kept:.1f} MiB。算子只保存 {kept_ours:.1f} MiB；它的反向要重算权重，耗时是其前向的 ×{backward:.1f}"
        f"（4 次乘积对 2 次应为 2.0，5 次为 2.5）。与说法不符的项数：{sum(not good for good in met.values())}。",
    )


def _ratio(a: Row, b: Row, key: str) -> float:
    return number(a, key) / number(b, key)


def plot(rows: Sequence[Row]) -> list[Panel]:
    return by_length(rows, WAYS, "forward_and_backward_ms", "forward and backward")


LAB = Claim(
    title_en="FlashAttention",
    title_zh="FlashAttention：不保存分数的注意力",
    claim_en="Attention that never stores its scores needs memory linear in the length, and is faster even though its "
    "backward makes them again.",
    claim_zh="从不保存分数的注意力，内存随长度线性增长；即使反向要重算分数，也更快。",
    regime=f"Forward and backward, one causal sequence, {HEADS} heads of {HEAD_SIZE}; fp32 on a CPU, where SDPA and "
    "bagu run PyTorch's blocked kernel, bf16 on a GPU, where bagu runs its Triton kernels.",
    varies="Length; all scores in memory, the same made again in the backward, SDPA, bagu's op.",
    measures="Best of three median times of a forward and of both passes; what a forward keeps for its backward; most "
    "memory allocated at once beyond the inputs, and its exponent over the last doubling of the length: square is "
    f"{2 - NEAR} or more, linear is {1 + NEAR} or less.",
    evidence="timing",
)
