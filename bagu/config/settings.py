"""Settings by dotted key: "train.optimizer.lr=3e-4" replaces one value of a configuration."""

import contextlib
import dataclasses
import json
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from bagu.config.errors import ConfigError, UnknownSetting, unknown_setting, wrong_value
from bagu.config.fields import by_kind, describe, fields_of, from_dict, kind_classes, kind_hint, members_of, value_of
from bagu.config.tree import dotted, parse, to_dict
from bagu.errors import UnknownName

C = TypeVar("C")


def override(config: C, settings: Iterable[str]) -> C:
    """Return `config` with settings such as "train.optimizer.lr=3e-4" or "windows.0=128" applied.

    Each value is parsed as the type of its field. "null" is None if the field allows it. A list is "[1, 2]" or
    "1,2". An object is JSON. All settings are applied before the result is checked, so settings that depend on each
    other can come in any order. Setting the `kind` of a union keeps the fields that both kinds have.
    """
    pairs = []
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key.strip():
            raise ConfigError(
                f"{setting!r} is not a setting", hint="write key=value, for example train.optimizer.lr=3e-4"
            )
        pairs.append((key.strip().split("."), text.strip()))
    data = to_dict(config)
    for keys, text in sorted(pairs, key=lambda pair: pair[0][-1] != "kind"):  # kinds first: they decide the keys
        try:
            data = _assigned(type(config), data, keys, text)
        except UnknownSetting as error:
            if not (places := _namesakes(data, keys)):
                raise
            raise UnknownSetting(str(error), hint=f"did you mean {' or '.join(map(repr, places[:3]))}?") from None
    return from_dict(type(config), data)


def _assigned(hint: Any, data: Any, keys: Sequence[str], text: str, where: str = "") -> Any:
    """Return the plain tree `data`, of type `hint`, with the value at `keys` replaced by `text`, parsed as its type."""
    if not keys:
        return _read(hint, text, where)
    key, below = keys[0], dotted(where, keys[0])
    members = members_of(hint)
    if classes := [m for m in members if dataclasses.is_dataclass(m)]:
        return _assigned_field(classes, data if isinstance(data, dict) else {}, keys, text, where)
    for member in members:
        if typing.get_origin(member) in (tuple, list) and isinstance(data, list):
            if not key.isdecimal() or int(key) >= len(data):
                has = f"items 0 to {len(data) - 1}" if data else "no items"
                raise ConfigError(f"{below}: {where} has {has}", hint=f"to change the number of items, set {where}")
            at = int(key)
            return [*data[:at], _assigned(_item(member, at), data[at], keys[1:], text, below), *data[at + 1 :]]
        if typing.get_origin(member) in (dict, Mapping):
            data, values = data or {}, typing.get_args(member)[1]
            return data | {key: _assigned(values, data.get(key), keys[1:], text, below)}
    raise ConfigError(f"{below}: {where} is {describe(hint)} and has no keys", hint=f"set {where} itself")


def _assigned_field(classes: Sequence[Any], data: dict[str, Any], keys: Sequence[str], text: str, where: str) -> Any:
    """The same for an object of one of the dataclasses `classes`; an object that was not set is empty."""
    key = keys[0]
    if key == "kind" and len(classes) > 1:
        shared = {f.name for f in dataclasses.fields(by_kind(classes, {"kind": text}, where))}
        return {name: value for name, value in data.items() if name in shared} | {"kind": text}
    cls = by_kind(classes, data, where)
    fields = fields_of(cls)
    if key not in fields:
        others = {k: c for k, c in (kind_classes(classes) if len(classes) > 1 else {}).items() if c is not cls}
        raise _of_other_kind(where, key, data, others) or unknown_setting(where, key, fields)
    old = data[key] if key in data else to_dict(_default(fields[key]))
    value = _assigned(typing.get_type_hints(cls)[key], old, keys[1:], text, dotted(where, key))
    return data | {key: value}


def _read(hint: Any, text: str, where: str) -> Any:
    """Parse the `text` after "=" as a plain value of type `hint`; `from_dict` checks the value again."""
    members = [m for m in members_of(hint) if m is not type(None)]
    if text in ("null", "none", "None") and len(members) < len(members_of(hint)):
        return None
    if len(members) == 1:
        return to_dict(value_of(members[0], _plain(members[0], text), where))
    for member in sorted(members, key=lambda m: (m is str, m is float)):  # try int, then float, then str
        with contextlib.suppress(ConfigError, UnknownName):
            return to_dict(value_of(member, _plain(member, text), where))
    raise wrong_value(where, describe(hint), text, hint=kind_hint(members, where))


def _plain(member: Any, text: str) -> Any:
    """Parse `text` for a field of type `member`; return the text itself if it does not parse."""
    if typing.get_origin(member) is Literal:
        return next((a for a in typing.get_args(member) if str(a) == text or json.dumps(a) == text), text)
    if member in (str, Path):
        return text
    if member is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        if member in (int, float):
            return member(text)
        if typing.get_origin(member) in (tuple, list) and not text.startswith("["):
            return [_plain(_item(member, at), part.strip()) for at, part in enumerate(text.split(","))]
        return parse(text)
    except (ValueError, RecursionError):
        return text


def _item(hint: Any, at: int) -> Any:
    """The type of item `at` of a list or tuple. `from_dict` checks the number of items later."""
    args = typing.get_args(hint)
    return args[at] if typing.get_origin(hint) is tuple and args[-1] is not ... and at < len(args) else args[0]


def _default(field: dataclasses.Field[Any]) -> Any:
    """The value of a field that is not set; None if it has to be set."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _of_other_kind(where: str, key: str, data: Mapping[str, Any], others: Mapping[str, Any]) -> UnknownSetting | None:
    """The error for a key that another kind of the union has."""
    owners = [kind for kind, cls in others.items() if key in fields_of(cls)]
    if not owners:
        return None
    what = f"there is no setting {dotted(where, key)!r} where {where}.kind is {data['kind']}"
    return UnknownSetting(what, hint=f"it belongs to kind {' and '.join(sorted(owners))}: set {where}.kind too")


def _namesakes(data: Any, keys: Sequence[str]) -> list[str]:
    """The dotted keys that share the longest suffix with `keys`."""
    for parts in range(len(keys), 0, -1):
        if found := [at for at in _keys(data) if at.split(".")[-parts:] == keys[-parts:]]:
            return found
    return []


def _keys(data: Any, where: str = "") -> Iterator[str]:
    """Yield the dotted key of every value in a plain tree."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield dotted(where, key)
            yield from _keys(value, dotted(where, key))
