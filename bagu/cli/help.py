"""Help as plain text that can be read and copied at 80 columns, and names that options had before.

A verb's docstring says what it does and, after a line "Examples:", how it is called. `grouped` puts the options that
few users need below headings. Where the whole help is longer than a screen, `--help` only names those, and
`--help-all` describes them. No rich here: it takes a quarter of the time of `bagu --help`, and it cuts long flags.
"""

import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

SCREEN = 60  # lines; a longer help is shortened
COLUMN = 26  # where descriptions begin
SECTIONS = ("Make a model", "Use a model", "Learn", "Measure and tune", "This machine", "Commands")
JOINED = "\N{NO-BREAK SPACE}"  # between words that stay on one line
SETTINGS = {"help_option_names": ["-h", "--help"]}
KINDS = {int: "N", float: "X", Path: "PATH"}
# Old names of options, which work until 0.2 in verbs that have an option of the new name and none of the old.
RENAMED = {
    "--prefix-caching": "--enable-prefix-caching",
    "--no-prefix-caching": "--no-enable-prefix-caching",
    "--batch": "--max-num-seqs",
    "--first-token-ms": "--ttft",
    "--token-ms": "--tpot",
    "--size": "--sizes",
    "--shapes": "--sizes",
    "--prompt": "--input-tokens",
    "--new": "--output-tokens",
    "--answer": "--output-tokens",
    "--quantization": "--gguf-type",
}


# An option whose value may be left out, followed by that value: the flag that stands for both.
WITH_VALUE = {("--resume", "auto"): "--resume-auto"}


def grouped(**groups: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put options of a verb, by the names of their parameters, below headings of its help."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        verb.help_groups = {  # type: ignore[attr-defined]
            name: title.replace("_", " ") for title, names in groups.items() for name in names.split()
        }
        return verb

    return decorate


