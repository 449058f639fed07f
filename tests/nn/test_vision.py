"""ViT, grouping block, towers and VLM: against transformers, and against their own definitions."""

import pytest
import torch
from torch.nn import functional as F

from bagu.errors import ArgumentError
from bagu.nn import ModelConfig
from bagu.nn.vision.group import GroupingBlock, GroupViT, GroupViTConfig, Stage, upsample_guided
from bagu.nn.vision.patches import cut, pack, to_floats
from bagu.nn.vision.towers import TowersConfig, TwoTowers, init_vision
from bagu.nn.vision.vit import ViT, ViTConfig
from bagu.nn.vision.vlm import VLM, VLMConfig, shuffled
from bagu.ops.gumbel_softmax.noise import gumbel, words
from bagu.train.objectives.contrastive import contrastive_nll
from bagu.train.objectives.vision_losses import names_nll

VIT = ViTConfig(image_size=32, patch_size=8, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)


def pixels(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_a_patch_is_a_convolution_with_its_stride():
    images, weight = torch.randn(2, 3, 16, 24), torch.randn(5, 3, 8, 8)
    want = F.conv2d(images, weight, stride=8).flatten(2).mT
    torch.testing.assert_close(cut(images, 8) @ weight.flatten(1).T, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pool", ["cls", "mean", "attention"])
def test_images_of_several_sizes_in_one_batch_do_not_see_each_other(pool):
    model = init_vision(ViT(ViTConfig(**{**VIT.__dict__, "pool": pool})), 0)
    images = [pixels(3, 32, 32), pixels(3, 16, 24, seed=1), pixels(3, 8, 8, seed=2)]
    together = model(images).pooled
    for i, image in enumerate(images):
        torch.testing.assert_close(together[i], model([image]).pooled[0], rtol=1e-4, atol=1e-5)


def test_registers_and_the_class_token_come_before_the_patches():
    packed = pack([torch.zeros(3, 16, 8), torch.zeros(3, 8, 8)], 8, 4, 2)
    assert packed.ids.tolist() == [0, 1, 0, 0, 0, 1, 0]
    assert packed.positions.tolist() == [0, 1, 2, 6, 0, 1, 2]  # the second patch is one row down, of four columns
    assert packed.rows.tolist() == [2, 3, 6] and packed.cu_seqlens.tolist() == [0, 4, 7]


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ArgumentError, match="20 × 16"):
        pack(torch.zeros(1, 3, 20, 16), 8, 4, 0)
    with pytest.raises(ArgumentError, match="40 × 8"):
        pack(torch.zeros(1, 3, 40, 8), 8, 4, 0)


def test_standardized_pictures_have_no_contrast_of_their_own():
    image = pixels(1, 3, 32, 32).float()
    dim = (image * 0.2 + 90).to(torch.uint8)
    a, b = (to_floats(x.to(torch.uint8), standardize=True) for x in (image, dim))
    assert (a - b).abs().max() < 0.1 and abs(float(a.mean())) < 1e-5


def _theirs(groups: int) -> tuple[torch.nn.Module, GroupingBlock]:
    """transformers' token assignment and ours, with the same weights in fp64."""
    groupvit = pytest.importorskip("transformers.models.groupvit.modeling_groupvit")
    config = groupvit.GroupViTVisionConfig(
        hidden_size=32, num_attention_heads=2, intermediate_size=64, assign_mlp_ratio=[0.5, 4], layer_norm_eps=1e-6
    )
    torch.manual_seed(0)
    theirs = groupvit.GroupViTTokenAssign(config, groups, groups).double()
    ours = GroupingBlock(GroupViTConfig(vit=VIT, stages=(Stage(layers=1, groups=groups),)), groups, groups).double()
    names = {
        "norm_groups": "norm_tokens", "norm_mixed": "norm_post_tokens", "norm_tokens": "norm_x",
        "norm_new": "norm_new_x", "mixer.up": "mlp_inter.fc1", "mixer.down": "mlp_inter.fc2",
        "cross.query": "pre_assign_attn.attn.q_proj", "cross.key": "pre_assign_attn.attn.k_proj",
        "cross.value": "pre_assign_attn.attn.v_proj", "cross.out": "pre_assign_attn.attn.out_proj",
        "cross.norm": "pre_assign_attn.norm2", "cross.mlp.up": "pre_assign_attn.mlp.fc1",
        "cross.mlp.down": "pre_assign_attn.mlp.fc2", "cross.norm_post": "pre_assign_attn.norm_post",
        "query": "assign.q_proj", "key": "assign.k_proj", "value": "assign.v_proj", "out": "assign.proj",
        "channels.up": "mlp_channels.fc1", "channels.down": "mlp_channels.fc2",
    }  # fmt: skip
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for p in weights.values():
            p.copy_(torch.randn_like(p) * 0.3)
        for name, p in ours.named_parameters():
            path, leaf = name.rsplit(".", 1)
            p.copy_(weights[f"{names[path]}.{leaf}"])
    assert len(weights) == len(list(ours.named_parameters()))
    return theirs, ours


@pytest.mark.parametrize("training", [True, False])
def test_the_grouping_block_is_that_of_transformers(monkeypatch, training):
    groups, seed = 6, 1234
    theirs, ours = _theirs(groups)
    noise = lambda self, shape: gumbel(words(torch.zeros(shape).mT, seed), torch.float64).mT  # noqa: E731
    monkeypatch.setattr(torch.distributions.gumbel.Gumbel, "sample", noise)
    stream = torch.Generator().manual_seed(5)
    tokens, own = (torch.randn(3, n, 32, generator=stream, dtype=torch.float64) for n in (11, groups))
    theirs.train(training)
    results = []
    for module, extra in ((theirs, ()), (ours, (seed if training else None,))):
        inputs = [x.clone().requires_grad_() for x in (tokens, own)]
        out, soft = module(*inputs, *extra)
        weights = dict(module.named_parameters())
        grads = torch.autograd.grad((out * out).sum(), [*inputs, *weights.values()])
        results.append((out, soft, grads, [w.numel() for w in weights.values()]))
    for a, b in zip(results[0][:2], results[1][:2], strict=True):
        assert (a - b).abs().max() <= 1e-10
    by_size = [sorted(float(g.square().sum()) for g in r[2]) for r in results]  # the modules' orders differ
    torch.testing.assert_close(*map(torch.tensor, by_size), rtol=1e-9, atol=1e-12)
    for a, b in zip(results[0][2][:2], results[1][2][:2], strict=True):
        assert (a - b).abs().max() <= 1e-10


def test_segments_cover_the_picture_and_do_not_flicker():
    config = GroupViTConfig(vit=VIT, stages=(Stage(layers=1, groups=6), Stage(layers=1, groups=3)))
    model = init_vision(GroupViT(config), 0).eval()
    images = pixels(2, 3, 32, 32)
    maps = model.segments(images)
    assert maps.shape == (2, 32, 32) and int(maps.max()) < 3
    assert maps.equal(model.segments(images))
    seen = model.train()(images)
    for soft in seen.assignments:
        torch.testing.assert_close(soft.sum(1), torch.ones_like(soft[:, 0]))  # a token is divided over the groups
    assert not seen.pooled.equal(model(images).pooled)  # sampled in training


def test_a_group_without_its_token_says_what_its_members_say():
    """With the token a group sees every patch, whoever its members are."""
    stage = Stage(layers=1, groups=4)
    tokens, groups = torch.randn(1, 1, 32), torch.randn(1, 4, 32)
    for carry in (True, False):
        block = init_vision(GroupingBlock(GroupViTConfig(vit=VIT, stages=(stage,), carry=carry), 4, 4), 0)
        out, soft = block(tokens, groups, None)
        empty = set(range(4)) - set(soft.argmax(1).unique().tolist())
        assert len(empty) == 3
        rows = out[0, sorted(empty)]
        assert rows.std(0).max() > 1e-3 if carry else rows.abs().max() < 1e-6


def test_first_group_tokens_take_different_patches():
    """At the scale of other embeddings (0.02) attention adds the same to all of them, and one takes every patch."""
    config = GroupViTConfig(vit=VIT, stages=(Stage(layers=2, groups=6),))
    images = pixels(8, 3, 32, 32, seed=3)
    used = [init_vision(GroupViT(config), seed).eval().shares(images).argmax(1).unique().numel() for seed in range(4)]
    assert min(used) >= 4


def test_guided_maps_follow_edges_finer_than_a_patch():
    truth = torch.zeros(1, 32, 32, dtype=torch.int64)
    truth[0, 5:27, 14:17] = 1  # a stroke of 3 pixels: no patch of 8 is mostly ink
    images = (truth * 200 + 20).unsqueeze(1).expand(-1, 3, -1, -1).to(torch.uint8)
    inked = F.avg_pool2d(truth.float().unsqueeze(1), 8) > 0.1
    maps = torch.cat((~inked, inked), 1).float()
    guided = upsample_guided(maps, images).argmax(1)
    plain = F.interpolate(maps, (32, 32), mode="bilinear").argmax(1)
    iou = [float((m * truth).sum() / (m | truth).sum()) for m in (guided, plain)]
    assert iou[0] > 0.95 and iou[1] < 0.5
    assert upsample_guided(maps, torch.zeros_like(images)).isfinite().all(), "an image of one colour"


def test_a_name_is_looked_for_among_the_groups():
    names = torch.eye(4)
    groups = torch.eye(4).view(2, 2, 4)  # an image of things 0 and 1, and one of 2 and 3
    present = torch.tensor([[True, True, False, False], [False, False, True, True]])
    scale = torch.tensor(10.0)
    assert float(names_nll(groups, names, present, scale)) < 1e-3
    mixed = F.normalize(groups.mean(1, keepdim=True), dim=2)  # one group of all things
    assert float(names_nll(mixed, names, present, scale)) > 5 * float(names_nll(groups, names, present, scale))
    everywhere = torch.ones(2, 4, dtype=torch.bool)  # no rivals: nothing to learn, and no NaN
    groups.requires_grad_()
    (grad,) = torch.autograd.grad(names_nll(groups, names, everywhere, scale), groups)
    assert grad.abs().max() < 1e-6


def test_the_contrastive_loss_is_that_of_open_clip_without_its_matrix():
    images, texts = (F.normalize(torch.randn(37, 16, dtype=torch.float64), dim=1).requires_grad_() for _ in range(2))
    scale = torch.tensor(14.3, dtype=torch.float64, requires_grad=True)
    logits = scale * images @ texts.T
    labels = torch.arange(37)
    want = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2  # open_clip's ClipLoss
    got = contrastive_nll(images, texts, scale).mean()
    assert (want - got).abs() <= 1e-6
    for a, b in zip(
        torch.autograd.grad(want, [images, texts, scale]), torch.autograd.grad(got, [images, texts, scale]), strict=True
    ):
        assert (a - b).abs().max() <= 1e-6


def _text(**more) -> ModelConfig:
    return ModelConfig(
        vocab_size=40, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=64,
        max_len=64, **more,
    )  # fmt: skip


def test_towers_give_unit_vectors_and_a_capped_scale():
    model = init_vision(TwoTowers(TowersConfig(image=VIT, text=_text(causal=False, lm_head=False), dim=24)), 0)
    assert abs(float(model.scale) - 1 / 0.07) < 1e-4
    vectors = model.image_vectors(pixels(3, 3, 32, 32))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    with torch.no_grad():
        model.log_scale.fill_(9.0)
    assert float(model.scale) == 100.0


def test_pixel_shuffle_joins_neighbours():
    patches = torch.arange(16.0).view(16, 1)
    assert shuffled(patches, (4, 4), 2)[0].tolist() == [0, 1, 4, 5]
    assert shuffled(patches, (2, 8), 2)[1].tolist() == [2, 3, 10, 11]


@pytest.fixture(scope="module")
def vlm() -> VLM:
    model = VLM(VLMConfig(vit=VIT, decoder=_text(tie_embeddings=True), image_token=5))
    init_vision(model, 0)
    return model.eval()


def test_the_answer_does_not_depend_on_the_batch_and_does_on_the_image(vlm):
    prompts = [[1, 5, 5, 5, 5, 7, 8], [2, 9, 5, 5, 5, 5]]
    images = pixels(2, 3, 32, 32)
    both = vlm.answer(prompts, images, 5, eos_id=-1)
    assert both == [vlm.answer([p], images[i : i + 1], 5, eos_id=-1)[0] for i, p in enumerate(prompts)]
    ids = torch.tensor(prompts[0])
    ends = torch.tensor([0, 7], dtype=torch.int32)
    logits = [vlm(ids, torch.arange(7), ends, 7, images=images[i : i + 1]).hidden[-1] for i in range(2)]
    assert (logits[0] - logits[1]).abs().max() > 1e-6


def test_placeholders_must_fit_the_images(vlm):
    with pytest.raises(ArgumentError, match="3 image tokens, and the images 4 vectors"):
        vlm.place(torch.tensor([1, 5, 5, 5]), pixels(1, 3, 32, 32))
