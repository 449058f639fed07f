"""The folders of a model repository.

    repo/chat/model.toml    the settings of the model `chat` (`Settings`)
    repo/chat/1/            its versions: each a run, a checkpoint or a Hugging Face folder
    repo/chat/2/
    repo/tiny/model.toml

The files are read when the server starts and when a version is loaded; the server writes none of them.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bagu.config import ConfigError, from_dict
from bagu.errors import BaguError
from bagu.serve.config import SamplingDefaults

FILE = "model.toml"


@dataclass(frozen=True, kw_only=True)
class ReturnLimits:
    """When a version that got more traffic loses it again. The limits apply after `after_requests`; a version that has
    answered `trial_requests` within the limits has passed, and the version that it replaced is unloaded."""

    error_percent: float | None = None  # requests that the server failed to finish
    ttft_p99_ms: float | None = None  # time to first token
    after_requests: int = 20
    trial_requests: int = 200

    def __post_init__(self) -> None:
        if self.error_percent is None and self.ttft_p99_ms is None:
            raise ConfigError("there is no limit", hint="set error_percent, ttft_p99_ms or both")
        if self.error_percent is not None and not 0 <= self.error_percent < 100:
            raise ConfigError(f"error_percent = {self.error_percent}", hint="a percentage: 0 or more, and below 100")
        if self.ttft_p99_ms is not None and not 0 < self.ttft_p99_ms < math.inf:
            raise ConfigError(f"ttft_p99_ms = {self.ttft_p99_ms}", hint="milliseconds above 0")
        if not 1 <= self.after_requests <= self.trial_requests:
            raise ConfigError(
                f"after_requests = {self.after_requests}, trial_requests = {self.trial_requests}",
                hint="1 <= after_requests <= trial_requests",
            )


@dataclass(frozen=True, kw_only=True)
class Shadow:
    """A version that gets copies of requests; its answers are dropped."""

    version: int
    share: float  # of the requests

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share = {self.share}", hint="a fraction: above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`model.toml`."""

    policy: Literal["latest", "all"] = "latest"  # the versions that are loaded at the start, unless `weights` is set
    weights: dict[str, float] = field(default_factory=dict)  # shares of the traffic by version, e.g. 1 = 90, 2 = 10
    versions: dict[str, Path] = field(default_factory=dict)  # versions in other places, e.g. 3 = "/models/run-3"
    sticky: Literal["user", "key", "none"] = "user"  # what decides the version of a request: its user; user, else key
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # instead of generation_config.json's
    warmup_prompts: tuple[str, ...] = ()
    memory_share: float | None = None  # of the memory, for one version; None: the versions at the start and one more
    swap: Literal["beside", "replace"] = "beside"  # load a version beside the old one, or after it is unloaded
    load_niceness: int = 10  # priority of loading beside a version that serves: 0 is normal, 19 the lowest
    replace_queue: int = 256  # requests that may wait while a version is replaced; more get 429
    drain_s: float = 600.0  # how long the requests of a version may take after it lost the traffic
    return_when: ReturnLimits | None = None
    shadow: Shadow | None = None
    max_num_seqs: int | None = None  # None: as given to `bagu serve`, also for the next two
    max_model_len: int | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "versions"):
            if wrong := [key for key in getattr(self, name) if not is_version(key)]:
                raise ConfigError(f"{name}: {wrong[0]!r} is not a version", hint="versions are 1, 2, 3 ...")
        if self.weights:
            check_weights({int(key): value for key, value in self.weights.items()})
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share = {self.memory_share}", hint="a fraction: above 0 and at most 1")
        if not 0 <= self.load_niceness <= 19:
            raise ConfigError(f"load_niceness = {self.load_niceness}", hint="0 to 19")
        if self.replace_queue < 0 or not self.drain_s > 0:
            raise ConfigError(
                f"replace_queue = {self.replace_queue}, drain_s = {self.drain_s}", hint="0 or more, and above 0"
            )


@dataclass(frozen=True)
class Layout:
    """A model of the repository: its settings, and where its versions are."""

    name: str
    settings: Settings
    folders: Mapping[int, Path]

    @property
    def initial(self) -> dict[int, float]:
        """The traffic at the start: weights by version."""
        settings = self.settings
        if settings.weights:
            return {int(version): weight for version, weight in settings.weights.items()}
        chosen = list(self.folders) if settings.policy == "all" else [max(self.folders)]
        return dict.fromkeys(sorted(chosen), 1.0)

    @property
    def loaded_at_start(self) -> tuple[int, ...]:
        shadow = () if self.settings.shadow is None else (self.settings.shadow.version,)
        return tuple(dict.fromkeys((*self.initial, *shadow)))


def is_version(text: str) -> bool:
    return re.fullmatch(r"[1-9][0-9]{0,8}", text) is not None


def check_weights(weights: Mapping[int, float]) -> None:
    """Raise ConfigError unless the weights are finite, none is negative, and their sum is positive."""
    for version, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"the weight of version {version} is {weight}", hint="weights are 0 or more")
    if not sum(weights.values()) > 0:
        raise ConfigError("the weights sum to zero: no version would get a request", hint="give one a positive weight")


def is_repository(folder: Path) -> bool:
    """Whether a folder is a repository: it is not a model itself, and a folder in it has a model.toml."""
    if not folder.is_dir() or (folder / "config.json").exists() or (folder / "bagu.json").exists():
        return False
    return any((child / FILE).is_file() for child in folder.iterdir())


def read_repository(folder: Path) -> dict[str, Layout]:
    """The models of a repository by name."""
    found = {child.name: read_model(child) for child in sorted(folder.iterdir()) if (child / FILE).is_file()}
    if not found:
        raise ConfigError(f"{folder} has no models", hint=f"a model is a folder in it with a {FILE}")
    return found


def read_model(folder: Path) -> Layout:
    """A model's folder. An error names the file and the field."""
    file = folder / FILE
    try:
        settings = from_dict(Settings, tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", hint="it is a TOML file") from error
    except BaguError as error:
        error.args = (f"{file}: {error}",)
        raise
    if not re.fullmatch(r"[^@:/\s]+", folder.name):
        raise ConfigError(f"{folder.name!r} is not a model name", hint="leave out spaces and the characters @ : /")
    folders = {int(child.name): child for child in folder.iterdir() if child.is_dir() and is_version(child.name)}
    folders |= {int(version): folder / path for version, path in settings.versions.items()}
    if not folders:
        raise ConfigError(f"{folder} has no versions", hint="a version is a folder 1, 2, 3 ... with a model")
    layout = Layout(folder.name, settings, dict(sorted(folders.items())))
    for version in layout.loaded_at_start:
        if version not in folders:
            hint = f"it has: {', '.join(map(str, layout.folders))}"
            raise ConfigError(f"{file}: {folder.name} has no version {version}", hint=hint)
    return layout
