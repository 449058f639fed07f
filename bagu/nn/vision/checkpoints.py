"""ViT, CLIP and SigLIP from and to Hugging Face folders.

A family is a table of the keys of its config.json (an unknown key or value is refused) and a list of names: ours,
theirs, and how the tensor is laid out. The layers of all three differ only in their names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bagu.config import ConfigError, write_atomic
from bagu.machine.hub import WeightsError
from bagu.nn.choices import NormConfig
from bagu.nn.config import FFNKind, ModelConfig
from bagu.nn.families.keys import SHARED, SIZE, UNUSED, Key, Keys, Only, Read, Required, refuse_value, resolve
from bagu.nn.model import Transformer
from bagu.nn.position_choices import Learned
from bagu.nn.vision.towers import TowersConfig, TwoTowers
from bagu.nn.vision.vit import ViT, ViTConfig

ACTS: dict[str, FFNKind] = {
    "quick_gelu": "gelu_quick",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
NAMED_ACTS: dict[FFNKind, str] = {"gelu_quick": "quick_gelu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# of training; the first two are dropout
TRAINING = ("attention_dropout", "dropout", "initializer_range", "initializer_factor")
TOWER: dict[str, Key] = {**SHARED, **dict.fromkeys(SIZES, SIZE), **dict.fromkeys(TRAINING, UNUSED)}
VISION: dict[str, Key] = {**TOWER, "image_size": SIZE, "patch_size": SIZE, "num_channels": Read(int, 3, least=1)}
TEXT: dict[str, Key] = {**TOWER, "vocab_size": SIZE, "max_position_embeddings": SIZE}


def _act(act: str, eps: float) -> dict[str, Key]:
    return {"hidden_act": Read(str, act), "layer_norm_eps": Read(float, eps, above=0)}


VIT_KEYS: Keys = {
    **VISION,
    **_act("gelu", 1e-12),
    "qkv_bias": Read(bool, True),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "encoder_stride"), UNUSED),
    **dict.fromkeys(("pooler_act", "pooler_output_size"), UNUSED),  # bagu's pool is the class token itself
}
CLIP_VISION: Keys = {**VISION, **_act("quick_gelu", 1e-5), "projection_dim": UNUSED}
CLIP_TEXT: Keys = {**TEXT, **_act("quick_gelu", 1e-5), "projection_dim": UNUSED}
CLIP_KEYS: Keys = {
    **SHARED,
    "text_config": Required(dict),
    "vision_config": Required(dict),
    "projection_dim": Read(int, 512, least=1),
    "logit_scale_init_value": UNUSED,
    "initializer_factor": UNUSED,
    "text_config_dict": Only(None),
    "vision_config_dict": Only(None),
}
SIGLIP_VISION: Keys = {**VISION, **_act("gelu_pytorch_tanh", 1e-6), "vision_use_head": Only(True)}
SIGLIP_TEXT: Keys = {**TEXT, **_act("gelu_pytorch_tanh", 1e-6), "projection_size": Read(int | None, None, least=1)}
SIGLIP_KEYS: Keys = {
    **SHARED,
    "text_config": Required(dict),
    "vision_config": Required(dict),
    "initializer_factor": UNUSED,
}

# (ours, theirs) of a layer
CLIP_LAYER = {
    "attention_norm": "layer_norm1",
    "ffn_norm": "layer_norm2",
    "attention.out": "self_attn.out_proj",
    "ffn.up": "mlp.fc1",
    "ffn.down": "mlp.fc2",
}
CLIP_QKV = tuple(f"self_attn.{n}_proj" for n in "qkv")
VIT_LAYER = {
    "attention_norm": "layernorm_before",
    "ffn_norm": "layernorm_after",
    "attention.out": "attention.output.dense",
    "ffn.up": "intermediate.dense",
    "ffn.down": "output.dense",
}
VIT_QKV = tuple(f"attention.attention.{n}" for n in ("query", "key", "value"))

Piece = tuple[str, torch.Tensor]  # the name in the file, and a view of our parameter in the file's shape


def _layers(body: Transformer, theirs: str, layer: Mapping[str, str], qkv: Sequence[str]) -> Iterator[Piece]:
    """The tensors of the blocks. Rows of our qkv are ordered by head: q, k, v of head 0, then of head 1."""
    heads = body.config.num_heads
    for name, p in body.named_parameters():
        if not name.startswith("blocks."):
            continue
        _, number, rest = name.split(".", 2)
        path, leaf = rest.rsplit(".", 1)
        base = theirs.format(number)
        if path == "attention.qkv":
            parts = p.view(heads, 3, -1, *p.shape[1:]).unbind(1)
            yield from ((f"{base}.{n}.{leaf}", part) for n, part in zip(qkv, parts, strict=True))
        else:
            yield f"{base}.{layer[path]}.{leaf}", p


def _both(module: nn.Module, name: str) -> Iterator[Piece]:
    """Weight and bias of a layer."""
    yield from ((f"{name}.{leaf}", p) for leaf, p in module.named_parameters())


def _vit_image(model: ViT) -> Iterator[Piece]:
    yield "embeddings.cls_token", model.body.embedding.weight
    yield "embeddings.position_embeddings", model.body.positions.weight  # type: ignore[misc]
    yield from _both(model.patches, "embeddings.patch_embeddings.projection")
    yield from _layers(model.body, "encoder.layer.{}", VIT_LAYER, VIT_QKV)
    assert model.body.norm is not None
    yield from _both(model.body.norm, "layernorm")


def _clip_image(model: ViT) -> Iterator[Piece]:
    body = model.body
    assert body.norm is not None and body.embedding_norm is not None
    yield "vision_model.embeddings.class_embedding", body.embedding.weight
    yield "vision_model.embeddings.position_embedding.weight", body.positions.weight  # type: ignore[misc]
    yield "vision_model.embeddings.patch_embedding.weight", model.patches.weight
    yield from _both(body.embedding_norm, "vision_model.pre_layrnorm")
    yield from _layers(body, "vision_model.encoder.layers.{}", CLIP_LAYER, CLIP_QKV)
    yield from _both(body.norm, "vision_model.post_layernorm")


def _siglip_image(model: ViT) -> Iterator[Piece]:
    body, pool = model.body, model.pool
    assert body.norm is not None and pool is not None
    yield "vision_model.embeddings.position_embedding.weight", body.positions.weight  # type: ignore[misc]
    yield from _both(model.patches, "vision_model.embeddings.patch_embedding")
    yield from _layers(body, "vision_model.encoder.layers.{}", CLIP_LAYER, CLIP_QKV)
    yield from _both(body.norm, "vision_model.post_layernorm")
    head = "vision_model.head"
    yield f"{head}.probe", pool.probe
    for ours, theirs in (
        ("out", "attention.out_proj"),
        ("norm", "layernorm"),
        ("mlp.up", "mlp.fc1"),
        ("mlp.down", "mlp.fc2"),
    ):
        yield from _both(pool.get_submodule(ours), f"{head}.{theirs}")
    for leaf in ("weight", "bias"):  # one tensor of theirs is two of ours: rows of the query, then of keys and values
        yield f"{head}.attention.in_proj_{leaf}[:1]", getattr(pool.query, leaf)
        yield f"{head}.attention.in_proj_{leaf}[1:]", getattr(pool.key_value, leaf)


def _text(model: TwoTowers) -> Iterator[Piece]:
    body = model.text
    assert body.norm is not None
    yield "text_model.embeddings.token_embedding.weight", body.embedding.weight
    yield "text_model.embeddings.position_embedding.weight", body.positions.weight  # type: ignore[misc]
    yield from _layers(body, "text_model.encoder.layers.{}", CLIP_LAYER, CLIP_QKV)
    yield from _both(body.norm, "text_model.final_layer_norm")


def _pieces(model: ViT | TwoTowers, kind: str) -> list[Piece]:
    if kind == "vit":
        assert isinstance(model, ViT)
        return list(_vit_image(model))
    if isinstance(model, ViT):
        return list(_clip_image(model) if kind == "clip_vision_model" else _siglip_image(model))
    assert isinstance(model.image, ViT) and model.text_projection is not None
    image = _clip_image(model.image) if kind == "clip" else _siglip_image(model.image)
    found = [*image, *_text(model), ("logit_scale", model.log_scale)]
    if kind == "siglip":
        assert model.logit_bias is not None
        return [*found, ("logit_bias", model.logit_bias), *_both(model.text_projection, "text_model.head")]
    assert model.image_projection is not None
    return [
        *found,
        *_both(model.image_projection, "visual_projection"),
        *_both(model.text_projection, "text_projection"),
    ]


def _ffn(values: Mapping[str, Any]) -> FFNKind:
    if values["hidden_act"] not in ACTS:
        refuse_value("config.json", "hidden_act", values["hidden_act"], ", ".join(ACTS))
    return ACTS[values["hidden_act"]]


def _vit_config(v: Mapping[str, Any], **more: Any) -> ViTConfig:
    return ViTConfig(
        image_size=v["image_size"],
        patch_size=v["patch_size"],
        channels=v["num_channels"],
        hidden_size=v["hidden_size"],
        num_layers=v["num_hidden_layers"],
        num_heads=v["num_attention_heads"],
        intermediate_size=v["intermediate_size"],
        ffn=_ffn(v),
        eps=float(v["layer_norm_eps"]),
        **more,
    )


def _text_config(v: Mapping[str, Any], *, causal: bool) -> ModelConfig:
    D, H = v["hidden_size"], v["num_attention_heads"]
    if D % H:
        raise WeightsError(f"config.json has {H} heads in {D} features", hint="the heads must divide them")
    return ModelConfig(
        vocab_size=v["vocab_size"], hidden_size=D, num_layers=v["num_hidden_layers"], num_heads=H, num_kv_heads=H,
        head_dim=D // H, intermediate_size=v["intermediate_size"], max_len=v["max_position_embeddings"],
        norm=NormConfig(kind="layer", eps=float(v["layer_norm_eps"]), bias=True), positions=Learned(), causal=causal,
        lm_head=False, qkv_bias=True, out_bias=True, ffn=_ffn(v), ffn_bias=True,
    )  # fmt: skip


def _read_clip(hf: Mapping[str, Any]) -> TowersConfig:
    top = resolve("clip: config.json", hf, CLIP_KEYS)
    vision = resolve("clip: vision_config", top["vision_config"], CLIP_VISION)
    text = resolve("clip: text_config", top["text_config"], CLIP_TEXT)
    if top["text_config"].get("eos_token_id") == 2:
        raise WeightsError(
            "clip: text_config has eos_token_id 2, where transformers pools at the largest token id",
            hint="write the id of the end token, 49407 for OpenAI's tokenizer",
        )
    return TowersConfig(
        image=_vit_config(vision, pool="cls", patch_bias=False, embedding_norm=True),
        text=_text_config(text, causal=True),
        dim=top["projection_dim"],
        text_pool="last",
    )


def _read_siglip(hf: Mapping[str, Any]) -> TowersConfig:
    top = resolve("siglip: config.json", hf, SIGLIP_KEYS)
    vision = resolve("siglip: vision_config", top["vision_config"], SIGLIP_VISION)
    text = resolve("siglip: text_config", top["text_config"], SIGLIP_TEXT)
    size = text["projection_size"] or text["hidden_size"]
    if size != vision["hidden_size"]:
        raise WeightsError(f"siglip: texts have {size} features and images {vision['hidden_size']}", hint="mend it")
    return TowersConfig(
        image=_vit_config(vision, pool="attention"),
        text=_text_config(text, causal=False),
        dim=None,
        text_pool="last",
        text_projection_bias=True,
        sigmoid_bias=True,
    )


@dataclass(frozen=True)
class Known:
    """A model_type: its class in transformers, how its config.json is read, tensors of files that bagu does not use."""

    architecture: str
    read: Callable[[Mapping[str, Any]], ViTConfig | TowersConfig]
    unused: tuple[str, ...] = ()


KNOWN = {
    "vit": Known(
        "ViTModel",
        lambda hf: _vit_config(v := resolve("vit: config.json", hf, VIT_KEYS), pool="cls", qkv_bias=v["qkv_bias"]),
        ("pooler.dense.weight", "pooler.dense.bias"),
    ),
    "clip_vision_model": Known(
        "CLIPVisionModel",
        lambda hf: _vit_config(
            resolve("clip: config.json", hf, CLIP_VISION), pool="cls", patch_bias=False, embedding_norm=True
        ),
    ),
    "siglip_vision_model": Known(
        "SiglipVisionModel",
        lambda hf: _vit_config(resolve("siglip: config.json", hf, SIGLIP_VISION), pool="attention"),
    ),
    "clip": Known("CLIPModel", _read_clip),
    "siglip": Known("SiglipModel", _read_siglip),
}


def load_vision_checkpoint(folder: str | Path) -> ViT | TwoTowers:
    """The model of a Hugging Face folder of ViT, CLIP or SigLIP, in evaluation mode. What would make its output differ
    from that of transformers is refused."""
    place = Path(folder)
    try:
        hf = json.loads((place / "config.json").read_text("utf-8"))
        files = load_file(place / "model.safetensors")
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"cannot read {place}: {error}", hint="it needs config.json and model.safetensors"
        ) from error
    kind = hf.get("model_type")
    if kind not in KNOWN:
        raise WeightsError(f"there is no vision family {kind!r}", hint=f"supported: {', '.join(KNOWN)}")
    known = KNOWN[kind]
    if hf.get("architectures") not in (None, [known.architecture]):
        raise WeightsError(f"{place} is a {hf['architectures'][0]}", hint=f"bagu reads {known.architecture}")
    try:
        config = known.read(hf)
    except ConfigError as error:
        raise WeightsError(f"{kind}: config.json describes no model of bagu: {error}", hint=error.hint) from error
    model = ViT(config) if isinstance(config, ViTConfig) else TwoTowers(config)
    _fill_unused(model)
    if kind.endswith("_vision_model") and not any(n.startswith("vision_model.") for n in files):
        files = {f"vision_model.{n}": t for n, t in files.items()}  # transformers 5 leaves the prefix out
    _load(model, kind, {n: t for n, t in files.items() if n not in known.unused})
    return model.eval()


def _fill_unused(model: nn.Module) -> None:
    """A ViT without special tokens has a vocabulary of one token that nothing reads."""
    for module in model.modules():
        if isinstance(module, ViT) and not module.config.specials:
            nn.init.zeros_(module.body.embedding.weight)


@torch.no_grad()
def _load(model: ViT | TwoTowers, kind: str, files: dict[str, torch.Tensor]) -> None:
    used: set[str] = set()
    for name, view in _pieces(model, kind):
        plain, cut = name.partition("[")[::2]
        if plain not in files:
            raise WeightsError(f"the weights do not match config.json ({kind}): {plain} is missing", hint="check both")
        tensor = files[plain]
        if cut:
            rows = len(tensor) // 3
            tensor = tensor[:rows] if cut == ":1]" else tensor[rows:]
        if tensor.numel() != view.numel():
            raise WeightsError(
                f"the weights do not match config.json ({kind}): {plain} has the shape {list(files[plain].shape)}",
                hint="check that both belong together",
            )
        view.copy_(tensor.reshape(view.shape))
        used.add(plain)
    if unknown := sorted(files.keys() - used):
        raise WeightsError(f"{kind}: {unknown[0]} is not in this model", hint="check that config.json belongs to it")


def _written(vit: ViTConfig) -> dict[str, Any]:
    return {
        "image_size": vit.image_size,
        "patch_size": vit.patch_size,
        "num_channels": vit.channels,
        "hidden_size": vit.hidden_size,
        "num_hidden_layers": vit.num_layers,
        "num_attention_heads": vit.num_heads,
        "intermediate_size": vit.intermediate_size,
        "hidden_act": NAMED_ACTS[vit.ffn],
        "layer_norm_eps": vit.eps,
    }


def hugging_face_config(config: ViTConfig | TowersConfig, kind: str) -> dict[str, Any]:
    """The config.json of a model of this kind; raises if that kind cannot describe it."""
    if isinstance(config, ViTConfig):
        body = _written(config) | ({"qkv_bias": config.qkv_bias} if kind == "vit" else {})
    else:
        assert isinstance(config.image, ViTConfig)
        text = config.text
        words = {
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.max_len,
            "hidden_size": text.hidden_size,
            "num_hidden_layers": text.num_layers,
            "num_attention_heads": text.num_heads,
            "intermediate_size": text.intermediate_size,
            "hidden_act": NAMED_ACTS.get(text.ffn, "none"),
            "layer_norm_eps": text.norm.eps,
            "eos_token_id": None,
            "bos_token_id": None,
            "pad_token_id": None,
        }
        body = {"vision_config": _written(config.image), "text_config": words}
        body |= {"projection_dim": config.dim} if kind == "clip" else {}
    hf = {"architectures": [KNOWN[kind].architecture], "model_type": kind, **body}
    if KNOWN[kind].read(hf) != config:
        raise WeightsError(f"{kind} cannot describe this model", hint=f"of the kinds {', '.join(KNOWN)} none may fit")
    return hf


def save_vision_checkpoint(model: ViT | TwoTowers, folder: str | Path, kind: str) -> None:
    """Write a folder that transformers loads as the class of `kind` (vit, clip, siglip, …)."""
    hf = hugging_face_config(model.config, kind)
    patch = model.config if isinstance(model, ViT) else model.config.image
    assert isinstance(patch, ViTConfig)
    tensors: dict[str, torch.Tensor] = {}
    for name, view in _pieces(model, kind):
        plain, cut = name.partition("[")[::2]
        tensor = view.detach().contiguous().clone()
        if "patch_embedding" in plain and plain.endswith("weight"):
            tensor = tensor.view(-1, patch.channels, patch.patch_size, patch.patch_size)
        elif plain.endswith(("cls_token", "position_embeddings", "probe")):
            tensor = tensor.view(1, -1, tensor.shape[-1])
        elif plain.endswith("class_embedding"):
            tensor = tensor.view(-1)
        elif ".attention.attention." in plain or "self_attn." in plain:
            tensor = tensor.reshape(-1, *view.shape[2:]) if "out_proj" not in plain else tensor
        elif plain in ("logit_scale", "logit_bias") and kind == "siglip":
            tensor = tensor.view(1)
        tensors[plain] = torch.cat((tensors[plain], tensor)) if cut == "1:]" else tensor
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    write_atomic(place / "config.json", json.dumps(hf, indent=2) + "\n")
