"""The page of a run with pictures: its loss, its scores, and what it sees, as pictures inside the file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from bagu.config import write_atomic
from bagu.data.pictures.glyphs import SANS, UNSEEN, Language, in_style, masks
from bagu.data.pictures.paint import painted
from bagu.data.pictures.read import encode_png
from bagu.data.pictures.scenes import DESCRIBE, draw_scenes, paint_scenes
from bagu.machine.terminal import counted
from bagu.nn.vision.group import GroupViT
from bagu.nn.vision.towers import TwoTowers
from bagu.nn.vision.vlm import VLM
from bagu.recipes.vision.evaluate import answers, image_vectors, text_vectors
from bagu.recipes.vision.run import Seeing
from bagu.runs.charts import Chart, Line
from bagu.runs.folder import RunFolder
from bagu.runs.html import grid, text

SHOWN = 12
PALETTE = torch.tensor(
    [[68, 1, 84], [253, 231, 37], [33, 145, 140], [59, 82, 139], [94, 201, 98], [230, 97, 1], [178, 24, 43], [90] * 3]
)
STYLE = """.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:14px}
.tiles figure{margin:0}.tiles img{width:128px;height:128px;image-rendering:pixelated;border:1px solid #8884}
.tiles figcaption{font-size:13px;line-height:1.35}.right{color:#1a7f37}.wrong{color:#b3261e}"""


def picture(pixels: torch.Tensor) -> str:
    """An <img> of [3, H, W] uint8, as a data URL."""
    data = base64.b64encode(encode_png(pixels.cpu())).decode()
    return f'<img alt="" src="data:image/png;base64,{data}">'


def tiles(items: Sequence[tuple[torch.Tensor, str]]) -> str:
    return (
        '<div class="tiles">'
        + "".join(f"<figure>{picture(p)}<figcaption>{c}</figcaption></figure>" for p, c in items)
        + "</div>"
    )


def marked(words: str, right: bool) -> str:
    return f'<span class="{"right" if right else "wrong"}">{text(words)}</span>'


def retrievals(seeing: Seeing, *, seed: int = 21) -> str:
    """Pictures in fonts that were never trained on, and the three names that the model finds for each."""
    stream, items = torch.Generator().manual_seed(seed), []
    for number, style in enumerate(UNSEEN):
        among = in_style(style)
        language = "zh" if number % 2 else "en"
        names = [c.en if language == "en" else c.zh for c in among]
        chosen = torch.randperm(len(among), generator=stream)[: SHOWN // len(UNSEEN)].tolist()
        pixels = painted(masks([among[i].char for i in chosen], style), 32, stream)
        scores = image_vectors(seeing, pixels) @ text_vectors(seeing, names).T
        for i, image, row in zip(chosen, pixels, scores, strict=True):
            found = row.topk(3).indices.tolist()
            lines = "<br>".join(marked(names[f], f == i) for f in found)
            items.append((image, f"{lines}<br><small>{text(style)}: {text(names[i])}</small>"))
    return tiles(items)


def segment_maps(seeing: Seeing, *, seed: int = 22) -> str:
    """Scenes, and the group of every pixel as a colour."""
    assert isinstance(seeing.model, TwoTowers) and isinstance(seeing.model.image, GroupViT)
    stream = torch.Generator().manual_seed(seed)
    scenes = draw_scenes(SHOWN // 2, stream, least=2, most=3)
    pixels = paint_scenes(scenes, stream).pictures
    maps = seeing.model.image.segments(pixels.to(seeing.model.log_scale.device)).cpu()
    coloured = PALETTE[maps % len(PALETTE)].permute(0, 3, 1, 2).to(torch.uint8)
    items = []
    for scene, image, groups, colour in zip(scenes, pixels, maps, coloured, strict=True):
        items.append((image, text(scene.caption("en"))))
        items.append((colour, counted(len(groups.unique()), "group")))
    return tiles(items)


def answered(seeing: Seeing, *, seed: int = 23) -> str:
    """Scenes in fonts that were never trained on, a caption or a question, and the answer."""
    stream = torch.Generator().manual_seed(seed)
    scenes = draw_scenes(SHOWN, stream, least=2)
    pixels = paint_scenes(scenes, stream, styles=UNSEEN).pictures
    asks, wanted = [], []
    for number, scene in enumerate(scenes):
        language: Language = "zh" if number % 4 == 3 else "en"
        questions = scene.questions(language)
        ask, answer = (DESCRIBE[language], scene.caption(language)) if number % 3 == 0 else questions[1][1:]
        asks.append(ask)
        wanted.append(answer)
    found = answers(seeing, pixels, asks)
    lines = [
        f"{text(a)}<br>{marked(f, f == w)}" + ("" if f == w else f"<br><small>{text(w)}</small>")
        for a, f, w in zip(asks, found, wanted, strict=True)
    ]
    return tiles(list(zip(pixels, lines, strict=True)))


def section(seeing: Seeing, folder: Path, scores: Mapping[str, Any]) -> str:
    """One run as HTML."""
    run, parameters = seeing.run, sum(p.numel() for p in seeing.model.parameters())
    rows = RunFolder(folder).metrics()
    curve = Chart(
        lines=[Line(name="loss", points=[(r["step"], r["loss_nats"]) for r in rows if "loss_nats" in r])], unit="nats"
    ).svg()
    if isinstance(seeing.model, VLM):
        title, shown = "Answers about scenes in fonts it has never seen", answered(seeing)
    elif isinstance(seeing.model.image, GroupViT):
        title, shown = "Scenes and their groups", segment_maps(seeing)
    else:
        title, shown = "Names found for pictures in fonts it has never seen", retrievals(seeing)
    tables = "".join(_score_table(name, value) for name, value in scores.items() if isinstance(value, list))
    single = [(k, v) for k, v in scores.items() if not isinstance(v, list)]
    facts = f"{parameters / 1e6:.2f} M parameters, {run.train.steps:,} steps of {run.rows} pictures"
    return (
        f"<section><h2>{text(run.kind)}</h2><p>{facts}</p>{curve}<h3>{title}</h3>{shown}{tables}"
        + (grid(["measure", "value"], single) if single else "")
        + "</section>"
    )


def _score_table(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(rows[0])
    cells = [[", ".join(v) if isinstance(v := row[c], list) else v for c in columns] for row in rows]
    return f"<h3>{text(name.replace('_', ' '))}</h3>" + grid([c.replace("_", " ") for c in columns], cells)


def write_page(
    sections: Sequence[str], path: Path, title: str, left_out: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """`left_out` has the reason for each recipe that was not trained."""
    missing = "".join(f"<p>{text(name)} was {text(why)}.</p>" for name, why in left_out.items())
    css = (files("bagu.runs") / "report.css").read_text(encoding="utf-8")
    write_atomic(
        path,
        f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{text(title)}</title>
<style>{css}{STYLE}</style></head><body><main><h1>{text(title)}</h1>
<p>Trained on fonts {text(", ".join(SANS))}; pictures are made on this machine, nothing is downloaded.</p>
{"".join(sections)}{missing}</main></body></html>
""",
    )
    return path
