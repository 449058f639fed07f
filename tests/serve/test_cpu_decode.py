"""The compiled decode step against `Transformer.forward` in fp64."""

from __future__ import annotations

import copy
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_engine import small_engine, small_model

from bagu import ops
from bagu.machine import native
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.linear import Linear
from bagu.nn.model import Transformer
from bagu.nn.position_choices import NoPositions
from bagu.ops import dequantize_int4, quantize_int4
from bagu.ops.int4_matmul.layout import GROUP, per_column
from bagu.ops.invariant import invariant_rows
from bagu.serve.cpu.compiled import SOURCE, CompiledDecode, Decodes, PackedLinear, has_int8_dot, rounded
from bagu.serve.cpu.dataflow import Mismatch
from bagu.serve.cpu.invariant_decode import InvariantDecode
from bagu.serve.cpu.match import match
from bagu.serve.kv.paged import Batch, LayerCache, PagedKV

B = 4  # places of a block
KINDS: dict[str, dict[str, Any]] = {
    "heads of 64": {},
    "heads of 128, GQA": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128},
    "odd sizes": {"hidden_size": 43, "num_heads": 3, "num_kv_heads": 3, "head_dim": 14, "intermediate_size": 51},
    "QK norm, no positions": {"qk_norm": True, "positions": NoPositions()},
    "QK norm": {"qk_norm": True},
    "biases": {"qkv_bias": True, "out_bias": True, "ffn_bias": True},
    "a window in some layers": {"windows": (6, None)},
    "GEGLU": {"ffn": "geglu"},
    "GEGLU by tanh": {"ffn": "geglu_tanh"},
    "GELU with biases": {"ffn": "gelu", "ffn_bias": True},
    "GELU by tanh, odd sizes": {"ffn": "gelu_tanh", "intermediate_size": 51},
    "squared ReLU": {"ffn": "relu2"},
}

INVARIANT = ["heads of 64", "heads of 128, GQA", "odd sizes", "QK norm", "biases", "a window in some layers"]


@pytest.fixture
def compiler() -> None:
    if native.library(SOURCE) is None:
        pytest.skip("no C++ compiler here")


def model_of(kind: str, dtype: torch.dtype) -> Transformer:
    sizes: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
        "intermediate_size": 80, "max_len": 64, "init_std": 0.2,
    }  # fmt: skip
    model = init_weights(Transformer(ModelConfig(**sizes | KINDS[kind]), dtype=dtype), 0).eval()
    with torch.no_grad():  # biases and gains begin as zeros and ones
        for name, p in model.named_parameters():
            if p.ndim == 1:
                own = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # of queries and keys, too, not the same
                p.copy_(torch.randn(p.shape, generator=own).mul_(0.3).add_(1.0))
    return model


