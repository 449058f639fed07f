"""The client of a server with OpenAI's API, for chats, evaluations and benchmarks. Every failure is a BaguError."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

from bagu.errors import ArgumentError, BaguError


class Refused(BaguError):
    """A response with an error status. `param` is the field that an error in OpenAI's format names."""

    def __init__(self, url: str, status: int, body: bytes) -> None:
        self.status, (message, self.param) = status, _error(body)
        super().__init__(f"{url} answered {status}: {message}")


class ApiClient:
    """A server at `url`, e.g. http://127.0.0.1:8000. Each call has a connection of its own."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0, proxies: dict[str, str] | None = None
    ) -> None:
        """`timeout_s` is for one read: the prefill of a long prompt on a CPU takes minutes. `proxies` None are those
        of the environment."""
        self.url, self.timeout_s = url.rstrip("/").removesuffix("/v1"), timeout_s
        self.parts = _split(self.url)
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))

    def models(self) -> list[dict[str, Any]]:
        """The entries of /v1/models."""
        with self.response("/v1/models") as response:
            return [{**entry, "id": str(entry["id"])} for entry in json.load(response)["data"]]

    def first_model(self) -> dict[str, Any]:
        found = self.models()
        if not found:
            raise BaguError(f"{self.url}/v1/models lists no model", hint="check that the server has loaded one")
        return found[0]

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of a response."""
        with self.response(path, body) as response:
            return json.load(response)

    @contextmanager
    def response(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
        """The response to a GET, or to a POST of `body`, to read and parse inside the block. At its end the connection
        is closed; the server then aborts a request that still runs."""
        try:
            with self._send(path, body) as response:
                yield response
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
            hint = "check that the server is running; `bagu serve MODEL` starts one"
            raise BaguError(f"{self.url} cannot be reached: {reason}", hint=hint) from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # not JSON, or without a field
            hint = "name a server with OpenAI's API, e.g. http://127.0.0.1:8000"
            raise BaguError(f"{self.url}{path} did not answer as OpenAI's API does: {error!r}", hint=hint) from error

    def _send(self, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self.timeout_s)
            return response
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(self.url + path, error.code, error.read()) from error


def _split(url: str) -> SplitResult:
    try:
        where = urlsplit(url)
        if where.scheme in ("http", "https") and where.hostname and where.port != 0:  # `port` raises if it is no number
            return where
    except ValueError:
        pass
    raise ArgumentError(f"{url!r} is not the URL of a server", hint="e.g. http://127.0.0.1:8000")


def _error(body: bytes) -> tuple[str, Any]:
    """The message and the field of an error in OpenAI's format; the beginning of any other body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"]), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        return body[:300].decode(errors="replace"), None
