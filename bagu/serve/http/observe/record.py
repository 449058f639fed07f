"""What is known about one HTTP request when it has ended: for logs and traces.

`ApiMiddleware` makes the record and gives it to the observers; `Routes.run_generation` adds the call in the engine.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.types import Scope

from bagu.serve.http.pending import PendingCall

RECORD = "bagu.record"  # key in the scope
REQUEST_ID = re.compile(r"[!-~]{1,128}")  # printable ASCII without blanks, so that it can be a header and a log field


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds; `began_ns` is Unix time. The fields of a generation are None or 0 for other requests."""

    id: str
    method: str
    path: str
    headers: Mapping[bytes, bytes] = field(repr=False)  # may contain the API key: never log them
    route: str = "unmatched"
    status: int = 500
    model: str | None = None  # that answers, if the request reached one
    version_label: str = ""  # of `model` in a repository: its labels in /metrics
    key_name: str | None = None  # of the API key that the client used, never the key
    began_ns: int = field(default_factory=time.time_ns)
    began: float = field(default_factory=time.perf_counter)
    total_s: float = 0.0
    call: PendingCall | None = field(default=None, repr=False)

    @classmethod
    def of(cls, scope: Scope) -> RequestRecord:
        """The record of a request that arrives now. Its id is the header X-Request-Id, or a new one."""
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        return cls(id=id, method=scope["method"], path=scope["path"], headers=headers)

    def end(self, route: str, status: int) -> None:
        self.route, self.status, self.total_s = route, status, time.perf_counter() - self.began

    @property
    def prompt_tokens(self) -> int:
        return 0 if self.call is None else sum(len(request.prompt) for request in self.call.requests)

    @property
    def completion_tokens(self) -> int:
        return 0 if self.call is None else self.call.num_tokens

    @property
    def finish_reasons(self) -> list[str]:
        return [] if self.call is None else list(self.call.finish_reasons)

    @property
    def queue_end_s(self) -> float | None:
        """From the arrival of the request to the first step of its prefill."""
        return None if self.call is None or self.call.started is None else self.call.started - self.began

    @property
    def ttft_s(self) -> float | None:
        """From the arrival of the request to its first token."""
        return None if self.call is None or self.call.first_token is None else self.call.first_token - self.began


Observer = Callable[[RequestRecord], None]
