"""Every key of config.json is read as in transformers, including its default, or refused by name.

Random files (family_draws.py): transformers makes a model of the file and saves random weights beside it, bagu loads
the folder, and the logits are compared. What bagu writes is loaded by transformers and compared again.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from family_draws import BASE, EXTRA, LENGTH, VALUES, Draw, draw_file
from safetensors.torch import load_file, save_file
from small_models import documents

from bagu.config import ConfigError
from bagu.errors import BaguError
from bagu.nn.config import ModelConfig, Rope
from bagu.nn.families import FAMILIES
from bagu.nn.families.keys import SHARED, Only, Read, Required
from bagu.nn.kv import DenseKV
from bagu.nn.model import Transformer
from bagu.nn.positions import rope_speeds
from bagu.nn.sample import generate
from bagu.nn.weights import WeightsError, from_pretrained, save_pretrained
from tests.variants import some

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity(transformers.logging.CRITICAL)
transformers.logging.disable_progress_bar()

LENGTHS = (LENGTH, 5)
ENCODERS = ("bert", "roberta")
FIRST = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt2", "bert")  # the bases of the others
EPS = torch.finfo(torch.float32).eps


def config_class(family: str) -> Any:
    return transformers.CONFIG_MAPPING[family]


def fields(family: str) -> set[str]:
    """Keys of the class's __init__, including inherited ones; some have a second name in transformers."""
    return {f.name for f in dataclasses.fields(config_class(family))}


def write_json(folder: Path, hf: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))


def loader(family: str) -> Any:
    return transformers.AutoModelForMaskedLM if family in ENCODERS else transformers.AutoModelForCausalLM


