"""Find the files of a model or a LoRA adapter: a local folder, a GGUF file, or a Hugging Face id to download.

This imports no torch: the HTTP server's process checks names with it.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from bagu.errors import BaguError

ADAPTER_CONFIG = "adapter_config.json"  # in the folder of a PEFT adapter
RUN_ADAPTER = "adapter"  # where a LoRA run of bagu writes its adapter

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FETCHED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "vocab*", "merges*"]  # never pickle files


class WeightsError(BaguError, ValueError):
    """A checkpoint does not match its configuration, or cannot be read."""


def find(name: str | Path) -> Path:
    """The folder of model `name`: the folder itself, a GGUF file, or the local copy of the Hugging Face repository.

    A download happens only for a name of the form "owner/model" that is not a folder here. The copy goes to the cache
    that all Hugging Face tools share.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf" and folder.is_file():
        return folder
    if folder.exists():
        raise WeightsError(f"{folder} is a file; expected a folder", hint=f"give its folder, {folder.parent}")
    if not HUB_ID.fullmatch(str(name)):
        raise WeightsError(f"folder {folder} does not exist", hint="give a folder with config.json, or owner/model")
    return _fetch(str(name))


def _fetch(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise WeightsError(
            f"folder {name} does not exist, and huggingface_hub, which could download it, is not installed",
            hint="pip install 'bagu[hub]', or give a folder",
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=FETCHED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise WeightsError(
            f"folder {name} does not exist, and the download failed: {str(error).splitlines()[0]}",
            hint="check the name and the network, or give the path of a local copy",
        ) from error


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def find_adapter(path: str | Path) -> Path:
    """The folder of an adapter: `path` itself, or that of a LoRA run of bagu at `path`."""
    folder = Path(path).expanduser()
    for found in (folder, folder / RUN_ADAPTER):
        if is_adapter(found):
            return found
    what = f"has no {ADAPTER_CONFIG}" if folder.is_dir() else "is not a folder"
    raise WeightsError(f"{folder} {what}", hint="give the folder of a PEFT adapter, or of a LoRA run of bagu")


def find_adapter_below(root: Path, given: str) -> Path:
    """The folder of an adapter below `root`, for a path that a client names, relative or absolute. A path that leads
    out of the root, also by a symbolic link, is refused with the same words as one that does not exist, and without a
    look at the disk where the path alone shows it."""
    refusal = WeightsError(f"there is no folder {given!r:.200} below the adapter root", hint="give one that is there")
    real = root.resolve()
    try:
        asked = Path(os.path.normpath(real / given))  # not expanduser: "~" is a name like others here
        if not any(asked.is_relative_to(start) for start in (real, root.absolute())):
            raise refusal
        folder = asked.resolve(strict=True)
        if folder.is_relative_to(real) and folder.is_dir():
            found = find_adapter(folder)
            if all(path.resolve().is_relative_to(real) for path in (found, *found.iterdir())):
                return found
    except (OSError, RuntimeError, ValueError) as error:  # no such file, a name too long, a loop of links, a null byte
        if isinstance(error, WeightsError):
            raise
        raise refusal from error
    raise refusal


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path.parent} has no {path.name}", hint="check that it is a model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"cannot read {path} as JSON: {error}", hint="download or write it again") from error
    if not isinstance(data, dict):
        raise WeightsError(f"{path} holds a {type(data).__name__}, not an object", hint="download or write it again")
    return data
