"""Configuration: trees of frozen dataclasses, read from and written to JSON, overridden by dotted key.

Each dataclass is defined next to the code that uses it; this file only reads the types of their fields.
`from_dict(C, to_dict(c)) == c` for every tree made of: dataclasses, `tuple`, `list`, `dict[str, X]`, `X | None`,
`Literal`, `bool`, `int`, `float`, `str` and `Path`. The field `kind: Literal["…"]` selects the member of a union of
dataclasses. An abstract dataclass is the union of its subclasses, so a new subclass needs no registration.

Types are strict: a float field accepts an int, and there is no other conversion. Numbers that are not finite are
refused, because JSON cannot represent them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from bagu.errors import BaguError, UnknownName

__all__ = ["ConfigError", "diff", "fingerprint", "from_dict", "load", "override", "save", "to_dict", "write_atomic"]

C = TypeVar("C")
MISSING = dataclasses.MISSING


class UnknownSetting(UnknownName):
    """A key that the configuration does not have."""


class ConfigError(BaguError, ValueError):
    """A value does not fit its field; the message starts with the dotted key of the field."""


def to_dict(config: Any) -> Any:
    """Convert the tree to dicts, lists and JSON scalars. Fields with `init=False` are left out."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_dict(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def from_dict(cls: type[C], data: Any, where: str = "") -> C:
    """Build a `cls` from `data`. `where` is the dotted key of `data`, for error messages.

    An unknown key, a missing required key and a value of the wrong type raise an error that names the dotted key. An
    error raised by `__post_init__` keeps its type and gets the dotted key too.
    """
    if not isinstance(data, Mapping):
        raise _wrong(where, "an object", data)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise _unknown(where, key, fields)
    given = {key: _value(hints[key], value, _join(where, key)) for key, value in data.items()}
    for name, field in fields.items():
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{_join(where, name)}: has no default and is not set", hint=f"set {_join(where, name)}")
    try:
        return cls(**given)
    except BaguError as error:
        if where:
            error.args = (f"{where}: {error}",)
        raise


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


def diff(a: Any, b: Any) -> list[str]:
    """List the differences, one line per key: "train.optimizer.lr: 0.001 → 0.0003". Accepts trees or their dicts."""
    old, new = dict(_leaves(to_dict(a))), dict(_leaves(to_dict(b)))

    def show(leaves: dict[str, Any], key: str) -> str:
        return json.dumps(leaves[key], ensure_ascii=False) if key in leaves else "absent"

    keys = [*old, *(key for key in new if key not in old)]
    return [f"{k}: {show(old, k)} → {show(new, k)}" for k in keys if k not in old or k not in new or old[k] != new[k]]


def fingerprint(config: Any) -> str:
    """A hash of 16 hex digits, equal for equal trees. 1 and 1.0 are equal; the order of keys does not matter."""
    text = json.dumps(_same_numbers(to_dict(config)), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def save(config: Any, path: str | os.PathLike[str]) -> None:
    """Write the tree as JSON, atomically."""
    data = to_dict(config)
    for key, value in _leaves(data):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}: {value} is not finite", hint="JSON cannot represent it; use null")
    write_atomic(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def load(cls: type[C], path: str | os.PathLike[str], *, upgrade: Callable[[Any], Any] | None = None) -> C:
    """Read the tree from a JSON file. `upgrade` converts JSON of an older layout to the current one."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
        return from_dict(cls, data if upgrade is None else upgrade(data))
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist", hint="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="a configuration must be a UTF-8 JSON file") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg}", hint="correct that line") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: the JSON is nested too deeply", hint="check the file") from error
    except BaguError as error:
        error.args = (f"{path}: {error}",)
        raise


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` atomically: a reader sees the old text or the new text, also after a crash.

    An OSError carries the file name, which the error of a full disk would otherwise lack.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


# Types


def _value(hint: Any, value: Any, where: str) -> Any:
    """Convert `value` to the type `hint`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType) or _is_abstract(hint):
        return _of_union(_members(hint), value, where)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    if origin is Literal:
        # `in` alone would accept 1 for True and 1.0 for 1
        found = next((a for a in args if a == value and type(a) is type(value)), MISSING)
        if found is MISSING:
            raise _not_among(where, value, args)
        return found
    if origin in (tuple, list):
        return origin(_items(hint, value, where))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(where, "an object", value)
        return {key: _value(args[1], item, _join(where, key)) for key, item in value.items()}
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is type(None) and value is None:
        return None
    if hint is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ConfigError(f"{where}: {value} is not finite", hint="give a finite number")
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint in (bool, int, str) and type(value) is hint:
        return value
    if hint in (bool, int, float, str, Path, type(None)):
        raise _wrong(where, _words(hint), value)
    raise TypeError(f"{where}: a configuration cannot hold {hint}")


