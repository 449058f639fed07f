"""`--config FILE`: the options of a verb from a TOML or JSON file. An option on the command line wins."""

import json
import tomllib
import typing
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from bagu.errors import ArgumentError, UnknownName

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def read(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of the file the defaults of the verb's options. Keys are the options' names, with - or _."""
    if path is not None:
        types = typing.get_type_hints(context.command.callback)
        flags = {p.name: p.opts for p in context.command.params if p.name in types and p.name != "config"}
        names = {flag.lstrip("-").replace("-", "_"): name for name, opts in flags.items() for flag in opts}
        defaults: dict[str, Any] = {}
        for key, value in _load(path).items():
            name = names.get(key.replace("-", "_"))
            if name is None:
                raise UnknownName.among(f"option of bagu {context.info_name} in {path}:", key, names)
            if name in defaults:
                raise ArgumentError(f"{path}: {key} is set twice", hint="delete one of them")
            if value is not None:
                defaults[name] = _checked(f"{path}: {key}", value, types[name])
        context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:  # ValueError: wrong syntax or encoding
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(f"cannot read {path}: {reason}", hint="give a TOML file, or a JSON file (*.json)") from None
    if not isinstance(data, dict):
        raise ArgumentError(f"{path} is not a JSON object", hint="write the options as keys of one object")
    return data


def _checked(where: str, value: Any, hint: Any) -> Any:
    """`value` if it has the type of the option; a repeatable option takes one value or a list."""
    members = [m for m in typing.get_args(hint) or (hint,) if m is not type(None)]
    repeatable = next((typing.get_args(m)[0] for m in members if typing.get_origin(m) is list), None)
    kind = repeatable or next((m for m in members if m in WORDS), str)  # a path is a string
    values = value if repeatable and isinstance(value, list) else [value]
    for one in values:
        fits = isinstance(one, (int, float) if kind is float else kind)
        if not fits or (isinstance(one, bool) and kind is not bool):
            raise ArgumentError(f"{where} = {json.dumps(one, default=str)}", hint=f"it is {WORDS[kind]}")
    return values if repeatable else value


ConfigFile = Annotated[
    Path | None, Option("--config", is_eager=True, callback=read, help="Read options from a TOML or JSON file.")
]
