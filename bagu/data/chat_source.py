"""Chats from rows of JSON or Parquet, in the common formats; each becomes messages with role and content.

    messages    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}              OpenAI
    ShareGPT    {"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}
    Alpaca      {"instruction": "...", "input": "...", "output": "...", "history": [["...", "..."]]}
    TRL         {"prompt": "...", "completion": "..."}: texts or lists of messages; only the completion is learned

Common roles are system, user, assistant and tool; the chat template decides which it accepts. An assistant's message
may call tools ("tool_calls") and then needs no content.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagu.data.json_rows import Row, json_rows
from bagu.data.source import Conversation, describe_files, list_files, non_empty
from bagu.data.table import parquet_rows
from bagu.errors import BaguError

# ShareGPT's role names, and those of formats derived from it
SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
FORMS = (
    '"messages" (role, content), "conversations" (from, value), "instruction" and "output", "prompt" and "completion"'
)


@dataclass(frozen=True)
class ChatJsonlSource:
    """Chats from JSON lines, JSON lists or Parquet, in a file or a folder. `glob` may select files of one kind."""

    path: Path
    glob: str = "**/*.jsonl*"

    def conversations(self) -> Iterator[Conversation]:
        files = self.files()
        rows = parquet_rows(files) if files[0][1].suffix == ".parquet" else json_rows(files)
        return non_empty(map(conversation, rows), self.path)

    def describe(self) -> dict[str, Any]:
        return describe_files("chat jsonl", self.files())

    def files(self) -> list[tuple[str, Path]]:
        """For a folder, by default its .jsonl files; if it has none, its .parquet files, or else its .json files."""
        standard = self.glob == ChatJsonlSource.glob and self.path.is_dir()
        if standard and not any(self.path.glob(self.glob)):
            other = "**/*.parquet" if any(self.path.glob("**/*.parquet")) else "**/*.json"
            return list_files(self.path, other)
        return list_files(self.path, self.glob)


def conversation(row: Row) -> Conversation:
    """The chat of a row, in any of the formats."""
    given = 0
    if "messages" in row.fields:
        messages = [_message(row, n, m) for n, m in enumerate(_list(row, "messages"))]
    elif "conversations" in row.fields:
        messages = [_from_sharegpt(row, n, m) for n, m in enumerate(_list(row, "conversations"))]
        messages = [*_system(row), *messages]
    elif "instruction" in row.fields and "output" in row.fields:
        messages = _from_alpaca(row)
    elif "prompt" in row.fields and "completion" in row.fields and "label" not in row.fields:  # with one: KTO's
        prompt = _said(row, "prompt", "user")
        messages, given = [*prompt, *_said(row, "completion", "assistant")], len(prompt)
    else:
        raise BaguError(f"{row.place}: not a chat: expected {FORMS}", hint=f"found {row.found}")
    return Conversation(id=row.id, messages=tuple(messages), tools=_tools(row), given=given, place=row.place)


def _said(row: Row, key: str, role: str) -> list[dict[str, Any]]:
    """The messages of a field: a list of them, or a text that is one message of `role`."""
    if isinstance(row.fields[key], str):
        return [{"role": role, "content": row.text(key)}]
    return [_message(row, n, m) for n, m in enumerate(_list(row, key))]


def _message(row: Row, number: int, message: Any) -> dict[str, Any]:
    if isinstance(message, dict):
        message = {key: value for key, value in message.items() if value is not None}  # Parquet's missing keys
    if not isinstance(message, dict) or "role" not in message:
        raise BaguError(f"{row.place}: message {number} has no role", hint=f"found {message!r:.80}")
    role = row.string(message["role"], f"the role of message {number}")
    calls, content = message.get("tool_calls"), message.get("content")
    if calls is not None and not (role == "assistant" and isinstance(calls, list)):
        raise BaguError(f"{row.place}: message {number} has tool_calls", hint="only an assistant may have a list")
    if calls:
        message = {**message, "tool_calls": [_call(row, number, call) for call in calls]}
    if content is None and calls:
        return {**message, "content": ""}
    if content is None:
        raise BaguError(f"{row.place}: message {number} has no content", hint=f"found {message!r:.80}")
    return {**message, "content": _text(row, number, content)}


def _call(row: Row, number: int, call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates expect; OpenAI's API has them as a JSON string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BaguError(
            f"{row.place}: a tool call of message {number} is not {{'function': {{'name': ..., 'arguments': ...}}}}",
            hint=f"found {call!r:.80}",
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(row, f"the arguments of a tool call of message {number}", arguments)
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _text(row: Row, number: int, content: Any) -> str:
    """The text of a content: a string, or a list of parts of type text."""
    what = f"the content of message {number}"
    if not isinstance(content, list):
        return row.string(content, what)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise BaguError(f"{row.place}: {what} has a part that is not text", hint=f"found {part!r:.80}")
    return "".join(row.string(part.get("text"), f"a part of {what}") for part in content)


def _from_sharegpt(row: Row, number: int, message: Any) -> dict[str, Any]:
    if isinstance(message, dict) and "role" in message:  # some files use ShareGPT's key with OpenAI's messages
        return _message(row, number, message)
    for key in ("from", "value"):
        if not isinstance(message, dict) or key not in message:
            raise BaguError(f"{row.place}: message {number} has no {key!r}", hint=f"found {message!r:.80}")
    speaker, text = (row.string(message[key], f"{key!r} of message {number}") for key in ("from", "value"))
    if speaker not in SHAREGPT:
        known = ", ".join(SHAREGPT)
        raise BaguError(f"{row.place}: message {number} is from {speaker!r}", hint=f"known speakers: {known}")
    if speaker == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(row, number, text)}
    return {"role": SHAREGPT[speaker], "content": text}


def _calls(row: Row, number: int, text: str) -> list[dict[str, Any]]:
    """ShareGPT writes a call, or a list of calls, as a JSON string."""
    parsed = _json(row, f"the function call of message {number}", text)
    functions = parsed if isinstance(parsed, list) else [parsed]
    return [_call(row, number, {"type": "function", "function": function}) for function in functions]


def _json(row: Row, what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BaguError(f"{row.place}: {what} is not JSON: {error}", hint="correct that line") from error


def _from_alpaca(row: Row) -> list[dict[str, Any]]:
    """A question (instruction, followed by input if there is one) and its answer, after the turns of history."""
    history = row.fields.get("history") or []
    messages = _system(row)
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list) or len(turn) != 2:
            raise BaguError(f"{row.place}: a turn of history must be [question, answer]", hint=f"found {turn!r:.80}")
        question, answer = (row.string(text, "a turn of history") for text in turn)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    given = row.fields.get("input") or ""
    question = "\n".join(filter(None, (row.text("instruction"), row.string(given, "field 'input'"))))
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": row.text("output")}]


def _system(row: Row) -> list[dict[str, Any]]:
    text = row.fields.get("system")
    return [{"role": "system", "content": row.string(text, "field 'system'")}] if text else []


def _list(row: Row, key: str) -> list[Any]:
    value = row.fields[key]
    if not isinstance(value, list) or not value:
        raise BaguError(f"{row.place}: {key!r} is not a list of messages", hint=f"found {value!r:.80}")
    return value


def _tools(row: Row) -> tuple[Mapping[str, Any], ...] | None:
    """The tools that a chat may call: a list, or a JSON string of a list."""
    tools = row.fields.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _json(row, "field 'tools'", tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BaguError(f"{row.place}: field 'tools' is not a list of objects", hint=f"found {tools!r:.80}")
    return tuple(tools)
