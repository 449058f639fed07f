"""Verbs that run a model: serve, chat."""

from __future__ import annotations

import typer

from bagu.cli.config_file import ConfigFile
from bagu.cli.options import takes
from bagu.recipes import serve as recipe
from bagu.recipes.loader import Loader
from bagu.recipes.serve import ChatOptions, ServeOptions
from bagu.serve.config import EngineConfig
from bagu.serve.http.options import ServerOptions


@takes(ServerOptions, Loader, EngineConfig, ServeOptions, config=ConfigFile)
def serve(server: ServerOptions, loader: Loader, engine: EngineConfig, more: ServeOptions) -> None:
    """Start an OpenAI-compatible server, with a chat page at /. MODEL may be a model repository (docs/running.md)."""
    recipe.serve_main(loader, engine, server, more)


@takes(ChatOptions)
def chat(options: ChatOptions) -> None:
    """Chat with a model in the terminal."""
    raise typer.Exit(recipe.chat_main(options))
