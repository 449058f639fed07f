"""Runs with pictures: the recipes `clip`, `groupvit` and `vlm`, from a configuration to a folder with a model.

They use the training loop of every other run. A model of them is a folder of config.json, model.safetensors and the
tokenizer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from safetensors.torch import load_file, save_file
from torch import nn

from bagu import config as configs
from bagu.config import write_atomic
from bagu.data.pictures.scenes import DESCRIBE
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.machine.device import named_device
from bagu.nn.choices import NormConfig
from bagu.nn.config import ModelConfig
from bagu.nn.model import Transformer
from bagu.nn.position_choices import Learned
from bagu.nn.vision.group import GroupViTConfig, Stage
from bagu.nn.vision.towers import TowersConfig, TwoTowers, init_vision
from bagu.nn.vision.vit import ViTConfig
from bagu.nn.vision.vlm import VLM, VLMConfig
from bagu.recipes.generation import suggest
from bagu.recipes.vision.batches import (
    IMAGE,
    SPECIAL,
    Make,
    PictureLoader,
    answer_batches,
    corpus_texts,
    glyph_batches,
    pair_batches,
    scene_batches,
)
from bagu.runs.folder import RunFolder, RunRecorder
from bagu.runs.observer import Observer
from bagu.runs.progress import TrainProgress
from bagu.train import OptimizerConfig, ScheduleConfig, TrainConfig, fit
from bagu.train.loss import Loss
from bagu.train.objectives.vision_losses import AnswerLoss, RewardedLoss, TowersLoss

MODEL, TOKENIZER = "model", "tokenizer"
Kind = Literal["clip", "groupvit", "vlm", "scenes"]
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}" + IMAGE + "{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class VisionRun:
    """A run with pictures. `data` is a folder or JSON lines of a user; None: glyphs for clip, scenes for the others.
    `rows` are the pictures of a step, `vocab_size` the size of a new tokenizer, `samples` the rewarded answers to a
    question."""

    kind: Kind
    model: TowersConfig | VLMConfig
    train: TrainConfig
    rows: int
    data: str | None = None
    vocab_size: int = 1024
    samples: int = 8
    device: str | None = None


def _vit(size: int, patch: int, width: int, layers: int) -> ViTConfig:
    return ViTConfig(
        image_size=size,
        patch_size=patch,
        hidden_size=width,
        num_layers=layers,
        num_heads=width // 32,
        intermediate_size=4 * width,
        standardize=True,
    )


def _text(width: int, layers: int, *, max_len: int) -> ModelConfig:
    """A bidirectional text tower."""
    return ModelConfig(
        vocab_size=1024, hidden_size=width, num_layers=layers, num_heads=width // 32, num_kv_heads=width // 32,
        head_dim=32, intermediate_size=4 * width, max_len=max_len, causal=False, lm_head=False, positions=Learned(),
        norm=NormConfig(kind="layer", bias=True, eps=1e-6), ffn="gelu", qkv_bias=True, out_bias=True, ffn_bias=True,
    )  # fmt: skip


def _decoder(width: int, layers: int, *, max_len: int) -> ModelConfig:
    """A small Llama with a tied head."""
    return ModelConfig(
        vocab_size=1024,
        hidden_size=width,
        num_layers=layers,
        num_heads=width // 32,
        num_kv_heads=width // 32,
        head_dim=32,
        intermediate_size=3 * width,
        max_len=max_len,
        tie_embeddings=True,
    )


def _train(steps: int, lr: float) -> TrainConfig:
    return TrainConfig(
        steps=steps,
        save_every=steps,
        keep_last=1,
        optimizer=OptimizerConfig(kind="muon", lr=lr, weight_decay=0.02),
        schedule=ScheduleConfig(kind="wsd", warmup_steps=min(20, steps // 10), decay_share=0.5),
    )


def clip() -> VisionRun:
    """Two towers over the glyphs: 32 × 32 pixels, patches of 8, names in English and Chinese."""
    model = TowersConfig(image=_vit(32, 8, 128, 4), text=_text(128, 2, max_len=64), dim=128)
    # of 800 steps: Muon at 0.005 names 60 % of the pictures in an unseen font, at 0.002 54 %, AdamW at 1e-3 3 %
    return VisionRun(kind="clip", model=model, rows=256, train=_train(800, 0.005))


def groupvit() -> VisionRun:
    """Two towers over scenes and captions, whose image tower takes the patches of 8 pixels into 8 groups."""
    group = GroupViTConfig(vit=_vit(64, 8, 96, 1), stages=(Stage(layers=2, groups=8),), carry=False)
    model = TowersConfig(image=group, text=_text(96, 2, max_len=64), dim=96)
    return VisionRun(kind="groupvit", model=model, rows=64, train=_train(400, 0.003))


def vlm() -> VisionRun:
    """A ViT of patches of 8 on scenes of 64 × 64, 16 tokens an image, and a decoder of 4 layers."""
    model = VLMConfig(
        vit=_vit(64, 8, 128, 4),
        decoder=_decoder(128, 4, max_len=256),
        image_token=SPECIAL.index(IMAGE),
        shuffle=2,
    )
    return VisionRun(kind="vlm", model=model, rows=64, train=_train(1000, 0.003))


def scenes() -> VisionRun:
    """GRPO on questions about scenes, from the result of `vlm`."""
    return replace(vlm(), kind="scenes", rows=32, train=_train(100, 0.0005))


RECIPES: dict[str, Callable[[], VisionRun]] = {f.__name__: f for f in (clip, groupvit, vlm, scenes)}


def vision_recipe(name: str) -> VisionRun:
    UnknownName.check("recipe", name, RECIPES)
    return RECIPES[name]()


def with_steps(run: VisionRun, steps: int) -> VisionRun:
    """The run of so many steps, its warm-up and saves with them."""
    schedule = replace(run.train.schedule, warmup_steps=min(20, steps // 10))
    return replace(run, train=replace(run.train, steps=steps, save_every=steps, schedule=schedule))


def new_tokenizer(run: VisionRun, extra: Sequence[str] = ()) -> BpeTokenizer:
    return BpeTokenizer.train(
        [*corpus_texts(), *extra], vocab_size=run.vocab_size, special_tokens=SPECIAL, chat_template=CHAT
    )


def new_model(run: VisionRun) -> TwoTowers | VLM:
    model = TwoTowers(run.model) if isinstance(run.model, TowersConfig) else VLM(run.model)
    init_vision(model, run.train.seed)
    return model


def batches_of(run: VisionRun, tokenizer: BpeTokenizer, model: nn.Module) -> Make:
    """`model` answers the questions of recipe scenes."""
    if isinstance(run.model, VLMConfig):
        if run.data is not None:
            raise BaguError(f"recipe {run.kind} trains on scenes, and data is given", hint="leave it out")
        if run.kind == "scenes":
            from bagu.recipes.vision.policy import rollout_batches

            assert isinstance(model, VLM)
            return rollout_batches(model, tokenizer, run.rows, run.samples)
        return answer_batches(tokenizer, run.rows, run.model.image_tokens)
    image = run.model.image
    size = image.image_size if isinstance(image, ViTConfig) else image.vit.image_size
    if run.data is not None:
        return pair_batches(Path(run.data), tokenizer, run.rows, size)
    return glyph_batches(tokenizer, run.rows, size) if run.kind == "clip" else scene_batches(tokenizer, run.rows)


def loss_of(run: VisionRun) -> Loss[Any, Any]:
    if isinstance(run.model, TowersConfig):
        return TowersLoss()
    return RewardedLoss() if run.kind == "scenes" else AnswerLoss()


@dataclass(frozen=True, kw_only=True)
class Seeing:
    """A trained model of pictures, its tokenizer and its run."""

    run: VisionRun
    model: TwoTowers | VLM
    tokenizer: BpeTokenizer
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def train_vision(
    run: VisionRun, out: Path, *, resume: bool = False, progress: Observer | None = None, start: Path | None = None
) -> Seeing:
    """Train a run in the folder `out`, and save its model. `start` is a run whose equal-named, equal-shaped weights
    are taken over: the ViT of `clip` for a `vlm`."""
    begun: Seeing | None = None
    if run.kind == "scenes" and not resume:
        if start is None:
            raise ArgumentError("recipe scenes needs a model that answers", hint="--from runs/vlm, of recipe vlm")
        begun = load_vision(start)
        run = replace(run, model=begun.run.model)
    folder = RunFolder.claim(out, resume=resume)
    try:
        extra = []
        if run.data is not None:
            from bagu.data.pictures.read import pairs_of

            extra = [pair.text for pair in pairs_of(Path(run.data))]
        known = out / TOKENIZER
        own = None if begun is None else begun.tokenizer
        tokenizer = BpeTokenizer.load(known) if known.is_dir() else own or new_tokenizer(run, extra)
        device = named_device(run.device)
        model = new_model(run).to(device)
        if start is not None:
            take_over(model, start)
        loader = PictureLoader(batches_of(run, tokenizer, model), run.train.seed)
        folder.begin(run)
        tokenizer.save(known)
        shown = progress or TrainProgress(run.train.steps, name=run.kind, formats={"loss_nats": "loss {:.3f} nats"})
        wall, cpu = time.monotonic(), time.process_time()
        with RunRecorder(folder, progress=shown, tensorboard=False) as recorder:
            result = fit(
                run.train,
                cast(Transformer, model),
                loader,
                loss=loss_of(run),
                folder=folder.checkpoints,
                resume=resume,
                observers=[recorder],
            )
        if result.interrupted:
            raise KeyboardInterrupt
        took = time.monotonic() - wall, time.process_time() - cpu
    finally:
        folder.close()
    done = Seeing(run=run, model=model.eval(), tokenizer=tokenizer, seconds=took[0], cpu_seconds=took[1])
    save_vision(done, out / MODEL)
    return done


def take_over(model: nn.Module, start: Path) -> int:
    """Copy the weights of another model that have the same names and shapes; return their number."""
    others = load_vision(start).model.state_dict()
    renamed = {
        name.replace("image.", "vit.", 1) if name.startswith("image.") else name: t for name, t in others.items()
    }
    own = model.state_dict()
    same = {name: t for name, t in renamed.items() if name in own and own[name].shape == t.shape}
    if not same:
        raise BaguError(f"{start} has no weights in common with this model", hint="leave --from out")
    model.load_state_dict(same, strict=False)
    return len(same)


def save_vision(done: Seeing, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.detach().cpu().contiguous() for k, v in done.model.state_dict().items()}, folder / "model.safetensors"
    )
    done.tokenizer.save(folder)
    if isinstance(done.model, VLM):
        suggest(folder, [DESCRIBE["en"], "how many things are there?", DESCRIBE["zh"]])
    write_atomic(folder / "vision.json", json.dumps(configs.to_dict(done.run), indent=2) + "\n")


def load_vision(path: Path, device: str | None = None) -> Seeing:
    """The model of a run's folder, or of the folder `model` in it."""
    folder = path if (path / "vision.json").is_file() else path / MODEL
    if not (folder / "vision.json").is_file():
        raise ArgumentError(f"{path} holds no model of pictures", hint="bagu train --recipe clip --out runs/clip")
    run = configs.from_dict(VisionRun, json.loads((folder / "vision.json").read_text("utf-8")))
    model = TwoTowers(run.model) if isinstance(run.model, TowersConfig) else VLM(run.model)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return Seeing(run=run, model=model.to(named_device(device)).eval(), tokenizer=BpeTokenizer.load(folder))


def pace_of(run: VisionRun) -> float:
    """Seconds of a training step here: of one after a small one, which pays what only a first step costs."""
    tokenizer = new_tokenizer(run)
    model = cast(Transformer, new_model(run).to(named_device(run.device)))
    took = 0.0
    for rows in (max(2, run.rows // 8), run.rows):
        timed = replace(run, rows=rows)
        loader = PictureLoader(batches_of(timed, tokenizer, model), run.train.seed)
        began = time.monotonic()
        fit(replace(with_steps(timed, 1).train, save_every=None), model, loader, loss=loss_of(run))
        took = time.monotonic() - began
    return took


def steps_in(run: VisionRun, minutes: float) -> int:
    """The number of steps that take about so many minutes here."""
    return max(20, int(60 * minutes / pace_of(run)))
