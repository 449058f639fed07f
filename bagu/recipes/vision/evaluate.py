"""What a model of pictures has learned, beside what needs no learning: nearest pixels, k-means of colours, chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional as F

from bagu.data.pictures.glyphs import SANS, UNSEEN, Concept, Language, concepts, in_style, masks
from bagu.data.pictures.paint import painted
from bagu.data.pictures.scenes import CHARS, COUNTS, DESCRIBE, RELATIONS, Drawn, Scene, draw_scenes, paint_scenes
from bagu.eval.intervals import compare, estimate
from bagu.nn.vision.group import GroupViT, upsample_guided
from bagu.nn.vision.towers import TwoTowers
from bagu.nn.vision.vit import ViT
from bagu.nn.vision.vlm import VLM
from bagu.recipes.vision.batches import prompt_of
from bagu.recipes.vision.run import Seeing, new_model
from bagu.train.objectives.vision_losses import packed_texts

CHUNK = 128


@torch.no_grad()
def text_vectors(seeing: Seeing, texts: Sequence[str]) -> torch.Tensor:
    assert isinstance(seeing.model, TwoTowers)
    device, found = seeing.model.log_scale.device, []
    for at in range(0, len(texts), CHUNK):
        packed = packed_texts([seeing.tokenizer.encode(t) for t in texts[at : at + CHUNK]])
        ids, positions, ends = (packed[name].to(device) for name in ("ids", "positions", "cu_seqlens"))
        vectors = seeing.model.text_vectors(ids, positions, ends, packed["max_len"])
        found.append(vectors)
    return torch.cat(found).float().cpu()


@torch.no_grad()
def image_vectors(seeing: Seeing, images: torch.Tensor) -> torch.Tensor:
    assert isinstance(seeing.model, TwoTowers)
    device = seeing.model.log_scale.device
    return torch.cat([seeing.model.image_vectors(part.to(device)) for part in images.split(CHUNK)]).float().cpu()


def ranks(scores: torch.Tensor, own: torch.Tensor) -> list[int]:
    """How many names score above the right one, for scores[N, names]."""
    return (scores > scores.gather(1, own.unsqueeze(1))).sum(1).tolist()


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Names found for pictures of a style: `names` to choose from, shares of `pictures` with the right name first and
    among five; the same for the nearest neighbour in raw pixels, and in pixels without colour and contrast."""

    style: str
    language: str
    pictures: int
    names: int
    r1: float
    r5: float
    pixels_r1: float
    shapes_r1: float
    difference_low: float  # of r1 and the better neighbour, 95 % interval
    difference_high: float


def _shape(x: torch.Tensor) -> torch.Tensor:
    grey = x.float().mean(1).flatten(1)
    return F.normalize(grey - grey.mean(1, keepdim=True), dim=1)


def unseen_style(seeing: Seeing, style: str, language: Language, *, seed: int = 7, size: int = 32) -> Recall:
    """Pictures of trained concepts in a font that was never trained on, and the names of all that the font draws. The
    neighbours are pictures of the same names in the four trained styles, drawn the same way."""
    among = in_style(style)
    asked = [i for i, c in enumerate(among) if not c.held_out]
    stream = torch.Generator().manual_seed(seed)
    pictures = painted(masks([among[i].char for i in asked], style), size, stream)
    known = painted(torch.cat([masks([c.char for c in among], s) for s in SANS]), size, stream)
    label, own = torch.arange(len(among)).repeat(len(SANS)), torch.tensor(asked)
    raw = torch.cdist(pictures.flatten(1).float(), known.flatten(1).float()).argmin(1)
    shape = (_shape(pictures) @ _shape(known).T).abs().argmax(1)  # abs: light on dark or dark on light
    found = ranks(image_vectors(seeing, pictures) @ text_vectors(seeing, [c.name(language) for c in among]).T, own)
    mine = [float(r < 1) for r in found]
    baselines = [(label[n] == own).float().tolist() for n in (raw, shape)]
    best = max(baselines, key=sum)
    change = compare(best, mine)
    return Recall(
        style=style,
        language=language,
        pictures=len(asked),
        names=len(among),
        r1=estimate(mine).mean,
        r5=sum(r < 5 for r in found) / len(found),
        pixels_r1=sum(baselines[0]) / len(asked),
        shapes_r1=sum(baselines[1]) / len(asked),
        difference_low=change.low,
        difference_high=change.high,
    )


