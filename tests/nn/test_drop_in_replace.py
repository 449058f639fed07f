"""`drop_in.replace`: a ResNet-18 and transformers' models keep their outputs, state dict and gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from bagu.nn import drop_in
from tests.nn.fp64 import assert_as_accurate, results


class Block(nn.Module):
    """The basic block of ResNet (https://arxiv.org/abs/1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


def resnet18(width: int = 8) -> nn.Sequential:
    """ResNet-18 with fewer channels."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, inputs = [], width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            blocks.append(Block(inputs, width << stage, stride))
            inputs = width << stage
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def transformers_model(kind: str) -> Any:
    import transformers as t

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model: Any = {
        "bert": lambda: t.BertModel(t.BertConfig(vocab_size=64, **small)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(vocab_size=64, num_key_value_heads=2, **small)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
        "t5": lambda: t.T5EncoderModel(
            t.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        ),
        "vit": lambda: t.ViTModel(t.ViTConfig(image_size=16, patch_size=8, **small)),
    }[kind]()
    return model.eval()


def first_output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)[0]
    return out


def check_replaced(model: nn.Module, x: torch.Tensor, run: Any = None) -> drop_in.Replacement:
    """Replace the layers of a copy, and compare it with the model and with the model in fp64."""
    ours, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    parameters = list(ours.parameters())
    found = drop_in.replace(ours)
    assert all(a is b for a, b in zip(parameters, ours.parameters(), strict=True))
    wide = x.double() if x.is_floating_point() else x
    assert_as_accurate(results(ours, x, run), results(model, x, run), results(exact, wide, run))
    assert list(ours.state_dict()) == list(model.state_dict())
    for (name, a), b in zip(ours.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)  # running statistics
    return found


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_resnet(training: bool) -> None:
    torch.manual_seed(0)
    found = check_replaced(resnet18().train(training), torch.randn(4, 3, 33, 33))
    kinds = [c.before for c in found.replaced]
    assert {k: kinds.count(k) for k in kinds} == {"Conv2d": 20, "BatchNorm2d": 20, "Linear": 1} and not found.left


@pytest.mark.parametrize(
    ("kind", "replaced", "left"),
    [
        ("bert", {"Linear", "LayerNorm"}, {"Embedding"}),
        ("llama", {"Linear", "LlamaRMSNorm"}, {"Embedding"}),
        ("gpt2", {"LayerNorm", "Linear"}, {"Conv1D", "Embedding"}),
        ("t5", {"Linear", "T5LayerNorm"}, {"Embedding"}),
        ("vit", {"Linear", "LayerNorm", "Conv2d"}, set()),
    ],
)
def test_a_transformers_model(kind: str, replaced: set[str], left: set[str]) -> None:
    model = transformers_model(kind)
    x = torch.randn(2, 3, 16, 16) if kind == "vit" else torch.arange(22).view(2, 11) % 64
    found = check_replaced(model, x, first_output)
    assert {c.before for c in found.replaced} == replaced
    assert {m.kind for m in found.left} >= left
    assert all(m.reason for m in found.left) and f"bagu {next(iter(replaced))}" in str(found)


def test_gemmas_norm_is_left_because_its_numbers_differ() -> None:
    import transformers as t

    model = nn.Sequential(t.models.gemma.modeling_gemma.GemmaRMSNorm(16))
    found = drop_in.replace(model)
    assert not found.replaced and "numbers" in found.left[0].reason and "left 0 (GemmaRMSNorm)" in str(found)


def test_hooks_weight_norm_and_tied_weights_are_kept() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 8)
            self.body = weight_norm(nn.Linear(8, 8))  # a hook computes the weight
            self.parametrized = parametrizations.weight_norm(nn.Linear(8, 8))
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.parametrized(self.body(self.embedding(tokens))))
            return out

    with pytest.warns(FutureWarning):
        model = Net()
    seen: list[tuple[int, ...]] = []
    model.head.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    tokens = torch.arange(6).view(2, 3)
    before = model(tokens)
    found = drop_in.replace(model)
    assert torch.equal(model(tokens), before) and seen == [(2, 3, 20)] * 2
    assert model.head.weight is model.embedding.weight
    assert {c.name for c in found.replaced} == {"body", "head"}
    reasons = {m.name: m.reason for m in found.left}
    assert "parametrized" in reasons["parametrized"] and "bandwidth" in reasons["embedding"]


def test_what_is_left_has_a_reason() -> None:
    class MyLinear(nn.Linear):
        pass

    patched = nn.Linear(4, 4)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    model = nn.Sequential(MyLinear(4, 4), patched, nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"))
    model.append(nn.LazyLinear(4))
    reasons = [m.reason for m in drop_in.replace(model).left]
    for reason, word in zip(reasons, ("subclass", "instance", "padding_mode", "subclass"), strict=True):
        assert word in reason


def test_replacing_twice_changes_nothing_more_and_int8_is_chosen_by_the_map() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    first, second = drop_in.replace(model), drop_in.replace(model)
    assert len(first.replaced) == 2 and not second.replaced and not second.left
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    drop_in.replace(model, layers={**drop_in.LAYERS, nn.Linear: drop_in.Int8Linear})
    assert type(model[0]) is drop_in.Int8Linear and type(model[1]) is drop_in.LayerNorm


def test_a_replaced_model_is_pickled_and_compiled() -> None:
    model = transformers_model("llama")
    drop_in.replace(model)
    x = torch.arange(6).view(1, 6)
    for restored in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(restored.model.norm) is type(model.model.norm)
        torch.testing.assert_close(restored(x)[0], model(x)[0])  # x86 kernels depend on the alignment of weights
    norm = model.model.norm
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    rows = torch.randn(3, 32)
    torch.testing.assert_close(compiled(rows), norm(rows))  # another backend, which rounds differently on x86
