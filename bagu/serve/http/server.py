"""`bagu serve MODEL`: the HTTP server's process.

It listens at once and answers 503 until the model is warm. SIGTERM or Ctrl-C drain: no new connection is taken, what
runs may finish for `shutdown_timeout` seconds and then fails with 503 (a stream with an error event), and the engine's
process is ended. A second signal ends it now.
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
from bagu.serve.http.process import EngineProcess
from bagu.serve.http.tickets import Tickets
from bagu.serve.http.worker import Load

__all__ = ["main"]

GRACE_S = 2  # for clients to read that their calls have failed, before their connections are cut
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
) -> None:
    """Serve until a signal says stop.

    `load` makes (model, tokenizer, chat encoder or None); it is pickled, and called in the engine's process.
    `max_queue` is how many choices (of an encoder: calls) may wait beside the `config.max_num_seqs` that run; further
    calls get 429.
    `allowed_origins` are those of pages elsewhere that may read answers (CORS): `https://name[:port]`, "*" for all, or
    JSON lists of them. `stall_timeout` is the age in seconds of the engine's last step from which `/health` says 503:
    more than the longest step takes. `request_timeout` is the seconds that a client has for the head of a request, and
    for its body beside a second for every 16 KiB. Port 0 takes a free one; the address is printed once the server
    listens.
    """
    if max_queue < 0:
        raise ArgumentError(f"{max_queue} choices that may wait", hint="0 or more, as --max-num-queued-reqs")
    if not (math.isfinite(shutdown_timeout) and shutdown_timeout >= 0):
        raise ArgumentError(
            f"a shutdown timeout of {shutdown_timeout} s", hint="0 or more seconds, and a finite number"
        )
    if not (math.isfinite(request_timeout) and request_timeout > 0):
        raise ArgumentError(f"a request timeout of {request_timeout} s", hint="above 0, and a finite number")
    if log_level not in LOG_LEVELS:
        raise UnknownName.among("log level", log_level, LOG_LEVELS)
    parts = _server_parts()
    config = config or EngineConfig()
    names = tuple(served_model_name) or (model,)
    metrics = Metrics(names[0])
    tickets = Tickets(config.max_num_seqs + max_queue, metrics)
    listener = _listen(host, port)

    def give_up() -> None:
        server.should_exit = True

    engine = EngineProcess(load, config, tickets, stall_s=stall_timeout, on_failure=give_up)
    served = parts.Served(
        names=names, api_key=api_key, allowed_origins=_origins(allowed_origins), created=int(time.time()),
        request_timeout=request_timeout, generation=config.generation,
    )  # fmt: skip
    settings = parts.uvicorn.Config(
        parts.make_app(engine, metrics, served), http=parts.connection_class(request_timeout), log_level=log_level,
        access_log=False, server_header=False, ws="none", lifespan="on", proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(shutdown_timeout) + GRACE_S,
    )  # fmt: skip
    server = parts.HttpServer(settings, shutdown_timeout, engine.end_calls)
    bound = listener.getsockname()[1]
    print(f"bagu serve: {names[0]} at http://{_written(host)}:{bound} (the page is /, the API /v1)", flush=True)
    _run(server, listener)
    if engine.state == "failed":
        raise BaguError(f"the engine did not start: {engine.why}", hint="what its process printed is above")


def _run(server: Any, listener: socket.socket) -> None:
    """uvicorn raises the signal that ended it once more when it is done; by then the work is done and it means 0."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    """Each is an origin as browsers send it, or a JSON list of such, as vLLM takes it."""
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
    except (OSError, OverflowError) as error:  # OverflowError: no such port
        listener.close()
        hint = "choose another with --port, or end what listens there; --port 0 takes a free one"
        why = error.strerror if isinstance(error, OSError) else error
        raise BaguError(f"cannot listen on {host}:{port}: {why}", hint=hint) from error
    listener.listen(1024)
    return listener


def _written(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _server_parts() -> Any:
    """What needs uvicorn and FastAPI, which are asked for when a server is, not when bagu is imported."""
    try:
        import uvicorn

        from bagu.serve.http.api import Served, make_app
        from bagu.serve.http.connection import HttpServer, connection_class
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("bagu"):
            raise
        hint = f"pip install 'bagu[serve]' into {sys.prefix}"
        raise BaguError(f"bagu serve needs {error.name}, which is not installed", hint=hint) from error
    return SimpleNamespace(
        uvicorn=uvicorn, Served=Served, make_app=make_app, HttpServer=HttpServer, connection_class=connection_class
    )