def unseen_concepts(seeing: Seeing, language: Language, *, seed: int = 8, size: int = 32) -> dict[str, Any]:
    """Pictures of held-out concepts in the four trained styles, and the names of all held-out concepts."""
    among: list[Concept] = [c for c in concepts() if c.held_out]
    stream = torch.Generator().manual_seed(seed)
    pictures = painted(torch.cat([masks([c.char for c in among], s) for s in SANS]), size, stream)
    own = torch.arange(len(among)).repeat(len(SANS))
    found = ranks(image_vectors(seeing, pictures) @ text_vectors(seeing, [c.name(language) for c in among]).T, own)
    top = estimate([float(r < 5) for r in found], own.tolist())
    return {
        "language": language,
        "pictures": len(found),
        "names": len(among),
        "r5": top.mean,
        "low": top.low,
        "high": top.high,
        "chance": 5 / len(among),
        "r1": sum(r < 1 for r in found) / len(found),
    }


def clip_scores(
    seeing: Seeing, *, styles: Sequence[str] = UNSEEN, languages: Sequence[Language] = ("en", "zh")
) -> dict[str, Any]:
    rows = [asdict(unseen_style(seeing, style, lang)) for style in styles for lang in languages]
    return {"unseen_style": rows, "unseen_concepts": [unseen_concepts(seeing, lang) for lang in languages]}


# --- segmentation -----------------------------------------------------------------------------------------------------


def best_iou(labels: torch.Tensor, segments: torch.Tensor) -> list[float]:
    """Of every thing in labels[N, H, W] (1, 2, …) the largest IoU with one of the segments [N, H, W]."""
    found = []
    for truth, guess in zip(labels, segments, strict=True):
        parts = [guess == s for s in guess.unique()]
        for thing in range(1, int(truth.max()) + 1):
            own = truth == thing
            found.append(max(float((own & p).sum() / (own | p).sum()) for p in parts))
    return found


def kmeans(x: torch.Tensor, k: int, *, rounds: int = 12, seed: int = 0) -> torch.Tensor:
    """[N] clusters of x[N, D], from k-means++ starts."""
    stream = torch.Generator().manual_seed(seed)
    centres = x[torch.randint(len(x), (1,), generator=stream)]
    for _ in range(k - 1):
        far = torch.cdist(x, centres).amin(1).square() + 1e-12
        centres = torch.cat((centres, x[torch.multinomial(far, 1, generator=stream)]))
    for _ in range(rounds):
        near = torch.cdist(x, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add(0, near, x)
        count = torch.bincount(near, minlength=k).unsqueeze(1)
        centres = torch.where(count > 0, sums / count.clamp(min=1), centres)
    return torch.cdist(x, centres).argmin(1)


@torch.no_grad()
def patch_clusters(vit: ViT, images: torch.Tensor, k: int) -> torch.Tensor:
    """[N, k, rows, columns] of 0 and 1: k-means of a plain ViT's patches, per image."""
    out = []
    for image in images:
        seen = vit(image.unsqueeze(0).to(vit.patches.weight.device))
        near = kmeans(seen.hidden[seen.packed.rows].float().cpu(), k)
        out.append(F.one_hot(near, k).T.unflatten(1, seen.packed.grids[0]).float())
    return torch.stack(out)


def true_patches(labels: torch.Tensor, patch: int, ground: float) -> torch.Tensor:
    """[N, things + 1, rows, columns] of 0 and 1: the right thing of every patch. The ground counts `ground` times,
    because strokes are thinner than a patch."""
    share = F.avg_pool2d(F.one_hot(labels.long()).permute(0, 3, 1, 2).float(), patch)
    share[:, 0] *= ground
    return F.one_hot(share.argmax(1), share.shape[1]).permute(0, 3, 1, 2).float()


def map_scores(name: str, maps: torch.Tensor, drawn: Drawn) -> dict[str, float]:
    """mIoU of maps of patches at the pixels, guided by colours and by interpolation alone."""
    size = tuple(drawn.labels.shape[-2:])
    plain = F.interpolate(maps, size, mode="bilinear").argmax(1)
    guided = upsample_guided(maps, drawn.pictures).argmax(1)
    return {
        name: estimate(best_iou(drawn.labels, guided)).mean,
        f"{name}_unguided": estimate(best_iou(drawn.labels, plain)).mean,
    }


def coloured_places(images: torch.Tensor, k: int, places: float) -> torch.Tensor:
    """[N, H, W] clusters of the pixels of images[N, 3, H, W]: k-means of their colours and, `places` times as much, of
    where they are, each in deviations of the image."""
    rows, columns = images.shape[-2:]
    where = torch.cartesian_prod(torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns))
    out = []
    for image in images.float():
        parts = [image.flatten(1).T] + ([where] if places else [])
        scales = (1.0, places)
        found = [
            (x - x.mean(0)) / x.var(0).sum().sqrt().clamp(min=1e-6) * w for x, w in zip(parts, scales, strict=False)
        ]
        out.append(kmeans(torch.cat(found, 1), k).view(rows, columns))
    return torch.stack(out)


