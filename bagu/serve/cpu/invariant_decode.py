"""A decode step in invariant mode on a CPU: the ops' own C++ functions, as one list of calls (invariant_rows.py).

The list has the ops of the recorded forward (match.py) in the same order, and each call is the function that the op
runs in training and prefill, so the bits are equal. Weights are the model's own memory, except for norms in bf16.

ms of a step of the 8M model (fp32, one Neoverse-N1 core, CPU time, other work on the machine):

    streams                              1       32
    fast (compiled.py)                   2.9     24
    this                                 4.1     26
    Transformer.forward                  25      52
"""

from typing import Any

import numpy as np
import torch

from bagu.ops.invariant import invariant_rows
from bagu.ops.invariant.invariant_rows import Kind, Program
from bagu.serve.cpu.compiled import Decodes
from bagu.serve.cpu.dataflow import Mismatch
from bagu.serve.cpu.match import DecodeStep, LayerWeights, Weight
from bagu.serve.kv.paged import PagedKV

KEPT = 32  # lists: a number of tokens that comes again is prepared


class InvariantDecode:
    """The hidden state of each new token, with the bits of `Transformer.forward` in invariant mode. It
    may be several tokens of a sequence: keys and values of all tokens are stored before one attends."""

    def __init__(self, step: DecodeStep, kv: PagedKV) -> None:
        if not invariant_rows.available(step.table.dtype):
            raise Mismatch(f"no C++ for invariant mode in {step.table.dtype} on this machine")
        if step.activation != "silu" or not step.gated or not step.rope_tables:
            raise Mismatch(f"{step.activation}, gated: {step.gated}, or no RoPE: the list has SwiGLU and RoPE only")
        if kv.choice is not None:
            raise Mismatch("blocks that queries choose")
        if kv.quantized:
            raise Mismatch("an 8-bit cache")
        for layer in step.layers:
            _head_rows(step, layer)  # raises if the layout is another
        self.step, self.kv = step, kv
        self.prepared: dict[tuple[int, int], _Prepared] = {}  # by number of sequences and threads

    def __call__(self, step: Decodes) -> torch.Tensor:
        """[S, hidden size]. The caller owns the result: the next call does not change it."""
        key = step.new.shape[1], torch.get_num_threads()
        found = self.prepared.pop(key, None) or _Prepared(self.step, self.kv, *key, step.tables)
        self.prepared[key] = found  # the last one used is at the end
        if len(self.prepared) > KEPT:
            del self.prepared[next(iter(self.prepared))]
        return found(step)


def _head_rows(step: DecodeStep, layer: LayerWeights) -> torch.Tensor:
    """The places of the heads [q heads, k heads, v heads] among the heads of the weight of qkv, [H + 2G]."""
    D = step.head_dim
    rows = layer.qkv_rows.view(-1, D)
    if (rows[:, 0] % D != 0).any() or (rows != rows[:, :1] + torch.arange(D)).any():
        raise Mismatch("a head is not one of equal blocks of rows of the weight of q, k and v")
    return rows[:, 0] // D


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.detach().float().contiguous()


