"""The op calls of one forward, written down without running it: what each costs, and what it keeps for the backward.

Sizes come from the modules of a model on the meta device, FLOPs and kept tensors from the ops' specs. A tensor is named
by the storage it lies in: v is a view of what the QKV matmul wrote, so keeping v keeps all of that. What does not grow
with the tokens (weights, statistics of batch norm) is left out.

Dims: T = tokens, D = hidden size, H = heads, G = key heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from bagu.nn.attention import Attention
from bagu.nn.block import Block
from bagu.nn.config import FFNKind, ModelConfig
from bagu.nn.ffn import FFN
from bagu.nn.linear import Linear
from bagu.nn.mla import MLA
from bagu.nn.model import Transformer
from bagu.nn.moe import MoE
from bagu.nn.norm import BatchNorm, GroupNorm, LayerNorm, Norm, RMSNorm, ScaleNorm
from bagu.ops.catalogue import spec

__all__ = ["Tape", "record"]

Kind = Literal["linear", "attention", "other"]
ACTIVATIONS: dict[FFNKind, str] = {
    "swiglu": "swiglu", "geglu": "geglu", "geglu_tanh": "geglu", "gelu": "gelu", "gelu_tanh": "gelu",
    "relu2": "relu_squared",
}  # fmt: skip


class Tape:
    """What a forward over one document of `tokens` tokens has done so far."""

    def __init__(self, config: ModelConfig, tokens: int, itemsize: int) -> None:
        self.config, self.tokens, self.itemsize = config, tokens, itemsize
        self.forward: Counter[Kind] = Counter()  # FLOPs
        self.backward: Counter[Kind] = Counter()
        self.bytes: dict[str, int] = {}  # of each storage
        self.kept: set[str] = set()
        self.entering: list[set[str]] = []  # storages that go into each block

    def call(
        self, kind: Kind, op: str, dims: Mapping[str, Any], itemsize: int | None = None, /, **storages: str
    ) -> None:
        """One op; `storages` are those of its arguments and results that are no weights."""
        s, size = spec(op), itemsize or self.itemsize
        self.forward[kind] += s.cost(dims, size).flops
        self.backward[kind] += s.cost_backward(dims, size).flops if s.cost_backward is not None else 0
        for arg in (*s.sig.tensors, *s.sig.results):
            if arg.name in storages:
                one = {"": size, "acc": max(4, size), "float": 4, "int": 8}[arg.dtype]
                n = math.prod((factor or 1) * (dims[name] if name else 1) for factor, name in arg.dims)
                self.write(storages[arg.name], n * one)
        self.kept |= {storages[name] for name in s.saves if name in storages}

    def write(self, storage: str, size: int) -> None:
        """A storage is as large as the largest tensor in it."""
        self.bytes[storage] = max(size, self.bytes.get(storage, 0))

    def keep(self, storage: str, size: int) -> None:
        """Something PyTorch keeps between the ops."""
        self.write(storage, size)
        self.kept.add(storage)

    def linear(self, module: Linear, x: str, y: str) -> None:
        dims = {"M": self.tokens, "N": module.out_features, "K": module.in_features}
        self.call("linear", "matmul", dims, x=x, y=y)

    def norm(self, module: Norm, x: str, y: str, heads: int = 1) -> None:
        """`heads` is more than one where each head is a row of its own."""
        M, N = self.tokens * heads, self.config.hidden_size if isinstance(module, ScaleNorm) else module.weight.numel()
        if isinstance(module, GroupNorm):
            dims = {"B": M, "C": N, "S": 1, "groups": module.groups}
            self.call("other", "group_norm", dims, x=x, y=y, mean=f"{y}.mean", r=f"{y}.r")
        elif isinstance(module, BatchNorm):
            self.call("other", "batch_norm", {"B": M, "C": N, "S": 1}, x=x, y=y)
        elif isinstance(module, LayerNorm):
            self.call("other", "layer_norm", {"M": M, "N": N}, x=x, y=y, mean=f"{y}.mean", rstd=f"{y}.rstd")
        elif isinstance(module, RMSNorm):
            self.call("other", "rms_norm", {"M": M, "N": N}, x=x, y=y, r=f"{y}.r")
        elif isinstance(module, ScaleNorm):
            self.call("other", "scale_norm", {"M": M, "N": N}, x=x, y=y, norm=f"{y}.norm")

    def add_norm(self, module: Norm, delta: str | None, x: str, y: str) -> str:
        """norm(x + delta) to `y`; returns where the sum is."""
        if delta is None:
            self.norm(module, x, y)
            return x
        if isinstance(module, RMSNorm):
            dims = {"M": self.tokens, "N": self.config.hidden_size}
            self.call("other", "add_rms_norm", dims, x=delta, residual=x, y=y, s=f"{y}.sum", r=f"{y}.r")
        else:
            self.norm(module, f"{y}.sum", y)
        return f"{y}.sum"

    def activate(self, kind: FFNKind, rows: int, width: int, x: str, y: str) -> None:
        gated = kind in ("swiglu", "geglu", "geglu_tanh")
        dims = {"M": rows, "K": 2 * width, "N": width} if gated else {"M": rows * width}
        self.call("other", ACTIVATIONS[kind], dims, x=x, y=y)

    def drop(self, x: str) -> None:
        """A byte of mask for each feature."""
        if self.config.dropout:
            self.keep(f"{x}.mask", self.tokens * self.config.hidden_size)


def record(model: Transformer, context: int, itemsize: int) -> Tape:
    """A forward of `model` over one document of `context` tokens, and the head."""
    config = model.config
    tape = Tape(config, context, itemsize)
    x, delta = "embedded", None
    if model.embedding_norm is not None:
        tape.norm(model.embedding_norm, "embedded", "normed")
        x = "normed"
    tape.drop(x)
    tape.write(x, context * config.hidden_size * itemsize)
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        tape.entering.append({x} if delta is None else {x, delta})
        x, delta = _block(tape, block, i, x, delta)
    if model.norm is not None:
        tape.add_norm(model.norm, delta, x, "hidden")
        x = "hidden"
    width = config.hidden_size
    if model.mlm is not None:
        tape.linear(model.mlm.dense, x, "mlm.dense")
        tape.activate("gelu", context, width, "mlm.dense", "mlm.act")
        tape.norm(model.mlm.norm, "mlm.act", "mlm.norm")
        x, width = "mlm", model.mlm.weight(model.embedding.weight).shape[1]
    tape.call("linear", "matmul", {"M": context, "N": config.vocab_size, "K": width}, x=x)
    return tape


def _block(tape: Tape, block: Block, layer: int, x: str, delta: str | None) -> tuple[str, str | None]:
    """Returns the stream behind the block: where x is, and where what is still to be added is."""
    at = f"blocks.{layer}"
    seen, fed = f"{at}.attention", f"{at}.ffn"
    size = tape.tokens * tape.config.hidden_size * tape.itemsize
    if block.placement in ("pre", "sandwich"):
        s = tape.add_norm(block.attention_norm, delta, x, f"{at}.h1")
        _attention(tape, block.attention, layer, f"{at}.h1", seen)
        if block.placement == "sandwich":
            tape.norm(block.attention_post_norm, seen, f"{seen}.normed")
            seen = f"{seen}.normed"
        s = tape.add_norm(block.ffn_norm, seen, s, f"{at}.h2")
        _feed(tape, block.ffn, f"{at}.h2", fed)
        if block.placement == "sandwich":
            tape.norm(block.ffn_post_norm, fed, f"{fed}.normed")
            fed = f"{fed}.normed"
        tape.write(fed, size)
        return s, fed
    if block.placement == "post":
        _attention(tape, block.attention, layer, x, seen)
        tape.add_norm(block.attention_norm, seen, x, f"{at}.h1")
        _feed(tape, block.ffn, f"{at}.h1", fed)
        tape.add_norm(block.ffn_norm, fed, f"{at}.h1", f"{at}.h2")
    else:
        _attention(tape, block.attention, layer, f"{at}.h1", seen)
        _feed(tape, block.ffn, f"{at}.h2", fed)
        tape.write(f"{at}.out", size)
        return f"{at}.out", None
    return f"{at}.h2", None


def _attention(tape: Tape, module: Attention | MLA, layer: int, x: str, y: str) -> None:
    c, T = tape.config, tape.tokens
    if isinstance(module, MLA):
        q, k, v = _latent(tape, module, x, y)
    else:
        q, k, v = _heads(tape, module, x, y)
    dims = {
        "T": T, "H": c.num_heads, "G": c.num_kv_heads, "D": c.head_dim, "E": c.v_dim, "S1": 2, "max_len": T,
        "causal": c.causal, "window": c.window(layer),
    }  # fmt: skip
    if c.attention == "softmax":
        tape.call("attention", "attention", dims, q=q, k=k, v=v, out=f"{y}.out", lse=f"{y}.lse")
    else:
        norms = {"norm_q": f"{y}.qf", "norm_k": f"{y}.kf"}
        tape.call("attention", "linear_attention", dims | {"F": c.head_dim}, q=q, k=k, v=v, out=f"{y}.out", **norms)
    tape.linear(module.out, f"{y}.out", y)
    tape.drop(y)


def _heads(tape: Tape, module: Attention, x: str, y: str) -> tuple[str, str, str]:
    """MHA, GQA and MQA up to the attention itself. Returns the storages of q, k and v."""
    c, T, qkv = tape.config, tape.tokens, f"{y}.qkv"
    H, G, D = c.num_heads, c.num_kv_heads, c.head_dim
    apart = G not in (1, H)  # the queries of a group lie between other groups' keys: to be one [T, H, D] is a copy
    tape.linear(module.qkv, x, qkv)
    q = k = v = qkv
    if module.q_norm is not None and module.k_norm is not None:
        tape.norm(module.q_norm, q, f"{y}.qn", heads=H)
        tape.norm(module.k_norm, k, f"{y}.kn", heads=G)
        q, k = f"{y}.qn", f"{y}.kn"
    elif c.rope_dim:
        v = f"{y}.v"  # a copy, so that qkv can go
    if q == qkv and apart and not (c.rope_dim and c.attention == "softmax"):
        q = f"{y}.q"
    if c.attention == "linear":
        q, k = _features(tape, q, f"{y}.qf", H), _features(tape, k, f"{y}.kf", G)
    if c.rope_dim:
        q, k = _rope(tape, q, f"{y}.qr", H, D), _rope(tape, k, f"{y}.kr", G, D)
        if apart and c.attention == "softmax":
            tape.keep("rows", T * G * 8)  # int64: which row of cos and sin each run of heads reads
    return q, k, v


def _features(tape: Tape, x: str, y: str, heads: int) -> str:
    """elu + 1: PyTorch keeps its input, exp of it, and which side of 0 it is on."""
    size = tape.tokens * heads * tape.config.head_dim
    tape.write(y, size * tape.itemsize)
    tape.keep(x, size * tape.itemsize)
    tape.keep(f"{y}.exp", size * tape.itemsize)
    tape.keep(f"{y}.side", size)
    return y


def _rope(tape: Tape, x: str, y: str, heads: int, features: int) -> str:
    dims = {"T": tape.tokens, "H": heads, "D": features, "R": tape.config.rope_dim // 2, "P": tape.tokens}
    tape.call("other", "rope", dims, x=x, y=y, cos="cos", sin="sin")
    return y


def _latent(tape: Tape, module: MLA, x: str, y: str) -> tuple[str, str, str]:
    """MLA as training runs it. Returns the storages of q, k and v."""
    T, H, mla = tape.tokens, module.num_heads, module.dims
    if mla.q_rank is None:
        tape.linear(module.q, x, f"{y}.q")
    else:
        tape.linear(module.q_a, x, f"{y}.qa")
        tape.norm(module.q_norm, f"{y}.qa", f"{y}.qan")
        tape.linear(module.q_b, f"{y}.qan", f"{y}.q")
    tape.linear(module.kv_a, x, f"{y}.kva")
    tape.norm(module.kv_norm, f"{y}.kva", f"{y}.latent")
    tape.linear(module.kv_b, f"{y}.latent", f"{y}.kvb")
    _rope(tape, f"{y}.q", f"{y}.qr", H, mla.rope_dim)
    _rope(tape, f"{y}.kva", f"{y}.kr", 1, mla.rope_dim)
    for name in ("qcat", "kcat"):
        tape.write(f"{y}.{name}", T * H * (mla.nope_dim + mla.rope_dim) * tape.itemsize)
    return f"{y}.qcat", f"{y}.kcat", f"{y}.kvb"


def _feed(tape: Tape, module: FFN | MoE, x: str, y: str) -> None:
    if isinstance(module, MoE):
        _moe(tape, module, x, y)
    else:
        _ffn(tape, module, x, y)
    tape.drop(y)


def _ffn(tape: Tape, module: FFN, x: str, y: str) -> None:
    tape.linear(module.gate_up if module.gated else module.up, x, f"{y}.up")
    tape.activate(module.kind, tape.tokens, module.down.in_features, f"{y}.up", f"{y}.act")
    tape.linear(module.down, f"{y}.act", y)


def _moe(tape: Tape, module: MoE, x: str, y: str) -> None:
    T, D, moe, acc = tape.tokens, tape.config.hidden_size, module.moe, max(4, tape.itemsize)
    E, K, F = moe.num_experts, moe.top_k, moe.expert_size
    wide = x if acc == tape.itemsize else f"{y}.x32"  # the router reads an fp32 copy
    tape.call("linear", "matmul", {"M": T, "N": E, "K": D}, acc, x=wide, y=f"{y}.logits")
    if moe.scoring == "softmax":
        tape.call("other", "softmax", {"M": T, "N": E}, acc, x=f"{y}.logits", y=f"{y}.scores")
    else:
        tape.keep(f"{y}.scores", T * E * acc)
    rows = T * K
    for index in ("experts", "order", "back"):  # int64, of the gathers
        tape.keep(f"{y}.{index}", rows * 8)
    if moe.normalize_top_k:
        tape.keep(f"{y}.weights", rows * acc)
        tape.keep(f"{y}.weight_sums", T * acc)
    into = (2 if module.gated else 1) * F
    tape.call("linear", "grouped_matmul", {"T": rows, "E": E, "N": into, "K": D}, x=f"{y}.gathered", y=f"{y}.up")
    tape.activate(module.kind, rows, F, f"{y}.up", f"{y}.act")
    tape.call("linear", "grouped_matmul", {"T": rows, "E": E, "N": D, "K": F}, x=f"{y}.act", y=f"{y}.down")
    tape.keep(f"{y}.choices", rows * D * tape.itemsize)
    tape.keep(f"{y}.weights_cast", rows * tape.itemsize)
    tape.forward["other"] += 2 * rows * D  # their weighted sum
    tape.backward["other"] += 4 * rows * D
    if module.shared is not None:
        _ffn(tape, module.shared, x, f"{y}.shared")
