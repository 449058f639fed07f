"""Quantized weights on a CPU: near the exact product at any number of rows, and no row is spoiled by another."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from small_engine import small_engine, small_model

from bagu import ops
from bagu.errors import ArgumentError, BackendError, UnknownName
from bagu.machine import native
from bagu.nn.linear import Linear
from bagu.serve import runner
from bagu.serve.config import EngineConfig, Quantization
from bagu.serve.cpu.compiled import SOURCE, has_int8_dot
from bagu.serve.cpu.quantize import DotInt8, Int8Linear, TorchInt8, int8
from bagu.serve.graphs import addresses
from bagu.serve.quantization import Int4Linear, W8A8Linear, quantized
from bagu.serve.request import Sampling

Pack = type[TorchInt8] | type[DotInt8]


@pytest.fixture(params=[TorchInt8, DotInt8])
def pack(request: pytest.FixtureRequest) -> Pack:
    if request.param is DotInt8 and not has_int8_dot():
        pytest.skip("int8 dot products need asimddp (ARM) or VNNI (x86)")
    kind: Pack = request.param
    return kind


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_near(pack: Pack, rows: int, biased: bool) -> None:
    weight, x = drawn(96, 64) / 8, drawn(rows, 64)
    bias = drawn(96) if biased else None
    packed = pack(weight, bias)
    want = torch.nn.functional.linear(x, weight, bias)
    for _ in range(3):  # TorchScript runs a function in one way at first and in another later
        assert 1e-4 < error(packed(x), want) < 0.02


@pytest.mark.parametrize("rows", [7, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_int8_layer_of_a_gpu_is_near_the_exact_product(dtype: torch.dtype, rows: int) -> None:
    """On a CPU, by the same ops: weights are rounded per row, and activations too where there are more than 64 rows."""
    linear = Linear(64, 96, bias=True).to(dtype)
    with torch.no_grad():
        linear.weight.copy_(drawn(96, 64) / 8), linear.bias.copy_(drawn(96))
    x = drawn(2, rows, 64).to(dtype)
    y, want = W8A8Linear(linear)(x), torch.nn.functional.linear(*(t.double() for t in (x, linear.weight, linear.bias)))
    assert y.dtype == dtype and 1e-4 < error(y, want) < 0.02


def test_a_row_of_large_values_does_not_spoil_the_others(pack: Pack) -> None:
    weight, x = drawn(96, 64), drawn(16, 64)
    x[0] *= 1000
    want = x @ weight.t()
    assert error(pack(weight)(x)[1:], want[1:]) < 0.02
    one_scale = torch.ops.quantized.linear_dynamic(x, TorchInt8(weight).weight, False)
    assert error(one_scale[1:], want[1:]) > 0.2, "or the rows need not be scaled"


def test_rows_that_are_empty_zero_or_broken_stay_what_they_are(pack: Pack) -> None:
    packed = pack(drawn(96, 64))
    assert packed(torch.zeros(0, 64)).shape == (0, 96)
    x = drawn(3, 64)
    x[0], x[1] = 0.0, torch.nan
    y = packed(x)
    assert not y[0].any() and y[1].isnan().all() and y[2].isfinite().all()


def test_the_dtype_of_the_activations_is_kept(pack: Pack) -> None:
    weight, x = drawn(96, 64).bfloat16(), drawn(2, 64).bfloat16()
    y = pack(weight)(x)
    assert y.dtype == torch.bfloat16 and error(y, x.double() @ weight.double().t()) < 0.02


def test_other_devices_are_refused() -> None:
    with pytest.raises(BackendError, match="weights are on meta"):
        int8(torch.empty(4, 4, device="meta"))


@pytest.mark.parametrize("kind, layer", [("int8", Int8Linear), ("int4", Int4Linear), ("fp8", Linear)])
def test_a_quantized_model_leaves_its_source_alone(kind: Quantization, layer: type[torch.nn.Module]) -> None:
    model = small_model()
    before = model.blocks[0].attention.qkv.weight.clone()
    twin = quantized(model, kind)
    assert isinstance(twin.blocks[0].attention.qkv, layer)
    assert isinstance(model.blocks[0].attention.qkv, Linear)
    assert torch.equal(model.blocks[0].attention.qkv.weight, before)
    assert twin.embedding is not None and twin.embedding.weight is model.embedding.weight


def test_fp8_weights_are_numbers_of_fp8_times_a_scale_per_row() -> None:
    model = small_model()
    weight = model.blocks[0].attention.qkv.weight.detach()
    values, scales = ops.quantize_fp8(weight)
    assert values.float().abs().amax(1).eq(448.0).all(), "the largest of a row is the largest of the dtype"
    twin = quantized(model, "fp8").blocks[0].attention.qkv
    torch.testing.assert_close(twin.weight, values.float() * scales[:, None], rtol=0, atol=0)
    # e4m3 keeps 3 bits after the leading one, and below 2^-6 steps of 2^-9
    assert (
        (twin.weight - weight).abs() <= torch.maximum(weight.abs() / 16, scales[:, None] * 2**-10) * (1 + 1e-6)
    ).all()


@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize("compiled", [True, False])
def test_an_engine_generates_from_quantized_weights(
    kind: Quantization, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode rounds other numbers than a prompt does (gains are in its weights), and is as far from the model."""
    if not compiled:
        monkeypatch.setattr(runner, "compiles", lambda dtype: False)
    model = small_model()
    engine, exact = small_engine(model, quantization=kind), small_engine(model)
    assert (engine.runner.compiled is not None) == (compiled and native.library(SOURCE) is not None)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    made = engine.generate([ids], Sampling(max_tokens=24, temperature=0.0, logprobs=1))[0]
    assert len(made.tokens) == 24 and made.logprobs is not None
    text = [ids + list(made.tokens)]
    prompt, want = (torch.tensor(e.score(text, [len(ids)])[0]) for e in (engine, exact))
    assert not torch.equal(prompt, want)
    assert (torch.tensor(made.logprobs) - want).norm() < 2 * (prompt - want).norm()


