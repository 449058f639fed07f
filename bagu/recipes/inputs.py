"""What a run needs before it has weights: device, tokenizer, the model's configuration, the tokens. All of it is
checked here, and nothing is written to the run's folder: what is wrong with a run is reported before it begins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch

from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.masked import Masking
from bagu.data.tokenizer import SPECIAL_TOKENS, BpeTokenizer
from bagu.errors import BaguError
from bagu.machine.cache import cache_folder
from bagu.machine.device import named_device, named_dtype
from bagu.machine.fast_dtype import compute_dtype
from bagu.nn.config import ModelConfig
from bagu.recipes.corpus import Corpus, Tokens, tokens_of, train_tokenizer
from bagu.recipes.models import find_model, model_config, tokenizer_folder
from bagu.recipes.run import Run

__all__ = ["DATA", "TOKENIZER", "Inputs", "facts_of", "read_inputs"]

DATA, TOKENIZER = "data.json", "tokenizer"  # in the folder of a run


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """`start` is the folder of the model that the run begins with; `data_changes` a line for each source that is not
    what it was when the run last started."""

    device: torch.device
    dtype: torch.dtype
    start: Path | None
    corpora: Mapping[str, Corpus]
    tokenizer: BpeTokenizer
    model: ModelConfig
    tokens: Tokens
    data_changes: tuple[str, ...]


def read_inputs(
    run: Run,
    out: Path,
    *,
    accept_data_change: bool = False,
    tokenizer: BpeTokenizer | None = None,
    corpora: Mapping[str, Corpus] | None = None,
) -> Inputs:
    """Read and check what `run` in the folder `out` needs. A tokenizer and corpora at hand save reading them again."""
    device = named_device(run.device)
    start = find_model(run.init_from) if run.init_from else None
    model = run.model if start is None else model_config(start)
    assert model is not None, "Run refuses to have neither"
    run.check_sight(model)
    made = {n: Corpus(n, c, run) for n, c in run.sources.items()} if corpora is None else corpora
    changes = _data_changes(out / DATA, made)
    if changes and not accept_data_change:
        raise BaguError(
            f"the data of the run {out} has changed since it last started: {'; '.join(changes)}",
            hint="restore the data, begin a new run in another folder, or resume with --accept-data-change",
        )
    tokenizer = tokenizer or _tokenizer(run, start, made, out)
    masking = None if run.mask_rate is None else Masking.of(tokenizer, rate=run.mask_rate, seed=run.data.seed)
    _check_fit(run, tokenizer, model)
    tokens = tokens_of(run, made, tokenizer, model.vocab_size)
    if masking is not None:
        tokens = replace(tokens, loader=tokens.loader.masked(masking))
    if corpora is None:
        made = {name: corpus.without_text() for name, corpus in made.items()}
    return Inputs(
        device=device, dtype=named_dtype(run.dtype) if run.dtype else compute_dtype(device), start=start,
        corpora=made, tokenizer=tokenizer, model=model, tokens=tokens, data_changes=changes,
    )  # fmt: skip


def _data_changes(path: Path, corpora: Mapping[str, Corpus]) -> tuple[str, ...]:
    """How the sources differ from those that data.json names; () where there is no such file yet."""
    if not path.is_file():
        return ()
    try:
        before = {
            name: (s["sha256"], s["files"], s["bytes"])
            for name, s in json.loads(path.read_text(encoding="utf-8"))["sources"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BaguError(
            f"{path} cannot be read, so it cannot be known whether the data has changed: {error!r}",
            hint="restore the file; if you know that the data is the same, delete it",
        ) from error
    changes = [f"source {name!r} is gone" for name in before if name not in corpora]
    for name, corpus in corpora.items():
        now = corpus.facts
        if name not in before:
            changes.append(f"source {name!r} is new")
        elif before[name][0] != now["sha256"]:
            was = f"{before[name][1]:,} files, {before[name][2]:,} bytes"
            changes.append(f"source {name!r} was {was} and is {now['files']:,} files, {now['bytes']:,} bytes")
    return tuple(changes)


def _tokenizer(run: Run, start: Path | None, corpora: Mapping[str, Corpus], out: Path) -> BpeTokenizer:
    """The named one, the starting model's, the one this run trained before it was interrupted, or a new one."""
    if run.tokenizer.path is not None:
        return BpeTokenizer.load(run.tokenizer.path)
    if start is not None:
        return BpeTokenizer.load(tokenizer_folder(start) or start)  # the second says what is missing
    if (out / TOKENIZER).is_dir():
        return BpeTokenizer.load(out / TOKENIZER)
    facts = {
        "corpora": {name: dict(corpus.facts) for name, corpus in corpora.items()},
        "vocab_size": run.tokenizer.vocab_size, "max_mb": run.tokenizer.max_mb, "special": SPECIAL_TOKENS,
        "template": DEFAULT_TEMPLATE, "tokenizers": tokenizers.__version__,
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    cached = cache_folder() / "tokenizers" / key  # training is deterministic: the same facts give the same merges
    if not (cached / "tokenizer.json").is_file():
        train_tokenizer(corpora, run.tokenizer).save(cached)
    return BpeTokenizer.load(cached)


def _check_fit(run: Run, tokenizer: BpeTokenizer, model: ModelConfig) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise BaguError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, and the model's vocabulary {model.vocab_size}",
            hint=f"set model.vocab_size={tokenizer.vocab_size}, or use the tokenizer the model was made with",
        )
    if run.data.context > model.max_len:
        raise BaguError(
            f"data.context is {run.data.context}, and the model has positions for {model.max_len}",
            hint=f"set data.context={model.max_len} or less",
        )


def facts_of(run: Run, inputs: Inputs) -> dict[str, Any]:
    """What data.json holds: by source its files, hash and tokens, and what the run takes from each."""
    return {"sources": inputs.tokens.facts, "loader": inputs.tokens.loader.report(run.train.steps)}
