"""From a plain tree to dataclasses: each value is checked and converted by the type of its field."""

import contextlib
import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from bagu.config.errors import ConfigError, not_among, unknown_setting, wrong_value
from bagu.config.tree import dotted
from bagu.errors import BaguError, UnknownName

C = TypeVar("C")


def from_dict(cls: type[C], data: Any, where: str = "") -> C:
    """Build a `cls` from `data`. `where` is the dotted key of `data`, for error messages.

    An unknown key, a missing required key and a value of the wrong type raise an error that names the dotted key. An
    error raised by `__post_init__` keeps its type and gets the dotted key too.
    """
    if not isinstance(data, Mapping):
        raise wrong_value(where, "an object", data)
    hints = typing.get_type_hints(cls)
    fields = fields_of(cls)
    for key in data:
        if key not in fields:
            raise unknown_setting(where, key, fields)
    given = {key: value_of(hints[key], value, dotted(where, key)) for key, value in data.items()}
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in given:
            key = dotted(where, name)
            raise ConfigError(f"{key}: has no default and is not set", hint=f"set {key}")
    try:
        return cls(**given)
    except BaguError as error:
        if where:
            error.args = (f"{where}: {error}",)
        raise


def fields_of(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a dataclass that a configuration can set, by name."""
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def value_of(hint: Any, value: Any, where: str) -> Any:
    """Convert `value` to the type `hint`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType) or _is_abstract(hint):
        return _of_union(members_of(hint), value, where)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    if origin is Literal:
        if not any(a == value and type(a) is type(value) for a in args):  # `in` alone would accept 1 for True
            raise not_among(where, value, args)
        return value
    if origin in (tuple, list):
        return origin(_items(hint, value, where))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise wrong_value(where, "an object", value)
        return {key: value_of(args[1], item, dotted(where, key)) for key, item in value.items()}
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
        raise wrong_value(where, describe(hint), value)
    raise TypeError(f"{where}: a configuration cannot hold {hint}")


def _items(hint: Any, value: Any, where: str) -> Iterator[Any]:
    """Convert the items of a list, a `tuple[X, ...]` or a `tuple[X, Y]`."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise wrong_value(where, describe(hint), value)
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and args[-1:] != (...,):
        if len(args) != len(value):
            raise ConfigError(f"{where}: expected {len(args)} items, got {len(value)}", hint=f"give {describe(hint)}")
    else:
        args = args[:1] * len(value)
    for index, (arg, item) in enumerate(zip(args, value, strict=True)):
        yield value_of(arg, item, dotted(where, str(index)))


def _of_union(members: Sequence[Any], value: Any, where: str) -> Any:
    """Convert to the matching member: an object by its `kind`, a scalar of the exact type before a converted one."""
    if value is None and type(None) in members:
        return None
    if isinstance(value, Mapping) and (classes := [m for m in members if dataclasses.is_dataclass(m)]):
        return from_dict(typing.cast(type, by_kind(classes, value, where)), value, where)
    members = [m for m in members if m is not type(None)]
    lists = [m for m in members if typing.get_origin(m) in (tuple, list)]
    if len(members) == 1 or (len(lists) == 1 and isinstance(value, list)):
        return value_of((lists or members)[0], value, where)  # the error then names the wrong item
    for member in sorted(members, key=lambda m: m is not type(value)):
        with contextlib.suppress(ConfigError, UnknownName):
            return value_of(member, value, where)
    raise wrong_value(where, " or ".join(dict.fromkeys(map(describe, members))), value, hint=kind_hint(members, where))


def by_kind(classes: Sequence[Any], data: Mapping[str, Any], where: str) -> Any:
    """The class selected by the `kind` of `data`; a single class needs no `kind`."""
    if len(classes) == 1:
        return classes[0]
    kinds = kind_classes(classes)
    if "kind" not in data:
        raise ConfigError(f"{where}: has no kind", hint=f"set kind to one of: {', '.join(kinds)}")
    if not isinstance(data["kind"], str) or data["kind"] not in kinds:
        raise not_among(dotted(where, "kind"), data["kind"], list(kinds))
    return kinds[data["kind"]]


def kind_classes(classes: Iterable[Any]) -> dict[str, Any]:
    """The dataclasses of a union by their `kind`."""
    return {kind: cls for cls in classes for kind in typing.get_args(typing.get_type_hints(cls)["kind"])}


def kind_hint(members: Iterable[Any], where: str) -> str:
    """How to choose among the classes of a union; "" if there is no choice."""
    classes = [m for m in members if dataclasses.is_dataclass(m)]
    return f"set {where}.kind to one of {', '.join(sorted(kind_classes(classes)))}" if len(classes) > 1 else ""


def members_of(hint: Any) -> tuple[Any, ...]:
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


def describe(hint: Any) -> str:
    """Describe a type in an error message."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin in (tuple, list):
        one = origin is list or args[-1] is ...
        return f"a list of {describe(args[0])}" if one else f"a list [{', '.join(map(describe, args))}]"
    if origin in (dict, Mapping) or dataclasses.is_dataclass(hint):
        return "an object"
    plain = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path"}
    return plain.get(hint, "null" if hint is type(None) else str(hint))
