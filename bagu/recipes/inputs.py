"""The inputs of a run besides weights: device, tokenizer, the model's configuration, the data. All of them are checked
here, and nothing is written to the run's folder: errors are reported before the run starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bagu.data.corpus import Corpus
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError
from bagu.machine.device import named_device, named_dtype
from bagu.machine.fast_dtype import compute_dtype
from bagu.nn.config import ModelConfig
from bagu.recipes.find import find_model
from bagu.recipes.models import model_config, tokenizer_folder
from bagu.recipes.run import Run
from bagu.recipes.tokenizer import run_tokenizer
from bagu.train.objective import TrainingData

DATA = "data.json"  # in the folder of a run
# facts of a source that decide, for the same files, which documents are trained on and which are held out
SELECTED = ("field", "dedup", "validation", "seed")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """`run` has the context that was chosen for it. `start` is the folder of the model that the run starts from,
    `auxiliary` the folders of the objective's other models, by role; `data_changes` has a line for each source that has
    changed since the run last started.
    """

    run: Run
    device: torch.device
    dtype: torch.dtype
    start: Path | None
    auxiliary: Mapping[str, Path]
    corpora: Mapping[str, Corpus]
    tokenizer: BpeTokenizer
    model: ModelConfig
    data: TrainingData[Any]
    data_changes: tuple[str, ...]


def read_inputs(
    run: Run,
    out: Path,
    *,
    accept_data_change: bool = False,
    tokenizer: BpeTokenizer | None = None,
    corpora: Mapping[str, Corpus] | None = None,
    fit_context: bool = False,
) -> Inputs:
    """Read and check the inputs of `run` in the folder `out`. A given tokenizer or corpus is not read again. With
    `fit_context` the objective may choose another context than `data.context`, by the model and the data."""
    device = named_device(run.device)
    start = find_model(run.init_from) if run.init_from else None
    model = run.model if start is None else run.objective.model_config(model_config(start))
    assert model is not None, "Run has model or init_from"
    if not fit_context:
        run.check_model(model)
    made = run.corpora() if corpora is None else corpora
    changes = _data_changes(out / DATA, made, run.objective.data_shape(run.data))
    if changes and not accept_data_change:
        raise BaguError(
            f"the data of the run {out} has changed since it last started: {'; '.join(changes)}",
            hint="restore it, begin a new run in another folder, or resume with --accept-data-change",
        )
    tokenizer = tokenizer or run_tokenizer(run, start, made, out)
    run.objective.check_tokenizer(tokenizer)
    _check_vocabulary(tokenizer, model)
    if fit_context:
        run = replace(run, data=run.objective.fit_context(made, tokenizer, run.data, model))
        run.check_model(model)
    auxiliary = _auxiliary(run, tokenizer, model)
    data = run.objective.read(made, tokenizer, run.data, model)
    if corpora is None:
        made = {name: corpus.without_text() for name, corpus in made.items()}
    return Inputs(
        run=run, device=device, dtype=named_dtype(run.dtype) if run.dtype else compute_dtype(device), start=start,
        auxiliary=auxiliary, corpora=made, tokenizer=tokenizer, model=model, data=data, data_changes=changes,
    )  # fmt: skip


def _data_changes(path: Path, corpora: Mapping[str, Corpus], shape: Mapping[str, Any]) -> tuple[str, ...]:
    """The differences between the sources and shape of the run and data.json; () if the file does not exist yet."""
    if not path.is_file():
        return ()
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        before = {
            name: {key: s[key] for key in ("sha256", "files", "bytes")} | {key: s.get(key) for key in SELECTED}
            for name, s in facts["sources"].items()
        }
        old_shape = dict(facts.get("shape", shape))  # older files have none
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BaguError(
            f"{path} cannot be read, so it cannot be known whether the data has changed: {error!r}",
            hint="restore the file; if you know that the data is the same, delete it",
        ) from error
    changes = [
        f"{key} was {old_shape.get(key)} and is {now}" for key, now in shape.items() if old_shape.get(key) != now
    ]
    changes += [f"source {name!r} is gone" for name in before if name not in corpora]
    for name, corpus in corpora.items():
        found, was = corpus.facts, before.get(name)
        if was is None:
            changes.append(f"source {name!r} is new")
        elif was["sha256"] != found["sha256"]:
            size = f"{was['files']:,} files, {was['bytes']:,} bytes"
            changes.append(f"source {name!r} was {size} and is {found['files']:,} files, {found['bytes']:,} bytes")
        elif was["validation"] is not None:  # older files do not have these facts
            changes += [
                f"{key} of source {name!r} was {was[key]} and is {found.get(key)}"
                for key in SELECTED
                if was[key] != found.get(key)
                and not (key == "dedup" and key not in found)  # older files have it always
            ]
    return tuple(changes)


def _check_vocabulary(tokenizer: BpeTokenizer, model: ModelConfig) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise BaguError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, and the model's vocabulary {model.vocab_size}",
            hint=f"set model.vocab_size={tokenizer.vocab_size}, or use the tokenizer the model was made with",
        )


def _auxiliary(run: Run, tokenizer: BpeTokenizer, model: ModelConfig) -> dict[str, Path]:
    """The folders of the objective's auxiliary models. They read the same token ids as the trained model."""
    found = {}
    for role, name in run.objective.auxiliary().items():
        if not name:
            raise BaguError(
                f"objective {run.objective.kind!r} needs a {role}, and objective.{role} is empty",
                hint=f"give a model with --set objective.{role}=MODEL",
            )
        folder = found[role] = find_model(name)
        config, place = model_config(folder), tokenizer_folder(folder)
        if place is None or BpeTokenizer.load(place).fingerprint != tokenizer.fingerprint:
            has = "has no tokenizer" if place is None else "has another tokenizer than the trained model"
            raise BaguError(
                f"the {role} {name} {has}, so token ids would not mean the same to both",
                hint=f"choose a {role} of the same family, or train a new model with tokenizer.path={place or folder}",
            )
        if run.data.context > config.max_len:
            raise BaguError(
                f"data.context is {run.data.context}, and the {role} {name} has positions for {config.max_len}",
                hint=f"set data.context={config.max_len} or less",
            )
        run.objective.check_auxiliary(role, config, model)
    return found


def source_facts(inputs: Inputs) -> dict[str, Any]:
    """What each source is: its hash, files and bytes, and how documents are selected."""
    keys = ("sha256", "files", "bytes", *SELECTED)
    return {name: {key: facts[key] for key in keys if key in facts} for name, facts in inputs.data.facts.items()}


def facts_of(run: Run, inputs: Inputs) -> dict[str, Any]:
    """The content of data.json: files, hash and tokens of each source, and how much of it the run uses."""
    report = inputs.data.loader.report(run.train.steps)
    return {"sources": inputs.data.facts, "shape": run.objective.data_shape(run.data), "loader": report}
