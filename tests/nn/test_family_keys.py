"""A key of config.json is read as transformers reads it, its default included, or the load is refused with its name.

Random files (family_draws.py): transformers makes a model of the file and saves random weights beside it, bagu loads
the folder, and the logits are compared. What bagu writes is loaded by transformers and compared again.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from family_draws import BASE, EXTRA, LENGTH, VALUES, Draw, draw_file
from small_models import documents

from bagu.config import ConfigError
from bagu.errors import BaguError
from bagu.nn.config import ModelConfig, Rope
from bagu.nn.families import FAMILIES
from bagu.nn.families.keys import SHARED, Only, Read, Required
from bagu.nn.model import Transformer
from bagu.nn.positions import rope_speeds
from bagu.nn.weights import WeightsError, from_pretrained, save_pretrained

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity(transformers.logging.CRITICAL)
transformers.logging.disable_progress_bar()

LENGTHS = (LENGTH, 5)
EPS = torch.finfo(torch.float32).eps


def config_class(family: str) -> Any:
    return transformers.CONFIG_MAPPING[family]


def fields(family: str) -> set[str]:
    """Keys of the class's own __init__, inherited ones included; transformers calls some by a second name too."""
    return {f.name for f in dataclasses.fields(config_class(family))}


def write_json(folder: Path, hf: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))


def loader(family: str) -> Any:
    return transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM


def judge_of(folder: Path, family: str) -> Any:
    """The model that transformers makes of the config.json of a folder, with loud random weights, in fp32."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = loader(family).from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, t in model.state_dict().items():
            noise = torch.randn(t.shape, generator=draw)
            if re.search(r"(norm|ln_\w)\.weight$", name.lower()):
                t.copy_(1 + 0.3 * noise)
            else:
                t.copy_(1.5 * noise / max(t.shape[-1], 1) ** 0.5 if t.ndim > 1 else 0.5 * noise)
    model.config.return_dict = True  # its classes cannot run without
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
    """Eight times what fp32 costs transformers itself, and the rounding of its angles, which are position * speed."""
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # the other ones have no fp64
    own = (judged(exact) - fp32).abs().max().item()
    return 8 * (own + LENGTH * EPS * fp32.abs().max().item())


def judged_windows(model: Any) -> list[int | None]:
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def check_config(ours: ModelConfig, model: Any) -> None:
    """What short documents cannot show: windows longer than they are, and RoPE far out."""
    assert [ours.window(i) for i in range(ours.num_layers)] == judged_windows(model)
    if isinstance(ours.positions, Rope):
        rotary = model.model.rotary_emb
        speeds, size = rope_speeds(ours.positions, ours.rope_dim)
        torch.testing.assert_close(rotary.inv_freq.double(), speeds, rtol=16 * EPS, atol=0.0)
        assert rotary.attention_scaling == pytest.approx(size, rel=16 * EPS)
        assert ours.max_len == model.config.max_position_embeddings


def check_draw(draw: Draw, folder: Path) -> str:
    """'equal', 'refused', or what transformers does not run; anything else is an AssertionError."""
    write_json(folder, draw.hf)
    try:
        model = judge_of(folder, draw.family)
        want = judged(model)
    except Exception as error:  # transformers raises many types
        assert draw.odd, f"a supported file, and transformers does not run it: {error!r}"
        with suppress(BaguError):  # any other error would be a traceback for a user
            FAMILIES[draw.family].config(draw.hf)
        return f"transformers: {type(error).__name__}"
    saved(model, folder, draw.hf)
    try:
        ours = from_pretrained(folder, dtype=torch.float32)
    except BaguError as error:
        assert draw.odd, f"a supported file is refused: {error}"
        sizes_do_not_fit = isinstance(error.__cause__, ConfigError)  # refused in the words of ModelConfig
        assert sizes_do_not_fit or any(name in str(error) for name in draw.odd), f"{error}: {sorted(draw.odd)}"
        return "refused"
    limit = tolerance(model, want)
    check_config(ours.config, model)
    assert (logits(ours) - want).abs().max().item() <= limit
    again = json.loads((folder / "config-of-transformers.json").read_text())
    assert FAMILIES[draw.family].config(again) == ours.config, "transformers' own file of the model is another model"
    check_export(ours, draw, folder / "export", want, limit)
    return "equal"


def check_export(ours: Transformer, draw: Draw, folder: Path, want: torch.Tensor, limit: float) -> None:
    save_pretrained(ours, folder, family=draw.family)
    theirs, said = loader(draw.family).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    assert (judged(theirs.eval()) - want).abs().max().item() <= limit
    assert torch.equal(logits(from_pretrained(folder)), logits(ours))


def run_draws(family: str, seeds: range, folder: Path) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        draw = draw_file(family, fields(family), seed)
        try:
            outcome = check_draw(draw, folder / str(seed))
        except Exception as error:
            error.add_note(f"{family}, seed {seed}: {json.dumps(draw.hf)}; odd: {sorted(draw.odd)}")
            raise
        outcomes[outcome.split(":")[0]] += 1
    return outcomes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_file_is_read_as_transformers_reads_it(family: str, tmp_path: Path) -> None:
    assert run_draws(family, range(6), tmp_path)["equal"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_hundred_random_files(family: str, tmp_path: Path) -> None:
    outcomes = run_draws(family, range(200), tmp_path)
    print(family, dict(outcomes))
    assert outcomes["equal"] >= 50 and outcomes["refused"] >= 10


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_the_class_is_in_the_table_with_its_default(family: str) -> None:
    """A key or a default that a new release of transformers adds or changes fails here first."""
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
