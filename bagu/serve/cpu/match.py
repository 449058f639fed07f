"""Checks whether step.cpp computes a model's decode step, by matching the recorded forward against that computation.

A forward of one new token per sequence is recorded on meta tensors (ops.call.recording) and followed from the hidden
states back to the embedding. In every layer step.cpp computes

    h = rms_norm(x + delta)     q, k, v = h Wqkv     q, k = rope(rms_norm(q)), rope(rms_norm(k))     kv_write(k, v)
    h = rms_norm(x + paged_attention(q) Wout)        delta = activation(h Wup) Wdown

with or without QK norm, RoPE, window, gate and biases; QK norm, RoPE and kv_write may be one rope_kv_write. Weights,
the order of their rows, windows and constants are read from the recording. Any other call or any unknown argument
raises `Mismatch`; the model then decodes by `Transformer.forward`.

Dims: S = sequences = new tokens, H = heads, G = key heads, D = features of a head.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from bagu.errors import BaguError
from bagu.nn.model import Transformer
from bagu.ops.call.recording import Call, Recorder, storage_id
from bagu.serve.cpu.dataflow import Dataflow, Mismatch, first_element
from bagu.serve.kv.paged import Batch, PagedKV

ATTENTION = (
    "q k_cache v_cache block_tables cu_seqlens context_lens slopes bias sinks k_scale v_scale max_len max_context"
    " window scale"
)
KNOWN = {  # the arguments of each call that this file reads
    "add_rms_norm": "x residual w eps", "rms_norm": "x w eps", "matmul": "x w bias", "kv_write": "x slots cache scale",
    "rope": "x cos sin positions layout",
    "rope_kv_write": "qkv slots k_cache v_cache k_scale v_scale cos sin q_weight k_weight eps layout",
    "paged_attention": ATTENTION, "swiglu": "x up", "geglu": "x up approximate",
    "gelu": "x approximate", "relu_squared": "x", "aten.embedding.default": "weight indices",
    "aten.index_select.default": "self dim index", "aten.arange.default": "end device pin_memory",
}  # fmt: skip


class Weight(NamedTuple):
    """The weights of a linear layer."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None
    gain: torch.Tensor | None = None  # [in]: the gain of the norm before it


class Heads(NamedTuple):
    """How the recording prepares the heads of a layer."""

    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # each [S, ..., D], before QK norm and RoPE
    gains: tuple[torch.Tensor, torch.Tensor] | None  # of the QK norm
    rope_tables: tuple[int, ...]  # the storages of cos and sin; empty without RoPE


