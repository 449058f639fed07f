"""Recipes with pictures, at a tiny size: training, resume, scores, pages."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from bagu import config as configs
from bagu.data.pictures import encode_png
from bagu.errors import ArgumentError, BaguError
from bagu.recipes.verbs import TrainOptions
from bagu.recipes.vision import run as runs
from bagu.recipes.vision.batches import IMAGE, SPECIAL, answer_batches, glyph_batches, prompt_of
from bagu.recipes.vision.budget import SCORES, SHARES, Budget
from bagu.recipes.vision.command import demo_vision, train_main
from bagu.recipes.vision.evaluate import best_iou, kmeans, unseen_concepts
from bagu.recipes.vision.policy import rewarded_batch
from bagu.recipes.vision.run import VisionRun, load_vision, new_tokenizer, train_vision, vision_recipe, with_steps
from bagu.train.objectives.vision_losses import RewardedLoss
from bagu.types import IGNORE

TINY = {
    "clip": ["rows=16", "model.image.num_layers=1", "model.image.hidden_size=32", "model.image.num_heads=1",
             "model.image.intermediate_size=32", "model.text.num_layers=1"],
    "groupvit": ["rows=4", "model.image.vit.hidden_size=32", "model.image.vit.num_heads=1",
                 "model.image.vit.patch_size=16", "model.text.num_layers=1"],
    "vlm": ["rows=4", "model.vit.hidden_size=32", "model.vit.num_heads=1", "model.vit.num_layers=1",
            "model.vit.patch_size=16", "model.decoder.num_layers=1"],
}  # fmt: skip


RECIPES = dict(runs.RECIPES)  # tests replace those of the package


def tiny(name: str, steps: int = 2) -> VisionRun:
    return with_steps(configs.override(RECIPES[name](), TINY[name]), steps)


@pytest.fixture(scope="module")
def tokenizer():
    return new_tokenizer(vision_recipe("clip"))


@pytest.mark.parametrize("name", ["clip", "groupvit", "vlm"])
def test_a_run_leaves_a_model_that_loads_with_the_same_weights(tmp_path, name):
    done = train_vision(tiny(name), tmp_path / "run")
    again = load_vision(tmp_path / "run")
    for key, value in done.model.state_dict().items():
        assert value.equal(again.model.state_dict()[key]), key
    assert again.run == done.run and len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert all(torch.isfinite(p).all() for p in again.model.parameters())


def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path, monkeypatch):
    run = configs.override(tiny("groupvit", 4), ["train.save_every=2"])  # its noise is drawn in every step
    whole = train_vision(run, tmp_path / "whole").model.state_dict()
    fit = runs.fit
    monkeypatch.setattr(runs, "fit", lambda *a, **k: fit(*a, **k, pause_after=2))
    train_vision(run, tmp_path / "parts")
    monkeypatch.setattr(runs, "fit", fit)
    parts = train_vision(run, tmp_path / "parts", resume=True).model.state_dict()
    assert all(value.equal(parts[key]) for key, value in whole.items())


def test_a_batch_has_one_picture_per_family_and_nothing_held_out(tokenizer):
    from bagu.data.pictures import concepts

    batch = glyph_batches(tokenizer, 200, 32)(torch.Generator().manual_seed(0))
    ends = batch.cu_seqlens.tolist()
    texts = {tokenizer.decode(batch.ids[a:b].tolist()) for a, b in pairwise(ends)}
    families = {text: c.family for c in concepts() for text in (c.en, c.zh)}
    assert len({families[t] for t in texts}) == 200
    assert not texts & {text for c in concepts() if c.held_out for text in (c.en, c.zh)}


def test_only_answers_are_learned(tokenizer):
    batch = answer_batches(tokenizer, 6, 4)(torch.Generator().manual_seed(1))
    ends, image = batch.cu_seqlens.tolist(), tokenizer.token_id(IMAGE)
    assert (batch.ids == image).sum() == 24 and batch.num_targets == int((batch.targets != IGNORE).sum())
    for a, b in pairwise(ends):
        ids, targets = batch.ids[a:b].tolist(), batch.targets[a:b].tolist()
        start = ids.index(tokenizer.token_id("<|assistant|>"))
        assert targets[:start] == [IGNORE] * start and targets[-1] == tokenizer.token_id("<|end|>")
        assert targets[start:-1] == ids[start + 1 :]


def test_a_placeholder_that_a_user_types_is_text(tokenizer):
    assert tokenizer.token_id(IMAGE) not in tokenizer.encode(f"what is {IMAGE} here?")
    assert prompt_of(tokenizer, 3, IMAGE).count(tokenizer.token_id(IMAGE)) == 3


def test_best_iou_and_kmeans():
    labels = torch.tensor([[[0, 0, 1, 1], [0, 0, 2, 2]]])
    assert best_iou(labels, labels.clone()) == [1.0, 1.0]
    assert best_iou(labels, (labels > 0).long()) == [0.5, 0.5]
    points = torch.cat((torch.randn(20, 2), torch.randn(20, 2) + 30))
    found = kmeans(points, 2)
    assert len(found[:20].unique()) == len(found[20:].unique()) == 1 and found[0] != found[-1]


@pytest.mark.slow
def test_train_writes_scores_and_a_page_with_pictures(tmp_path, monkeypatch):
    monkeypatch.setitem(runs.RECIPES, "groupvit", lambda: tiny("groupvit"))
    train_main(TrainOptions(recipe="groupvit", out=tmp_path / "g", steps=2))
    page = (tmp_path / "g" / "report.html").read_text()
    assert page.count("data:image/png") == 12 and "<script" not in page
    assert json.loads((tmp_path / "g" / "scores.json").read_text())["colours"] > 0
    with pytest.raises(ArgumentError, match="--wandb"):
        train_main(TrainOptions(recipe="groupvit", out=tmp_path / "h", wandb="x"))
    with pytest.raises(BaguError, match="already holds a run"):
        train_main(TrainOptions(recipe="groupvit", out=tmp_path / "g", steps=2))


def test_own_pictures_train_two_towers(tmp_path):
    for i, name in enumerate(("red", "green", "blue", "grey")):
        pixels = torch.full((3, 20, 30), 60 * i, dtype=torch.uint8)
        (tmp_path / f"{name}.png").write_bytes(encode_png(pixels))
    done = train_vision(replace(tiny("clip"), data=str(tmp_path), rows=3), tmp_path / "run")
    assert done.run.data == str(tmp_path)
    assert 0 <= unseen_concepts(done, "zh")["r5"] <= 1


def test_sampled_answers_are_rewarded_against_their_group():
    pictures = torch.zeros(3, 3, 64, 64, dtype=torch.uint8)
    answers = [[[7, 4], [8, 4]], [[7, 4], [7, 4]], [[9], [9, 4]]]
    batch = rewarded_batch(pictures, [[2, 3], [2, 3], [2]], answers, [[7, 4], [7, 4], [9, 4]])
    assert batch.reward == pytest.approx(4 / 6) and len(batch.images) == 4, "the second question says nothing"
    assert batch.weights.tolist() == [1, 1, -1, -1, -1, 1, 1]
    assert batch.targets.tolist() == [IGNORE, 7, 4, IGNORE, 8, 4, 9, 9, 4]
    assert batch.ids.tolist() == [2, 3, 7, 2, 3, 8, 2, 2, 9]
    equal = rewarded_batch(pictures, [[2, 3]], [[[7], [8]]], [[1]])
    assert RewardedLoss().totals([equal]).idle and not RewardedLoss().totals([batch]).idle


def test_scenes_goes_on_from_a_model_that_answers(tmp_path):
    with pytest.raises(ArgumentError, match="needs a model that answers"):
        train_vision(replace(tiny("vlm"), kind="scenes"), tmp_path / "none")
    train_vision(configs.override(tiny("vlm"), ["model.decoder.num_layers=2"]), tmp_path / "vlm")
    run = configs.override(with_steps(RECIPES["scenes"](), 2), ["rows=4", "samples=3"])
    done = train_vision(run, tmp_path / "scenes", start=tmp_path / "vlm")
    assert len(done.model.decoder.blocks) == 2, "the model is that of the run it starts from"
    rows = [json.loads(line) for line in (tmp_path / "scenes" / "metrics.jsonl").read_text().splitlines()]
    assert [0 <= row["reward_share"] <= 1 for row in rows] == [True, True]


def test_rewarded_answers_become_likelier():
    torch.manual_seed(0)
    model = runs.new_model(tiny("vlm"))
    tokens = model.config.image_tokens
    prompt = [2, *[SPECIAL.index(IMAGE)] * tokens, 3]
    pictures = torch.randint(0, 255, (1, 3, 64, 64), dtype=torch.uint8)
    batch = rewarded_batch(pictures, [prompt], [[[40, 4], [50, 4]]], [[40, 4]])
    loss, optimizer = RewardedLoss(), torch.optim.SGD(model.parameters(), lr=0.5)

    def margin() -> float:
        with torch.no_grad():
            hidden = model(torch.tensor(prompt), torch.arange(len(prompt)), torch.tensor([0, len(prompt)]).int(),
                           len(prompt), images=pictures).hidden  # fmt: skip
            logits = model.decoder.logits(hidden[-1:])[0]
        return float(logits[40] - logits[50])

    before = margin()
    for _ in range(3):
        loss(model, batch, loss.totals([batch])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert margin() > before


PACES = ({"clip": 0.75, "vlm": 0.8, "groupvit": 3.7}, {"clip": 0.4, "vlm": 0.4, "groupvit": 1.0})


@pytest.mark.parametrize("paces", PACES)
@pytest.mark.parametrize("minutes", [1, 2, 5, 10])
@pytest.mark.parametrize("slower", [0.8, 1.0, 1.25])
def test_a_demo_keeps_its_minutes_at_any_pace(paces, minutes, slower):
    now = 0.0
    budget, shown = Budget(60.0 * minutes, lambda: now), []
    for name in SHARES:
        now += 1.5 * paces[name]  # what measuring takes
        steps = budget.steps(name, paces[name])
        now += (steps + SCORES[name] * bool(steps)) * paces[name] * slower  # not the pace that was measured
        shown += [name] * bool(steps)
        if not steps:
            assert f"a step takes {paces[name]:.1f} s" in budget.reason(name, paces[name])
    assert budget.spent <= 60 * minutes * 1.2
    assert shown[:2] == ["clip", "vlm"]
    if slower == 1.0:
        assert ("groupvit" in shown) == (minutes >= (5 if paces["groupvit"] > 1 else 2))
        assert budget.spent >= 60 * minutes * 0.75


@pytest.mark.slow
def test_the_demo_shows_retrievals_segments_and_answers(tmp_path, monkeypatch):
    for name in TINY:
        monkeypatch.setitem(runs.RECIPES, name, lambda name=name: tiny(name))
    page = demo_vision(tmp_path / "demo", minutes=0.6).read_text()
    assert page.count("<section>") == 3 and page.count("data:image/png") == 36
    assert set(json.loads((tmp_path / "demo" / "scores.json").read_text())) == {
        "seconds", "left_out", "clip", "groupvit", "vlm",
    }  # fmt: skip
    with pytest.raises(BaguError, match="not empty"):
        demo_vision(tmp_path / "demo")
    with pytest.raises(BaguError, match="too few for any recipe: left out: a step takes"):
        demo_vision(tmp_path / "short", minutes=0.01)