class Verb(TyperCommand):
    """A command with this help."""

    def get_help(self, ctx: Any) -> str:
        return help_text(self, ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _answer_help_all(self, ctx, args)
        return super().parse_args(ctx, with_new_names(self, ctx, args))


class Group(TyperGroup):
    """A command with subcommands, by their sections."""

    def listed(self) -> Mapping[str, Any]:
        """What the help says of each subcommand: `help`, `hidden` and `rich_help_panel`."""
        return self.commands

    def get_help(self, ctx: Any) -> str:
        return help_text(self, ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:  # click exits with an error there
            typer.echo(ctx.get_help())
            ctx.exit()
        verb = next((at for at, word in enumerate(args) if word in self.commands), len(args))
        _answer_help_all(self, ctx, args[:verb])
        return super().parse_args(ctx, with_new_names(self, ctx, args[:verb]) + args[verb:])


class Verbs(typer.Typer):
    """Commands with the help of this file. Without a command they print it."""

    def __init__(self, help: str, *, cls: type[Group] = Group, completion: bool = False) -> None:
        super().__init__(
            cls=cls,
            help=help,
            add_completion=completion,
            pretty_exceptions_enable=False,
            no_args_is_help=True,
            rich_markup_mode=None,
            context_settings=SETTINGS,
        )

    def command(self, name: str | None = None, *, section: str | None = None, **given: Any) -> Any:
        return super().command(name, cls=Verb, rich_help_panel=section, context_settings=SETTINGS, **given)


def _answer_help_all(command: Any, ctx: Any, args: Sequence[str]) -> None:
    if "--help-all" in args and not ctx.resilient_parsing:
        typer.echo(help_text(command, ctx, whole=True))
        ctx.exit()


def with_new_names(command: Any, ctx: Any, args: Sequence[str]) -> list[str]:
    """`args` with the options that were renamed by their new names, and a line on stderr for each."""
    flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    found: list[str] = []
    for word in args:
        joined = WITH_VALUE.get((found[-1], word)) if found else None
        if joined is not None and joined in flags:
            found[-1] = joined
            continue
        flag, equals, value = word.partition("=")
        new = RENAMED.get(flag)
        if new in flags and flag not in flags:
            if not ctx.resilient_parsing:
                print(f"bagu: {flag} is now {new}; the old name works until 0.2", file=sys.stderr)
            word = f"{new}{equals}{value}"
        found.append(word)
    return found


def help_text(command: Any, ctx: Any, *, whole: bool = False) -> str:
    """The help of a command; the `whole` one describes the options of its groups too."""
    width = max(40, min(shutil.get_terminal_size().columns, 100))
    full = _sections(command, ctx, width, whole=True)
    if whole or len(full) <= SCREEN:
        return "\n".join(full)
    return "\n".join(_sections(command, ctx, width, whole=False))


def _sections(command: Any, ctx: Any, width: int, *, whole: bool) -> list[str]:
    text, _, examples = (command.help or "").partition("Examples:\n")
    shown = [param for param in command.get_params(ctx) if not getattr(param, "hidden", False)]
    arguments = [param for param in shown if param.param_type_name == "argument"]
    options = [param for param in shown if param.param_type_name == "option"]
    words = [ctx.command_path, "[OPTIONS]" if options else "", *map(_argument, arguments)]
    words += ["COMMAND"] if isinstance(command, TyperGroup) else []
    lines = _wrapped("Usage: " + " ".join(filter(None, words)), width)
    lines += ["", *_wrapped(" ".join(text.split()), width)]
    if arguments:
        lines += ["", "Arguments:"]
        for param in arguments:
            lines += _row(_argument(param), param.help or "", width)
    if isinstance(command, TyperGroup):
        lines += _commands(command, width)
    groups: dict[str, list[Any]] = {}
    headings = getattr(command.callback, "help_groups", {})
    for param in options:
        groups.setdefault(headings.get(param.name, ""), []).append(param)
    types = typing.get_type_hints(command.callback) if command.callback else {}
    for title, members in sorted(groups.items(), key=lambda item: item[0] != ""):
        if whole or not title:
            lines += ["", f"{title or 'Options'}:"]
            for param in members:
                lines += _row(_flags(param, types.get(param.name)), _described(param), width)
    if not whole:
        lines += ["", f"More options; {ctx.command_path} --help-all describes them:"]
        for title, members in groups.items():
            if title:
                lines += _row(title, " ".join(param.opts[0] for param in members), width)
    if not examples and isinstance(command, TyperGroup):
        inside = ((one.help or "").partition("Examples:\n")[2] for one in list(command.commands.values())[:2])
        examples = "\n".join(text.strip().splitlines()[0] for text in inside)
    return [*lines, "", "Examples:", *(f"  {line.strip()}" for line in examples.strip().splitlines())]


def _commands(group: Any, width: int) -> list[str]:
    """The subcommands by section."""
    sections: dict[str, list[str]] = {}
    column = 4 + max(map(len, group.commands))
    for name, command in group.listed().items():
        if not command.hidden:
            first = (command.help or "").split("\n\n")[0].split("Examples:\n")[0]
            title = getattr(command, "rich_help_panel", None)
            title = title if isinstance(title, str) else "Commands"
            sections.setdefault(title, []).extend(_row(name, first.split(". ")[0].rstrip("."), width, column))
    return [line for title in SECTIONS if title in sections for line in ("", f"{title}:", *sections[title])]


def _argument(param: Any) -> str:
    name = param.metavar or param.name.upper()
    many = "..." if param.nargs == -1 else ""
    return f"{name}{many}" if param.required else f"[{name}]{many}"


def _flags(param: Any, hint: Any) -> str:
    members = [m for m in typing.get_args(hint) or (hint,) if m is not type(None)]
    members = [typing.get_args(m)[0] if typing.get_origin(m) is list else m for m in members]
    value = "" if param.is_flag else param.metavar or next((KINDS[m] for m in members if m in KINDS), "TEXT")
    if param.secondary_opts:
        return f"{param.opts[0]}/{param.secondary_opts[0]}"
    return f"{', '.join(sorted(param.opts, key=len))} {value}".rstrip()


def _described(param: Any) -> str:
    """The help of an option, its default and its environment variable."""
    default, envvar = param.default, param.envvar
    notes = [] if envvar is None else [f"env: {envvar if isinstance(envvar, str) else ' '.join(envvar)}"]
    if param.is_flag:
        notes += ["default: on"] if default is True else []
    elif default is not None and default != "" and not callable(default) and "Default:" not in (param.help or ""):
        notes += [f"default: {default}"]
    return " ".join([param.help or "", *(f"[{note}]".replace(" ", JOINED) for note in notes)])


def _row(name: str, text: str, width: int, column: int = COLUMN) -> list[str]:
    """`name` and its description beside it; below it, if the name is too long."""
    lines = _wrapped(text, width - column) or [""]
    if len(name) + 4 > column:
        return [f"  {name}", *(" " * column + line for line in lines)]
    return [f"  {name}".ljust(column) + lines[0], *(" " * column + line for line in lines[1:])]


def _wrapped(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace(JOINED, " ") for line in lines]
