"""Chat responses with reasoning and tool calls, parsed from the text of each choice (message/parser.py)."""

import secrets
import string
from collections.abc import Iterable
from typing import Any

from bagu.serve.http.bodies.openai import Job
from bagu.serve.http.files_api.turn import Turn
from bagu.serve.http.responses import ChatResponse, Choice, GenerationResponse, to_json
from bagu.serve.message.format import MessageFormat
from bagu.serve.message.parser import CallDelta, Content, Delta, Reasoning
from bagu.serve.request import Event, PromptLogprobs, TokenEvent
from bagu.serve.wire.messages import Ready


class Call:
    """A tool call of a message."""

    def __init__(self, name: str, *, short_id: bool) -> None:
        letters = string.ascii_letters + string.digits
        self.id = "".join(secrets.choice(letters) for _ in range(9)) if short_id else f"call_{secrets.token_hex(12)}"
        self.name = name
        self.arguments: list[str] = []

    def body(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class ParsedMessage:
    """The message of one choice: its parts so far, and the number of reasoning tokens."""

    def __init__(self, format: MessageFormat) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[Call] = []
        self.reasoning_tokens = 0
        self._parser = format.parser()
        self._short_ids = format.form is not None and format.form.short_ids

    def add(self, choice: Choice, event: TokenEvent) -> list[Delta]:
        """Add an event of the choice; returns the deltas that can be sent now."""
        thinking = self._parser.thinking
        text = choice.push(event)
        deltas = self._parser.push(text) if text else []
        if choice.finish is not None:
            deltas += self._parser.finish()
        self.reasoning_tokens += event.token is not None and (thinking or self._parser.thinking)
        for delta in deltas:
            if isinstance(delta, Content):
                self.content.append(delta.text)
            elif isinstance(delta, Reasoning):
                self.reasoning.append(delta.text)
            else:
                if delta.name is not None:
                    self.calls.append(Call(delta.name, short_id=self._short_ids))
                self.calls[delta.index].arguments.append(delta.arguments)
        return deltas

    @property
    def text(self) -> str | None:
        """The content; None if the message only calls tools."""
        return "".join(self.content) or (None if self.calls else "")


class ParsedChatResponse(ChatResponse):
    """A chat response whose messages have a format."""

    def __init__(self, job: Job, ready: Ready, model: str, turn: Turn | None = None) -> None:
        super().__init__(job, ready, model)
        assert job.format is not None
        self.format, self.turn = job.format, turn
        self.messages = {choice.index: ParsedMessage(job.format) for choice in self.choices.values()}

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, PromptLogprobs):
                self.prompt_logprobs[event.request_id] = event
            else:
                self._read(event)

    def _read(self, event: TokenEvent) -> tuple[Choice, list[Delta]]:
        choice = self.choices[event[:2]]
        deltas = self.messages[choice.index].add(choice, event)
        if choice.finish == "stop" and self.messages[choice.index].calls:
            choice.finish = "tool_calls"
        return choice, deltas

    def chunks(self, events: Iterable[Event]) -> bytes:
        return "".join(c for event in events if isinstance(event, TokenEvent) for c in self._chunks(event)).encode()

    def _chunks(self, event: TokenEvent) -> list[str]:
        """A chunk per delta; logprobs that wait for one are in the first.

        The last chunk of a choice has an empty text, as in a
        chat without tools: clients join `content` over the chunks."""
        choice, deltas = self._read(event)
        head = choice.head.removesuffix(self.before)
        found = []
        for delta in [*deltas, None] if choice.finish is not None else deltas:
            fields = {"content": "", **self._read_fields(choice)} if delta is None else self._fields(choice, delta)
            logprobs, choice.scored = self.logprobs(choice) if choice.scored else None, []
            ends = f',"stop_reason":{to_json(choice.stop_reason)}' if delta is None else ""
            finish = to_json(choice.finish if delta is None else None)
            found.append(
                f'{head}"delta":{to_json(fields)},"logprobs":{to_json(logprobs)},"finish_reason":{finish}{ends}}}]'
                f"{self._usage}}}\n\n"
            )
        return found

    def _fields(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, Content):
            return {"content": delta.text}
        if isinstance(delta, Reasoning):
            return {"reasoning_content": delta.text}
        return {"tool_calls": [self._call_fields(choice, delta)]}

    def _read_fields(self, choice: Choice) -> dict[str, Any]:
        """The sources that were sent with the question, and the citations of them."""
        if self.turn is None:
            return {}
        text = self.messages[choice.index].text or ""
        return {"sources": self.turn.source_bodies(), "annotations": self.turn.url_citations(text)}

    def _call_fields(self, choice: Choice, delta: CallDelta) -> dict[str, Any]:
        if delta.name is None:
            return {"index": delta.index, "function": {"arguments": delta.arguments}}
        call = self.messages[choice.index].calls[delta.index]
        function = {"name": call.name, "arguments": delta.arguments}
        return {"index": delta.index, "id": call.id, "type": "function", "function": function}

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if self.format.thinks:
            count = sum(message.reasoning_tokens for message in self.messages.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        return usage

    def _choice(self, choice: Choice) -> dict[str, Any]:
        found = self.messages[choice.index]
        message: dict[str, Any] = {"role": "assistant", "content": found.text}
        if self.format.thinks:
            message["reasoning_content"] = "".join(found.reasoning) or None
        if found.calls:
            message["tool_calls"] = [call.body() for call in found.calls]
        message |= self._read_fields(choice)
        return {"index": choice.index, "message": message, **self._common_fields(choice)}


def chat_response(job: Job, ready: Ready, model: str, turn: Turn | None = None) -> GenerationResponse:
    """The response to a chat: text as it is, or parsed."""
    if job.format is None and turn is None:
        return ChatResponse(job, ready, model)
    return ParsedChatResponse(job._replace(format=job.format or MessageFormat()), ready, model, turn)
