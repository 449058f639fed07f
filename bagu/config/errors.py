"""The errors of a configuration; each names the dotted key of the field."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from bagu.errors import BaguError, UnknownName


class UnknownSetting(UnknownName):
    """A key that the configuration does not have."""


class ConfigError(BaguError, ValueError):
    """A value does not fit its field; the message starts with the dotted key of the field."""


def wrong_value(where: str, expected: str, value: Any, *, hint: str = "") -> ConfigError:
    shown = json.dumps(value, ensure_ascii=False, default=repr)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    what = f"{where or 'the configuration'}: expected {expected}, got {shown}"
    return ConfigError(what, hint=hint or f"give {expected}")


def not_among(where: str, value: Any, options: Sequence[Any]) -> UnknownName:
    error = UnknownName.among(where, str(value), map(str, options))
    error.args = (f"{where}: unknown value {value!r}; expected one of {', '.join(map(str, options))}",)
    return error


def unknown_setting(where: str, key: str, known: Iterable[str]) -> UnknownSetting:
    """Build the error for an unknown key. The hint compares the last part only: long common prefixes look similar."""
    return UnknownSetting.among("setting", key, known, within=f"{where}." if where else "")
