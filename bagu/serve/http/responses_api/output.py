"""Output items of a response, and the events that report them while they are generated.

response.created, response.in_progress
for each item:  output_item.added
                message    content_part.added, output_text.delta ..., output_text.done, content_part.done
                reasoning  content_part.added, reasoning_text.delta ..., reasoning_text.done, content_part.done
                call       function_call_arguments.delta ..., function_call_arguments.done
                search     file_search_call.in_progress, .searching, .completed
                output_item.done
response.completed, or response.incomplete if max_output_tokens ended it
"""

import uuid
from collections.abc import Callable
from typing import Any

from bagu.serve.http.parsed_response import ParsedMessage
from bagu.serve.message.parser import CallDelta, Content, Delta, Reasoning

Emit = Callable[..., None]  # (event type, fields)


class OutputItems:
    """The items of one response. Each delta extends the last item or begins the next; `emit` gets the events."""

    def __init__(
        self, message: ParsedMessage, emit: Emit, annotate: Callable[[str], list[dict[str, Any]]] = lambda text: []
    ) -> None:
        """`annotate` makes the annotations of a complete text."""
        self.items: list[dict[str, Any]] = []
        self._message, self._emit, self._annotate = message, emit, annotate
        self._open = False  # the last item is not complete

    def add(self, delta: Delta) -> None:
        if isinstance(delta, CallDelta):
            self._add_call(delta)
        else:
            self._add_text(delta)

    def finish(self, *, incomplete: bool) -> None:
        """Close the last item. A response without output has an empty message."""
        if all(item["type"] == "file_search_call" for item in self.items):
            self._add_text(Content(""))
        self._close("incomplete" if incomplete else "completed")

    def add_search(self, query: str, results: list[dict[str, Any]] | None) -> None:
        """The search that was made before the generation."""
        self._begin({"id": _id("fs"), "type": "file_search_call", "queries": [query], "results": None})
        for state in ("in_progress", "searching", "completed"):
            self._emit(f"response.file_search_call.{state}", **self._place())
        self.items[-1] |= {"status": "completed", "results": results}
        self._open = False
        self._emit("response.output_item.done", output_index=len(self.items) - 1, item=self.items[-1])

    def _add_text(self, delta: Content | Reasoning) -> None:
        kind, part = ("message", "output_text") if isinstance(delta, Content) else ("reasoning", "reasoning_text")
        if not self._open or self.items[-1]["type"] != kind:
            self._close()
            about: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            self._begin({"id": _id("msg" if kind == "message" else "rs"), "type": kind, **about, "content": []})
            self.items[-1]["content"].append(_part(part, ""))
            self._emit("response.content_part.added", **self._place(0), part=_part(part, ""))
        self.items[-1]["content"][0]["text"] += delta.text
        if delta.text:
            extra: dict[str, Any] = {"logprobs": []} if part == "output_text" else {}
            self._emit(f"response.{part}.delta", **self._place(0), delta=delta.text, **extra)

    def _add_call(self, delta: CallDelta) -> None:
        if delta.name is not None:
            self._close()
            call = self._message.calls[delta.index]
            self._begin(
                {"id": _id("fc"), "type": "function_call", "call_id": call.id, "name": delta.name, "arguments": ""}
            )
        self.items[-1]["arguments"] += delta.arguments
        if delta.arguments:
            self._emit("response.function_call_arguments.delta", **self._place(), delta=delta.arguments)

    def _begin(self, item: dict[str, Any]) -> None:
        self.items.append({**item, "status": "in_progress"})
        self._open = True
        added = {**self.items[-1], **({"content": []} if "content" in item else {})}
        self._emit("response.output_item.added", output_index=len(self.items) - 1, item=added)

    def _close(self, status: str = "completed") -> None:
        if not self._open:
            return
        item, self._open = self.items[-1], False
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            self._emit("response.function_call_arguments.done", **self._place(), **done)
        else:
            (part,) = item["content"]
            extra: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            if part["type"] == "output_text":
                part["annotations"] = self._annotate(part["text"])
                for at, one in enumerate(part["annotations"]):
                    place = {**self._place(0), "annotation_index": at}
                    self._emit("response.output_text.annotation.added", **place, annotation=one)
            self._emit(f"response.{part['type']}.done", **self._place(0), text=part["text"], **extra)
            self._emit("response.content_part.done", **self._place(0), part=part)
        self._emit("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place if content_index is None else {**place, "content_index": content_index}


def _part(kind: str, text: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **extra}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