def segment_scores(seeing: Seeing, plain: Seeing | None, *, count: int = 120, seed: int = 9) -> dict[str, Any]:
    """mIoU over the things of held-out scenes of 2 or 3: GroupViT as trained and with its first weights, k-means of
    colours, of colours and places, of a plain ViT's patches, and an oracle of patches; k-means and the oracle with the
    best of several settings. Maps of patches go to pixels in the same two ways, whatever they come from."""
    assert isinstance(seeing.model, TwoTowers) and isinstance(seeing.model.image, GroupViT)
    stream = torch.Generator().manual_seed(seed)
    drawn = paint_scenes(draw_scenes(count, stream, least=2, most=3), stream)
    result: dict[str, Any] = {"scenes": count}
    for name, model in (("groupvit", seeing.model), ("untrained", new_model(seeing.run).eval())):
        assert isinstance(model, TwoTowers) and isinstance(model.image, GroupViT)
        device = model.log_scale.device
        shares = torch.cat([model.image.shares(p.to(device)).cpu() for p in drawn.pictures.split(32)])
        result |= map_scores(name, shares, drawn)
        result[f"{name}_groups"] = sum(len(groups.unique()) for groups in shares.argmax(1)) / count
    best: dict[str, list[float]] = {}
    for ground in (0.15, 0.4):
        maps = true_patches(drawn.labels, seeing.model.image.config.vit.patch_size, ground)
        for name, value in map_scores("oracle", maps, drawn).items():
            best.setdefault(name, []).append(value)
    for k in (2, 3, 4, 6, 8):
        found = {
            name: estimate(best_iou(drawn.labels, coloured_places(drawn.pictures, k, places))).mean
            for name, places in (("colours", 0.0), ("colours_and_places", 1.0))
        }
        if plain is not None and isinstance(plain.model, TwoTowers) and isinstance(plain.model.image, ViT):
            found |= map_scores("vit", patch_clusters(plain.model.image, drawn.pictures, k), drawn)
        for name, value in found.items():
            best.setdefault(name, []).append(value)
            result[f"{name}_{k}"] = value
    return result | {name: max(values) for name, values in best.items()}


# --- answers ----------------------------------------------------------------------------------------------------------


def answers(seeing: Seeing, pictures: torch.Tensor, asks: Sequence[str], *, max_new: int = 32) -> list[str]:
    """Greedy answers to one question about each picture."""
    model = seeing.model
    assert isinstance(model, VLM)
    device, end = model.decoder.embedding.weight.device, seeing.tokenizer.token_id("<|end|>")
    out: list[str] = []
    for at in range(0, len(asks), CHUNK):
        prompts = [prompt_of(seeing.tokenizer, model.config.image_tokens, a) for a in asks[at : at + CHUNK]]
        found = model.answer(prompts, pictures[at : at + CHUNK].to(device), max_new, end)
        out += [seeing.tokenizer.decode(ids) for ids in found]
    return out


def answer_scores(
    seeing: Seeing, *, styles: tuple[str, ...] = SANS, language: Language = "en", count: int = 256, seed: int = 11
) -> dict[str, Any]:
    """Exact answers about held-out scenes by kind of question, exact captions, and what guessing gives."""
    stream = torch.Generator().manual_seed(seed)
    scenes: list[Scene] = draw_scenes(count, stream)
    pictures = paint_scenes(scenes, stream, styles=styles).pictures
    captions = answers(seeing, pictures, [DESCRIBE[language]] * count)
    right = [float(c == s.caption(language)) for c, s in zip(captions, scenes, strict=True)]
    asked = [(i, q) for i, s in enumerate(scenes) for q in s.questions(language)]
    replies = answers(seeing, pictures[[i for i, _ in asked]], [q.ask for _, q in asked])
    kinds: dict[str, list[float]] = {}
    for (_, q), reply in zip(asked, replies, strict=True):
        kinds.setdefault("relation" if q.kind in RELATIONS else q.kind, []).append(float(reply == q.answer))
        if q.kind in RELATIONS:
            kinds.setdefault(q.kind, []).append(float(reply == q.answer))
    whole = estimate(right)
    return {
        "styles": list(styles),
        "language": language,
        "scenes": count,
        "caption_exact": whole.mean,
        "caption_low": whole.low,
        "chance_relation": 1 / len(CHARS),
        "chance_count": 1 / (len(COUNTS["en"]) - 1),
        **{name: estimate(found).mean for name, found in kinds.items()},
    }


def vlm_scores(seeing: Seeing) -> dict[str, Any]:
    """Answers in the trained styles and in fonts that were never trained on."""
    plans: list[tuple[tuple[str, ...], Language]] = [(SANS, "en"), (UNSEEN, "en"), (UNSEEN, "zh")]
    return {"answers": [answer_scores(seeing, styles=styles, language=lang) for styles, lang in plans]}
