"""The response to `POST /v1/responses`, as one body or as events."""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from bagu.serve.http.bodies.openai import Job
from bagu.serve.http.errors import ApiError
from bagu.serve.http.files_api.turn import Source, Turn
from bagu.serve.http.parsed_response import ParsedMessage
from bagu.serve.http.responses import GenerationResponse, to_json
from bagu.serve.http.responses_api.body import ResponsesBody, TextOptions
from bagu.serve.http.responses_api.items import output_messages
from bagu.serve.http.responses_api.output import OutputItems
from bagu.serve.http.responses_api.store import ResponseStore, StoredResponse
from bagu.serve.message.format import MessageFormat
from bagu.serve.request import Event, TokenEvent
from bagu.serve.wire.messages import Ready

MAX_USER = 512  # characters that a response repeats: a stored one keeps them


class ModelResponse(GenerationResponse):
    """A response object. When it is complete it is put into `store` for its `owner`, with `messages`,
    the conversation before it."""

    def __init__(
        self,
        job: Job,
        ready: Ready,
        model: str,
        *,
        asked: ResponsesBody,
        messages: list[dict[str, Any]],
        store: ResponseStore,
        owner: bytes | None = None,
        turn: Turn | None = None,
        earlier: Sequence[Source] = (),
    ) -> None:
        super().__init__(job, ready, model)
        self.id = f"resp_{uuid.uuid4().hex}"
        self.asked, self.messages, self.store, self.owner = asked, messages, store, owner
        self.format = job.format or MessageFormat()
        (self.choice,) = self.choices.values()
        self.message = ParsedMessage(self.format)
        self._events: list[str] = []
        self._sequence = 0
        self.turn, self.earlier = turn, earlier
        annotate = {} if turn is None else {"annotate": turn.file_citations}
        self.output = OutputItems(self.message, self._emit, **annotate)
        if not job.stream:
            self._add_search()

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, TokenEvent):
                for delta in self.message.add(self.choice, event):
                    self.output.add(delta)
                if self.choice.finish is not None:
                    self.output.finish(incomplete=self.choice.finish == "length")

    def body(self) -> dict[str, Any]:
        """The complete response, which is stored if the client wants it."""
        found = self._object("incomplete" if self.choice.finish == "length" else "completed")
        if self.asked.store is not False:
            messages = self.messages + output_messages(found["output"])
            sources = [*self.earlier, *(() if self.turn is None else self.turn.sources)]
            self.store.put(StoredResponse(owner=self.owner, body=found, messages=messages, sources=tuple(sources)))
        return found

    def first_chunks(self) -> bytes:
        for kind in ("response.created", "response.in_progress"):
            self._emit(kind, response=self._object("in_progress"))
        self._add_search()
        return self._take_events()

    def _add_search(self) -> None:
        if self.turn is not None:
            shown = "file_search_call.results" in (self.asked.include or ())
            results = [source.result() for source in self.turn.sources] if shown else None
            self.output.add_search(self.turn.question, results)

    def chunks(self, events: Iterable[Event]) -> bytes:
        self.add(events)
        return self._take_events()

    def last_chunk(self) -> bytes:
        body = self.body()
        self._emit(f"response.{body['status']}", response=body)
        return self._take_events()

    def error_event(self, error: ApiError) -> bytes:
        detail = error.body["error"]
        failed = {**self._object("failed"), "error": {"code": "server_error", "message": detail["message"]}}
        self._emit("response.failed", response=failed)
        self._emit("error", code=str(detail["code"]), message=detail["message"], param=detail["param"])
        return self._take_events()

    def usage(self) -> dict[str, Any]:
        found = super().usage()
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": found["prompt_tokens_details"],
            "output_tokens": found["completion_tokens"],
            "total_tokens": found["total_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.message.reasoning_tokens},
        }

    def _emit(self, kind: str, **fields: Any) -> None:
        if self.job.stream:
            data = to_json({"type": kind, "sequence_number": self._sequence, **fields})
            self._events.append(f"event: {kind}\ndata: {data}\n\n")
            self._sequence += 1

    def _take_events(self) -> bytes:
        events, self._events = "".join(self._events), []
        return events.encode()

    def _object(self, status: str) -> dict[str, Any]:
        asked, sampling = self.asked, self.job.requests[0].sampling
        options = asked.model_dump(mode="json", include={"tools", "tool_choice"}, exclude_unset=True)
        ended, user = status in ("completed", "incomplete"), (asked.model_extra or {}).get("user")
        if not isinstance(user, str) or len(user) > MAX_USER:
            user = None
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model, "output": self.output.items if ended else [],
            "usage": self.usage() if ended else None, "instructions": asked.instructions,
            "previous_response_id": asked.previous_response_id, "store": asked.store is not False,
            "tools": options.get("tools") or [], "tool_choice": options.get("tool_choice") or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "text": (asked.text or TextOptions()).echo(),
            "max_output_tokens": asked.max_output_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "metadata": asked.metadata or {}, "truncation": "disabled", "background": False, "service_tier": "default",
            # always there in OpenAI's responses, and required by clients such as litellm 1.72
            "reasoning": {"effort": None, "summary": None}, "user": user,
        }  # fmt: skip

    def _head(self, index: int) -> str:
        return ""  # of a chat chunk; not used here
