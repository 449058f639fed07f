"""Where a model's files are: a folder, or a hub id of which a copy is fetched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bagu.errors import BaguError

__all__ = ["WeightsError", "find", "read_json"]

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FETCHED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "vocab*", "merges*"]  # never a pickle


class WeightsError(BaguError, ValueError):
    """A checkpoint does not hold what its configuration says, or cannot be read."""


def find(name: str | Path) -> Path:
    """The folder of model `name`: itself where it is one, otherwise the local copy of the hub's repository.

    The hub is asked only for a name of the form "owner/model" that is no folder here, and its copy is kept in the cache
    that every other tool of Hugging Face uses.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise WeightsError(f"{folder} is a file, and a model is a folder", hint=f"give its folder, {folder.parent}")
    if not HUB_ID.fullmatch(str(name)):
        raise WeightsError(f"there is no folder {folder}", hint="give a folder with config.json, or owner/model")
    return _fetch(str(name))


def _fetch(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise WeightsError(
            f"there is no folder {name}, and huggingface_hub, which would fetch it, is not installed",
            hint="pip install 'bagu[hub]', or give a folder",
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=FETCHED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise WeightsError(
            f"there is no folder {name}, and the hub did not give it: {str(error).splitlines()[0]}",
            hint="check the name and the network, or copy the model's folder here and give its path",
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path.parent} has no {path.name}", hint="is it a model's folder?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read as JSON: {error}", hint="fetch or write it again") from error
    if not isinstance(data, dict):
        raise WeightsError(f"{path} holds a {type(data).__name__}, not an object", hint="fetch or write it again")
    return data
