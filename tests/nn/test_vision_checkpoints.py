"""ViT, CLIP and SigLIP checkpoints: random small ones of transformers, over the keys of their configs."""

import itertools
import json

import pytest
import torch
import transformers
from torch.nn import functional as F

from bagu.machine.hub import WeightsError
from bagu.nn.vision.checkpoints import load_vision_checkpoint, save_vision_checkpoint

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE = {**SMALL, "image_size": 24, "patch_size": 8}
TEXT = {**SMALL, "hidden_size": 24, "vocab_size": 50, "max_position_embeddings": 16}
VISION_CHANGES = [
    {}, {"image_size": 32}, {"patch_size": 4}, {"num_channels": 1}, {"hidden_act": "gelu"},
    {"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": "quick_gelu"}, {"layer_norm_eps": 1e-3},
    {"num_attention_heads": 2}, {"intermediate_size": 80}, {"num_hidden_layers": 1}, {"attention_dropout": 0.5},
]  # fmt: skip


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    """Weights that show a mistake: neither zeros nor ones."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2)
    return model.eval()


def pixels(config) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(3, config.num_channels, config.image_size, config.image_size)


@pytest.mark.parametrize("change", [*VISION_CHANGES[:-1], {"qkv_bias": False}, {"hidden_dropout_prob": 0.3}], ids=str)
def test_vit(tmp_path, change):
    theirs = randomized(transformers.ViTModel(transformers.ViTConfig(**{**IMAGE, **change})))
    theirs.save_pretrained(tmp_path / "a")
    images = pixels(theirs.config)
    with torch.no_grad():
        want = theirs(images).last_hidden_state
        ours = load_vision_checkpoint(tmp_path / "a")
        assert (ours(images).hidden.view_as(want) - want).abs().max() <= 2e-4
    save_vision_checkpoint(ours, tmp_path / "b", "vit")
    again = transformers.ViTModel.from_pretrained(tmp_path / "b", add_pooling_layer=False).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(images).last_hidden_state, want)


@pytest.mark.parametrize(("family", "change"), [*itertools.product(("CLIP", "Siglip"), VISION_CHANGES)], ids=str)
def test_vision_towers(tmp_path, family, change):
    config = getattr(transformers, f"{family}VisionConfig")(**{**IMAGE, **change})
    theirs = randomized(getattr(transformers, f"{family}VisionModel")(config))
    theirs.save_pretrained(tmp_path)
    images = pixels(config)
    with torch.no_grad():
        want = theirs(images).pooler_output
        assert (load_vision_checkpoint(tmp_path)(images).pooled - want).abs().max() <= 2e-4


@pytest.mark.parametrize(
    ("text", "vision"),
    [
        ({}, {}), ({"hidden_act": "gelu"}, {}), ({"layer_norm_eps": 1e-2}, {"patch_size": 4}),
        ({"num_attention_heads": 2}, {"image_size": 16}), ({"vocab_size": 60}, {"hidden_act": "gelu"}),
    ],
    ids=str,
)  # fmt: skip
def test_clip_and_back(tmp_path, text, vision):
    config = transformers.CLIPConfig(
        text_config={**TEXT, "eos_token_id": 49, "bos_token_id": 48, **text}, vision_config={**IMAGE, **vision},
        projection_dim=20,
    )  # fmt: skip
    theirs = randomized(transformers.CLIPModel(config))
    theirs.save_pretrained(tmp_path / "a")
    images, ids = pixels(config.vision_config), torch.tensor([[48, 5, 7, 49], [48, 9, 3, 49]])
    with torch.no_grad():
        want = theirs(input_ids=ids, pixel_values=images)
        ours = load_vision_checkpoint(tmp_path / "a")
        place, ends = torch.arange(4).repeat(2), torch.tensor([0, 4, 8], dtype=torch.int32)
        texts, seen = ours.text_vectors(ids.flatten(), place, ends, 4), ours.image_vectors(images)
        assert (texts - want.text_embeds).abs().max() <= 2e-4 and (seen - want.image_embeds).abs().max() <= 2e-4
        assert (ours.log_scale.exp() * seen @ texts.T - want.logits_per_image).abs().max() <= 2e-4
    save_vision_checkpoint(ours, tmp_path / "b", "clip")
    again = transformers.CLIPModel.from_pretrained(tmp_path / "b").eval()
    with torch.no_grad():
        torch.testing.assert_close(
            again.get_image_features(images).pooler_output, theirs.get_image_features(images).pooler_output
        )


@pytest.mark.parametrize("text", [{}, {"hidden_act": "gelu"}, {"num_attention_heads": 2}], ids=str)
def test_siglip_and_back(tmp_path, text):
    config = transformers.SiglipConfig(text_config={**TEXT, "hidden_size": 32, **text}, vision_config=IMAGE)
    theirs = randomized(transformers.SiglipModel(config))
    theirs.save_pretrained(tmp_path / "a")
    images, ids = pixels(config.vision_config), torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = theirs(input_ids=ids, pixel_values=images)
        ours = load_vision_checkpoint(tmp_path / "a")
        place, ends = torch.arange(16).repeat(2), torch.tensor([0, 16, 32], dtype=torch.int32)
        texts, seen = ours.text_vectors(ids.flatten(), place, ends, 16), ours.image_vectors(images)
        assert (seen - F.normalize(want.image_embeds, dim=-1)).abs().max() <= 2e-4
        assert (texts - F.normalize(want.text_embeds, dim=-1)).abs().max() <= 2e-4
    save_vision_checkpoint(ours, tmp_path / "b", "siglip")
    again = transformers.SiglipModel.from_pretrained(tmp_path / "b").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids, pixel_values=images).logits_per_image, want.logits_per_image)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_act": "relu"}, "hidden_act"), ({"image_size": [8, 9]}, "image_size"), ({"patch_size": 7}, "patches"),
        ({"is_causal": True}, "is_causal"), ({"model_type": "dinov2"}, "dinov2"), ({"num_hidden_layers": 3}, "missing"),
        ({"architectures": ["ViTForImageClassification"]}, "ViTForImageClassification"), ({"hidden_size": 48}, "shape"),
        ({"num_hidden_layers": 1}, "not in this model"), ({"num_attention_heads": 3}, "num_heads"),
    ],
    ids=str,
)  # fmt: skip
def test_what_would_be_wrong_is_refused(tmp_path, change, word):
    transformers.ViTModel(transformers.ViTConfig(**IMAGE)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(WeightsError, match=word):
        load_vision_checkpoint(tmp_path)