class _Prepared:
    """The list for S sequences, its inputs and its memory."""

    def __init__(self, step: DecodeStep, kv: PagedKV, S: int, threads: int, tables: np.ndarray) -> None:
        C, dtype = step.table.shape[1], step.table.dtype
        self.S, self.threads, self.shape, self.kv = S, threads, step, kv
        self.program = Program(dtype)
        self.tables = tables
        R = len(kv.groups)
        self.ids, self.positions, self.ends = torch.zeros(3, S, dtype=torch.int64).unbind()
        self.rows = torch.zeros(R, S, dtype=torch.int64)  # of the block tables, for each group of layers
        self.places = torch.zeros(R, S, step.num_key_heads, dtype=torch.int64)  # rows of the pool as [·, D]
        self.begins = {layer.window: torch.zeros(S, dtype=torch.int64) for layer in step.layers}
        self.zeros = torch.zeros(S, dtype=torch.int64)
        self.cos, self.sin = (t.float().contiguous() for t in step.rope_tables)

        x = self.new(C)
        table = step.table
        self.add(Kind.COPY, M=S, N=C, source=table, from_rows=self.ids, to_rows=None, to=x)
        delta: torch.Tensor | None = None
        for layer in step.layers:
            h, x = self.norm(x, delta, layer.qkv)
            h, x = self.norm(x, self.attention(layer, h), layer.up)
            delta = self.linear(layer.down, self.gate(self.linear(layer.up, h)))
        self.hidden, _ = self.norm(x, delta, Weight(table, None, step.gain))

    def __call__(self, step: Decodes) -> torch.Tensor:
        assert step.tables is self.tables, "the block tables are one array for the life of a runner"
        ids, lengths, rows = step.new
        positions, B = lengths - 1, self.kv.block_size
        R, _, G = self.places.shape
        rows = np.arange(R)[:, None] * (len(self.tables) // R) + rows
        slots = self.tables[rows, positions // B].astype(np.int64) * B + positions % B
        inputs = (self.ids, self.positions, self.ends, self.rows, self.places)
        values = (ids, positions, lengths, rows, slots[:, :, None] * G + np.arange(G))
        for into, new in zip(inputs, values, strict=True):
            into.numpy()[:] = new
        for window, begins in self.begins.items():
            begins.numpy()[:] = 0 if window is None else np.maximum(lengths - window, 0)
        self.program.run()
        return self.hidden.clone()

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(self.S, *shape, dtype=dtype or self.shape.table.dtype)

    def add(self, kind: Kind, **args: Any) -> None:
        self.program.add(kind, **args)

    def norm(self, x: torch.Tensor, delta: torch.Tensor | None, of: Weight) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + delta), x + delta), with the gain of the norm before `of`."""
        C = x.shape[1]
        assert of.gain is not None, "every block of the matched step begins with a norm"
        y, s = self.new(C), x if delta is None else self.new(C)
        first, second = (x, None) if delta is None else (delta, x)
        self.add(
            Kind.NORM, M=self.S, N=C, threads=self.threads, eps=self.shape.eps, x=first, residual=second,
            w=_wide(of.gain), y=y, s=None if delta is None else s, r=None,
        )  # fmt: skip
        return y, s

    def linear(self, linear: Weight, x: torch.Tensor) -> torch.Tensor:
        (N, K), dtype = linear.weight.shape, x.dtype
        y = self.new(N, dtype=torch.float32)
        bias = None if linear.bias is None else _wide(linear.bias)
        self.add(
            Kind.PRODUCT, M=self.S, N=N, K=K, x_stride=K, w_stride=linear.weight.stride(0), threads=self.threads,
            x=x, w=linear.weight, bias=bias, y=y,
        )  # fmt: skip
        if dtype == torch.float32:
            return y
        narrow = self.new(N)
        self.add(Kind.NARROW, count=y.numel(), x=y, y=narrow)
        return narrow

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        N = x.shape[1] // 2
        y = self.new(N)
        self.add(Kind.GATE, M=self.S, N=N, threads=self.threads, x=x, y=y, act=None)
        return y

    def attention(self, layer: LayerWeights, h: torch.Tensor) -> torch.Tensor:
        m, kv, S = self.shape, self.kv, self.S
        H, G, D = m.num_heads, m.num_key_heads, m.head_dim
        group = kv.group_of[layer.cache]
        keys, values = kv.layers[layer.cache].keys, kv.layers[layer.cache].values
        assert values is not None, "match.py refuses a cache without values"
        qkv, places = self.linear(layer.qkv, h), _head_rows(m, layer)
        gains = (None, None) if layer.qk_gain is None else (layer.qk_gain[0], layer.qk_gain[H])
        q, k, v = (self.heads(qkv, own) for own in places.split((H, G, G)))
        q, k = (self.rotated(x, gain) for x, gain in zip((q, k), gains, strict=True))
        for pool, x in ((keys, k), (values, v)):
            self.add(Kind.COPY, M=S * G, N=D, source=x, from_rows=None, to_rows=self.places[group], to=pool)
        y, lse = self.new(H * D), self.new(H, dtype=torch.float32)
        self.add(
            Kind.ATTENTION, T=S, H=H, G=G, D=D, E=D, B=kv.block_size, columns=self.tables.shape[1],
            threads=self.threads, k_place=G * D, k_head=D, v_place=G * D, v_head=D, scale=m.scale, q=q, k=keys,
            v=values, begins=self.begins[layer.window], ends=self.ends, row=self.rows[group], slot=self.zeros,
            tables=self.tables.ctypes.data, out=y, lse=lse,
        )  # fmt: skip
        return self.linear(layer.out, y)

    def heads(self, qkv: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The heads of qkv at `places`, as [S, heads, D]."""
        D, count = self.shape.head_dim, len(places)
        rows = torch.arange(self.S).unsqueeze(1) * (qkv.shape[1] // D) + places
        out = self.new(count, D)
        self.add(Kind.COPY, M=rows.numel(), N=D, source=qkv, from_rows=rows.contiguous(), to_rows=None, to=out)
        return out

    def rotated(self, x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        """QK norm, with this gain, and RoPE of x[S, heads, D]."""
        S, heads, D = x.shape
        if gain is not None:
            normed = self.new(heads, D)
            self.add(
                Kind.NORM, M=S * heads, N=D, threads=self.threads, eps=self.shape.qk_eps, x=x, residual=None,
                w=_wide(gain), y=normed, s=None, r=None,
            )  # fmt: skip
            x = normed
        y = self.new(heads, D)
        self.add(
            Kind.ROTATE, M=S, H=heads, D=D, threads=self.threads, x=x, cos=self.cos, sin=self.sin, at=self.positions,
            y=y,
        )  # fmt: skip
        return y
