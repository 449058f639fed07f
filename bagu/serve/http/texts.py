"""Text to prompt tokens, with the limits that hold before and after tokenizing.

Tokenizing is where a client decides how much work and memory the server spends: 8 MB of text are about 3 million tokens
and 1.2 GB while they are made. So a text that cannot fit the model's longest sequence is refused by its length in
characters, or by the tokens of its beginning, before the whole of it is tokenized.
"""

from __future__ import annotations

from typing import Any

from bagu.errors import BaguError
from bagu.serve.http.tickets import ApiError
from bagu.serve.http.worker import Ready

__all__ = ["SHORT", "check_length", "check_tokens", "each", "encode", "encode_each", "render", "room"]

SHORT = 2**14  # characters or tokens that are always taken: a millisecond or so of work
USUAL_CHARACTERS = 8  # of a token; English has 4 to 5. Longer texts have their beginning counted first.


def each(texts: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """The texts of a field that takes one or several."""
    one = isinstance(texts, str) or isinstance(texts[0], int)
    return [texts] if one else texts  # type: ignore[list-item, return-value]


def encode_each(
    texts: str | list[int] | list[str] | list[list[int]], ready: Ready, param: str
) -> list[list[int]]:  # fmt: skip
    """The tokens of every text, at least one each; token ids are checked and passed on."""
    found = []
    for text in each(texts):
        ids = encode(text, ready, param) if isinstance(text, str) else text
        if not ids:
            raise ApiError(400, "the prompt is empty", param=param, hint="give at least one token")
        check_tokens(ids, ready, param)
        found.append(ids)
    return found


def encode(text: str, ready: Ready, param: str, *, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a text, or 400 where it is too long or no text."""
    check_length(text, ready, param)
    try:
        return ready.tokenizer.encode_prompt(text) if add_special_tokens else ready.tokenizer.encode(text)
    except BaguError as error:
        raise ApiError(400, str(error), param=param, hint=error.hint) from error


def check_tokens(ids: list[int], ready: Ready, param: str) -> None:
    """Refuse an id that the vocabulary does not have."""
    if ids and max(ids) >= ready.vocab_size:
        raise ApiError(400, f"token {max(ids)} in a vocabulary of {ready.vocab_size}", param=param)


def check_length(text: str, ready: Ready, param: str) -> None:
    """Refuse a text that has more tokens than the model's longest sequence, without tokenizing the whole of it."""
    longest = ready.max_model_len
    if len(text) <= max(SHORT, longest * min(USUAL_CHARACTERS, ready.longest_token)):
        return
    if len(text) > longest * ready.longest_token:
        hint = f"this model's longest sequence is {longest} tokens, of at most {ready.longest_token} characters each"
        raise _too_long(f"the text has {len(text)} characters", param, hint)
    head = text[: max(SHORT, longest * USUAL_CHARACTERS)]
    count = len(ready.tokenizer.encode(head))
    if count - ready.longest_token > longest:  # where the text was cut, one token of the whole may have become several
        message = f"the first {len(head)} of the text's {len(text)} characters are {count} tokens"
        raise _too_long(message, param, f"this model's longest sequence is {longest} tokens")


def room(prompts: list[list[int]], max_tokens: int | None, longest: int, param: str) -> int:
    """The tokens left beside the longest prompt, or 400 where `max_tokens` (at least one) are more."""
    length = max(map(len, prompts))
    if length + (1 if max_tokens is None else max_tokens) <= longest:
        return longest - length
    asked = "" if max_tokens is None else f" and max_tokens is {max_tokens}: {length + max_tokens} tokens"
    where = "max_tokens" if length < longest else param
    raise _too_long(
        f"the prompt has {length} tokens{asked}", where, f"this model's longest sequence is {longest} tokens"
    )


def render(ready: Ready, messages: list[dict[str, Any]], variables: dict[str, Any]) -> list[int]:
    """The prompt of a chat."""
    if not ready.generates or ready.chat is None:
        what = "has no chat template" if ready.generates else "embeds text and does not generate"
        raise ApiError(400, f"this model {what}", param="messages", hint="use /v1/completions or /v1/embeddings")
    if taken := variables.keys() & {"messages", "add_generation_prompt", "self"}:
        raise ApiError(400, f"chat_template_kwargs may not set {min(taken)}", param="chat_template_kwargs")
    roles = {"developer": ready.system_role}
    messages = [{**message, "role": roles.get(message["role"], message["role"])} for message in messages]
    check_length("\n".join(message["content"] for message in messages), ready, "messages")
    try:
        ids: list[int] = ready.chat.prompt(messages, **variables)
    except RecursionError as error:
        raise ApiError(400, "the messages are nested too deeply to be read", param="messages") from error
    except BaguError as error:  # the template refuses the chat
        raise ApiError(400, str(error), param="messages", hint=error.hint) from error
    return ids


def _too_long(message: str, param: str, hint: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded", hint=hint)
