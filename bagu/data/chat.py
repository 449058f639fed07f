"""Chats: convert messages to token ids and a loss mask of the assistant's tokens.

A chat template (chat_template.py) renders messages as one text with control tokens between them. The loss mask comes
from the same rendering, so text and mask always agree:

* A template with `{% generation %} ... {% endgeneration %}` marks the assistant's text itself.
* For any other template, the text that one more assistant message adds after the generation prompt is that message's
  text. A template that rewrites earlier turns as the chat grows is refused.

The token that ends the assistant's turn is part of it: a model that is never trained on it never stops.

The content of a message is data: "<|assistant|>" in a user's message is encoded as ordinary characters. Before
rendering, guard characters are inserted into the names of control tokens inside messages, and after a message that ends
with the beginning of such a name; no token may cross a guard. Only the template can therefore write a control token,
and it still sees the real messages. Guards and marks are Unicode noncharacters, which text does not use; a message that
contains one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers

from bagu.data.chat_template import CLOSE, OPEN, ChatTemplate, Message, Span
from bagu.data.source import Conversation
from bagu.data.store import TokenDocument
from bagu.data.tokenizer import BpeTokenizer, encoded
from bagu.errors import BaguError

GUARD = "\ufdd2"
MARKS = re.compile(f"[{OPEN}{CLOSE}{GUARD}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedChat:
    """Token ids, and a mask with 1 for the tokens of the assistant."""

    ids: list[int]
    mask: list[int]


class ChatEncoder:
    """Encodes chats, for training (`encode`) and for generation (`prompt`)."""

    def __init__(self, tokenizer: BpeTokenizer, template: ChatTemplate | None = None) -> None:
        """`template` defaults to the tokenizer's own."""
        if template is None and tokenizer.chat_template is None:
            hint = "pass one: ChatTemplate(source=DEFAULT_TEMPLATE) fits tokenizers that bagu trains"
            raise BaguError("the tokenizer has no chat template", hint=hint)
        source = tokenizer.chat_template or ""
        self.template = template or ChatTemplate(source=source, variables=tokenizer.variables)
        self.tokenizer = tokenizer
        self._markup = tokenizers.Tokenizer.from_str(tokenizer.spec)  # a separate instance: offsets are needed here
        self._markup.no_padding()
        self._markup.no_truncation()
        names = sorted(tokenizer.special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._begun = tuple({name[:n] for name in names for n in range(1, len(name))})

    @property
    def token_facts(self) -> dict[str, Any]:
        """What decides the tokens of a chat."""
        return self.tokenizer.token_facts | {"template": self.template.source, "variables": self.template.variables}

    def encode(self, messages: Sequence[Message], **variables: Any) -> EncodedChat:
        """Encode all messages and mask the assistant's tokens. A chat without assistant text is refused."""
        text, spans = self._rendered(self._safe(messages), self._safe(variables))
        ids, places = self._tokens(text)
        mask = [int(any(start < end and end > a and start < b for a, b in spans)) for start, end in places]
        if not any(mask):
            roles = ", ".join(str(m.get("role")) for m in messages)
            hint = "remove it from the data, or correct the template's generation block"
            raise BaguError(f"this chat has no assistant text: its roles are {roles}", hint=hint)
        return EncodedChat(ids=ids, mask=mask)

    def prompt(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The ids of the messages and the generation prompt, after which the assistant's answer starts."""
        return self.prompt_tokens(self.prompt_text(messages, **variables))

    def prompt_text(self, messages: Sequence[Message], **variables: Any) -> str:
        """The text of `prompt`, with guards: a server looks at its length before it is encoded."""
        return self.template.render(self._safe(messages), add_generation_prompt=True, **self._safe(variables))

    def prompt_tokens(self, text: str) -> list[int]:
        """The ids of a `prompt_text`."""
        return self._tokens(text)[0]

    @cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """The token that ends the assistant's turn: generation stops there too, not only at the end-of-text token.
        Empty if the template does not mark the assistant's tokens."""
        try:
            chat = self.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        except BaguError:
            return ()
        return (chat.ids[max(i for i, in_answer in enumerate(chat.mask) if in_answer)],)

    def documents(self, conversations: Iterable[Conversation]) -> Iterator[TokenDocument]:
        """Encode conversations for a token store."""
        for conversation in conversations:
            variables = {} if conversation.tools is None else {"tools": list(conversation.tools)}
            try:
                chat = self.encode(conversation.messages, **variables)
            except BaguError as error:
                error.args = (f"{conversation.place or conversation.id}: {error}",)
                raise
            yield TokenDocument(id=conversation.id, tokens=chat.ids, mask=chat.mask)

    def _safe(self, value: Any) -> Any:
        """The messages with guards, so that no text is the name of a control token."""
        if isinstance(value, str):
            self._check(value)
            value = self._special.sub(lambda match: GUARD.join(match[0]), value)
            return value + GUARD if value.endswith(self._begun) else value
        if isinstance(value, Mapping):
            return {self._safe(key): self._safe(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._safe(item) for item in value]
        return value

    def _check(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            hint = "the text was decoded wrongly; decode it again from its bytes"
            raise BaguError(f"a message has a lone surrogate at character {error.start}", hint=hint) from error
        if MARKS.search(text):
            hint = "remove the noncharacters U+FDD0 to U+FDD2; text does not use them"
            raise BaguError("a message contains a Unicode noncharacter that chat encoding reserves", hint=hint)

    def _rendered(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> tuple[str, list[Span]]:
        """The text (with guards) and the spans of the assistant's text."""
        text, spans = self.template.render_spans(messages, **variables)
        if self.template.marks_generation:
            return text, [self._with_end(text, span) for span in spans]
        for i, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = self.template.render(messages[:i], add_generation_prompt=True, **variables)
                after = self.template.render(messages[: i + 1], **variables)
                if not (after.startswith(before) and text.startswith(after)):
                    hint = "put {% generation %} and {% endgeneration %} around the assistant's text in the template"
                    raise BaguError(f"the chat template rewrites the text before or in message {i}", hint=hint)
                spans.append(self._to_end(text, (len(before), len(after))))
        return text, spans

    def _with_end(self, text: str, span: Span) -> Span:
        """The span of a generation block, extended by a control token right after it if the block omits it."""
        start, end = span
        ends_itself = any(not text[m.end() : end].strip() for m in self._special.finditer(text, start, end))
        follows = self._special.match(text, end)
        return (start, follows.end()) if follows and not ends_itself else span

    def _to_end(self, text: str, span: Span) -> Span:
        """A span without the white space that the template adds after the control token that ends the turn."""
        start, end = span
        ends = [m.end() for m in self._special.finditer(text, start, end) if not text[m.end() : end].strip()]
        return (start, ends[-1]) if ends else span

    def _tokens(self, text: str) -> tuple[list[int], list[Span]]:
        """Ids, and the span of `text` of each. The text between two guards is encoded separately."""
        ids: list[int] = []
        places: list[Span] = []
        at = 0
        for part in text.split(GUARD):
            encoding = encoded(self._markup, part)
            ids += encoding.ids
            places += _without_gaps(encoding.offsets, at)
            at += len(part) + len(GUARD)
        return ids, places


def _without_gaps(offsets: Sequence[Span], base: int) -> list[Span]:
    """Offsets without gaps: some tokenizers exclude the space before a word from the offsets of its token."""
    spans: list[Span] = []
    previous = 0
    for start, end in offsets:
        spans.append((base + min(start, previous), base + end))
        previous = max(previous, end)
    return spans


def turn_ends(tokenizer: BpeTokenizer) -> tuple[int, ...]:
    """The token that ends the assistant's turn in a tokenizer's own chat template; empty without a template, or if the
    template does not mark the assistant's tokens."""
    return () if tokenizer.chat_template is None else ChatEncoder(tokenizer).turn_ends
