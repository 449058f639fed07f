"""Verbs that are imported and built when they are called: to import all of them takes more than most commands run."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import typer

from bagu.cli.help import Group, Verbs

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Place:
    """Where a verb is: its section of the help, a module of bagu.cli, the name of a function or of Verbs in it."""

    rich_help_panel: str
    module: str
    name: str
    hidden: ClassVar[bool] = False

    def command(self, verb: str) -> Any:
        """The verb as a command: imports its module."""
        found = getattr(importlib.import_module(f"bagu.cli.{self.module}"), self.name)
        one = found
        if not isinstance(found, Verbs):
            one = Verbs("")
            one.command(verb)(found)
        command = typer.main.get_command(one)
        command.name = verb
        return command

    @property
    def help(self) -> str:
        """The docstring of the function or the text of the Verbs, read from the source of the module."""
        for node in ast.parse((HERE / f"{self.module}.py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name == self.name:
                return ast.get_docstring(node) or ""
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == self.name:
                assert isinstance(node.value, ast.Call)
                return str(ast.literal_eval(node.value.args[0]))
        raise AttributeError(f"bagu.cli.{self.module} defines no {self.name}")


class Commands(Mapping[str, Any]):
    """Commands by name, each built at its first use."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = places
        self._built: dict[str, Any] = {}

    def __getitem__(self, verb: str) -> Any:
        if verb not in self._built:
            self._built[verb] = self.places[verb].command(verb)
        return self._built[verb]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


class LazyGroup(Group):
    """A group whose subclass names the places of its commands."""

    places: ClassVar[Mapping[str, Place]] = {}

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands: Any = Commands(self.places)

    def listed(self) -> Mapping[str, Any]:
        return self.places
