"""Preferences from the rows of a table, in the usual forms; each becomes a prompt and one or two answers.

    {"prompt": "…", "chosen": "…", "rejected": "…"}                  strings are one message each
    {"prompt": [messages], "chosen": [message], "rejected": [message]}
    {"chosen": [messages], "rejected": [messages]}                   the messages that both begin with are the prompt
    {"chosen": "\\n\\nHuman: …\\n\\nAssistant: …", "rejected": "…"}      the same, as text with speakers (hh-rlhf)
    {"prompt": "…", "completion": "…", "label": true}                one answer that is good or bad (KTO)

`question`, `instruction` (with `input`), `messages` and `conversations` are other names of the prompt, and `system` may
stand beside it. Messages have role and content, or from and value (ShareGPT).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from bagu.data.chat_source import conversation
from bagu.data.json_rows import Row
from bagu.errors import BaguError

Message = Mapping[str, Any]
Messages = tuple[Message, ...]
SPEAKERS = re.compile(r"\n\n(Human|Assistant): ?")
ANSWER_BEGINS = re.compile(r"\n\nAssistant:\s*\Z")
FORMS = '"prompt", "chosen" and "rejected"; chats in "chosen" and "rejected"; or "prompt", "completion" and "label"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """A prompt with a better and a worse answer. KTO's rows have one of the two.

    `strings` says that prompt and answers were strings, which may also be read as plain text. `place` is the file and
    line, for errors.
    """

    id: str
    place: str
    prompt: Messages
    chosen: Message | None
    rejected: Message | None
    strings: bool = False


def preference(row: Row) -> Preference:
    """The preference of a row, in any of the forms."""
    fields = {name: value for name, value in row.fields.items() if value is not None}  # Parquet has all columns
    row = replace(row, fields=fields)
    if "chosen" in fields and "rejected" in fields:
        return _pair(row)
    if "completion" in fields and "label" in fields:
        return _judged(row)
    raise BaguError(f"{row.place}: not a preference: expected {FORMS}", hint=f"found {row.found}")


def _pair(row: Row) -> Preference:
    prompt = _prompt(row)
    chosen, rejected = (_messages(row, side) for side in ("chosen", "rejected"))
    if prompt is None:
        prompt = _shared(row, chosen, rejected)
    sides = [_answer(row, name, prompt, side) for name, side in (("chosen", chosen), ("rejected", rejected))]
    if sides[0] == sides[1]:
        _refuse(row, "'chosen' and 'rejected' are equal")
    strings = isinstance(row.fields["chosen"], str) and len(prompt) == 1
    return Preference(id=row.id, place=row.place, prompt=prompt, chosen=sides[0], rejected=sides[1], strings=strings)


def _judged(row: Row) -> Preference:
    prompt, label = _prompt(row), row.fields["label"]
    if prompt is None:
        _refuse(row, "there is no prompt")
    if label not in (True, False):  # 1 and 0 too
        raise BaguError(f"{row.place}: 'label' is {label!r}", hint="true for a good completion, false for a bad one")
    answer = _answer(row, "completion", prompt, _messages(row, "completion"))
    strings = isinstance(row.fields["completion"], str) and len(prompt) == 1
    chosen, rejected = (answer, None) if label else (None, answer)
    return Preference(id=row.id, place=row.place, prompt=prompt, chosen=chosen, rejected=rejected, strings=strings)


def _prompt(row: Row) -> Messages | None:
    """The prompt of a row; None if it has no column for it."""
    name = next(
        (n for n in ("prompt", "question", "messages", "conversations", "instruction") if n in row.fields), None
    )
    if name is None:
        return None
    value = row.fields[name]
    if name == "instruction" and row.fields.get("input"):
        value = f"{row.text(name)}\n{row.text('input')}"
    if not isinstance(value, str):
        messages = _chat(row, name, value)
    elif value.startswith("\n\nHuman:"):
        messages = _spoken(ANSWER_BEGINS.sub("", value))
    else:
        messages = ({"role": "user", "content": row.string(value, f"field {name!r}")},)
    if row.fields.get("system"):
        messages = ({"role": "system", "content": row.text("system")}, *messages)
    if not str(messages[-1].get("content", "")).strip():
        _refuse(row, "the prompt is empty")
    return messages


def _messages(row: Row, name: str) -> Messages:
    """The messages of a side: a string is one message, unless it has speakers."""
    value = row.fields[name]
    if not isinstance(value, str):
        return _chat(row, name, value)
    if value.startswith("\n\nHuman:"):
        return _spoken(value)
    return ({"role": "assistant", "content": row.string(value, f"field {name!r}")},)


def _chat(row: Row, name: str, value: Any) -> Messages:
    """Messages with role and content, or from and value; a single one may stand without a list."""
    listed = [value] if isinstance(value, Mapping) else value
    if not isinstance(listed, list) or not listed:
        raise BaguError(f"{row.place}: {name!r} is not a text or a list of messages", hint=f"found {value!r:.80}")
    form = "messages" if isinstance(listed[0], Mapping) and "role" in listed[0] else "conversations"
    try:
        return conversation(replace(row, fields={form: listed})).messages
    except BaguError as error:
        error.args = (f"{error} (in {name!r})",)
        raise


def _spoken(text: str) -> Messages:
    """The messages of a text like "\\n\\nHuman: …\\n\\nAssistant: …"."""
    _, *parts = SPEAKERS.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    return tuple({"role": roles[who], "content": said} for who, said in zip(parts[::2], parts[1::2], strict=True))


def _shared(row: Row, chosen: Messages, rejected: Messages) -> Messages:
    """The messages that both chats begin with; each keeps at least its last one."""
    n = 0
    while n < min(len(chosen), len(rejected)) - 1 and chosen[n] == rejected[n]:
        n += 1
    if n == 0:
        raise BaguError(
            f"{row.place}: there is no prompt: 'chosen' and 'rejected' begin differently",
            hint='give a "prompt", or chats whose first messages are the same',
        )
    return chosen[:n]


def _answer(row: Row, name: str, prompt: Messages, side: Messages) -> Message:
    """The one message of a side that follows the prompt, which the side may repeat."""
    rest = side[len(prompt) :] if side[: len(prompt)] == prompt else side
    if len(rest) != 1 or rest[0].get("role") != "assistant":
        roles = ", ".join(str(m.get("role")) for m in rest) or "none"
        raise BaguError(
            f"{row.place}: {name!r} must have one assistant message after the prompt, and has {roles}",
            hint="put the other messages into the prompt; both sides share them",
        )
    (answer,) = rest
    if not str(answer.get("content", "")).strip() and not answer.get("tool_calls"):
        _refuse(row, f"{name!r} is empty")
    return answer


def _refuse(row: Row, what: str) -> NoReturn:
    raise BaguError(f"{row.place}: {what}", hint="correct or delete that row")


def same_prompt(preferences: Sequence[Preference]) -> dict[str, str]:
    """For each id, the id of the first preference with the same prompt."""
    first: dict[str, str] = {}
    return {p.id: first.setdefault(repr(p.prompt), p.id) for p in preferences}
