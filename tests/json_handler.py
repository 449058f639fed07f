"""The base of small HTTP servers that answer in JSON."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler

__all__ = ["JsonHandler"]


class JsonHandler(BaseHTTPRequestHandler):
    def reply(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
