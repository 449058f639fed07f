"""PEFT judges the adapters of every family: with those that bagu writes, and with its own, both give the same logits.

The checkpoints are small and random, and written by transformers. fp64 would not help: transformers computes parts of
the models in fp32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
from family_draws import BASE  # noqa: E402
from small_models import documents  # noqa: E402

from bagu.machine.hub import WeightsError  # noqa: E402
from bagu.nn import Transformer  # noqa: E402
from bagu.nn.families import FAMILIES  # noqa: E402
from bagu.nn.lora import add_lora, lora_state  # noqa: E402
from bagu.nn.peft import load_adapter, save_adapter  # noqa: E402
from bagu.nn.weights import from_pretrained  # noqa: E402

RANK, ALPHA, TOLERANCE = 3, 6, 1e-4
IDS = torch.randint(3, 61, (23,), generator=torch.Generator().manual_seed(0))


def judge_of(folder: Path, family: str, architecture: str | None = None, **changes: Any) -> Any:
    """A random model of transformers, saved to `folder`."""
    torch.manual_seed(0)
    if family == "deepseek_v3":  # transformers' default is 128
        changes |= {"num_key_value_heads": BASE[family]["num_attention_heads"]}
    config = transformers.AutoConfig.for_model(family, **BASE[family] | changes)
    config._attn_implementation = "eager"  # gpt-oss has no other
    model = getattr(transformers, architecture or FAMILIES[family].architecture)(config).eval()
    with torch.no_grad():
        for p in model.parameters():  # at 0.02 a small model is nearly linear and hides errors
            p.normal_(0, 0.2) if p.ndim > 1 else p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    return model


def draw_pairs(parameters: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for number, (_, p) in enumerate(sorted(parameters.items())):
            p.copy_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))


@torch.no_grad()
def assert_same(ours: Transformer, judge: Any, unchanged: Any) -> None:
    hidden = ours(*documents([IDS])).hidden
    if ours.config.lm_head:
        got, want = ours.logits(hidden), outputs(judge)
    else:
        got, want = hidden, outputs(judge)
    assert (want - unchanged).abs().max() > 0.1, "the adapter changes nothing"
    assert (got - want).abs().max() < TOLERANCE * want.abs().max()


@torch.no_grad()
def outputs(judge: Any) -> torch.Tensor:
    out = judge(IDS[None])
    return (out.logits if "logits" in out else out.last_hidden_state)[0].clone()


CASES: list[tuple[str, str | None, dict[str, Any]]] = [
    *((family, None, {}) for family in FAMILIES),
    ("deepseek_v3", None, {"q_lora_rank": None, "first_k_dense_replace": 1}),
    ("qwen3_moe", None, {"mlp_only_layers": [0]}),
    ("bert", "BertModel", {}),
    ("roberta", "RobertaModel", {}),
]  # fmt: skip
IDENTITIES = [f"{architecture or family}{'-mixed' if changes else ''}" for family, architecture, changes in CASES]


@pytest.mark.parametrize("targets", [".*", r"blocks\.1\..*", r".*attention\..*"])
@pytest.mark.parametrize("case", CASES, ids=IDENTITIES)
def test_peft_reads_what_bagu_writes(
    tmp_path: Path, case: tuple[str, str | None, dict[str, Any]], targets: str
) -> None:
    judge = judge_of(tmp_path / "base", case[0], case[1], **case[2])
    unchanged, model = outputs(judge), from_pretrained(tmp_path / "base")
    add_lora(model, rank=RANK, alpha=ALPHA, targets=targets)
    draw_pairs(lora_state(model))
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    assert_same(model, peft.PeftModel.from_pretrained(judge, tmp_path / "adapter").eval(), unchanged)


@pytest.mark.parametrize("targets", ["attention", "all-linear"])
@pytest.mark.parametrize("case", CASES, ids=IDENTITIES)
def test_bagu_reads_what_peft_writes(
    tmp_path: Path, case: tuple[str, str | None, dict[str, Any]], targets: str
) -> None:
    judge = judge_of(tmp_path / "base", case[0], case[1], **case[2])
    unchanged = outputs(judge)
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    attention = [n for n, m in judge.named_modules() if isinstance(m, kinds) and "att" in n]
    chosen = targets if targets == "all-linear" else attention[::2]  # of q, k and v one or two
    tuned = peft.get_peft_model(judge, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=chosen)).eval()
    draw_pairs({n: p for n, p in tuned.named_parameters() if "lora_" in n})
    tuned.save_pretrained(tmp_path / "adapter")
    model = from_pretrained(tmp_path / "base")
    if targets == "all-linear" and case[0] in ("qwen3_moe", "mixtral", "deepseek_v3"):  # it includes the experts
        with pytest.raises(WeightsError, match="adapts experts"):
            load_adapter(model, tmp_path / "adapter")
        return
    load_adapter(model, tmp_path / "adapter")
    assert_same(model, tuned, unchanged)
