"""Chats: convert messages to token ids and a loss mask of the assistant's tokens.

A chat template (chat_template.py) renders messages as one text with control tokens between them. The loss mask comes
from the same rendering, so text and mask always agree:

* A template with `{% generation %} ... {% endgeneration %}` marks the assistant's text itself.
* For any other template, the text that one more assistant message adds after the generation prompt is that message's
  text (chat_spans.py). Where a template rewrites an answer as the chat grows, as Qwen3's removes earlier thoughts, that
  answer is an example of its own, rendered as the last message: so the model sees it when it generates it.

The token that ends the assistant's turn is part of it: a model that is never trained on it never stops.

The content of a message is data: "<|assistant|>" in a user's message is encoded as ordinary characters. Before
rendering, guard characters are inserted into the names of control tokens inside messages, and after a message that ends
with the beginning of such a name; no token may cross a guard. Only the template can therefore write a control token,
and it still sees the real messages. Guards and marks are Unicode noncharacters, which text does not use; a message that
contains one is refused.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from bagu.data.chat_cut import EncodedChat, fitted
from bagu.data.chat_spans import SpanFinder
from bagu.data.chat_template import CLOSE, OPEN, ChatTemplate, Message, Span
from bagu.data.source import Conversation
from bagu.data.store import TokenDocument
from bagu.data.tokenizer import BpeTokenizer, encoded
from bagu.errors import BaguError

GUARD = "\ufdd2"
SPANS = 2  # version of the rules for examples and spans, in the key of stored tokens
MARKS = re.compile(f"[{OPEN}{CLOSE}{GUARD}]")


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
        self._finder = SpanFinder(self.template, self._special)
        self._begun = tuple({name[:n] for name in names for n in range(1, len(name))})

    @property
    def token_facts(self) -> dict[str, Any]:
        """What decides the tokens of a chat."""
        template = {"template": self.template.source, "variables": self.template.variables}
        return self.tokenizer.token_facts | template | {"spans": SPANS}

    def encode(self, messages: Sequence[Message], **variables: Any) -> EncodedChat:
        """Encode all messages and mask the assistant's tokens: the last of the `examples`, which has all of them unless
        the template rewrites answers. A chat without assistant text is refused."""
        return self.examples(messages, **variables)[-1]

    def examples(self, messages: Sequence[Message], *, given: int = 0, **variables: Any) -> list[EncodedChat]:
        """What to train on for a chat whose first `given` messages are a prompt: the chat with its answers masked, and
        before it each answer that the template rewrites as the chat grows, as the end of a chat of its own."""
        found = self._finder.examples(self._safe(messages), given, self._safe(variables))
        return [self._example(messages, text, spans) for text, spans in found]

    def _example(self, messages: Sequence[Message], text: str, spans: Sequence[Span]) -> EncodedChat:
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
        Empty if the template refuses such a chat."""
        try:
            chat = self.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        except BaguError:
            return ()
        return (chat.ids[max(i for i, in_answer in enumerate(chat.mask) if in_answer)],)

    def documents(self, conversations: Iterable[Conversation], context: int | None = None) -> Iterator[TokenDocument]:
        """Encode conversations for a token store. A chat that is longer than `context` is cut at turns (chat_cut.py).
        The further examples of chat "a:1" have the ids "a:1#2", "a:1#3", ..."""
        for conversation in conversations:
            variables = {} if conversation.tools is None else {"tools": list(conversation.tools)}

            def encode(
                messages: Sequence[Message], given: int, variables: dict[str, Any] = variables
            ) -> list[EncodedChat]:
                return self.examples(messages, given=given, **variables)

            try:
                if context is None:
                    chats = encode(conversation.messages, conversation.given)
                else:
                    chats = fitted(conversation, encode, context)
            except BaguError as error:
                error.args = (f"{conversation.place or conversation.id}: {error}",)
                raise
            for n, chat in enumerate(chats, start=1):
                id = conversation.id if n == 1 else f"{conversation.id}#{n}"
                yield TokenDocument(id=id, tokens=chat.ids, mask=chat.mask)

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