def _items(hint: Any, value: Any, where: str) -> Iterator[Any]:
    """Convert the items of a list, a `tuple[X, ...]` or a `tuple[X, Y]`."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong(where, _words(hint), value)
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and args[-1:] != (...,):
        if len(args) != len(value):
            raise ConfigError(f"{where}: expected {len(args)} items, got {len(value)}", hint=f"give {_words(hint)}")
    else:
        args = args[:1] * len(value)
    for index, (arg, item) in enumerate(zip(args, value, strict=True)):
        yield _value(arg, item, _join(where, str(index)))


def _of_union(members: Sequence[Any], value: Any, where: str) -> Any:
    """Convert to the matching member: an object by its `kind`, a scalar of the exact type before a converted one."""
    if value is None and type(None) in members:
        return None
    if isinstance(value, Mapping) and (classes := [m for m in members if dataclasses.is_dataclass(m)]):
        return from_dict(typing.cast(type, _by_kind(classes, value, where)), value, where)
    members = [m for m in members if m is not type(None)]
    lists = [m for m in members if typing.get_origin(m) in (tuple, list)]
    if len(members) == 1 or (len(lists) == 1 and isinstance(value, list)):
        return _value((lists or members)[0], value, where)  # the error then names the wrong item
    for member in sorted(members, key=lambda m: m is not type(value)):
        with contextlib.suppress(ConfigError, UnknownName):
            return _value(member, value, where)
    raise _wrong(where, " or ".join(dict.fromkeys(map(_words, members))), value, hint=_kind_hint(members, where))


def _by_kind(classes: Sequence[Any], data: Mapping[str, Any], where: str) -> Any:
    """The class selected by the `kind` of `data`; a single class needs no `kind`."""
    if len(classes) == 1:
        return classes[0]
    kinds = _kinds(classes)
    if "kind" not in data:
        raise ConfigError(f"{where}: has no kind", hint=f"set kind to one of: {', '.join(kinds)}")
    if not isinstance(data["kind"], str) or data["kind"] not in kinds:
        raise _not_among(_join(where, "kind"), data["kind"], list(kinds))
    return kinds[data["kind"]]


def _kinds(classes: Iterable[Any]) -> dict[str, Any]:
    return {kind: cls for cls in classes for kind in typing.get_args(typing.get_type_hints(cls)["kind"])}


# Settings


def _assigned(hint: Any, data: Any, keys: Sequence[str], text: str, where: str = "") -> Any:
    """Return the plain tree `data`, of type `hint`, with the value at `keys` replaced by `text`, parsed as its type."""
    if not keys:
        return _read(hint, text, where)
    key, below = keys[0], _join(where, keys[0])
    members = _members(hint)
    if classes := [m for m in members if dataclasses.is_dataclass(m)]:
        data = data if isinstance(data, dict) else {}  # an unset object starts empty
        if key == "kind" and len(classes) > 1:
            shared = {f.name for f in dataclasses.fields(_by_kind(classes, {"kind": text}, where))}
            return {name: value for name, value in data.items() if name in shared} | {"kind": text}
        cls = _by_kind(classes, data, where)
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
        if key not in fields:
            others = {k: c for k, c in (_kinds(classes) if len(classes) > 1 else {}).items() if c is not cls}
            raise _of_other_kind(where, key, data, others) or _unknown(where, key, fields)
        old = data[key] if key in data else to_dict(_default(fields[key]))
        return data | {key: _assigned(typing.get_type_hints(cls)[key], old, keys[1:], text, below)}
    for member in members:
        args = typing.get_args(member)
        if typing.get_origin(member) in (tuple, list) and isinstance(data, list):
            if not key.isdecimal() or int(key) >= len(data):
                has = f"items 0 to {len(data) - 1}" if data else "no items"
                raise ConfigError(f"{below}: {where} has {has}", hint=f"to change the number of items, set {where}")
            at = int(key)
            return [*data[:at], _assigned(_item(member, at), data[at], keys[1:], text, below), *data[at + 1 :]]
        if typing.get_origin(member) in (dict, Mapping):
            data = data or {}
            return data | {key: _assigned(args[1], data.get(key), keys[1:], text, below)}
    raise ConfigError(f"{below}: {where} is {_words(hint)} and has no keys", hint=f"set {where} itself")


def _read(hint: Any, text: str, where: str) -> Any:
    """Parse the `text` after "=" as a plain value of type `hint`; `from_dict` checks the value again."""
    members = [m for m in _members(hint) if m is not type(None)]
    if text in ("null", "none", "None") and len(members) < len(_members(hint)):
        return None
    if len(members) == 1:
        return to_dict(_value(members[0], _plain(members[0], text), where))
    for member in sorted(members, key=lambda m: (m is str, m is float)):  # try int, then float, then str
        with contextlib.suppress(ConfigError, UnknownName):
            return to_dict(_value(member, _plain(member, text), where))
    raise _wrong(where, _words(hint), text, hint=_kind_hint(members, where))


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
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return text


def _item(hint: Any, at: int) -> Any:
    """The type of item `at` of a list or tuple. `_items` checks the number of items later."""
    args = typing.get_args(hint)
    return args[at] if typing.get_origin(hint) is tuple and args[-1] is not ... and at < len(args) else args[0]


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a field of type `hint` may have: those of a union, or the subclasses of an abstract dataclass."""
    if _is_abstract(hint):
        return tuple(_concrete(hint))
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _concrete(cls: type) -> Iterator[type]:
    subclasses: list[type] = cls.__subclasses__()
    for sub in subclasses:
        if not inspect.isabstract(sub):
            yield sub
        yield from _concrete(sub)


