"""`bagu serve MODEL`: the main function of the HTTP server's process.

It listens at once and answers 503 until the model is warmed up. SIGTERM or Ctrl-C starts a graceful shutdown: no new
connection is accepted, running calls have `shutdown_timeout` seconds and then fail with 503 (a stream with an error
event), and the engine process is stopped. A second signal stops the server at once.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bagu.errors import ArgumentError, BaguError
from bagu.serve.config import EngineConfig
from bagu.serve.http.keys import Key, Keys, read_keys
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.http.options import ServerOptions
from bagu.serve.replicas.make import Replicas, make_engine
from bagu.serve.wire.messages import Load

if TYPE_CHECKING:
    from bagu.serve.http.instances import Models

GRACE_S = 2  # after calls were failed at shutdown, for clients to read the errors before connections are closed


def main(
    model: str,
    *,
    load: Load,
    config: EngineConfig | None = None,
    load_draft: Load | None = None,
    options: ServerOptions | None = None,
    replicas: Replicas | None = None,
) -> None:
    """Run the server until SIGINT or SIGTERM. The URL is printed when the model answers.

    `load` returns (model, tokenizer, chat encoder or None); it is pickled and called in the engine process. So is
    `load_draft`, for the draft model that `config.speculative` names. With `replicas`, those engines serve.
    """
    options = options or ServerOptions()
    parts = import_server()
    config = config or EngineConfig()
    names = options.served_model_name or (model,)
    if clash := next((name for name, _ in config.adapters if name in names), None):
        raise ArgumentError(f"an adapter has the base model's name {clash!r}", hint="give one of them another name")
    metrics = Metrics(names[0])

    def exit_server() -> None:
        server.stop()

    engine = make_engine(
        load,
        config,
        metrics,
        max_queue=options.max_queue,
        stall_s=options.stall_timeout,
        replicas=replicas,
        load_draft=load_draft,
        on_failure=exit_server,
    )
    models = parts.OneModel(engine, names, config.generation)
    server = Server(parts, options, parts.Api, models, metrics)
    server.run(names[0])
    if engine.state == "failed":
        raise BaguError(
            f"the engine did not start: {engine.failure}", hint="correct the command, or see the output above"
        )


class Server:
    """uvicorn with the application of these models. The socket is bound at once, so that a used port is reported before
    a model is loaded."""

    def __init__(self, parts: Any, options: ServerOptions, api: type[Any], models: Models, metrics: Metrics) -> None:
        self._options = options
        self._tracing = None if options.otlp_endpoint is None else parts.Tracing(options.otlp_endpoint)
        as_json = options.log_format == "json"
        observers = [*([parts.log_request] if as_json else []), *([self._tracing] if self._tracing else [])]
        config = parts.ApiConfig(
            keys=_keys(options),
            open_metrics=options.open_metrics,
            allowed_origins=options.origins,
            created=int(time.time()),
            request_timeout=options.request_timeout,
            observers=tuple(observers),
            files=options.files,
            indexes=options.indexes,
            image_hosts=frozenset(map(str.lower, options.allow_image_host)),
        )
        self._listener = listen(options.host, options.port)
        routes = api(models, metrics, config)
        if options.index or options.files:
            _ = routes.library  # a wrong index is reported before a model is loaded
        settings = parts.uvicorn.Config(
            parts.make_app(routes),
            http=parts.connection_class(options.request_timeout),
            log_level=options.log_level,
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(options.shutdown_timeout) + GRACE_S,
            **({"log_config": parts.log_config()} if as_json else {}),
        )
        self._server = parts.HttpServer(settings, options.shutdown_timeout, models)

    def stop(self) -> None:
        self._server.should_exit = True

    def run(self, name: str) -> None:
        """Serve until a signal or `stop`. The first line says what is loading, and the port for a client that asks
        /health meanwhile; the URL is printed when requests are answered."""
        port = self._listener.getsockname()[1]
        url = f"http://{_url_host(self._options.host)}:{port}"
        print(f"bagu serve: loading {name} (port {port})", flush=True)
        said = f"bagu serve: {name} at {url} is ready (the page is /, the API /v1; Ctrl-C stops)"
        self._server.when_ready = partial(print, said, flush=True)
        _run(self._server, self._listener)
        if self._tracing is not None:
            self._tracing.close()


def _keys(options: ServerOptions) -> Keys:
    single = [] if options.api_key is None else [Key(name="api-key", key=options.api_key, admin=True)]
    return Keys([*single, *([] if options.api_keys is None else read_keys(options.api_keys))])


def _run(server: Any, listener: socket.socket) -> None:
    """Run uvicorn. After a graceful shutdown uvicorn raises the signal again; it is ignored, so that the exit status
    is 0."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    if os.name == "posix":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:  # OverflowError: the port is out of range
        listener.close()
        hint = "choose another port with --port, or stop the process that uses it; --port 0 selects a free one"
        if isinstance(error, OverflowError):
            hint = "give --port a number from 0 to 65535"
        elif isinstance(error, socket.gaierror):
            hint = "give --host an address or a name of this machine"
        reason = error.strerror if isinstance(error, OSError) else "the port is out of range"
        raise BaguError(f"cannot listen on {host}:{port}: {reason}", hint=hint) from error
    listener.listen(1024)
    return listener


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def import_server() -> Any:
    """Import the modules that need uvicorn and FastAPI, which are optional dependencies of bagu."""
    try:
        import uvicorn

        from bagu.serve.http.api import Api, make_app
        from bagu.serve.http.connection import HttpServer, connection_class
        from bagu.serve.http.instances import OneModel
        from bagu.serve.http.observe.logs import log_config, log_request
        from bagu.serve.http.observe.tracing import Tracing
        from bagu.serve.http.routes import ApiConfig
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("bagu"):
            raise
        hint = f"run pip install 'bagu[serve]' in {sys.prefix}"
        raise BaguError(f"bagu serve needs {error.name}, which is not installed", hint=hint) from error
    return SimpleNamespace(
        uvicorn=uvicorn,
        Api=Api,
        ApiConfig=ApiConfig,
        OneModel=OneModel,
        make_app=make_app,
        HttpServer=HttpServer,
        connection_class=connection_class,
        log_config=log_config,
        log_request=log_request,
        Tracing=Tracing,
    )