def judge_of(folder: Path, family: str) -> Any:
    """The model that transformers builds from a folder's config.json, with large random weights, in fp32."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = loader(family).from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, t in model.state_dict().items():
            noise = torch.randn(t.shape, generator=draw)
            if re.search(r"(norm|ln_\w)\.weight$", name.lower()):
                t.copy_((0 if config.model_type == "gemma3_text" else 1) + 0.3 * noise)
            else:
                t.copy_(1.5 * noise / max(t.shape[-1], 1) ** 0.5 if t.ndim > 1 else 0.5 * noise)
    model.config.return_dict = True  # its classes need it
    return model.eval()


def saved(model: Any, folder: Path, hf: dict[str, Any]) -> None:
    """The weights as transformers saves them, and config.json as it was drawn."""
    model.save_pretrained(folder)
    (folder / "config.json").replace(folder / "config-of-transformers.json")
    write_json(folder, hf)


def texts() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 61, (n,), generator=draw) for n in LENGTHS]


@torch.no_grad()
def judged(model: Any) -> torch.Tensor:
    return torch.cat([model(text[None], return_dict=True).logits[0] for text in texts()])


@torch.no_grad()
def logits(model: Transformer) -> torch.Tensor:
    return model.logits(model(*documents(texts())).hidden)


def tolerance(model: Any, fp32: torch.Tensor) -> float:
    """Eight times the fp32 error of transformers itself, plus the rounding of its angles, position * frequency."""
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # the default has no fp64
    if exact.config.model_type == "gpt2":
        exact.config._attn_implementation = "sdpa"  # its upcasting has no fp64 in eager mode
    return bound((judged(exact) - fp32).abs().max().item(), fp32.abs().max().item())


def bound(own: float, size: float) -> float:
    """The limit of a difference to transformers: `own` is the fp32 error of transformers, `size` the largest value."""
    return 8 * (own + LENGTH * EPS * size)


def judged_windows(model: Any) -> list[int | None]:
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    if getattr(config, "use_sliding_window", True) is False:
        return [None] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def check_config(ours: ModelConfig, model: Any) -> None:
    """Tests what short documents do not cover: long windows, and RoPE at large positions."""
    assert [ours.window(i) for i in range(ours.num_layers)] == judged_windows(model)
    if isinstance(ours.positions, Rope):
        some = ours.layer_positions
        other = ours.positions if some is None else some.positions
        ropes = {"": ours.positions}
        if model.config.model_type == "gemma3_text":
            both = {"full_attention_": ours.positions, "sliding_attention_": other}
            ropes = {name: rope for name, rope in both.items() if name[:-1] in model.config.layer_types}
        for name, rope in ropes.items():
            rotary, (speeds, size) = model.model.rotary_emb, rope_speeds(rope, ours.rope_dim, ours.max_len)
            found = getattr(rotary, f"{name}inv_freq").double()
            torch.testing.assert_close(found, speeds, rtol=16 * EPS, atol=0.0)
            assert getattr(rotary, f"{name}attention_scaling") == pytest.approx(size, rel=16 * EPS)
        assert ours.max_len == model.config.max_position_embeddings


def check_draw(draw: Draw, folder: Path) -> str:
    """'equal', 'refused', or the reason why transformers cannot run it; anything else raises AssertionError."""
    write_json(folder, draw.hf)
    try:
        model = judge_of(folder, draw.family)
        want = judged(model)
    except Exception as error:  # transformers raises many types
        assert draw.odd, f"a supported file, and transformers does not run it: {error!r}"
        with suppress(BaguError):  # any other error type fails the test
            FAMILIES[draw.family].config(draw.hf)
        return f"transformers: {type(error).__name__}"
    saved(model, folder, draw.hf)
    try:
        ours = from_pretrained(folder, dtype=torch.float32)
    except BaguError as error:
        assert draw.odd, f"a supported file is refused: {error}"
        sizes_do_not_fit = isinstance(error.__cause__, ConfigError)  # ModelConfig refused it
        assert sizes_do_not_fit or any(name in str(error) for name in draw.odd), f"{error}: {sorted(draw.odd)}"
        return "refused"
    limit = tolerance(model, want)
    check_config(ours.config, model)
    assert (logits(ours) - want).abs().max().item() <= limit
    again = json.loads((folder / "config-of-transformers.json").read_text())
    assert FAMILIES[draw.family].config(again) == ours.config, (
        "the file that transformers wrote describes another model"
    )
    check_export(ours, draw, folder / "export", want, limit)
    return "equal"


def check_export(ours: Transformer, draw: Draw, folder: Path, want: torch.Tensor, limit: float) -> None:
    save_pretrained(ours, folder, family=draw.family)
    theirs, said = loader(draw.family).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    assert (judged(theirs.eval()) - want).abs().max().item() <= limit
    assert torch.equal(logits(from_pretrained(folder)), logits(ours))


def run_draws(family: str, count: int, folder: Path) -> Counter[str]:
    """Compare this many files that transformers can run; others are counted separately."""
    outcomes: Counter[str] = Counter()
    for seed in itertools.count():
        if outcomes["equal"] + outcomes["refused"] == count:
            return outcomes
        draw = draw_file(family, fields(family), seed)
        try:
            outcome = check_draw(draw, folder / str(seed))
        except Exception as error:
            error.add_note(f"{family}, seed {seed}: {json.dumps(draw.hf)}; odd: {sorted(draw.odd)}")
            raise
        outcomes[outcome.split(":")[0]] += 1
    raise AssertionError("unreachable")


# Of the families with a common reader one; `make test-full` has all.
QUICK = ("bert", "deepseek_v3", "gemma3_text", "gpt2", "gpt_oss", "llama", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("family", some(list(FAMILIES), QUICK))
def test_a_random_file_is_read_as_in_transformers(family: str, tmp_path: Path) -> None:
    count = 8 if family in FIRST else 4
    assert run_draws(family, count, tmp_path)["equal"] >= count // 2


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_hundred_random_files(family: str, tmp_path: Path) -> None:
    outcomes = run_draws(family, 200, tmp_path)
    print(family, dict(outcomes))  # printed with -s
    assert outcomes["equal"] >= 100 and outcomes["refused"] >= 20


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FACTORS = {"short_factor": [1.25, 2], "long_factor": [3.0, 20.0]}
BARE = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
READ: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": {**YARN, "rope_theta": 50.0}, "rope_scaling": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_theta": 50.0, **LLAMA3}, "rope_scaling": None}),
    ("llama", {"rope_scaling": LLAMA3, "rope_theta": 50.0}),
    ("llama", {"rope_scaling": BARE, "original_max_position_embeddings": 8}),
    ("qwen2", {"rope_parameters": {**YARN, "original_max_position_embeddings": 8, "factor": None}}),
    ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 8}),
    # yarn's ramp ends below 0
    ("llama", {"rope_scaling": {**YARN, "original_max_position_embeddings": 4, "truncate": False}}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3_moe", {"use_sliding_window": True}),
    ("qwen3_moe", {"num_local_experts": 8}),
    ("gpt2", {"hidden_size": 32, "num_attention_heads": 2}),
    ("bert", {"tie_word_embeddings": False}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2}),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default"}, "num_experts": 8}),
    # both texts are longer than the original context, so that transformers takes the long factors
    ("phi3", {"rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 4}),
    # the context is not longer than the original one: the short factors
    ("phi3", {"rope_scaling": {"rope_type": "longrope", **FACTORS, "factor": 4.0}}),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", **FACTORS, "attention_factor": 1.5, "rope_theta": 50.0}}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "deepseek_v3",
        {"num_key_value_heads": 4, "rope_scaling": {**LLAMA3, "mscale_all_dim": 0.7}},
        "rope_scaling has 'mscale_all_dim'",
    ),
    ("llama", {"is_causal": False}, "is_causal = False"),
    ("llama", {"sliding_window": 4}, "sliding_window = 4"),
    ("llama", {"some_new_switch": 1}, "has 'some_new_switch'"),
    ("mistral", {"use_sliding_window": False}, "has 'use_sliding_window'"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types = "),
    ("llama", {"rope_scaling": {**YARN, "type": "linear"}}, "type = 'linear'"),
    (
        "llama",
        {"rope_scaling": YARN, "original_max_position_embeddings": 8},
        "original_max_position_embeddings = 8",
    ),
    ("llama", {"rope_scaling": {**YARN, "rope_theta": 50.0}, "rope_theta": 1e4}, "rope_theta = 10000.0"),
    ("llama", {"hidden_size": "16"}, "hidden_size = '16'"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", **FACTORS}}, "rope_type = 'longrope'"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "has no 'long_factor'"),
    ("phi3", {"rope_scaling": {"type": "longrope", **FACTORS, "long_factor": [1.0]}}, "1 long_factors for 4 rotated"),
    ("phi3", {"rope_scaling": {"type": "longrope", **FACTORS, "short_factor": [1, "2"]}}, "short_factors = (1, '2')"),
    ("phi3", {"rope_scaling": {"type": "su"}}, "rope_type = 'su'"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "'type': 'linear'"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters has 'rope_theta'"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers = [1]"),
    ("granite", {"attention_multiplier": 0.0}, "attention_multiplier = 0.0"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 2}, "layer_types = "),
    ("roberta", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
]


@pytest.mark.parametrize(("family", "change"), READ)
def test_unusual_files_are_read_as_in_transformers(family: str, change: dict[str, Any], tmp_path: Path) -> None:
    hf = {"model_type": family, **BASE[family], **change}
    assert check_draw(Draw(family, hf, set(change), set()), tmp_path) == "equal"


def longrope(folder: Path, original: int) -> tuple[Any, Transformer]:
    """A Phi-3 with this original context, in transformers and here."""
    scaling = {"rope_type": "longrope", **FACTORS}
    hf = {"model_type": "phi3", **BASE["phi3"], "rope_scaling": scaling, "original_max_position_embeddings": original}
    write_json(folder, hf)
    judge = judge_of(folder, "phi3")
    saved(judge, folder, hf)
    return judge, from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("original", [LENGTH - 1, LENGTH])
def test_longrope_takes_its_factors_by_the_longest_text(tmp_path: Path, original: int) -> None:
    """If one text of a forward is longer than the original context, all have the long factors."""
    judge, model = longrope(tmp_path, original)
    long, short = texts()
    padded = torch.stack((long, torch.cat((short, short.new_zeros(len(long) - len(short))))))
    with torch.no_grad():
        first, second = judge(padded).logits
    want = torch.cat((first, second[: len(short)]))
    assert (logits(model) - want).abs().max().item() <= tolerance(judge, judged(judge))


def test_longrope_in_a_cache_has_the_short_factors_if_they_suffice(tmp_path: Path) -> None:
    judge, model = longrope(tmp_path, LENGTH)
    prompt, room = texts()[1], LENGTH - LENGTHS[1]
    found = generate(model, [prompt.tolist()], room, temperature=0.0)
    want = judge.generate(
        prompt[None], max_new_tokens=room, do_sample=False, eos_token_id=-1, attention_mask=torch.ones(1, len(prompt))
    )
    assert found == [want[0, len(prompt) :].tolist()]
    kv = DenseKV(model.config, 1, model.config.max_len)  # a text may grow beyond it: the long factors from the start
    ids, positions, offsets, _ = documents([prompt])
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids, *kv.plan([len(prompt)]), kv).hidden, model(ids, positions, offsets, LENGTH + 1).hidden
        )


@pytest.mark.parametrize(("family", "change", "says"), REFUSED)
def test_an_unsupported_key_is_refused_by_name(family: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises(WeightsError, match=re.escape(says)):
        FAMILIES[family].config({**BASE[family], **change})


def test_mistral_defaults_to_8_kv_heads_and_a_window_of_4096(tmp_path: Path) -> None:
    hf = {"model_type": "mistral", **BASE["mistral"], "hidden_size": 64, "num_attention_heads": 16}
    del hf["num_key_value_heads"]
    assert check_draw(Draw("mistral", hf, set(), set()), tmp_path) == "equal"
    config = FAMILIES["mistral"].config(hf)
    assert config.num_kv_heads == 8 and config.windows == (4096,)


def test_an_untied_bert_of_transformers_4_uses_the_other_bias_name(tmp_path: Path) -> None:
    """In version 4 the decoder's bias and the head's are one parameter, stored once."""
    hf = {"model_type": "bert", **BASE["bert"], "tie_word_embeddings": False}
    write_json(tmp_path, hf)
    model = judge_of(tmp_path, "bert")
    saved(model, tmp_path, hf)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["cls.predictions.bias"] = tensors.pop("cls.predictions.decoder.bias")
    save_file(tensors, file, metadata={"format": "pt"})
    want = judged(model)
    assert (logits(from_pretrained(tmp_path)) - want).abs().max().item() <= tolerance(model, want)


def test_the_default_dtype_is_that_of_the_weights(tmp_path: Path) -> None:
    hf = {"model_type": "llama", **BASE["llama"]}
    write_json(tmp_path, hf)
    saved(judge_of(tmp_path, "llama").bfloat16(), tmp_path, hf)
    assert {p.dtype for p in from_pretrained(tmp_path).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_the_class_is_in_the_table_with_its_default(family: str) -> None:
    """This fails first if a new version of transformers adds a key or changes a default."""
    table, cls = FAMILIES[family].keys, config_class(family)
    assert fields(family) - table.keys() == set()
    for f in dataclasses.fields(cls):
        match table[f.name]:
            case Read(default=default):
                assert default == f.default, f.name
            case Only() as key:
                assert f.default in key.values, f.name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_is_drawn(family: str) -> None:
    assert (fields(family) | set(EXTRA[family])) - {"rope_parameters"} - VALUES.keys() == set()
    drawn = set().union(*(draw_file(family, fields(family), seed).drawn for seed in range(200)))
    assert fields(family) - drawn == set()


def test_inherited_keys_are_in_the_shared_list() -> None:
    inherited = {f.name for f in dataclasses.fields(transformers.PreTrainedConfig)}
    generation = transformers.GenerationConfig._get_default_generation_params()
    assert (inherited | set(generation)) - SHARED.keys() == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_key_that_is_missing_is_named(family: str) -> None:
    for name in [name for name in BASE[family] if isinstance(FAMILIES[family].keys[name], Required)]:
        with pytest.raises(WeightsError, match=f"has no '{name}'"):
            FAMILIES[family].config({k: v for k, v in BASE[family].items() if k != name})