def step_of(model: Transformer, S: int) -> tuple[PagedKV, Batch]:
    """S sequences of 1 to 45 tokens in scattered blocks. What nobody owns is NaN, as is the place of a new token."""
    random = torch.Generator().manual_seed(S)
    lengths = torch.randint(1, 46, (S,), generator=random)
    if S > 1:
        lengths[0], lengths[1] = 1, 45
    P = -(-int(lengths.max()) // B)
    tables = torch.randperm(S * P + 3, generator=random)[: S * P].view(S, P)
    kv = PagedKV(model.config, S * P + 3, B, dtype=model.embedding.weight.dtype)
    place = torch.arange(P * B)
    slots = tables.repeat_interleave(B, 1) * B + place % B  # [S, P * B]
    for pool in kv.tensors:
        flat = pool.flatten(0, 1)
        flat.fill_(torch.nan)
        past = slots[place < lengths.unsqueeze(1) - 1]
        flat[past] = torch.randn(len(past), *flat.shape[1:], generator=random).to(flat.dtype)
    last = lengths - 1
    batch = Batch(
        ids=torch.randint(61, (S,), generator=random), positions=last, slots=(slots[torch.arange(S), last],),
        cu_seqlens=torch.arange(S + 1, dtype=torch.int32), context_lens=lengths.to(torch.int32),
        block_tables=(tables.to(torch.int32),), max_len=1, max_context=int(lengths.max()), num_decodes=S,
        decode_context=int(lengths.max()),
    )  # fmt: skip
    return kv, batch


def exact(model: Transformer, kv: PagedKV, batch: Batch) -> tuple[torch.Tensor, PagedKV]:
    """Hidden states, and the pool afterwards, of the model itself in fp64."""
    wide = copy.copy(kv)
    wide.layers = [LayerCache(*(t.double() for t in layer.tensors)) for layer in kv.layers]
    wide.load(batch)
    hidden = copy.deepcopy(model).double()(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len, wide).hidden
    return hidden, wide


def decodes(batch: Batch) -> Decodes:
    """The batch, the rows of its block tables in another order."""
    rows = torch.arange(len(batch.ids)).flip(0)
    new = torch.stack((batch.ids, batch.context_lens.long(), rows))
    return Decodes(new.numpy(), batch.block_tables[0].flip(0).contiguous().numpy())


def assert_near(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """NaN where NaN is wanted; the others off by `limit` of their size, and none by 8 times that."""
    known = ~want.isnan()
    assert torch.equal(~got.isnan(), known)
    off, size = (got.double() - want)[known], want[known].square().mean().sqrt()
    assert off.square().mean().sqrt() < limit * size
    assert off.abs().max() < 8 * limit * size


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("S", [1, 2, 7, 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_hidden_states_and_pool_are_those_of_the_model(kind: str, dtype: torch.dtype, S: int) -> None:
    model = model_of(kind, dtype)
    kv, batch = step_of(model, S)
    want, after = exact(model, kv, batch)
    got = CompiledDecode(match(model), kv)(decodes(batch))
    assert got.dtype == dtype
    limit = 5e-6 if dtype == torch.float32 else 0.03  # 8e-7 with AVX-512, 3e-6 without FMA; bf16 keeps 8 bits
    assert_near(got, want, limit)
    for pool, wide in zip(kv.tensors, after.tensors, strict=True):
        assert_near(pool, wide, limit)


def several_of(model: Transformer, lengths: tuple[int, ...]) -> tuple[PagedKV, Batch]:
    """Several new tokens of each sequence, after 9 others, or, if there is room, after as many as the sequence before
    ends with: then only the table tells where one begins."""
    random, S, room = torch.Generator().manual_seed(len(lengths)), len(lengths), 9 + sum(lengths) <= 64
    pasts = [9 + sum(lengths[:i]) * room for i in range(S)]
    ends = [past + n for past, n in zip(pasts, lengths, strict=True)]
    P = -(-max(ends) // B)
    kv = PagedKV(model.config, S * P, B, dtype=model.embedding.weight.dtype)
    tables = torch.randperm(S * P, generator=random).view(S, P)
    positions = torch.cat([torch.arange(*span) for span in zip(pasts, ends, strict=True)])
    owner = torch.arange(S).repeat_interleave(torch.tensor(lengths))
    for pool in kv.tensors:
        pool.fill_(torch.nan)
        places = (tables[:, :, None] * B + torch.arange(B)).flatten(1)
        before = torch.cat([row[:past] for row, past in zip(places, pasts, strict=True)])
        pool.flatten(0, 1)[before] = torch.randn(len(before), *pool.shape[2:], generator=random).to(pool.dtype)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    batch = Batch(
        ids=torch.randint(61, (len(positions),), generator=random), positions=positions,
        slots=(tables[owner, positions // B] * B + positions % B,), cu_seqlens=cu_seqlens,
        context_lens=torch.tensor(ends, dtype=torch.int32), block_tables=(tables.to(torch.int32),),
        max_len=max(lengths), max_context=max(ends), num_decodes=0, decode_context=0,
    )  # fmt: skip
    return kv, batch


def several_tokens(batch: Batch) -> Decodes:
    rows = torch.arange(len(batch.context_lens)).repeat_interleave(batch.cu_seqlens.diff().long())
    new = torch.stack((batch.ids, batch.positions + 1, rows))
    return Decodes(new.numpy(), batch.block_tables[0].numpy(), several=True)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("lengths", [(5,), (1, 8, 3), (20, 1), (54, 2)])  # groups of 16 tokens, tiles of 32 keys
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["heads of 64", "QK norm", "a window in some layers"])
@torch.inference_mode()
def test_several_tokens_of_a_sequence_see_each_other(
    kind: str, threads: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a prompt or in drafts: a token attends to those before it in the same step."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    model = model_of(kind, torch.float32)
    kv, batch = several_of(model, lengths)
    invariant = copy.deepcopy(kv)
    want, after = exact(model, kv, batch)
    got = CompiledDecode(match(model), kv)(several_tokens(batch))
    assert_near(got, want, 5e-6)
    for pool, wide in zip(kv.tensors, after.tensors, strict=True):
        assert_near(pool, wide, 5e-6)
    with ops.invariant():
        own = copy.deepcopy(invariant)
        own.load(batch)
        bits = model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len, own).hidden
    assert torch.equal(InvariantDecode(match(model), invariant)(several_tokens(batch)), bits)


def rounded_inputs(module: Linear, args: tuple[torch.Tensor]) -> torch.Tensor:
    """The activations of a linear layer as int8 dot products see them: each token's largest value becomes 127."""
    step = args[0].abs().amax(-1, True) / 127
    return (args[0] / step).round() * step


def model_without_gains() -> Transformer:
    """A gain is multiplied into a weight before it is rounded: here all are 1."""
    model = model_of("heads of 64", torch.float32)
    for p in model.parameters():
        if p.ndim == 1:
            p.fill_(1.0)
    return model


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("S", [1, 9])
@torch.inference_mode()
def test_int8_is_the_model_of_the_rounded_weights(S: int) -> None:
    """And of rounded activations where the CPU has dot products of int8. There a value within fp32's error of a half
    may round to the other side, so the result is held to a quarter of what rounding all activations changes."""
    model = model_without_gains()
    kv, batch = step_of(model, S)
    near = copy.deepcopy(model)
    for m in near.modules():
        if isinstance(m, Linear):
            w, scales = rounded(m.weight)
            assert w.abs().max() == 127 and not torch.equal(w * scales.unsqueeze(1), m.weight)
            m.weight.copy_(w * scales.unsqueeze(1))
    want, _ = exact(near, kv, batch)
    x = torch.randn(S, model.head_weight.shape[1], generator=torch.Generator().manual_seed(S))
    w, scales = rounded(model.head_weight)
    limit = 5e-6
    if has_int8_dot():
        for m in near.modules():
            if isinstance(m, Linear):
                m.register_forward_pre_hook(rounded_inputs)
        weights_only, (want, _) = want, exact(near, kv, batch)
        limit = ((want - weights_only).norm() / want.norm()).item() / 4
    assert_near(CompiledDecode(match(model), kv, rounding="int8")(decodes(batch)), want, limit)
    seen = rounded_inputs(near.blocks[0].ffn.down, (x,)) if has_int8_dot() else x
    logits = PackedLinear(model.head_weight, rounding="int8")(x)[0]
    torch.testing.assert_close(logits, seen @ (w * scales.unsqueeze(1)).T, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("S", [1, 5, 16, 41])
@pytest.mark.parametrize("N, K", [(40, 576), (7, 30), (33, 137)])
def test_an_int8_linear_is_the_product_of_the_rounded_numbers(S: int, N: int, K: int) -> None:
    """By dot products of vectors, and for blocks of 16 tokens by AMX where the CPU has it."""
    if not has_int8_dot():
        pytest.skip("activations are rounded where the CPU has int8 dot products")
    weight, bias = (torch.randn(*shape, generator=torch.Generator().manual_seed(K)) for shape in ((N, K), (N,)))
    x = torch.randn(S, K, generator=torch.Generator().manual_seed(S))
    y, largest = PackedLinear(weight, bias, rounding="int8")(x)
    w, scales = rounded(weight)
    step = x.abs().amax(1, keepdim=True) / 127
    seen, even = (x / step).round() * step, w * scales.unsqueeze(1)
    want = seen.double() @ even.double().T + bias
    # sums are exact integers: what is left are roundings of fp32 in scales and in the sum with the bias
    slack = 4 * torch.finfo(torch.float32).eps * (seen.abs().double() @ even.abs().double().T + bias.abs())
    assert ((y - want).abs() <= slack).all()
    assert torch.equal(largest, y.argmax(1))


def int4_inputs(x: torch.Tensor) -> torch.Tensor:
    """Activations as int4_product.h rounds them: the largest of each group of 128 becomes 127."""
    step = per_column(torch.stack([g.abs().amax(-1) for g in x.split(GROUP, -1)], -1) / 127, x.shape[-1])
    return (x / step).round() * step


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("S", [1, 5, 19])
@pytest.mark.parametrize("N, K", [(40, 576), (7, 30), (96, 256), (33, 137)])
def test_an_int4_linear_is_the_product_of_the_rounded_numbers(S: int, N: int, K: int) -> None:
    weight, bias = (torch.randn(*shape, generator=torch.Generator().manual_seed(K)) for shape in ((N, K), (N,)))
    x = torch.randn(S, K, generator=torch.Generator().manual_seed(S))
    y, largest = PackedLinear(weight, bias, rounding="int4")(x)
    even = dequantize_int4(*quantize_int4(torch.nn.functional.pad(weight, (0, K % 2))))[:, :K]
    want = int4_inputs(x).double() @ even.double().T + bias
    # sums of a group are exact integers: what is left are roundings of fp32 in scales and in the sum of the groups
    slack = 4 * torch.finfo(torch.float32).eps * (int4_inputs(x).abs().double() @ even.abs().double().T + bias.abs())
    assert ((y - want).abs() <= slack).all()
    assert torch.equal(largest, y.argmax(1))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("S", [1, 9])
@torch.inference_mode()
def test_int4_is_the_model_of_the_rounded_weights(S: int) -> None:
    """A value within fp32's error of a half may round to the other side, so the result is held to a quarter of what
    rounding all activations changes."""
    model = model_without_gains()
    kv, batch = step_of(model, S)
    near = copy.deepcopy(model)
    for m in near.modules():
        if isinstance(m, Linear):
            m.weight.copy_(dequantize_int4(*quantize_int4(m.weight)))
    weights_only, _ = exact(near, kv, batch)
    for m in near.modules():
        if isinstance(m, Linear):
            m.register_forward_pre_hook(lambda module, args: int4_inputs(args[0]))
    want, _ = exact(near, kv, batch)
    limit = ((want - weights_only).norm() / want.norm()).item() / 4
    assert_near(CompiledDecode(match(model), kv, rounding="int4")(decodes(batch)), want, limit)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_int4_has_the_same_bits_with_and_without_dot_products(tmp_path: Path) -> None:
    """The portable loop of int4_product.h, compiled instead of the instructions of this CPU: a block of 16 tokens and
    some more, since AMX multiplies whole blocks.

    Its sums are of integers, and its fma is explicit: the bits do not depend on -O1, which compiles in 6 s, not 14 s.
    """
    weight, x = (torch.randn(*s, generator=torch.Generator().manual_seed(s[0])) for s in ((40, 304), (27, 304)))
    torch.save((weight, x), tmp_path / "given.pt")
    code = (
        "import sys, torch; from bagu.machine import native\n"
        "native.COMPILE = (*native.COMPILE, '-DBAGU_PORTABLE', '-O1')\n"
        "from bagu.serve.cpu.compiled import PackedLinear\n"
        "weight, x = torch.load(sys.argv[1])\n"
        "torch.save(PackedLinear(weight, rounding='int4')(x)[0], sys.argv[2])\n"
    )
    files = [str(tmp_path / name) for name in ("given.pt", "made.pt")]
    subprocess.run([sys.executable, "-c", code, *files], check=True, timeout=600)
    assert torch.equal(torch.load(tmp_path / "made.pt"), PackedLinear(weight, rounding="int4")(x)[0])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_gives_logits_and_the_likeliest_token(
    dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    random = torch.Generator().manual_seed(0)
    w = torch.randint(-2, 3, (101, 7), generator=random).to(dtype)  # small integers: sums are exact, and have ties
    x = torch.randint(-2, 3, (11, 7), generator=random).to(dtype)
    bias = torch.zeros(101, dtype=dtype)
    bias[40] = -torch.inf
    x[1], x[2, 3] = 0.0, torch.nan
    for width, hole in ((101, 0.0), (101, torch.nan), (41, 0.0), (3, 0.0)):
        bias[57] = hole  # one NaN in a row is its largest value
        want = torch.nn.functional.linear(x.float(), w[:width].float(), bias[:width].float())
        logits, tokens = PackedLinear(w[:width], bias[:width])(x)
        torch.testing.assert_close(logits, want, rtol=0, atol=0, equal_nan=True)
        assert tokens.tolist() == np.argmax(want.numpy(), -1).tolist()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("S", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", INVARIANT)
def test_the_step_of_invariant_mode_has_the_bits_of_the_forward(
    kind: str, dtype: torch.dtype, S: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden states and all of the pool."""
    if not invariant_rows.available(dtype):
        pytest.skip("invariant mode has no C++ kernel for bf16 on this CPU: PyTorch computes the products")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    model = model_of(kind, dtype)
    kv, batch = step_of(model, S)
    own, step = copy.deepcopy(kv), InvariantDecode(match(model), kv)
    with torch.inference_mode(), ops.invariant():
        own.load(batch)
        want = model(batch.ids, batch.positions, batch.cu_seqlens, 1, own).hidden
    assert torch.equal(step(decodes(batch)), want)
    for mine, theirs in zip(kv.tensors, own.tensors, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(INVARIANT)))
def test_models_that_the_list_of_invariant_mode_cannot_express_decode_by_forward(kind: str) -> None:
    with pytest.raises(Mismatch, match="SwiGLU and RoPE only"):
        InvariantDecode(match(model_of(kind, torch.float32)), PagedKV(model_of(kind, torch.float32).config, 4, B))


@pytest.mark.usefixtures("compiler")
def test_a_step_of_invariant_mode_reads_weights_that_were_changed_in_place() -> None:
    model = model_of("heads of 64", torch.float32)
    kv, batch = step_of(model, 3)
    step, given = InvariantDecode(match(model), kv), decodes(batch)
    before = step(given)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    after = step(given)
    assert torch.equal(after, InvariantDecode(match(model), kv)(given)) and not torch.equal(before, after)


@pytest.mark.usefixtures("compiler")
def test_each_mode_has_its_step_and_machines_without_a_compiler_decode_by_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiled step has its own bits; that of invariant mode has the bits of the forward."""
    assert isinstance(small_engine(small_model()).runner.compiled, CompiledDecode)
    assert isinstance(small_engine(small_model(), quantization="int8").runner.compiled, CompiledDecode)
    assert isinstance(small_engine(small_model(), invariant=True).runner.compiled, InvariantDecode)
    monkeypatch.setenv("BAGU_NATIVE", "0")
    native.library.cache_clear()
    try:
        for settings in ({}, {"quantization": "int8"}, {"invariant": True}):
            assert small_engine(small_model(), **settings).runner.compiled is None
    finally:
        native.library.cache_clear()
