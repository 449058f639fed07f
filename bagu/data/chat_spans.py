"""The text of a chat and the spans of the assistant's text in it, for any chat template.

A template with generation blocks marks the spans itself. For any other one they come from rendering prefixes. Answer i
starts where the rendering of the messages before it, with the generation prompt, ends. It ends with the control token
that still follows it when a user's message comes next: Phi-3 writes one more token after the last message alone.

Templates differ in two more ways:

* A generation prompt may open a thought that the answer in a chat does not have (DeepSeek). The answer then starts
  where the two renderings part, if that is after the messages before it.
* An answer may be rendered in another way once the chat goes on: without its thought (Qwen3), with another end
  (gpt-oss). It is then an example of its own, in which it is the last message.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from bagu.data.chat_template import ChatTemplate, Span
from bagu.errors import BaguError

Messages = Sequence[Mapping[str, Any]]
Example = tuple[str, list[Span]]  # a text, and the spans of it that are targets


class SpanFinder:
    """Finds the answers in the renderings of `template`; `special` matches the names of control tokens."""

    def __init__(self, template: ChatTemplate, special: re.Pattern[str]) -> None:
        self.template, self.special = template, special
        self._parts = re.compile(f"({special.pattern})")

    def examples(self, messages: Messages, given: int, variables: Mapping[str, Any]) -> list[Example]:
        """The renderings to train on. Answers among the first `given` messages are no targets."""
        text, spans = self.template.render_spans(messages, **variables)
        self._check_calls(messages, text, variables)
        if self.template.marks_generation:
            prompt = self.template.render(messages[:given], **variables) if given else ""
            first = len(_shared(prompt, text))
            return [(text, [self._with_end(text, span) for span in spans if span[0] >= first])]
        own: list[Example] = []
        for i, message in enumerate(messages):
            if i >= given and message.get("role") == "assistant":
                after = self.template.render(messages[: i + 1], **variables)
                span = self._answer(messages, i, after, variables)
                if text.startswith(after[: span[1]]):
                    spans.append(span)
                else:
                    own.append((after, [span]))
        return [*own, (text, spans)] if spans or not own else own

    def _answer(self, messages: Messages, i: int, after: str, variables: Mapping[str, Any]) -> Span:
        """The span of message `i` in `after`, the rendering that ends with it."""
        before = self.template.render(messages[:i], add_generation_prompt=True, **variables)
        start = len(before)
        if not after.startswith(before):
            start = len(self._common(before, after))
            if start < len(self._common(before, self.template.render(messages[:i], **variables))):
                hint = "put {% generation %} and {% endgeneration %} around the assistant's text in the template"
                raise BaguError(f"the chat template rewrites the text before message {i}", hint=hint)
        if messages[i].get("content"):
            try:
                longer = self.template.render([*messages[: i + 1], {"role": "user", "content": "?"}], **variables)
            except BaguError:
                longer = ""  # the template allows no user's message here, as after a tool call
            if end := self._end(after, start, len(self._common(after, longer))):
                return start, end
        return start, self._end(after, start, len(after)) or len(after)

    def _common(self, one: str, other: str) -> str:
        """The common beginning of two texts, in whole control tokens and whole texts between them."""
        return "".join(_shared(self._parts.split(one), self._parts.split(other)))

    def _end(self, text: str, start: int, end: int) -> int | None:
        """The end of the last control token of a span, if no more than white space follows it there."""
        ends = [m.end() for m in self.special.finditer(text, start, end) if not text[m.end() : end].strip()]
        return ends[-1] if ends else None

    def _with_end(self, text: str, span: Span) -> Span:
        """The span of a generation block, extended by a control token right after it if the block omits it."""
        start, end = span
        follows = self.special.match(text, end)
        return (start, follows.end()) if follows and self._end(text, start, end) is None else span

    def _check_calls(self, messages: Messages, text: str, variables: Mapping[str, Any]) -> None:
        """Raise for a tool call that the template does not write: the model would learn to answer nothing."""
        for i, message in enumerate(messages):
            calls = message.get("tool_calls") or []
            for n in range(len(calls)):
                without = {**message, "tool_calls": [*calls[:n], *calls[n + 1 :]]}
                try:
                    same = self.template.render([*messages[:i], without, *messages[i + 1 :]], **variables) == text
                except BaguError:
                    continue  # a message without calls is refused: they matter to the template
                if same:
                    hint = "use a template that writes tool_calls, or write the calls in the content of the message"
                    raise BaguError(f"the chat template leaves out tool call {n} of message {i}", hint=hint)


def _shared(one: Sequence[str], other: Sequence[str]) -> list[str]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
