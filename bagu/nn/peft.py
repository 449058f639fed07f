"""LoRA adapters in the format of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors.

PEFT names an adapter by its linear, base_model.model.<name>.lora_A.weight ([rank, in]) and .lora_B.weight ([out,
rank]). If bagu has one linear for several of PEFT's (qkv, gate_up), the rules of the family map rows of B to them: a
pair is written once for each, with the same A. Pairs that are read become one pair whose rank is the sum of the ranks
of the different A.

transformers 5 has the experts of a layer in one module. PEFT takes the names of their linears, wherever they are, for
that module's parameters, also in a dense layer or a shared expert: those are written as `target_parameters`.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from bagu.config import write_atomic
from bagu.machine.hub import ADAPTER_CONFIG, WeightsError, read_json
from bagu.nn.families import Family, family_for
from bagu.nn.families.core import Part
from bagu.nn.linear import Linear, linears_of
from bagu.nn.model import Transformer

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
MERGE = "merge the adapter with PEFT's merge_and_unload, and use the merged model"
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "base_model_name_or_path"}
# Settings that do not affect the weights of a trained adapter.
IRRELEVANT = {
    "task_type", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
    "lora_dropout", "inference_mode", "revision", "auto_mapping", "peft_version", "fan_in_fan_out", "megatron_core",
    "qalora_group_size", "runtime_config",
}  # fmt: skip
# Other initializations (pissa, olora, ...) change the base too; such an adapter fits only the changed base.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The pairs of an adapter by the names of the model's linear layers: W becomes W + scale * B A."""

    rank: int  # in PEFT's config; a pair of a fused linear may have a multiple of it
    scale: float
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # A [rank, in] and B [out, rank]


def base_of(folder: Path) -> str:
    """The model that the adapter was trained on, as named in its config."""
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise WeightsError(
            f"{folder / ADAPTER_CONFIG} has no base_model_name_or_path", hint="write the path of the base model into it"
        )
    return base


