"""`bagu chat`: a chat in the terminal, with a server over HTTP or an engine in this process.

    Chat        streams the answer to a list of messages (clients.py)
    Session     the conversation, its settings, and the commands that begin with "/"
    main        reads a line, streams the answer, prints its token count and speed

Ctrl-C stops an answer and keeps the text so far; at the prompt it clears the line. Ctrl-D ends the chat. Control
characters in the model's output are printed as symbols, so the terminal does not execute them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.machine.terminal import Terminal, counted
from bagu.serve.chat.clients import Chat, Message, Settings, sampling_of

if TYPE_CHECKING:  # it needs NumPy
    from bagu.retrieve.conversation import Conversation

SETTINGS = {  # the settings of /set and their types
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
}
CONTROL_SYMBOLS = (  # control characters to Unicode's control pictures
    {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)
HELP = """\
  /new              start a new conversation
  /system TEXT      set the system prompt; without TEXT, remove it
  /set NAME=VALUE   {names}; without NAME, show the settings
  /retry            answer the last message again
  /save FILE        write the conversation as JSON
  /quit             end the chat, as Ctrl-D does
  End a line with \\ to continue it on the next line. Ctrl-C stops an answer."""


@dataclass
class Session:
    """A conversation and its sampling settings."""

    chat: Chat
    system: str = ""
    settings: dict[str, float | int] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    documents: Conversation | None = None  # where passages for each question come from

    def ask(self, question: str) -> None:
        """Append the user's message, with the passages that were found for it."""
        content = question if self.documents is None else self.documents.ask(question)
        self.messages.append({"role": "user", "content": content})

    def prompt(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def command(self, line: str) -> str | None:
        """Run a command line that begins with "/". Returns the text to print; None ends the session."""
        name, _, rest = line[1:].partition(" ")
        known = {"new": self._new, "system": self._system, "set": self._set, "save": self._save, "help": self._help}
        if name in ("quit", "exit"):
            return None
        if name not in known:
            raise UnknownName.among("command", line[1:] if name == "retry" else name, [*known, "retry", "quit"])
        return known[name](rest.strip())

    def _new(self, _: str) -> str:
        self.messages.clear()
        return "A new conversation."

    def _system(self, text: str) -> str:
        self.system = text
        return "The system prompt is set." if text else "There is no system prompt."

    def _set(self, text: str) -> str:
        for pair in text.replace(",", " ").split():
            name, _, value = pair.partition("=")
            UnknownName.check("setting", name, SETTINGS)
            try:
                changed = {**self.settings, name: SETTINGS[name](value)}
            except ValueError as error:
                raise ArgumentError(f"{name} = {value!r}", hint=f"{name} is a number, e.g. /set {name}=1") from error
            sampling_of(changed)
            self.settings = changed
        return ", ".join(f"{name}={value}" for name, value in self.settings.items()) or "Nothing is set."

    def _save(self, path: str) -> str:
        if not path:
            raise ArgumentError("/save needs a file name", hint="/save chat.json")
        content = {"model": self.chat.name, "settings": self.settings, "messages": self.prompt()}
        try:
            Path(path).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise BaguError(f"{path} cannot be written: {error.strerror}") from error
        return f"{len(self.messages)} messages written to {path}."

    def _help(self, _: str) -> str:
        return HELP.format(names=", ".join(SETTINGS))


@dataclass(frozen=True, kw_only=True)
class AnswerStats:
    """Token count and times of an answer."""

    tokens: int | None  # None if a server did not report it, e.g. for a stopped answer
    first_s: float | None  # time to the first token
    decode_s: float  # from the first token to the last
    finish: str

    def describe(self) -> str:
        parts = [] if self.tokens is None else [counted(self.tokens, "token")]
        if self.tokens is not None and self.tokens > 1 and self.decode_s > 0:
            parts.append(f"{(self.tokens - 1) / self.decode_s:.1f} tokens/s")
        if self.first_s is not None:
            parts.append(f"first token {1e3 * self.first_s:.0f} ms")
        return " · ".join(
            [*parts, *({"length": ["cut at the token limit"], "abort": ["stopped"]}.get(self.finish, []))]
        )


def stream(
    session: Session, show: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
) -> AnswerStats:
    """Answer the last message: pass each piece of text to `show`, and append the answer to the conversation."""
    began, first, last = clock(), None, 0.0
    texts, tokens, finish = [], 0, "stop"
    with contextlib.closing(session.chat.answer(session.prompt(), session.settings)) as pieces:
        try:
            for piece in pieces:
                texts.append(piece.text)
                tokens += piece.tokens
                finish = piece.finish or finish
                if piece.tokens or piece.text:
                    last = clock()
                    first = first or last
                show(piece.text.translate(CONTROL_SYMBOLS))
        except KeyboardInterrupt:
            finish = "abort"
    if "".join(texts):
        session.messages.append({"role": "assistant", "content": "".join(texts)})
    first_s = None if first is None else first - began
    counted = tokens if tokens or not any(texts) else None
    return AnswerStats(tokens=counted, first_s=first_s, decode_s=last - first if first else 0.0, finish=finish)


def read_message(read: Callable[[str], str]) -> str | None:
    """Read a message; a line that ends with a backslash continues on the next. None at the end of the input."""
    lines: list[str] = []
    try:
        while (line := read("… " if lines else "› ")).endswith("\\"):
            lines.append(line[:-1])
        return "\n".join([*lines, line]).strip()
    except KeyboardInterrupt:
        return ""
    except EOFError:
        return None


def main(
    chat: Chat,
    *,
    system: str = "",
    settings: Settings | None = None,
    prompt: str | None = None,
    console: Console | None = None,
    read: Callable[[str], str] | None = None,
    documents: Conversation | None = None,
) -> int:
    """Chat until the input ends; with `prompt`, answer only that. Returns the exit status."""
    console = console or Terminal(highlight=False)
    session = Session(chat=chat, system=system, documents=documents)
    session.settings = dict(settings or {})
    sampling_of(session.settings)
    if prompt is not None:
        session.ask(prompt)
        return int(not _answer(session, console))
    read = read or _reader()
    console.print(f"{chat.name} · /help", style="dim", markup=False)
    while (line := read_message(read)) is not None:
        try:
            if line.startswith("/") and line != "/retry":
                text = session.command(line)
                if text is None:
                    break
                console.print(text, style="dim", markup=False)
            elif line and _add_message(session, line):
                _answer(session, console)
        except BaguError as error:
            _print_error(console, error)
    return 0


def _add_message(session: Session, line: str) -> bool:
    """Append the user's message; for /retry remove the last answer instead. False if there is nothing to answer."""
    if line != "/retry":
        session.ask(line)
    elif session.messages and session.messages[-1]["role"] == "assistant":
        session.messages.pop()
    return bool(session.messages)


def _answer(session: Session, console: Console) -> bool:
    """Stream an answer. On an error, print it and return False; the user's message stays for /retry."""

    def show(text: str) -> None:
        console.file.write(text)  # not console.print, which would wrap and style the model's text
        console.file.flush()

    try:
        stats = stream(session, show)
    except BaguError as error:
        _print_error(console, error)
        return False
    console.print()
    for line in () if session.documents is None else session.documents.sources(session.messages[-1]["content"]):
        console.print(line.translate(CONTROL_SYMBOLS), style="dim", markup=False)
    console.print(stats.describe(), style="dim")
    return True


def _print_error(console: Console, error: BaguError) -> None:
    console.print(f"bagu: {error}" + (f"\n  -> {error.hint}" if error.hint else ""), style="red", markup=False)


def _reader() -> Callable[[str], str]:
    """`input`, with line editing and history if the platform supports them, and without a prompt for a pipe."""
    if not sys.stdin.isatty():
        return lambda _: input()
    with contextlib.suppress(ImportError):  # Windows has no readline; input() works there too
        import readline  # noqa: F401
    return input