def test_a_model_that_is_quantized_again_has_its_weights_at_other_addresses() -> None:
    """CUDA graphs read weights by address: those of the first model must not be used for the second. fp16 has no C++
    product, so int4 layers hold the tensors that a GPU's hold."""
    model = small_model().half()
    first = quantized(model, "int4")
    layers = [layer for layer in first.modules() if isinstance(layer, Int4Linear)]
    tensors = [t for layer in layers for t in (layer.packed, layer.scales)]
    assert {t.data_ptr() for t in tensors} <= set(addresses(first))
    assert addresses(first) != addresses(quantized(model, "int4"))
    assert addresses(model) == addresses(model), "weights that change in place keep their graphs"


def test_an_unknown_quantization_names_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="int3"):
        EngineConfig(quantization="int3")  # type: ignore[arg-type]


def test_a_logprob_is_of_the_distribution_that_the_token_was_drawn_from() -> None:
    """The chosen token stands among the likeliest with the same number."""
    engine = small_engine(small_model(), quantization="int8")
    drawn = engine.generate([[1, 2, 3, 4]], Sampling(max_tokens=12, temperature=0.0, logprobs=3))[0]
    assert drawn.logprobs is not None and drawn.top is not None
    for token, own, top in zip(drawn.tokens, drawn.logprobs, drawn.top, strict=True):
        assert top[0][0] == token
        assert own == pytest.approx(top[0][1], abs=1e-6)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(
    "model_kind", ["gqa", pytest.param("mha, tied", marks=pytest.mark.slow), "alibi"]
)  # the last one is not computed by the C++ step
def test_a_released_source_leaves_no_unquantized_linear_weight(kind: Quantization, model_kind: str) -> None:
    model = small_model(model_kind)
    engine = small_engine(model, quantization=kind)
    greedy = Sampling(max_tokens=12, temperature=0.0)
    prompt = [i % 89 for i in range(70)]
    before = engine.generate([prompt], greedy)[0].tokens
    layers = [weakref.ref(m.weight) for m in model.modules() if isinstance(m, Linear)]
    assert layers and all(w() is not None for w in layers)
    engine.release_source()
    del model
    gc.collect()
    assert [w() for w in layers] == [None] * len(layers)
    assert engine.generate([prompt], greedy)[0].tokens == before
    for change in (engine.weights_changed, lambda: engine.update_weights({})):
        with pytest.raises(ArgumentError, match="released the weights"):
            change()


def test_an_engine_without_quantization_keeps_its_weights() -> None:
    engine = small_engine(small_model())
    engine.release_source()
    engine.update_weights({name: w.clone() for name, w in engine.model.state_dict().items()})
    assert len(engine.generate([[1, 2, 3]], Sampling(max_tokens=4))[0].tokens) == 4


def test_the_compiled_step_is_the_only_copy_of_weights_whose_products_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """int4 everywhere; int8 where the CPU has dot products: elsewhere torch's are faster for long prompts. Layers that
    no step runs are not quantized in the first place."""
    has_compiler, made = native.library(SOURCE) is not None, []
    monkeypatch.setattr(runner, "quantized", lambda *given: made.append(given) or quantized(*given))
    assert (small_engine(small_model(), quantization="int4").runner.model is None) == has_compiler
    assert (small_engine(small_model(), quantization="int8").runner.model is None) == has_int8_dot()
    assert len(made) == (not has_compiler) + (not has_int8_dot())
    assert small_engine(small_model("alibi"), quantization="int4").runner.model is not None