def save_adapter(model: Transformer, folder: str | Path, *, base: str) -> None:
    """Write the LoRA pairs of `model`, which was loaded from `base`. PEFT can load them onto that model.

    Each file is replaced atomically: a failure keeps the weights that were there.
    """
    folder, family = Path(folder), family_for(model.config, model.family)
    pairs = {name: m for name, m in linears_of(model).items() if m.lora_a is not None and m.lora_b is not None}
    if not pairs:
        raise WeightsError("the model has no LoRA to save", hint="call add_lora first")
    tensors: dict[str, torch.Tensor] = {}
    targets: list[str] = []
    for name, linear in pairs.items():
        assert linear.lora_a is not None and linear.lora_b is not None
        for theirs, (part, stored_as_in_out) in _parts(family, model, name, linear.lora_b.detach()).items():
            b = part.save()
            tensors[f"{PREFIX}{theirs}.lora_A.weight"] = linear.lora_a.detach().clone()
            tensors[f"{PREFIX}{theirs}.lora_B.weight"] = b.t().contiguous() if stored_as_in_out else b
            targets.append(theirs)
    ranks = {m.lora_a.shape[0] for m in pairs.values() if m.lora_a is not None}
    scales = {m.lora_scale for m in pairs.values()}
    if len(ranks) > 1 or len(scales) > 1:
        raise WeightsError(
            f"the pairs have ranks {sorted(ranks)} and scales {sorted(scales)}", hint="an adapter needs one of each"
        )
    rank, scale = ranks.pop(), scales.pop()
    stored_as_in_out = any(s for n, m in pairs.items() for _, s in _parts(family, model, n, m.weight.detach()).values())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.config.causal else None,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        **_targets(model, family, targets),
        "fan_in_fan_out": stored_as_in_out,
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
            made = Path(partial) / WEIGHTS
            save_file(tensors, made, metadata={"format": "pt"})
            made.replace(folder / WEIGHTS)
        write_atomic(folder / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot write {folder}: {error}", hint="free some space, or save elsewhere") from error


def load_adapter(model: Transformer, folder: str | Path) -> list[str]:
    """Add the pairs of an adapter to `model`, its base, and freeze all other parameters. Returns the adapted linears.

    PEFT features that bagu does not support are refused by name: DoRA, trained biases, different ranks.
    """
    adapter, linears = read_adapter(model, folder), linears_of(model)
    model.requires_grad_(False)
    for name, pair in adapter.pairs.items():
        linear = linears[name]
        linear.lora_a, linear.lora_b = (nn.Parameter(x.to(linear.weight.device, linear.dtype)) for x in pair)
        linear.lora_scale = adapter.scale
    return list(adapter.pairs)


@torch.no_grad()
def read_adapter(model: Transformer, folder: str | Path) -> Adapter:
    """Read an adapter of `model`, its base, without changing the model. Raises as `load_adapter` does."""
    folder, family = Path(folder), family_for(model.config, model.family)
    config = read_json(folder / ADAPTER_CONFIG)
    scale = _scale(folder / ADAPTER_CONFIG, config)
    stored = _read(folder / WEIGHTS)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, linear in linears_of(model).items():
        if (pair := _joined(family, model, name, linear, stored)) is not None:
            if linear.gain is not None or linear.lora_a is not None:
                raise WeightsError(f"{name} has weight normalization or LoRA already", hint="merge it first")
            pairs[name] = pair
    if odd := sorted(name for name in stored if not _is_unused(family, name)):
        raise WeightsError(
            f"{folder / WEIGHTS}: {len(odd)} tensors match no linear of the model, the first is {odd[0]}",
            hint=MERGE if ".experts." in odd[0] else "check that this is the base model of the adapter",
        )
    return Adapter(rank=config["r"], scale=scale, pairs=pairs)


def num_parts(model: Transformer, name: str) -> int:
    """In how many linear layers PEFT divides ours: an adapter's rank there is up to so many times its `r`."""
    return len(_parts(family_for(model.config, model.family), model, name, linears_of(model)[name].weight.detach()))


def _parts(family: Family, model: Transformer, name: str, b: torch.Tensor) -> dict[str, tuple[Part, bool]]:
    """PEFT's linears in our linear of this name -> their rows in `b` [out, n], and whether they store [in, out]
    (GPT-2)."""
    key = f"{name}.weight"
    out = b.shape[0]
    probe = family.parts({key: torch.empty(out, out + 1, device="meta")}, model.config)  # no part has out + 1 rows
    parts = family.parts({key: b}, model.config)
    prefix = "" if model.config.lm_head else family.prefix  # which the class without a head lacks
    names = {n: n.removeprefix(prefix).removesuffix(".weight") for n in parts}
    return {names[n]: (p, probe[n].shape[0] == out + 1) for n, p in parts.items()}


def _joined(
    family: Family, model: Transformer, name: str, linear: Linear, stored: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A and B of our linear from PEFT's pairs, which are removed from `stored`; None if it has none."""
    places = _parts(family, model, name, linear.weight.detach())
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for theirs, (part, stored_as_in_out) in places.items():
        names = [f"{PREFIX}{theirs}.lora_{x}.weight" for x in "AB"]
        if names[0] not in stored or names[1] not in stored:
            continue  # an incomplete pair stays in `stored` and is reported later
        a, b = (stored.pop(n) for n in names)
        out = part.shape[1] if stored_as_in_out else part.shape[0]
        if a.dim() != 2 or a.shape[1] != linear.in_features or tuple(b.shape) != (out, a.shape[0]):
            raise WeightsError(
                f"the adapter of {theirs} has A {list(a.shape)} and B {list(b.shape)}, but the linear is "
                f"[{out}, {linear.in_features}]",
                hint="check that this is the base model of the adapter",
            )
        found[theirs] = (a, b)
    if not found:
        return None
    kinds: list[torch.Tensor] = []  # the distinct A
    kind_of: dict[str, int] = {}
    for theirs, (a, _) in found.items():
        kind_of[theirs] = next((i for i, k in enumerate(kinds) if torch.equal(a, k)), len(kinds))
        if kind_of[theirs] == len(kinds):
            kinds.append(a)
    starts = [sum(k.shape[0] for k in kinds[:i]) for i in range(len(kinds))]
    joined = torch.zeros(linear.out_features, sum(k.shape[0] for k in kinds), dtype=kinds[0].dtype)
    for theirs, (a, b) in found.items():
        start = starts[kind_of[theirs]]
        columns = joined[:, start : start + a.shape[0]]
        part, stored_as_in_out = _parts(family, model, name, columns)[theirs]
        part.load(b.t() if stored_as_in_out else b)
    return torch.cat(kinds), joined


def _scale(path: Path, config: Mapping[str, Any]) -> float:
    """The factor of B A in the config. Other settings that would change the result are refused."""
    if config.get("peft_type") != "LORA":
        raise WeightsError(f"{path} has peft_type {config.get('peft_type')!r}", hint="only LORA is supported")
    if experts := [n for n in config.get("target_parameters") or () if not n.endswith(".weight")]:
        raise WeightsError(f"{path} adapts experts ({', '.join(experts)}), which is not supported", hint=MERGE)
    for key, value in config.items():
        if key not in READ | IRRELEVANT and value and value not in HARMLESS.get(key, ()):
            raise WeightsError(
                f"{path} has {key} = {value!r}, which is not supported",
                hint=MERGE,
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise WeightsError(f"{path} has r = {rank!r} and lora_alpha = {alpha!r}", hint="both must be numbers above 0")
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise WeightsError(f"{path} does not exist", hint="save the adapter as safetensors; other formats are not read")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"cannot read {path}: {error}", hint="download or write it again") from error


def _is_unused(family: Family, name: str) -> bool:
    """Whether a tensor of an adapter belongs to a linear that bagu's model does not have or need, such as a pooler."""
    theirs = re.sub(r"\.lora_[AB]\.weight$", ".weight", name.removeprefix(PREFIX))
    return any(re.fullmatch(pattern, n) for pattern in family.unused for n in (theirs, family.prefix + theirs))


def _targets(model: Transformer, family: Family, chosen: list[str]) -> dict[str, list[str]]:
    """target_modules: short names if every linear of that name is adapted, else full names; and target_parameters."""
    names = [n for name, m in linears_of(model).items() for n in _parts(family, model, name, m.weight.detach())]
    experts = {n.rsplit(".", 2)[-2] for rule in family.rules for n in rule.names if "{expert}" in n}
    parameters = sorted(f"{n}.weight" for n in chosen if n.rsplit(".", 1)[-1] in experts)
    modules = {n for n in chosen if f"{n}.weight" not in parameters}
    last = {n.rsplit(".", 1)[-1] for n in modules}
    by_last_name = model.config.lm_head and {n for n in names if n.rsplit(".", 1)[-1] in last} == modules
    targets = {"target_modules": sorted(last if by_last_name else modules)}
    return targets | ({"target_parameters": parameters} if parameters else {})
