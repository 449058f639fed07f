"""The parser of one message: text in, deltas out.

    generated text -> [<think> ... </think>] -> reasoning
                   -> content, and tool calls in the form of the model's template (forms.py)

Joined over a message, the deltas of each kind do not depend on how the text was cut into pieces. Text that only looks
like a call stays content: a call is sent when its arguments are a complete JSON object and its name is that of an
offered tool. Where a grammar makes every call valid (`live`), its arguments are sent while they are generated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass

from bagu.serve.message.json_text import SPACE, json_object, json_string, json_value
from bagu.serve.message.reader import Malformed, Reader, Steps

THINK, END_THINK = "<think>", "</think>"
KEYS = {"name", "arguments", "parameters", "id", "type"}  # of a call; any other key ends the attempt at once


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of the call with number `index`. The first delta of a call has its name; the arguments are JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


Delta = Content | Reasoning | CallDelta


class MessageParser:
    """Parses the text of one choice. `form` reads content and calls; None if no tools are offered. `required`: a
    grammar allows calls alone, so other text is the beginning of a call that max_tokens has cut, and is not sent.

    `thinks`: the message may begin with <think>; `thinking`: the prompt ends with it already.
    """

    def __init__(
        self,
        form: Callable[[MessageParser], Steps[None]] | None = None,
        names: Collection[str] = (),
        *,
        live: bool = False,
        required: bool = False,
        max_calls: int | None = None,
        thinks: bool = False,
        thinking: bool = False,
    ) -> None:
        self.reader = Reader()
        self.thinking = thinking  # the text that arrives now is reasoning
        self.calls = 0  # number of calls that were sent
        self._names, self._live, self._max_calls = frozenset(names), live, max_calls
        self._required = required
        self._deltas: list[Delta] = []
        self._space = ""  # white space that is sent only if text of the same kind follows
        self._wrote = False  # content or reasoning was sent, so that the white space after it counts
        self._steps = self._message(form, thinks)
        next(self._steps, None)

    def push(self, text: str) -> list[Delta]:
        """The deltas of the next piece of text."""
        self.reader.feed(text)
        next(self._steps, None)
        return self._take_deltas()

    def finish(self) -> list[Delta]:
        """The deltas of text that was held back, at the end of the message."""
        self.reader.ended = True
        next(self._steps, None)
        if self._space and not self.calls and not self.thinking:
            self._deltas.append(Content(self._space))
        return self._take_deltas()

    def _take_deltas(self) -> list[Delta]:
        """The new deltas; neighbours of the same kind are joined."""
        found: list[Delta] = []
        for delta in self._deltas:
            last = found[-1] if found else None
            if isinstance(delta, Content) and isinstance(last, Content):
                found[-1] = Content(last.text + delta.text)
            elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
                found[-1] = Reasoning(last.text + delta.text)
            elif isinstance(delta, CallDelta) and isinstance(last, CallDelta) and delta.name is None and last.arguments:
                found[-1] = CallDelta(last.index, last.name, last.arguments + delta.arguments)
            else:
                found.append(delta)
        self._deltas = []
        return found

    def _message(self, form: Callable[[MessageParser], Steps[None]] | None, thinks: bool) -> Steps[None]:
        if thinks or self.thinking:
            yield from self._think()
        if form is not None:
            yield from form(self)
        while (yield from self.reader.peek()):
            self.content(self.reader.take(len(self.reader.unread)))

    def _think(self) -> Steps[None]:
        space = yield from self.reader.run(SPACE)
        tag = yield from self.reader.literal(THINK)  # also where the prompt ends with it: some models repeat it
        if tag is None and not self.thinking:
            self.content(space)
            return
        self.thinking = True
        yield from self.text_until(END_THINK)
        if (yield from self.reader.literal(END_THINK)):
            yield from self.reader.run(SPACE)
            self.thinking, self._space, self._wrote = False, "", False

    def text_until(self, *markers: str) -> Steps[bool]:
        """Send text until one of `markers` comes next; False if the message ends before."""
        while (yield from self.reader.peek()):
            size, found = self.reader.find(markers)
            if size:
                self.content(self.reader.take(size))
            if found:
                return True
            if self.reader.unread and not self.reader.ended:
                yield
        return False

    def content(self, text: str) -> None:
        """Send text. White space at its end waits for more text: around a call it belongs to the form."""
        if self._required and not self.thinking:
            return
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return
        if not self._wrote and (self.calls or self.thinking):
            kept = kept.lstrip()
        self._wrote = True
        self._deltas.append(Reasoning(kept) if self.thinking else Content(kept))

    def skip(self, *words: str) -> Steps[bool]:
        """Read white space and one of `words`, if it follows; otherwise the white space is text."""
        space = yield from self.reader.run(SPACE)
        found = yield from self.reader.literal(*words)
        if found is None:
            self.content(space)
        return found is not None

    def attempt(self, call: Steps[None]) -> Steps[bool]:
        """Read a call; if it is malformed, send the text that was read for it as content, unless it is only cut."""
        text, before = self.reader.record(), self.calls
        try:
            yield from call
            return True
        except Malformed:
            if self.calls == before and not (self._live and self.reader.ended):
                self.content("".join(text))
            return False
        finally:
            self.reader.stop(text)

    def object_call(self, *before: str) -> Steps[None]:
        """Read the literals `before`, then a call as an object with a name and arguments (or parameters)."""
        yield from self._literals(before)
        name: str | None = None
        arguments: str | None = None
        sent = False

        def member(key: str, depth: int) -> Steps[None]:
            nonlocal name, arguments, sent
            if key not in KEYS:
                raise Malformed
            if key == "name":
                name = self._known((yield from json_string(self.reader)))
            elif key not in ("arguments", "parameters"):
                yield from json_value(self.reader, depth)
            elif name is not None and self._live:
                sent = True
                yield from self.arguments(name)
            else:
                arguments = yield from self._whole_arguments()

        yield from json_object(self.reader, member)
        if sent:
            return
        if name is None or arguments is None:
            raise Malformed
        self._send_call(name, arguments)

    def named_call(self, name: str, *before: str) -> Steps[None]:
        """Read the literals `before` and the arguments of a call whose name was read before."""
        name = self._known(name)
        yield from self._literals(before)
        if self._live:
            yield from self.arguments(name)
        else:
            self._send_call(name, (yield from self._whole_arguments()))

    def arguments(self, name: str) -> Steps[None]:
        """Read arguments and send them as they arrive."""
        if (yield from self.reader.peek()) != "{":
            raise Malformed
        index = self._open_call(name)
        text, steps = self.reader.record(), json_value(self.reader)
        try:
            while next(steps, True) is None:  # None: it waits for text
                self._send_arguments(index, text)
                yield
        finally:
            self._send_arguments(index, text)
            self.reader.stop(text)

    def _send_arguments(self, index: int | None, text: list[str]) -> None:
        if text and index is not None:
            self._deltas.append(CallDelta(index, arguments="".join(text)))
        text.clear()

    def _whole_arguments(self) -> Steps[str]:
        if (yield from self.reader.peek()) != "{":
            raise Malformed
        text = self.reader.record()
        try:
            yield from json_value(self.reader)
            return "".join(text)
        finally:
            self.reader.stop(text)

    def _literals(self, words: Collection[str]) -> Steps[None]:
        for word in words:
            yield from self.reader.run(SPACE)
            yield from self.reader.expect(word)
        yield from self.reader.run(SPACE)

    def _known(self, name: str) -> str:
        """The name as one of the tools has it; it may have JSON's escapes."""
        try:
            name = json.loads(f'"{name}"') if "\\" in name else name
        except ValueError as error:  # not an escape of JSON, or a backslash at the end
            raise Malformed from error
        if name not in self._names:
            raise Malformed
        return name

    def _send_call(self, name: str, arguments: str) -> None:
        index = self._open_call(name)
        if index is not None:
            self._deltas.append(CallDelta(index, arguments=arguments))

    def _open_call(self, name: str) -> int | None:
        """Send the name of the next call; None, and nothing is sent, beyond `max_calls`."""
        self._space = ""
        if self._max_calls is not None and self.calls >= self._max_calls:
            return None
        self.calls += 1
        self._deltas.append(CallDelta(self.calls - 1, name))
        return self.calls - 1
