"""A route as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from bagu.serve.http.bodies.openai import Body
from bagu.serve.http.keys import Access
from bagu.serve.wire.messages import Ready

READING = {
    400: "The body is invalid, or this server or model does not support it; `param` is the field.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The content type is not application/json.",
}
NO_MODEL = {404: "There is no model of this name."}
NOT_READY = {503: "The model is loading, the engine is restarting, or the server is shutting down."}
QUEUE_FULL = {429: "The queue is full, or the API key has reached a limit; Retry-After is in seconds."}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A route. `name` is the method of api.Api that handles it."""

    path: str
    name: str
    summary: str
    answer: type[BaseModel] | Literal["text/plain", "application/octet-stream"]
    body: type[Body] | None = None
    form: bool = False  # the body is a form with a file
    method: Literal["GET", "POST", "DELETE"] = "GET"
    description: str = ""
    failures: Mapping[int, str]
    parameters: Sequence[Mapping[str, Any]] = ()
    access: Access  # who may use it, if the server has API keys
    # capability that the model must have
    needs: Literal["chat", "generation", "embedding", "scoring", "adapters"] | None = None

    def is_offered(self, ready: Ready | None) -> bool:
        """Whether the model supports this route; True while the model is loading."""
        if self.needs is None or ready is None:
            return True
        offers = {
            "chat": ready.generates and ready.chat is not None,
            "generation": ready.generates,
            "embedding": ready.embeds,
            "scoring": ready.embeds or ready.scores,
            "adapters": ready.loads_adapters,
        }
        return offers[self.needs]

    @property
    def route(self) -> str:
        """The path in Starlette's syntax: a model's name may contain slashes."""
        return self.path.replace("{name}", "{name:path}")
