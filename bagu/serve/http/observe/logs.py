"""`bagu serve --log-format json`: one JSON object per line on stderr, one line per request.

The server's other messages (uvicorn's) become JSON lines too, so that a log collector reads one format.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from bagu.serve.http.observe.record import RequestRecord

PROBES = ("/health", "/metrics", "/engine")


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """The fields of a request's line. Prompts, outputs and API keys are not logged."""
    return {
        "time": _iso(record.began_ns / 1e9), "level": "info", "event": "request", "request_id": record.id,
        "method": record.method, "path": record.path, "status": record.status, "model": record.model,
        "key": record.key_name, "prompt_tokens": record.prompt_tokens, "completion_tokens": record.completion_tokens,
        "finish_reasons": record.finish_reasons, "queue_ms": _ms(record.queue_end_s), "ttft_ms": _ms(record.ttft_s),
        "total_ms": _ms(record.total_s),
    }  # fmt: skip


def log_request(record: RequestRecord) -> None:
    """Write the line of a request. Successful probes and scrapes are left out: there are thousands of them a day."""
    if record.route in PROBES and record.status == 200:
        return
    sys.stderr.write(json.dumps(request_fields(record)) + "\n")  # one write per line: lines of processes do not mix
    sys.stderr.flush()


class JsonFormatter(logging.Formatter):
    """A log message as a JSON object, with the traceback of its exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _iso(record.created),
            "level": record.levelname.lower(),
            "event": "log",
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def log_config() -> dict[str, Any]:
    """The logging configuration for uvicorn."""
    handler = {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonFormatter}},
        "handlers": {"stderr": handler},
        "loggers": {"uvicorn": {"handlers": ["stderr"], "level": "INFO", "propagate": False}},
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
