"""A family: the keys of its config.json, functions to read and write them, and rules that map its tensor names.

A rule lists the Hugging Face tensors that are part of one of ours. Its layout returns them as views of our tensor:
loading copies each file tensor into its view, saving reads the view. One function thus describes both merge and split,
and neither needs a second copy of the weights. Layouts also work on the meta device.

Templates: `{layer}` and `{expert}` are numbers, a final `*` is `weight` or `bias`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from bagu.config import ConfigError
from bagu.machine.hub import WeightsError
from bagu.nn.config import ModelConfig
from bagu.nn.families.keys import Keys, resolve

# a classifier with one label is a regression in transformers: its output is the score itself
ONE_LABEL: dict[str, Any] = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


class Part(NamedTuple):
    """One Hugging Face tensor inside ours: its shape in the file, and views of its location. Several views hold the
    rows of the file's tensor in order."""

    views: tuple[torch.Tensor, ...]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(view.numel() * view.element_size() for view in self.views)

    def load(self, tensor: torch.Tensor) -> None:
        if len(self.views) == 1:
            self.views[0].copy_(tensor.reshape(self.views[0].shape))
            return
        sizes = [view.numel() // math.prod(self.shape[1:]) for view in self.views]
        for view, rows in zip(self.views, tensor.split(sizes), strict=True):
            view.copy_(rows.reshape(view.shape))

    def save(self) -> torch.Tensor:
        if len(self.views) == 1:
            return self.views[0].reshape(self.shape).contiguous()
        return torch.cat([view.reshape(-1, *self.shape[1:]) for view in self.views])


Layout = Callable[[torch.Tensor, ModelConfig], Sequence[Part]]


def same(t: torch.Tensor, config: ModelConfig) -> list[Part]:
    return [Part((t,), tuple(t.shape))]


def conv1d(t: torch.Tensor, config: ModelConfig) -> list[Part]:
    """GPT-2 stores the weight of a linear layer as [in, out]; its bias is stored as usual."""
    return same(t.t(), config)


def qkv(t: torch.Tensor, config: ModelConfig) -> list[Part]:
    """Split the rows [q heads of group g.., k_g, v_g] of each group g into the q, the k and the v of all groups."""
    G, per_group, D, rest = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim, t.shape[1:]
    heads = t.view(G, per_group + 2, D, *rest)
    return [Part((x,), (x.shape[:3].numel(), *rest)) for x in heads.split([per_group, 1, 1], dim=1)]


def fused_qkv(t: torch.Tensor, config: ModelConfig) -> list[Part]:
    """Like `qkv`, with q, k and v in one tensor in the file."""
    return [Part(tuple(view for part in qkv(t, config) for view in part.views), tuple(t.shape))]


def gpt2_qkv(t: torch.Tensor, config: ModelConfig) -> list[Part]:
    """Like `qkv` with one group per head, and one tensor [in, 3 * out] in the file."""
    heads = t.view(config.num_heads, 3, config.head_dim, *t.shape[1:]).transpose(0, 1)
    return [Part((heads if t.dim() == 1 else heads.movedim(-1, 0),), tuple(reversed(t.shape)))]


def gate_up(t: torch.Tensor, config: ModelConfig) -> list[Part]:
    """The rows of the gate, then those of the up projection."""
    return [part for half in t.chunk(2) for part in same(half, config)]


def experts(layout: Layout) -> Layout:
    """Split a tensor whose first dim is the experts into the tensors of each expert."""

    def laid_out(t: torch.Tensor, config: ModelConfig) -> list[Part]:
        return [part for expert in t for part in layout(expert, config)]

    return laid_out


@dataclass(frozen=True)
class Rule:
    """The tensor `ours` holds `theirs`, in the order of the layout's parts; experts repeat the list."""

    ours: str
    theirs: str | tuple[str, ...]
    layout: Layout = same
    tied: bool | None = None  # only for models with this tie_embeddings; None is for all

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        text = re.escape(self.ours).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\*", r"(?P<leaf>weight|bias)")
        return re.compile(text)

    def parts(self, name: str, t: torch.Tensor, config: ModelConfig) -> dict[str, Part] | None:
        """Their names and views in our tensor `name`; None if the rule is for another tensor."""
        if (match := self.pattern.fullmatch(name)) is None or self.tied not in (None, config.tie_embeddings):
            return None
        parts = self.layout(t, config)
        theirs = self.names
        names = [n.replace("*", match.groupdict().get("leaf", "")) for n in theirs] * (len(parts) // len(theirs))
        where = {"layer": match.groupdict().get("layer")}
        return {
            n.format(expert=i // len(theirs), **where): p for i, (n, p) in enumerate(zip(names, parts, strict=True))
        }


@dataclass(frozen=True, kw_only=True)
class Family:
    """A Hugging Face model family as data. `read` and `write` convert config.json to a ModelConfig and back; `read`
    gets only the values of `keys`, defaults included."""

    name: str  # config.json's model_type
    architecture: str  # the class name in transformers
    classifier: str | None = None  # the class of a model with a score head, None if the family has none
    headless: str | None = None  # the class of an encoder without a head, None if it is not supported
    keys: Keys
    read: Callable[[Mapping[str, Any]], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    rules: Sequence[Rule]
    prefix: str = ""  # the part that names lack in a checkpoint of the headless class
    aliases: Mapping[str, str] = field(default_factory=dict)  # second name of a key -> its name; the second name wins
    unused: Sequence[str] = ()  # patterns of tensors in files that this model does not use
    copies: Mapping[str, str] = field(default_factory=dict)  # a second copy in some files -> the tensor that is read
    # a tensor in files besides the one that transformers uses -> that one. It is written with the same values, and read
    # only from a file that lacks the other.
    spares: Mapping[str, str] = field(default_factory=dict)
    renamed: Sequence[tuple[str, str]] = ()  # (pattern, replacement) for names in old files

    def config(self, hf: Mapping[str, Any]) -> ModelConfig:
        """The model that a config.json describes. An unsupported key or value raises an error that names it."""
        given = {k: v for k, v in hf.items() if k not in self.aliases}
        given |= {self.aliases[k]: v for k, v in hf.items() if k in self.aliases}
        values = resolve(f"{self.name}: config.json", given, self.keys)
        try:
            config = self.read(values)
            if self._is_headless(hf):
                return replace(config, lm_head=False, mlm_head=False, tie_embeddings=False)
            return replace(config, score_head=True) if self._scores(hf) else config
        except ConfigError as error:
            raise WeightsError(
                f"{self.name}: config.json describes a model that bagu does not support: {error}", hint=error.hint
            ) from error

    def file(self, config: ModelConfig) -> dict[str, Any]:
        """The config.json of a model."""
        if not config.lm_head and self.headless is None:
            raise WeightsError(f"{self.name} has no model without a head", hint="keep it as a bagu checkpoint")
        if not config.score_head:
            name = self.architecture if config.lm_head else self.headless
            return {"architectures": [name], "model_type": self.name, **self.write(config)}
        if self.classifier is None:
            raise WeightsError(f"{self.name} has no model with a score head", hint="keep it as a bagu checkpoint")
        return {"architectures": [self.classifier], "model_type": self.name, **self.write(config), **ONE_LABEL}

    def _is_headless(self, hf: Mapping[str, Any]) -> bool:
        """Whether a config.json describes an encoder without a head."""
        return self.headless is not None and hf.get("architectures") == [self.headless]

    def _scores(self, hf: Mapping[str, Any]) -> bool:
        """Whether a config.json describes a sequence classifier; raises if it has more than one label."""
        classes = hf.get("architectures")
        if self.classifier is None or not isinstance(classes, list) or self.classifier not in classes:
            return False
        names = hf.get("id2label")
        labels = len(names) if isinstance(names, Mapping) else hf.get("num_labels", 2)  # 2 is transformers' default
        if labels != 1:
            raise WeightsError(
                f"{self.name}: config.json describes a classifier with {labels} labels",
                hint="bagu reads classifiers with one label, such as reward models",
            )
        return True

    def parts(self, tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, Part]:
        """The checkpoint name of every tensor -> its view in ours."""
        out: dict[str, Part] = {}
        for name, t in tensors.items():
            found = next((p for rule in self.rules if (p := rule.parts(name, t, config)) is not None), None)
            if found is None:
                raise WeightsError(
                    f"{self.name} has no name for the tensor {name}",
                    hint="merge adapters into the weights first; any other tensor needs a rule in its family",
                )
            out |= found
        return out
