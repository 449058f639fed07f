"""`bagu serve RUN` for a run of process data: its page, and the JSON API at /v1/process.

Same security as the chat page: nothing from other servers, no HTML strings, bodies only as JSON (a page of another
origin cannot send that without a preflight request), API keys. An uploaded table becomes a run of its own beside it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bagu.errors import BaguError
from bagu.process.commands import plain, whole_row
from bagu.process.files import parse_table
from bagu.process.guess import guess
from bagu.process.health import examine
from bagu.process.recommend import check_inputs, no_skill, recommend, whatif
from bagu.process.report import report, score_notes, write_report
from bagu.process.run import Process, create, data_path, open_run
from bagu.process.schema import Schema, schema_of
from bagu.process.table import Table
from bagu.process.words import Lang
from bagu.runs.files import complete_rows
from bagu.runs.record import append_rows
from bagu.serve.http.calls import ApiMiddleware, error_response, json_response, read_json
from bagu.serve.http.errors import ApiError
from bagu.serve.http.keys import Key, Keys, read_keys
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.http.options import ServerOptions
from bagu.serve.http.routes import key_of
from bagu.serve.http.server import listen
from bagu.serve.page import HEADERS, MEDIA_TYPES
from bagu.serve.page import assets as chat_assets

Handler = Callable[[Request], Awaitable[Response]]
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MINUTES = 2.0  # of a fit that the page starts
SHOWN = 50  # answers of the history


class ProcessApi:
    """The routes. One fit runs at a time; meanwhile the run before it answers."""

    def __init__(self, run: Path, keys: Keys, timeout: float) -> None:
        self.run, self.keys, self.timeout = run, keys, timeout
        self.process = open_run(run)
        warm(self.process)
        self.fitting = False

    def app(self, name: str, origins: tuple[str, ...]) -> ApiMiddleware:
        routes = [Route(path, _asset(body, kind)) for path, (body, kind) in page().items()]
        for path, method, handler in (
            ("/v1/process", "GET", self.state),
            ("/v1/process/report", "GET", self.report),
            ("/v1/process/whatif", "POST", self.whatif),
            ("/v1/process/recommend", "POST", self.recommend),
            ("/v1/process/look", "POST", self.look),
            ("/v1/process/fit", "POST", self.fit),
        ):
            routes.append(Route(path, self._guarded(handler), methods=[method]))
        return ApiMiddleware(Starlette(routes=routes), Metrics(name), keys=self.keys, allowed_origins=origins)

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                self.keys.check(key_of(request), "key")
                return await handler(request)
            except ApiError as error:
                return error_response(error)
            except BaguError as error:
                return error_response(ApiError(400, str(error), hint=error.hint))

        return guarded

    async def _body(self, request: Request) -> dict[str, Any]:
        try:
            body = json.loads(await read_json(request, self.timeout))
        except (ValueError, RecursionError):
            raise ApiError(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise ApiError(400, "the body is not a JSON object")
        return body

    async def state(self, request: Request) -> Response:
        return json_response(described(self.process, self.run) | {"fitting": self.fitting})

    async def report(self, request: Request) -> Response:
        headers = {**HEADERS, "Content-Security-Policy": REPORT_POLICY, "content-type": "text/html; charset=utf-8"}
        lang: Lang = "zh" if request.query_params.get("lang") == "zh" else "en"
        return Response(await asyncio.to_thread(report, self.process, lang), headers=headers)

    async def whatif(self, request: Request) -> Response:
        """One row: {"row": {name: value}}; inputs that are not given are those of the last row."""
        row = whole_row(self.process, _values(await self._body(request), "row"))
        return json_response({"row": row, **asdict(whatif(self.process, row))})

    async def recommend(self, request: Request) -> Response:
        """{"given", "now", "moves": {name: value}, "recent": base64 of a CSV of the latest rows, "probability"}; an
        answer or a refusal, both with status 200."""
        body = await self._body(request)
        given, now, moves = (_values(body, name) for name in ("given", "now", "moves"))
        check_inputs(self.process, moves)
        probability = body.get("probability", 0.95)
        if not isinstance(probability, int | float) or not 0.5 <= probability < 1:
            raise ApiError(400, "probability is not a number from 0.5 to 1", param="probability")
        widths = {n: float(v) for n, v in moves.items()}
        recent = await asyncio.to_thread(parse_table, _bytes(body, "recent"), "recent") if body.get("recent") else None
        found = await asyncio.to_thread(
            recommend, self.process, given, now, widths, recent=recent, probability=probability
        )
        answer = plain(found)
        append_rows(self.run / "answers.jsonl", [{"given": given, "now": now, "answer": answer}])
        return json_response(answer)

    async def look(self, request: Request) -> Response:
        """{"data": base64 of a CSV or Parquet file, "schema": optional}: roles and findings."""
        table, schema, _ = await self._upload(request)
        return json_response({"rows": table.rows, "schema": _schema(schema), "findings": _findings(table, schema)})

    async def fit(self, request: Request) -> Response:
        """The same body; fits a run beside this one and serves it from then on. With a schema alone, its rows again."""
        _, schema, data = await self._upload(request)
        if self.fitting:
            raise ApiError(409, "a fit is running", hint="wait until it ends")
        mark = hashlib.sha256(data + repr(schema).encode()).hexdigest()[:12]
        out = self.run.parent / f"upload_{mark}"
        self.fitting = True
        try:
            made = await asyncio.to_thread(create, data, schema, out, minutes=MINUTES)
            await asyncio.to_thread(write_report, made, out)
            await asyncio.to_thread(warm, made)
        finally:
            self.fitting = False
        self.process, self.run = made, out
        return json_response(described(made, out) | {"fitting": False})

    async def _upload(self, request: Request) -> tuple[Table, Schema, bytes]:
        body = await self._body(request)
        if body.get("schema") and "data" not in body:  # the rows of this run with other roles
            data = await asyncio.to_thread(data_path(self.run).read_bytes)
        else:
            data = _bytes(body, "data")
        table = await asyncio.to_thread(parse_table, data, "the file")
        return table, schema_of(body["schema"], "schema") if body.get("schema") else guess(table), data


def warm(process: Process) -> None:
    """Compute what the first answer would wait for."""
    whatif(process, whole_row(process, {}))
    _ = process.halves, process.context_domain


def described(process: Process, run: Path) -> dict[str, Any]:
    """What the page shows of a run."""
    refusal = no_skill(process)
    inputs = []
    for f in process.encoder.fields:
        values = process.rows[f.name].values
        ends = (
            (None, None) if f.levels else (float(values[values == values].min()), float(values[values == values].max()))
        )
        low, high = (f.low if f.low is not None else ends[0], f.high if f.high is not None else ends[1])
        inputs.append(
            {
                "name": f.name,
                "role": f.role,
                "unit": f.unit,
                "low": low,
                "high": high,
                "step": f.step,
                "levels": list(f.levels),
            }
        )
    fits = {
        name: {
            "scores": {m: [asdict(s) for s in scores] for m, scores in fit.scores.items()},
            "coverage": fit.coverage,
            "weights": dict(fit.model.weights),
            "notes": {"en": score_notes(process, name, "en"), "zh": score_notes(process, name, "zh")},
        }
        for name, fit in process.fits.items()
    }
    return {
        "run": run.name,
        "rows": process.table.rows,
        "goal": process.goal.name,
        "better": process.better,
        "unit": process.schema.target.unit,
        "inputs": inputs,
        "last": whole_row(process, {}),
        "fits": fits,
        "schema": _schema(process.schema),
        "findings": _findings(process.table, process.schema),
        "no_skill": None if refusal is None else plain(refusal)["words"],
        "answers": complete_rows(run / "answers.jsonl")[-SHOWN:],
    }


def _schema(schema: Schema) -> dict[str, Any]:
    return {"columns": [asdict(f) for f in schema.columns], "limits": list(schema.limits)}


def _findings(table: Table, schema: Schema) -> list[dict[str, str]]:
    return [{"level": f.level, "en": f.words("en"), "zh": f.words("zh")} for f in examine(table, schema)[:SHOWN]]


def _bytes(body: dict[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(body.get(name, ""), validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ApiError(400, f"{name} is not base64", param=name) from None


def _values(body: dict[str, Any], name: str) -> dict[str, float | str]:
    """A part of the body with names and numbers or texts."""
    found = body.get(name) or {}
    if not isinstance(found, dict) or not all(isinstance(v, int | float | str) for v in found.values()):
        raise ApiError(400, f"{name} is not an object of numbers and texts", param=name)
    return {n: v if isinstance(v, str) else float(v) for n, v in found.items()}


@cache
def page() -> dict[str, tuple[bytes, str]]:
    """The files of the page by path; dom.js and the icon are those of the chat page."""
    shared = chat_assets()
    found = {path: (shared[path].body, shared[path].media_type) for path in ("/dom.js", "/favicon.svg")}
    for file in files("bagu.process").joinpath("page").iterdir():
        kind = MEDIA_TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            found["/" if file.name == "index.html" else f"/{file.name}"] = file.read_bytes(), kind
    return found


def _asset(body: bytes, kind: str) -> Handler:
    async def asset(request: Request) -> Response:
        return Response(body, headers={**HEADERS, "content-type": kind})

    return asset


def main(run: Path, options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM."""
    single = [] if options.api_key is None else [Key(name="api-key", key=options.api_key, admin=True)]
    keys = Keys([*single, *([] if options.api_keys is None else read_keys(options.api_keys))])
    api = ProcessApi(run, keys, options.request_timeout)
    listener = listen(options.host, options.port)
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    print(f"bagu serve: {run} at {url} (the page is /, the API /v1/process)", flush=True)
    config = uvicorn.Config(
        api.app(run.name, options.origins),
        log_level=options.log_level,
        access_log=False,
        server_header=False,
        ws="none",
    )
    uvicorn.Server(config).run(sockets=[listener])
