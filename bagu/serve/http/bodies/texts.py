"""Tokenize prompts, with length checks before and after.

Tokenizing costs what the client sends: 8 MB of text are about 3 million tokens and need 1.2 GB of memory. So a text
that cannot fit the model's longest sequence is refused by its number of characters, or by the tokens of its beginning,
before all of it is tokenized. For a chat, that text is everything that the template gets, before it is rendered, and
then what the template made of it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from bagu.errors import BaguError
from bagu.serve.http.errors import ApiError
from bagu.serve.wire.messages import Ready

SHORT = 2**14  # characters or tokens that are accepted without a check: about a millisecond of work
USUAL_CHARACTERS = 8  # per token; English has 4 to 5. The tokens of longer texts are counted piece by piece first.


def as_list(texts: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a field that accepts one or several."""
    one = isinstance(texts, str) or isinstance(texts[0], int)
    return [texts] if one else texts  # type: ignore[list-item, return-value]


def encode_all(texts: str | list[int] | list[str] | list[list[int]], ready: Ready, param: str) -> list[list[int]]:
    """The tokens of every prompt. Raises 400 for an empty prompt; token ids are checked and returned unchanged."""
    found = []
    for text in as_list(texts):
        ids = encode(text, ready, param) if isinstance(text, str) else text
        if not ids:
            raise ApiError(400, "the prompt is empty", param=param, hint="send at least one token")
        check_tokens(ids, ready, param)
        tokens_left([ids], 0, ready.max_model_len, param)  # before the next text is tokenized
        found.append(ids)
    return found


def encode(text: str, ready: Ready, param: str, *, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a text. Raises 400 if it is too long or not valid Unicode."""
    check_length(text, ready, param)
    try:
        return ready.tokenizer.encode_prompt(text) if add_special_tokens else ready.tokenizer.encode(text)
    except BaguError as error:
        raise ApiError(400, str(error), param=param, hint=error.hint) from error


def check_tokens(ids: list[int], ready: Ready, param: str) -> None:
    """Raise 400 for an id outside the vocabulary."""
    if ids and max(ids) >= ready.vocab_size:
        raise ApiError(400, f"token {max(ids)} is outside the vocabulary of {ready.vocab_size} tokens", param=param)


def check_length(text: str, ready: Ready, param: str) -> None:
    """Raise 400 if a text has more tokens than the model's longest sequence, without tokenizing all of it."""
    longest = ready.max_model_len
    if len(text) <= max(SHORT, longest * min(USUAL_CHARACTERS, ready.longest_token)):
        return
    if len(text) > longest * ready.longest_token:
        hint = f"this model's longest sequence is {longest} tokens, of at most {ready.longest_token} characters each"
        raise _too_long(f"the text has {len(text)} characters", param, hint)
    count, piece = 0, max(SHORT, longest)
    for end in range(piece, len(text) + piece, piece):
        count += len(ready.tokenizer.encode(text[end - piece : end]))
        if count - end // piece * ready.longest_token > longest:  # a cut may split one token of the text into several
            message = f"the first {min(end, len(text))} of the text's {len(text)} characters are {count} tokens"
            raise _too_long(message, param, f"this model's longest sequence is {longest} tokens")


def check_chat_length(ready: Ready, param: str, *given: Any) -> None:
    """`check_length` of all text in `given`, which goes to the chat template: messages, tools, variables."""
    most, size, found = ready.max_model_len * ready.longest_token, 0, []
    for text in _texts(given):
        size += len(text)
        found.append(text)
        if size > max(most, SHORT):
            break
    check_length("\n".join(found), ready, param)


def _texts(value: Any) -> Iterator[str]:
    """The strings and numbers in a value, with the keys of its objects and without the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, BaseModel):
        yield from _texts(list(vars(value).values()))
        yield from _texts(value.model_extra)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif value is not None:
        yield str(value)


def tokens_left(prompts: list[list[int]], max_tokens: int | None, longest: int, param: str) -> int:
    """How many tokens fit after the longest prompt. Raises 400 if `max_tokens` (None: one token) do not fit."""
    length = max(map(len, prompts))
    if length + (1 if max_tokens is None else max_tokens) <= longest:
        return longest - length
    asked = "" if max_tokens is None else f" and max_tokens is {max_tokens}: {length + max_tokens} tokens"
    where = "max_tokens" if length < longest else param
    raise _too_long(
        f"the prompt has {length} tokens{asked}", where, f"this model's longest sequence is {longest} tokens"
    )


def render(ready: Ready, messages: list[dict[str, Any]], variables: dict[str, Any]) -> list[int]:
    """The tokens of a chat, rendered with the chat template."""
    if not ready.generates or ready.chat is None:
        reason = "has no chat template" if ready.generates else f"{ready.other_use} and does not generate"
        raise ApiError(400, f"this model {reason}", param="messages", hint="use /v1/completions or /v1/embeddings")
    if taken := variables.keys() & {"messages", "add_generation_prompt", "self"}:
        raise ApiError(400, f"chat_template_kwargs may not set {min(taken)}", param="chat_template_kwargs")
    roles = {"developer": ready.system_role}
    messages = [{**message, "role": roles.get(message["role"], message["role"])} for message in messages]
    try:
        text = ready.chat.prompt_text(messages, **variables)
        check_length(text, ready, "messages")  # a template may indent tools, or repeat a message
        return ready.chat.prompt_tokens(text)
    except RecursionError as error:
        raise ApiError(400, "the messages are nested too deeply", param="messages") from error
    except ApiError:
        raise
    except BaguError as error:  # the template raised an error
        raise ApiError(400, str(error), param="messages", hint=error.hint) from error


def _too_long(message: str, param: str, hint: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded", hint=hint)
