"""A configuration as a plain tree of dicts, lists and JSON scalars: dotted keys, differences, hash."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bagu.config.errors import ConfigError


def to_dict(config: Any) -> Any:
    """Convert the tree to dicts, lists and JSON scalars. Fields with `init=False` are left out."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_dict(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def diff(a: Any, b: Any) -> list[str]:
    """List the differences, one line per key: "train.optimizer.lr: 0.001 → 0.0003". Accepts trees or their dicts."""
    old, new = dict(leaves(to_dict(a))), dict(leaves(to_dict(b)))

    def show(values: dict[str, Any], key: str) -> str:
        return json.dumps(values[key], ensure_ascii=False) if key in values else "absent"

    keys = [*old, *(key for key in new if key not in old)]
    return [f"{k}: {show(old, k)} → {show(new, k)}" for k in keys if k not in old or k not in new or old[k] != new[k]]


def fingerprint(config: Any) -> str:
    """A hash of 16 hex digits, equal for equal trees. 1 and 1.0 are equal; the order of keys does not matter."""
    text = json.dumps(_same_numbers(to_dict(config)), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def dotted(where: str, key: str) -> str:
    """The dotted key of `key` in the object at `where`."""
    return f"{where}.{key}" if where else key


def leaves(data: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every scalar and every empty container of a plain tree with its dotted key."""
    if isinstance(data, (dict, list)) and data:
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from leaves(value, dotted(where, str(key)))
    else:
        yield where, data


def _same_numbers(data: Any) -> Any:
    """The plain tree with 1.0 as 1: a float field set in code may hold an int, a loaded one holds a float."""
    if isinstance(data, dict):
        return {key: _same_numbers(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_same_numbers(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data


def parse(text: str) -> Any:
    """The plain tree of a JSON text. A key that stands twice in one object raises."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ConfigError(f"duplicate key {key!r} in one object", hint="delete one of them")
        seen[key] = value
    return seen