class LayerWeights(NamedTuple):
    qkv: Weight
    out: Weight
    up: Weight  # with a gate, gate rows first
    down: Weight
    qkv_rows: torch.Tensor  # [(H + 2G) D]: the rows of qkv that are [q heads, k heads, v heads]
    qk_gains: tuple[torch.Tensor, ...]  # [D] of each of the H + G heads; empty without a QK norm
    window: int | None
    cache: int  # the layer of the KV pool that it writes and reads

    @property
    def qk_gain(self) -> torch.Tensor | None:
        """[H + G, D], with a QK norm."""
        return torch.stack(self.qk_gains) if self.qk_gains else None


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The weights and constants of a model that step.cpp needs."""

    table: torch.Tensor  # [vocabulary, hidden size]
    layers: Sequence[LayerWeights]
    gain: torch.Tensor  # [hidden size]: the gain of the last norm
    rope_tables: Sequence[torch.Tensor]  # cos and sin, each [positions, D / 2]; empty without RoPE
    activation: str  # "silu", "gelu", "gelu_tanh" or "relu_squared"
    gated: bool
    eps: float
    qk_eps: float
    scale: float
    num_heads: int
    num_key_heads: int
    head_dim: int


def match(model: Transformer) -> DecodeStep:
    """Return the weights and constants to decode `model` with step.cpp; raise Mismatch if it does not support it.

    It records steps of one and of three sequences, since a model may treat a single token differently.
    """
    with torch.inference_mode(False), torch.no_grad():  # inference mode does not decompose `reshape` and similar ops
        copied = _MetaCopy(model)
        return [_Matcher(copied, S).step() for S in (1, 3)][-1]


class KeptMatch:
    """Matches a model once, and again only if the shapes of its tensors have changed; `step` has the tensors that the
    model has now. Between, no tensor is kept: a place in the list of the model's tensors stands for each."""

    def __init__(self) -> None:
        self._shapes: list[tuple[Any, ...]] | None = None
        self._step: DecodeStep | str  # or why there is none

    def step(self, model: Transformer) -> DecodeStep:
        tensors = _tensors(model)
        if (shapes := [(t.shape, t.stride(), t.dtype) for t in tensors]) != self._shapes:
            try:
                found = match(model)
                places = {(t.data_ptr(), t.shape): _Place(i) for i, t in enumerate(tensors)}
                self._step = _each_tensor(found, lambda t: places.get((t.data_ptr(), t.shape), t))
            except Mismatch as error:
                self._step = str(error)
            self._shapes = shapes
        if isinstance(self._step, str):  # a new exception each time: a kept one would keep frames that hold the weights
            raise Mismatch(self._step)
        step: DecodeStep = _each_tensor(self._step, lambda x: tensors[x.number] if isinstance(x, _Place) else x)
        return step


class _Place(NamedTuple):
    """Stands for a tensor of the model."""

    number: int


def _tensors(model: Transformer) -> list[torch.Tensor]:
    own = (*model.parameters(), *model.buffers(), *model.positions.tables(torch.device("cpu")))
    return [t.detach() for t in own]


def _each_tensor(x: Any, change: Callable[[Any], Any]) -> Any:
    """`x` with `change` applied to every tensor, or place of one, inside its tuples, lists and fields."""
    if isinstance(x, torch.Tensor | _Place):
        return change(x)
    if isinstance(x, DecodeStep):
        return replace(x, **{f.name: _each_tensor(getattr(x, f.name), change) for f in fields(x)})
    if isinstance(x, tuple | list):
        inner = [_each_tensor(value, change) for value in x]
        return type(x)(*inner) if hasattr(x, "_fields") else type(x)(inner)
    return x


class _MetaCopy:
    """A copy of the model on the meta device: its tensors, and each of them with that of the model by its storage."""

    def __init__(self, model: Transformer) -> None:
        own, meta = [*model.parameters(), *model.buffers()], torch.device("meta")
        there = [t.detach().to(meta) for t in own]
        self.model: Transformer = copy.deepcopy(model, {id(t): x for t, x in zip(own, there, strict=True)})
        there += self.model.positions.tables(meta)
        own += model.positions.tables(torch.device("cpu"))
        self.tensors = there
        self.weights = {storage_id(x): (x, t.detach()) for x, t in zip(there, own, strict=True)}


