"""The generation settings in a model's folder: the end-of-text tokens, and the recommended sampling parameters.

generation_config.json is read as vLLM reads it by default: its sampling parameters apply if a request sets none, and
`do_sample` is ignored. Its `eos_token_id`, one or several, overrides that of config.json, as in transformers.

A model that bagu writes keeps the settings of the model that it started from, and ends at the token that ends the
assistant's turn too: other programs stop at the tokens in these files and do not look at the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagu.config import write_atomic
from bagu.errors import ArgumentError, BaguError
from bagu.machine.hub import WeightsError, read_json
from bagu.serve.config import GenerationDefaults

if TYPE_CHECKING:
    from bagu.data.tokenizer import BpeTokenizer

GENERATION_CONFIG = "generation_config.json"
SUGGESTED = "suggested_prompts"  # a key of our own: what the chat page offers
SAMPLING = {  # name in generation_config.json -> name in bagu
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def check_generation_config(setting: str) -> None:
    """Raise unless `setting` (`--generation-config`) is "auto", "none" or a folder with the file."""
    if setting not in ("auto", "none") and not (Path(setting) / GENERATION_CONFIG).is_file():
        raise BaguError(
            f"there is no {Path(setting) / GENERATION_CONFIG}", hint="use auto, none, or a folder with the file"
        )


def generation_defaults(folder: Path, setting: str) -> GenerationDefaults:
    """The defaults of the model in `folder` by `--generation-config`: its own for "auto", no defaults for "none", or
    those of the folder that `setting` names."""
    check_generation_config(setting)
    if setting == "none":
        return GenerationDefaults()
    return read_generation(folder if setting == "auto" else Path(setting))


def read_generation(folder: Path) -> GenerationDefaults:
    """The defaults of the model in `folder`; empty if it has neither file."""
    file, config = folder / GENERATION_CONFIG, folder / "config.json"
    said = _read(file)
    source = said if "eos_token_id" in said or not config.is_file() else read_json(config)
    ends = source.get("eos_token_id")
    found = {ours: said[theirs] for theirs, ours in SAMPLING.items() if said.get(theirs) is not None}
    prompts = tuple(map(str, said.get(SUGGESTED) or ()))
    if found.get("top_k") == 0:  # 0 means "all" in transformers
        del found["top_k"]
    try:
        return GenerationDefaults(eos_ids=_ids(ends, folder), suggested_prompts=prompts, **found)
    except ArgumentError as error:
        raise WeightsError(f"{folder / GENERATION_CONFIG}: {error}", hint=error.hint) from error


def written_settings(tokenizer: BpeTokenizer, start: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The token ids for config.json, and generation_config.json, of a model with this tokenizer. `start` is the folder
    of the model that it was trained or exported from, if there is one."""
    from bagu.data.chat import turn_ends  # imports numpy, which the process of a server does without

    said = {} if start is None else _read(start / GENERATION_CONFIG)
    said.pop(SUGGESTED, None)  # they are checked for the model that they are written for
    config = {} if start is None else _read(start / "config.json")
    named = {
        f"{name}_token_id": tokenizer.token_id(tokenizer.named[f"{name}_token"])
        for name in ("bos", "pad")
        if f"{name}_token" in tokenizer.named
    }
    kept: dict[str, Any] = {
        key: source[key] for source in (config, said) for key in ("bos_token_id", "pad_token_id") if key in source
    }
    known = _ids(said.get("eos_token_id", config.get("eos_token_id")), start) if start is not None else ()
    ends = list(dict.fromkeys([*turn_ends(tokenizer), *known, tokenizer.eos_id]))
    ids: dict[str, Any] = {**named, **kept, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    return ids, {**said, **ids, "pad_token_id": ids.get("pad_token_id", tokenizer.eos_id)}


def suggest(folder: Path, prompts: Sequence[str]) -> None:
    """Let the model in `folder` answer without sampling, and the chat page offer these prompts."""
    file = folder / GENERATION_CONFIG
    write_atomic(file, json.dumps({**_read(file), "temperature": 0.0, SUGGESTED: list(prompts)}, indent=2) + "\n")


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _ids(value: Any, folder: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id in ids:
        if not isinstance(id, int) or isinstance(id, bool):
            raise WeightsError(f"{folder}: eos_token_id is {value!r}", hint="it is a token id, or a list of them")
    return tuple(id for id in ids if id >= 0)  # some files use -1 for "none"
