"""API keys with limits: `--api-keys FILE`, a TOML file with one table per key.

    [[key]]
    name = "alice"                  # in metrics; not a secret
    key = "sk-..."                  # or sha256 = "..." of it, so that the file holds no secret
    requests_per_minute = 60
    tokens_per_day = 100000
    models = ["chat"]               # the models and adapters that it may use; without this field all of them
    admin = true                    # may load, unload and promote models, and load and unload adapters

Usage is counted in memory: it starts at 0 when the server starts. A day begins at 00:00 UTC.
"""

import hashlib
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bagu.config import ConfigError, from_dict
from bagu.errors import BaguError
from bagu.serve.http.errors import ApiError
from bagu.serve.http.observe.metrics import labels, sample

DAY_S = 86400
# Who may use a route of a server with keys: everyone, a key, a key with `admin`. "metrics": a key, or everyone with
# --open-metrics.
Access = Literal["open", "metrics", "key", "admin"]


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key and its limits; None is no limit."""

    name: str
    key: str | None = field(default=None, repr=False)
    sha256: str | None = None
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    models: tuple[str, ...] | None = None
    admin: bool = False

    def __post_init__(self) -> None:
        if (self.key is None) == (self.sha256 is None) or self.key == "":
            raise ConfigError(f"the key {self.name!r} has no secret", hint="set either key or sha256")
        if self.sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", self.sha256):
            raise ConfigError(f"sha256 of the key {self.name!r} is not a digest", hint="64 hexadecimal digits")
        for limit in ("requests_per_minute", "tokens_per_day"):
            if (value := getattr(self, limit)) is not None and value < 1:
                raise ConfigError(f"{limit} = {value} of the key {self.name!r}", hint="1 or more; leave it out for all")

    @property
    def digest(self) -> bytes:
        if self.key is not None:
            return hashlib.sha256(self.key.encode()).digest()
        return bytes.fromhex(self.sha256 or "")


@dataclass(frozen=True, kw_only=True)
class KeyFile:
    key: tuple[Key, ...] = ()


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file. An error names the file and the field."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        keys = from_dict(KeyFile, data).key
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}", hint="it is a TOML file") from error
    except BaguError as error:
        error.args = (f"{path}: {error}",)
        raise
    if not keys:
        raise ConfigError(f"{path} has no keys", hint="add a table [[key]] with name and key")
    for unique in ("name", "digest"):
        counts = Counter(getattr(key, unique) for key in keys)
        if twice := [key.name for key in keys if counts[getattr(key, unique)] > 1]:
            raise ConfigError(f"{path}: two keys have the same {unique}: {', '.join(twice)}", hint="make it unique")
    return keys


class KeyUse:
    """A key with what it has used. Times are seconds of `time.time`."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.requests = self.tokens = 0
        self.refused: Counter[str] = Counter()  # by limit
        self._credit, self._since = float(key.requests_per_minute or 0), 0.0  # requests that may be sent now
        self._day, self._today = 0, 0  # the day, and its tokens

    def admit(self, now: float) -> None:
        """Count a request; raises 429 if a limit is reached. `requests_per_minute` may come at once, and the credit is
        renewed continuously."""
        key = self.key
        if key.tokens_per_day is not None and self._used_today(now) >= key.tokens_per_day:
            raise self._refusal("tokens_per_day", key.tokens_per_day, DAY_S - now % DAY_S)
        if (rate := key.requests_per_minute) is not None:
            self._credit = min(float(rate), self._credit + max(now - self._since, 0.0) * rate / 60)
            self._since = now
            if self._credit < 1:
                raise self._refusal("requests_per_minute", rate, (1 - self._credit) * 60 / rate)
            self._credit -= 1
        self.requests += 1

    def charge(self, tokens: int, now: float) -> None:
        """Count the tokens of a request that has ended."""
        self.tokens += tokens
        self._today = self._used_today(now) + tokens

    def may_use(self, *names: str) -> bool:
        """Whether the key may use the model with one of these names."""
        return self.key.models is None or any(name in self.key.models for name in names)

    def check_model(self, *names: str) -> None:
        """Raise 403 unless the list of models has one of these names. The caller does not look first whether there is
        such a model: the answer for one that the key may not see is that for one that does not exist."""
        if not self.may_use(*names):
            hint = f"it may use: {', '.join(self.key.models or ())}"
            raise ApiError(
                403, "this API key may not use the model", param="model", code="model_not_allowed", hint=hint
            )

    def _used_today(self, now: float) -> int:
        if self._day != (day := int(now // DAY_S)):
            self._day, self._today = day, 0
        return self._today

    def _refusal(self, limit: str, value: int, wait_s: float) -> ApiError:
        self.refused[limit] += 1
        message = f"this API key has reached its limit of {value} {limit.replace('_', ' ')}"
        headers = {"Retry-After": str(max(1, math.ceil(wait_s)))}
        return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


class Keys:
    """The keys of a server. Without any key, every request is allowed."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        self._uses = {key.digest: KeyUse(key) for key in keys}

    def __bool__(self) -> bool:
        return bool(self._uses)

    def find(self, authorization: bytes) -> KeyUse | None:
        """The key of an Authorization header. It is found by its digest, so the time of the search reveals nothing."""
        scheme, _, secret = authorization.partition(b" ")
        return self._uses.get(hashlib.sha256(secret.strip()).digest()) if scheme.lower() == b"bearer" else None

    def check(self, use: KeyUse | None, access: Access) -> None:
        """Raise 401 or 403 if the key of a request, None if it has none, does not have this access."""
        if not self._uses or access == "open":
            return
        if use is None:
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        if access == "admin" and not use.key.admin:
            hint = "the keys file sets admin = true for a key that may"
            raise ApiError(403, "this API key has no admin right", code="admin_required", hint=hint)

    def metrics(self) -> Iterator[str]:
        """Lines for Prometheus, if a key has a limit."""
        uses = [use for use in self._uses.values() if use.key.requests_per_minute or use.key.tokens_per_day]
        if not uses:
            return
        named = [(labels(key=use.key.name), use) for use in uses]
        yield from sample("bagu:key_requests_total", "counter", "Requests.", [(n, u.requests) for n, u in named])
        yield from sample("bagu:key_tokens_total", "counter", "Tokens.", [(n, u.tokens) for n, u in named])
        refused = [
            (labels(key=use.key.name, limit=limit), count) for use in uses for limit, count in use.refused.items()
        ]
        yield from sample("bagu:key_refusals_total", "counter", "Requests refused by a limit of a key.", refused)
