"""The options of the HTTP server."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bagu.config.options import Option
from bagu.errors import ArgumentError, UnknownName

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
ORIGIN = "e.g. http://localhost:3000, without a path, or * for every page"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server; what has an `Option` is an option of `bagu serve`.

    `allowed_origins` are the origins whose pages may read responses (CORS): `https://name[:port]`, "*" for all, or JSON
    lists of them. `api_key` is one key without limits that may change a repository; `api_keys` is a file of keys with
    limits (keys.py). `max_queue` is the number of choices (for an encoder: calls) that may wait in addition to the
    `max_num_seqs` that run; further calls get 429.
    """

    host: Annotated[str, Option("The address to listen on; 0.0.0.0 is all interfaces.")] = "127.0.0.1"
    port: Annotated[int, Option("The port to listen on; 0 picks a free one.")] = 8000
    api_key: Annotated[str | None, Option("Require this key from clients.", envvar="BAGU_API_KEY")] = None
    api_keys: Annotated[Path | None, Option("TOML file of API keys with request rates, token quotas and models.")] = (
        None
    )
    open_metrics: Annotated[bool, Option("/metrics and /engine need no API key.", flags=("--open-metrics",))] = False
    served_model_name: Annotated[tuple[str, ...], Option("Model name in the API; repeatable.")] = ()
    allowed_origins: Annotated[tuple[str, ...], Option("Allowed CORS origin; repeatable, or JSON.")] = ()
    max_queue: Annotated[
        int, Option("Maximum waiting sequences (encoder: calls); more get 429.", flags=("--max-num-queued-reqs",))
    ] = 256
    index: Annotated[
        tuple[str, ...],
        Option("An index of `bagu index` that every client may search; repeatable.", metavar="NAME=FILE"),
    ] = ()
    files: Annotated[
        Path | None, Option("Keep uploaded files and vector stores here. Default: until the server stops.")
    ] = None
    allow_image_host: Annotated[
        tuple[str, ...], Option("Fetch images of prompts from this host; repeatable. Default: none.", metavar="NAME")
    ] = ()
    shutdown_timeout: Annotated[float, Option("Seconds to let running requests finish on shutdown.")] = 30.0
    log_level: Annotated[str, Option("debug, info, warning or error.")] = "warning"
    log_format: Annotated[str, Option("text, or json: one line per request on stderr.")] = "text"
    otlp_endpoint: Annotated[
        str | None, Option("Send OpenTelemetry traces to this OTLP/HTTP URL, e.g. http://localhost:4318.")
    ] = None
    request_timeout: float = 20.0  # for the head of a request; for its body the same and a second for every 16 KiB
    stall_timeout: float = 60.0  # /health answers 503 if the last step is older; the longest step must take less

    def __post_init__(self) -> None:
        if self.max_queue < 0:
            raise ArgumentError(f"max_queue = {self.max_queue}", hint="--max-num-queued-reqs is 0 or more")
        if not (math.isfinite(self.shutdown_timeout) and self.shutdown_timeout >= 0):
            found = f"a shutdown timeout of {self.shutdown_timeout} s"
            raise ArgumentError(found, hint="it is a finite number, 0 or more")
        if not (math.isfinite(self.request_timeout) and self.request_timeout > 0):
            raise ArgumentError(f"a request timeout of {self.request_timeout} s", hint="it is a finite number above 0")
        UnknownName.check("log level", self.log_level, LOG_LEVELS)
        UnknownName.check("log format", self.log_format, LOG_FORMATS)

    @property
    def indexes(self) -> dict[str, Path]:
        """`index` by name; a value without a name has that of its file."""
        found: dict[str, Path] = {}
        for value in self.index:
            name, equal, path = value.partition("=")
            if not equal:
                name, path = Path(value).stem, value
            if not name or not path or name in found:
                raise ArgumentError(f"--index {value}", hint="NAME=FILE, each name once")
            found[name] = Path(path)
        return found

    @property
    def origins(self) -> tuple[str, ...]:
        """`allowed_origins`, each value an origin in the browsers' format, or a JSON list of origins, as in vLLM."""
        found: list[Any] = []
        for value in self.allowed_origins:
            try:
                found += json.loads(value) if value.startswith("[") else [value]
            except ValueError as error:
                raise ArgumentError(f"allowed origins: {value!r} is not JSON", hint=ORIGIN) from error
        for origin in found:
            if not isinstance(origin, str) or not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ArgumentError(f"allowed origins: {origin!r} is not an origin", hint=ORIGIN)
        return tuple(found)