def _is_abstract(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) and inspect.isabstract(hint)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


# Keys and error messages


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _leaves(data: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every scalar and every empty container of a plain tree with its dotted key."""
    if isinstance(data, (dict, list)) and data:
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _leaves(value, _join(where, str(key)))
    else:
        yield where, data


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
            yield _join(where, key)
            yield from _keys(value, _join(where, key))


def _same_numbers(data: Any) -> Any:
    """The plain tree with 1.0 as 1: a float field set in code may hold an int, a loaded one holds a float."""
    if isinstance(data, dict):
        return {key: _same_numbers(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_same_numbers(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a duplicate key raises."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ConfigError(f"duplicate key {key!r} in one object", hint="delete one of them")
        seen[key] = value
    return seen


def _words(hint: Any) -> str:
    """Describe a type in an error message."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(a) for a in args)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin in (tuple, list):
        one = origin is list or args[-1] is ...
        return f"a list of {_words(args[0])}" if one else f"a list [{', '.join(map(_words, args))}]"
    if origin in (dict, Mapping) or dataclasses.is_dataclass(hint):
        return "an object"
    plain = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path"}
    return plain.get(hint, "null" if hint is type(None) else str(hint))


def _wrong(where: str, expected: str, value: Any, *, hint: str = "") -> ConfigError:
    shown = json.dumps(value, ensure_ascii=False, default=repr)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    what = f"{where or 'the configuration'}: expected {expected}, got {shown}"
    return ConfigError(what, hint=hint or f"give {expected}")


def _kind_hint(members: Iterable[Any], where: str) -> str:
    """How to choose among the classes of a union; "" if there is no choice."""
    classes = [m for m in members if dataclasses.is_dataclass(m)]
    return f"set {where}.kind to one of {', '.join(sorted(_kinds(classes)))}" if len(classes) > 1 else ""


def _of_other_kind(where: str, key: str, data: Mapping[str, Any], others: Mapping[str, Any]) -> UnknownSetting | None:
    """The error for a key that another kind of the union has."""
    owners = [kind for kind, cls in others.items() if key in {f.name for f in dataclasses.fields(cls) if f.init}]
    if not owners:
        return None
    what = f"there is no setting {_join(where, key)!r} where {where}.kind is {data['kind']}"
    return UnknownSetting(what, hint=f"it belongs to kind {' and '.join(sorted(owners))}: set {where}.kind too")


def _not_among(where: str, value: Any, options: Sequence[Any]) -> UnknownName:
    error = UnknownName.among(where, str(value), map(str, options))
    error.args = (f"{where}: unknown value {value!r}; expected one of {', '.join(map(str, options))}",)
    return error


def _unknown(where: str, key: str, known: Iterable[str]) -> UnknownSetting:
    """Build the error for an unknown key. The hint compares the last part only: long common prefixes look similar."""
    return UnknownSetting.among("setting", key, known, within=f"{where}." if where else "")