class _Matcher:
    """Matches a decode step of S sequences, recorded from a copy of the model on the meta device."""

    def __init__(self, copied: _MetaCopy, S: int) -> None:
        model, self.weights, meta = copied.model, copied.weights, torch.device("meta")
        dtype = model.embedding.weight.dtype
        context = min(64, model.config.max_len)
        ids, positions, slots = (torch.empty(S, dtype=torch.int64, device=meta) for _ in range(3))
        cu, lengths, tables = (torch.empty(n, dtype=torch.int32, device=meta) for n in ((S + 1,), (S,), (S, 4)))
        self.batch = batch = Batch(ids, positions, (slots,), cu, lengths, (tables,), 1, context, S, context)
        self.slots, self.tables = slots, tables
        kv = PagedKV(model.config, 4, 16, device=meta, dtype=dtype)
        if kv.layers[0].values is None:
            raise Mismatch("a cache without values")
        self.pools = kv.layers
        kv.load(batch)
        try:
            with Recorder() as recorder:
                self.hidden = model(batch.ids, batch.positions, batch.cu_seqlens, 1, kv).hidden
        except (RuntimeError, BaguError) as error:  # reads a value, or has a tensor that is not a parameter or buffer
            raise Mismatch(f"the forward does not run on meta tensors: {error}") from error
        given = [t for t in (*batch, slots, tables, *kv.tensors, *copied.tensors) if isinstance(t, torch.Tensor)]
        self.flow = Dataflow(recorder.calls, KNOWN, given)
        self.S, self.hidden_size = self.hidden.shape
        self.constants: dict[str, Any] = {}

    def step(self) -> DecodeStep:
        layers: list[LayerWeights] = []
        last = norm = self.producer(self.hidden, "add_rms_norm")
        while norm.name == "add_rms_norm":
            layer, norm = self.layer(norm)
            layers.insert(0, layer)
        embedding = self.producer(norm.args["x"], "aten.embedding.default")
        self.flow.check_same(embedding.args["indices"], self.batch.ids)
        table, gain = self.weight(embedding.args["weight"]), self.gain(last)
        if any(w.weight.dtype != table.dtype for layer in layers for w in layer[:4]):
            raise Mismatch("weights of several dtypes")
        writes = {"kv_write": 1, "rope_kv_write": 2}
        if sum(writes.get(call.name, 0) for call in self.flow.calls) != 2 * len(layers):
            raise Mismatch("writes to the cache that no layer reads")
        shared = {"qk_eps": 0.0} | self.constants
        shared["rope_tables"] = [self.weights[x][1] for x in shared["rope_tables"]]
        return DecodeStep(table=table, layers=layers, gain=gain, **shared)

    def layer(self, after: Call) -> tuple[LayerWeights, Call]:
        """The layer before the norm `after`, and the norm at its start, which adds nothing in the first layer."""
        down = self.producer(after.args["x"], "matmul")
        activation = self.activation(down.args["x"])
        up = self.producer(activation.args["x"], "matmul")
        middle = self.producer(up.args["x"], "add_rms_norm")
        out = self.producer(middle.args["x"], "matmul")
        attention = self.flow.producer(out.args["x"], "paged_attention")
        qkv, rest = self.attention(attention)
        before = self.producer(qkv.args["x"], "add_rms_norm", "rms_norm")
        if before.name == "rms_norm":
            self.flow.check_same(middle.args["residual"], before.args["x"])
        residuals = [(after, middle)] + [(middle, before)] * (before.name == "add_rms_norm")
        if any(self.producer(b.args["residual"], "add_rms_norm", result=1) is not a for b, a in residuals):
            raise Mismatch("a residual that is not the sum before")
        layer = LayerWeights(
            qkv=self.linear(qkv, self.hidden_size, before),
            out=self.linear(out, attention.results[0][0].numel()),
            up=self.linear(up, self.hidden_size, middle),
            down=self.linear(down, activation.results[0].shape[1]),
            **rest,
        )
        return layer, before

    def activation(self, x: torch.Tensor) -> Call:
        call = self.producer(x, "swiglu", "geglu", "gelu", "relu_squared")
        if call.args.get("up") is not None:
            raise Mismatch(f"{call.name} of two tensors")
        gelu = "gelu_tanh" if call.args.get("approximate") in (True, "tanh") else "gelu"
        name = {"swiglu": "silu", "relu_squared": "relu_squared"}.get(call.name, gelu)
        self.constant(activation=name, gated=call.name in ("swiglu", "geglu"))
        return call

    def attention(self, call: Call) -> tuple[Call, dict[str, Any]]:
        """The matmul that computes queries, keys and values, and the other attention parameters of the layer."""
        a, pools = call.args, [first_element(pool.keys) for pool in self.pools]
        cache = pools.index(first_element(a["k_cache"])) if first_element(a["k_cache"]) in pools else 0
        keys, values = self.pools[cache].keys, self.pools[cache].values
        assert values is not None  # __init__ refuses a cache without values
        given = self.batch._asdict() | {"k_cache": keys, "v_cache": values, "block_tables": self.tables}
        for name in ("block_tables", "cu_seqlens", "context_lens", "k_cache", "v_cache"):
            self.flow.check_same(a[name], given[name])
        terms = [a[name] for name in ("slopes", "bias", "sinks", "k_scale", "v_scale")]
        if any(term is not None for term in terms) or a["max_context"] != self.batch.max_context:
            raise Mismatch("paged_attention with slopes, a bias, sinks, scales or another context")
        fused = self.flow.producer_name(a["q"]) == "rope_kv_write"
        heads = self.fused_heads(a["q"], keys, values) if fused else self.separate_heads(call, keys, values)
        products, rows = zip(*map(self.weight_rows, heads.qkv), strict=True)
        if len(set(products)) > 1:
            raise Mismatch("q, k and v by more than one product")
        (H, D), G = rows[0].shape, len(rows[1])
        tables = heads.rope_tables
        self.constant(num_heads=H, num_key_heads=G, head_dim=D, scale=a["scale"] or D**-0.5, rope_tables=tables)
        gains = () if heads.gains is None else (heads.gains[0],) * H + (heads.gains[1],) * G
        layer = {"qkv_rows": torch.cat(rows).flatten(), "qk_gains": gains, "window": a["window"], "cache": cache}
        return products[0], layer

    def fused_heads(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None) -> Heads:
        """The heads of a layer that prepares them by rope_kv_write."""
        args = self.flow.producer(q, "rope_kv_write").args
        assert values is not None, "rope_kv_write writes values"
        given = {"k_cache": keys, "v_cache": values, "slots": self.slots}
        for name, tensor in given.items():
            self.flow.check_same(args[name], tensor)
        qkv, gains, tables = args["qkv"], None, tuple[int, ...]()
        if args["q_weight"] is not None:
            self.constant(qk_eps=args["eps"])
            gains = self.weight(args["q_weight"]), self.weight(args["k_weight"])
        if args["cos"] is not None:
            tables = self.rope_tables(args, qkv.shape[-1])
        return Heads((qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]), gains, tables)

    def separate_heads(self, reader: Call, keys: torch.Tensor, values: torch.Tensor) -> Heads:
        """The heads of a layer that prepares them by rms_norm, rope and kv_write."""
        q, q_gain, q_tables = self.before_rope(reader.args["q"])
        k, k_gain, k_tables = self.before_rope(self.written(keys, reader))
        if q_tables != k_tables or (q_gain is None) != (k_gain is None):
            raise Mismatch("a QK norm or RoPE on one of q and k")
        gains = None if q_gain is None or k_gain is None else (q_gain, k_gain)
        return Heads((q, k, self.written(values, reader)), gains, q_tables)

    def written(self, pool: torch.Tensor, reader: Call) -> Any:
        """The tensors that are written to the slots of the new tokens before the pool is read."""
        before = self.flow.calls[: self.flow.calls.index(reader)]
        writes = [c for c in before if c.name == "kv_write" and first_element(c.args["cache"]) == first_element(pool)]
        if len(writes) != 1:
            raise Mismatch(f"{len(writes)} writes to a layer of the cache before it is read")
        args = self.flow.check_arguments(writes[0]).args
        self.flow.check_same(args["cache"], pool)
        self.flow.check_same(args["slots"], self.slots)
        return args["x"]

    def before_rope(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...]]:
        """x[S, heads, D] before QK norm and RoPE, the gain of the norm, and the storages of cos and sin."""
        D, gain, tables = x.shape[-1], None, tuple[int, ...]()
        if self.flow.producer_name(x) == "rope":
            call = self.flow.producer(x, "rope")
            tables, x = self.rope_tables(call.args, D), call.args["x"]
            self.check_rope_shape(call)
        if self.flow.producer_name(x) == "rms_norm":
            call = self.flow.producer(x, "rms_norm")
            self.constant(qk_eps=call.args["eps"])
            gain, x = self.weight(call.args["w"]), call.args["x"]
            if gain.shape != (D,):
                raise Mismatch("a QK norm of several heads at once")
        return x, gain, tables

    def weight_rows(self, x: torch.Tensor) -> tuple[Call, torch.Tensor]:
        """The matmul whose result x[S, ..., D] is a part of, and the rows [heads, D] of its weight that give x."""
        product, elements = self.flow.part_of(x, "matmul")
        rows = (
            elements.reshape(self.S, -1, x.shape[-1])
            - torch.arange(self.S).view(-1, 1, 1) * product.results[0].shape[-1]
        )
        if (rows != rows[0]).any():
            raise Mismatch("tokens that differ in their columns of q, k or v")
        return product, rows[0]

    def rope_tables(self, args: Mapping[str, Any], D: int) -> tuple[int, ...]:
        """The storages of cos and sin, from which each token reads the row of its position."""
        lookups = [self.producer(args[name], "aten.index_select.default") for name in ("cos", "sin")]
        for lookup in lookups:
            self.flow.check_same(lookup.args["index"], self.batch.positions)
            if lookup.args["dim"] != 0 or 2 * self.weight(lookup.args["self"]).shape[1] != D:
                raise Mismatch("RoPE of a part of the features")
        if args["layout"] != "half":
            raise Mismatch("RoPE in pairs of neighbours")
        return tuple(storage_id(lookup.args["self"]) for lookup in lookups)

    def check_rope_shape(self, call: Call) -> None:
        """Check that a rope op rotates every token by its own row of cos and sin."""
        a = call.args
        if a["x"].ndim != (3 if a["positions"] is None else 4):
            raise Mismatch("RoPE of other heads")
        if a["positions"] is not None:  # [S, G], with grouped queries
            _, tokens = self.flow.part_of(a["positions"], "aten.arange.default")
            if (torch.arange(self.S) != tokens.T).any():
                raise Mismatch("RoPE with other positions")

    def producer(self, x: torch.Tensor, *ops: str, result: int = 0) -> Call:
        """Like `Dataflow.producer`, for a result [S, features]."""
        call = self.flow.producer(x, *ops, result=result)
        if call.results[result].ndim != 2 or len(call.results[result]) != self.S:
            raise Mismatch(f"{call.name} of several rows a token")
        return call

    def constant(self, **values: Any) -> None:
        """Store values that must be equal in all layers."""
        for name, value in values.items():
            if self.constants.setdefault(name, value) != value:
                both = "" if name == "rope_tables" else f": {self.constants[name]} and {value}"  # those are addresses
                raise Mismatch(f"layers that differ in {name}{both}")

    def weight(self, x: torch.Tensor) -> torch.Tensor:
        """The model's tensor that corresponds to a tensor of its meta copy."""
        if storage_id(x) not in self.weights:
            raise Mismatch(f"{self.flow.producer_name(x)} where a weight is expected")
        there, own = self.weights[storage_id(x)]
        self.flow.check_same(x, there)
        return own

    def gain(self, norm: Call) -> torch.Tensor:
        self.constant(eps=norm.args["eps"])
        return self.weight(norm.args["w"])

    def linear(self, call: Call, inputs: int, norm: Call | None = None) -> Weight:
        weight, bias = self.weight(call.args["w"]), call.args["bias"]
        if weight.shape[1] != inputs:
            raise Mismatch(f"a product of {weight.shape[1]} of {inputs} features")
        return Weight(weight, None if bias is None else self.weight(bias), None if norm is None else self.gain(norm))
