"""The generation settings in a model's folder: the end-of-text tokens, and the recommended sampling parameters.

generation_config.json is read as vLLM reads it by default: its sampling parameters apply if a request sets none, and
`do_sample` is ignored. Its `eos_token_id`, one or several, overrides that of config.json, as in transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bagu.errors import ArgumentError, BaguError
from bagu.machine.hub import WeightsError, read_json
from bagu.serve.config import GenerationDefaults

GENERATION_CONFIG = "generation_config.json"
SAMPLING = {  # name in generation_config.json -> name in bagu
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip


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
    said = read_json(file) if file.is_file() else {}
    source = said if "eos_token_id" in said or not config.is_file() else read_json(config)
    ends = source.get("eos_token_id")
    found = {ours: said[theirs] for theirs, ours in SAMPLING.items() if said.get(theirs) is not None}
    if found.get("top_k") == 0:  # 0 means "all" in transformers
        del found["top_k"]
    try:
        return GenerationDefaults(eos_ids=_ids(ends, folder), **found)
    except ArgumentError as error:
        raise WeightsError(f"{folder / GENERATION_CONFIG}: {error}", hint=error.hint) from error


def _ids(value: Any, folder: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id in ids:
        if not isinstance(id, int) or isinstance(id, bool):
            raise WeightsError(f"{folder}: eos_token_id is {value!r}", hint="it is a token id, or a list of them")
    return tuple(id for id in ids if id >= 0)  # some files use -1 for "none"
