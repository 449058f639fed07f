"""`--config FILE`: the options of a verb from a TOML or JSON file. An option on the command line wins."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from bagu.errors import ArgumentError, UnknownName

__all__ = ["ConfigFile"]

KINDS: dict[str, tuple[type, ...]] = {"boolean": (bool,), "integer": (int,), "float": (int, float), "text": (str,)}


def read(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of the file the defaults of the verb's options. Keys are the options' names, with - or _."""
    if path is not None:
        options = {p.name: p for p in context.command.params if p.name not in (None, "config", "help")}
        names = {flag.lstrip("-").replace("-", "_"): p.name for p in options.values() for flag in p.opts}
        defaults: dict[str, Any] = {}
        for key, value in _load(path).items():
            name = names.get(key.replace("-", "_"))
            if name is None:
                raise UnknownName.among(f"option of bagu {context.info_name} in {path}:", key, names)
            if name in defaults:
                raise ArgumentError(f"{path}: {key} is set twice", hint="delete one of them")
            if value is not None:
                defaults[name] = _checked(f"{path}: {key}", value, options[name])
        context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:  # ValueError: wrong syntax or encoding
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(
            f"cannot read {path}: {reason}", hint="give a TOML file, or a JSON file named *.json"
        ) from None
    if not isinstance(data, dict):
        raise ArgumentError(f"{path} is not a JSON object", hint="write the options as keys of one object")
    return data


def _checked(where: str, value: Any, option: Any) -> Any:
    """`value` if its type is that of the option; a repeatable option takes one value or a list."""
    allowed = KINDS.get(option.type.name, (str,))
    values = value if option.multiple and isinstance(value, list) else [value]
    for one in values:
        if not isinstance(one, allowed) or (isinstance(one, bool) and bool not in allowed):
            raise ArgumentError(f"{where} = {json.dumps(one, default=str)}", hint=f"it is a {option.type.name}")
    return values if option.multiple else value


ConfigFile = Annotated[
    Path | None,
    Option(
        "--config", is_eager=True, callback=read, help="Read options from a TOML or JSON file; the command line wins."
    ),
]
