"""Pictures: names, splits, scenes, and files of others."""

import hashlib
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from bagu.data.pictures import concepts, decode, digest, draw_scenes, encode_png, paint_scenes, pairs_of
from bagu.data.pictures.chinese import chinese_name
from bagu.data.pictures.command import add, show
from bagu.data.pictures.glyphs import SANS, UNSEEN, in_style, mask, masks
from bagu.data.pictures.paint import painted
from bagu.data.pictures.scenes import CHARS
from bagu.errors import ArgumentError, BaguError


def test_the_corpus_is_the_same_on_every_machine():
    lines = "\n".join(f"{c.char} {c.en} {c.zh} {c.family} {c.held_out}" for c in concepts())
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == "cbf58a1599918c04"
    assert len(concepts()) == 1434 and sum(c.held_out for c in concepts()) == 170
    assert [len(in_style(style)) for style in UNSEEN] == [970, 911, 753]


def test_a_family_is_held_out_as_a_whole():
    by_family: dict[int, set[bool]] = {}
    for c in concepts():
        by_family.setdefault(c.family, set()).add(c.held_out)
    assert all(len(parts) == 1 for parts in by_family.values())
    squares = {c.family for c in concepts() if c.en in ("black square", "white square", "white small square")}
    assert len(squares) == 1


def test_chinese_names_follow_the_words():
    assert chinese_name("BLACK CHESS KNIGHT") == "黑国际象棋马"
    assert chinese_name("SQUARE WITH LEFT HALF BLACK") == "带左半黑的方块"
    assert chinese_name("BLACK NOSUCHWORD") is None
    assert all(c.zh and not c.zh.isascii() for c in concepts() if c.held_out)


def test_every_style_draws_every_thing_of_the_scenes():
    for style in (*SANS, *UNSEEN):
        assert all(mask(char, style).any() for char in CHARS), style


def test_pictures_are_a_function_of_the_seed():
    drawn = [painted(masks(["☂", "■"], SANS[0]), 32, torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert drawn[0].shape == (2, 3, 32, 32) and drawn[0].dtype == torch.uint8
    assert drawn[0].equal(drawn[1]) and not drawn[0].equal(drawn[2])


def test_scenes_have_exact_masks_captions_and_answers():
    stream = torch.Generator().manual_seed(3)
    scenes = draw_scenes(40, stream)
    drawn = paint_scenes(scenes, stream)
    for scene, labels in zip(scenes, drawn.labels, strict=True):
        assert set(labels.unique().tolist()) == set(range(len(scene.things) + 1))
        for i, cell in enumerate(scene.cells):
            rows, columns = torch.nonzero(labels == i + 1, as_tuple=True)
            assert set((rows // 32 * 2 + columns // 32).tolist()) == {cell}
        for kind, ask, answer in scene.questions("en"):
            if kind == "left":  # the answer stands before the asked thing in the caption
                asked = ask.removeprefix("what is left of the ").removesuffix("?")
                caption = scene.caption("en")
                assert 0 <= caption.index(f" {answer}") < caption.index(f" {asked}")
    assert len({s.caption("zh") for s in scenes}) == len({s.caption("en") for s in scenes})


def _bytes(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_every_kind_of_picture_becomes_rgb():
    red = Image.new("RGB", (6, 4), (200, 0, 0))
    assert decode(_bytes(red, "PNG")).equal(torch.tensor([200, 0, 0], dtype=torch.uint8)[:, None, None].expand(3, 4, 6))
    assert decode(_bytes(red.convert("P"), "PNG"))[0].float().mean() > 150
    assert decode(_bytes(red.convert("CMYK"), "JPEG")).shape == (3, 4, 6)
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert (decode(_bytes(clear, "PNG")) == 255).all()
    deep = Image.fromarray(np.full((4, 4), 40000, dtype=np.uint16))
    assert abs(int(decode(_bytes(deep, "PNG"))[0, 0, 0]) - 40000 // 257) <= 1
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert decode(_bytes(red, "JPEG", exif=exif)).shape == (3, 6, 4)
    frames = [Image.new("RGB", (4, 4), c) for c in ("red", "blue")]
    assert decode(_bytes(frames[0], "GIF", save_all=True, append_images=frames[1:]))[0, 0, 0] > 200
    small = decode(_bytes(red, "PNG"), 32)
    assert small.shape == (3, 32, 32) and (small[:, 0, 0] == 255).all()
    assert digest(small) == digest(decode(encode_png(small))) != digest(small.flip(2).flip(0))


@pytest.mark.parametrize("data", [b"", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_what_is_no_picture_is_refused(data):
    with pytest.raises(ArgumentError, match="cannot be read"):
        decode(data)


def test_truncated_and_huge_pictures_are_refused():
    whole = _bytes(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)), "PNG")
    with pytest.raises(ArgumentError, match="cannot be read"):
        decode(whole[: len(whole) // 2])
    bomb = bytearray(whole)
    bomb[16:24] = (65535).to_bytes(4, "big") * 2
    with pytest.raises(ArgumentError):
        decode(bytes(bomb))
    with pytest.raises(ArgumentError, match="100000 × 1"):
        decode(_bytes(Image.new("L", (100_000, 1)), "PNG"))


def test_users_bring_a_folder_json_lines_or_a_font(tmp_path, monkeypatch):
    monkeypatch.setenv("BAGU_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "red_house.png").write_bytes(_bytes(Image.new("RGB", (8, 8), "red"), "PNG"))
    (folder / "b.png").write_bytes(_bytes(Image.new("RGB", (8, 8), "blue"), "PNG"))
    (folder / "b.txt").write_text("蓝色的房子", encoding="utf-8")
    assert sorted(p.text for p in pairs_of(folder)) == ["red house", "蓝色的房子"]
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"image": "b.png", "text": "blue"}) + "\n")
    file, count = add(rows)
    assert count == 1 and pairs_of(file)[0].text == "blue"
    rows.write_text('{"image": "b.png"}\n')
    with pytest.raises(BaguError, match=r"rows\.jsonl:1"):
        pairs_of(rows)
    with pytest.raises(BaguError, match="no images"):
        (tmp_path / "none").mkdir()
        pairs_of(tmp_path / "none")


def test_show_writes_a_picture(tmp_path):
    out = tmp_path / "x.png"
    assert any("umbrella" in line for line in show("umbrella", out))
    assert decode(out.read_bytes()).shape[2] == 64 * 7
    assert len(show("scenes", out)) == 8
    with pytest.raises(BaguError, match="nosuchname"):
        show("nosuchname", out)
