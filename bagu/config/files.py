"""Configuration files: JSON, written atomically and read strictly."""

import json
import math
import os
from pathlib import Path
from typing import Any, TypeVar

from bagu.config.errors import ConfigError
from bagu.config.fields import from_dict
from bagu.config.tree import leaves, parse, to_dict
from bagu.errors import BaguError

C = TypeVar("C")


def save(config: Any, path: str | os.PathLike[str]) -> None:
    """Write the tree as JSON, atomically."""
    data = to_dict(config)
    for key, value in leaves(data):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}: {value} is not finite", hint="JSON cannot represent it; use null")
    write_atomic(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def load(cls: type[C], path: str | os.PathLike[str]) -> C:
    """Read the tree from a JSON file."""
    path = Path(path)
    try:
        return from_dict(cls, parse(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist", hint="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {path}: {reason}", hint="a configuration must be a UTF-8 JSON file") from error
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
