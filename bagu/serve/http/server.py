"""`bagu serve MODEL`: the main function of the HTTP server's process.

It listens at once and answers 503 until the model is warmed up. SIGTERM or Ctrl-C starts a graceful shutdown: no new
connection is accepted, running calls have `shutdown_timeout` seconds and then fail with 503 (a stream with an error
event), and the engine process is stopped. A second signal stops the server at once.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.serve.config import EngineConfig
from bagu.serve.http.metrics import Metrics
from bagu.serve.http.pending import PendingCalls
from bagu.serve.http.pipe import Load
from bagu.serve.http.process import EngineProcess

__all__ = ["main"]

GRACE_S = 2  # after calls were failed at shutdown, for clients to read the errors before connections are closed
LOG_LEVELS = ("debug", "info", "warning", "error")
ORIGIN = "e.g. http://localhost:3000, without a path, or * for every page"


def main(
    model: str,
    *,
    load: Load,
    config: EngineConfig | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    served_model_name: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    max_queue: int = 256,
    shutdown_timeout: float = 30.0,
    stall_timeout: float = 60.0,
    request_timeout: float = 20.0,
    log_level: str = "warning",
    load_draft: Load | None = None,
) -> None:
    """Run the server until SIGINT or SIGTERM.

    `load` returns (model, tokenizer, chat encoder or None); it is pickled and called in the engine process. So is
    `load_draft`, for the draft model that `config.speculative` names.
    `max_queue` is the number of choices (for an encoder: calls) that may wait in addition to the `config.max_num_seqs`
    that run; further calls get 429. `allowed_origins` are the origins whose pages may read responses (CORS):
    `https://name[:port]`, "*" for all, or JSON lists of them. `/health` answers 503 if the engine's last step is older
    than `stall_timeout` seconds; the longest step must take less. A client has `request_timeout` seconds to send the
    head of a request, and the same for its body plus a second for every 16 KiB. Port 0 selects a free port. The URL is
    printed when the server listens.
    """
    if max_queue < 0:
        raise ArgumentError(f"max_queue = {max_queue}", hint="--max-num-queued-reqs is 0 or more")
    if not (math.isfinite(shutdown_timeout) and shutdown_timeout >= 0):
        raise ArgumentError(f"a shutdown timeout of {shutdown_timeout} s", hint="it is a finite number, 0 or more")
    if not (math.isfinite(request_timeout) and request_timeout > 0):
        raise ArgumentError(f"a request timeout of {request_timeout} s", hint="it is a finite number above 0")
    if log_level not in LOG_LEVELS:
        raise UnknownName.among("log level", log_level, LOG_LEVELS)
    parts = _import_server()
    config = config or EngineConfig()
    names = tuple(served_model_name) or (model,)
    if clash := next((name for name, _ in config.adapters if name in names), None):
        raise ArgumentError(f"an adapter has the base model's name {clash!r}", hint="give one of them another name")
    metrics = Metrics(names[0])
    pending = PendingCalls(config.max_num_seqs + max_queue, metrics)
    listener = _listen(host, port)

    def exit_server() -> None:
        server.should_exit = True

    engine = EngineProcess(load, config, pending, stall_s=stall_timeout, on_failure=exit_server, load_draft=load_draft)
    api_config = parts.ApiConfig(
        names=names, api_key=api_key, allowed_origins=_origins(allowed_origins), created=int(time.time()),
        request_timeout=request_timeout, generation=config.generation,
    )  # fmt: skip
    settings = parts.uvicorn.Config(
        parts.make_app(engine, metrics, api_config), http=parts.connection_class(request_timeout), log_level=log_level,
        access_log=False, server_header=False, ws="none", lifespan="on", proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(shutdown_timeout) + GRACE_S,
    )  # fmt: skip
    server = parts.HttpServer(settings, shutdown_timeout, engine.fail_calls)
    bound = listener.getsockname()[1]
    print(f"bagu serve: {names[0]} at http://{_url_host(host)}:{bound} (the page is /, the API /v1)", flush=True)
    _run(server, listener)
    if engine.state == "failed":
        raise BaguError(f"the engine did not start: {engine.failure}", hint="the output of its process is above")


def _run(server: Any, listener: socket.socket) -> None:
    """Run uvicorn. After a graceful shutdown uvicorn raises the signal again; it is ignored, so that the exit status
    is 0."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    """Parse origins: each value is an origin in the browsers' format, or a JSON list of origins, as in vLLM."""
    found: list[Any] = []
    for value in given:
        try:
            found += json.loads(value) if value.startswith("[") else [value]
        except ValueError as error:
            raise ArgumentError(f"allowed origins: {value!r} is not JSON", hint=ORIGIN) from error
    for origin in found:
        if not isinstance(origin, str) or not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ArgumentError(f"allowed origins: {origin!r} is not an origin", hint=ORIGIN)
    return tuple(found)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    if os.name == "posix":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:  # OverflowError: the port is out of range
        listener.close()
        hint = "choose another port with --port, or stop the process that uses it; --port 0 selects a free one"
        reason = error.strerror if isinstance(error, OSError) else error
        raise BaguError(f"cannot listen on {host}:{port}: {reason}", hint=hint) from error
    listener.listen(1024)
    return listener


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _import_server() -> Any:
    """Import the modules that need uvicorn and FastAPI, which are optional dependencies of bagu."""
    try:
        import uvicorn

        from bagu.serve.http.api import ApiConfig, make_app
        from bagu.serve.http.connection import HttpServer, connection_class
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("bagu"):
            raise
        hint = f"run pip install 'bagu[serve]' in {sys.prefix}"
        raise BaguError(f"bagu serve needs {error.name}, which is not installed", hint=hint) from error
    return SimpleNamespace(
        uvicorn=uvicorn,
        ApiConfig=ApiConfig,
        make_app=make_app,
        HttpServer=HttpServer,
        connection_class=connection_class,
    )
