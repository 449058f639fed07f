"""`bagu serve` and `bagu chat`: load the model and its tokenizer, then start the server or the terminal chat."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bagu.errors import BaguError
from bagu.machine.cores import available_cores
from bagu.machine.openmp import wait_briefly
from bagu.recipes.loader import Loader

DEFAULT_ADAPTERS = 8  # slots of a server that loads adapters by request
TEMPERATURE = 0.7  # default of `bagu chat` with a local model, if neither the user nor generation_config.json sets one


def adapter_settings(
    given: Sequence[str], *, max_adapters: int | None, max_rank: int, root: Path | None, allow_loading: bool = False
) -> dict[str, Any]:
    """The engine's settings for `--adapter NAME=PATH`. Without `max_adapters` there is room for those that are given
    and, if requests may load others from folders below `root`, for DEFAULT_ADAPTERS. `allow_loading` is the deprecated
    `--allow-adapter-loading`."""
    if allow_loading:
        if root is None:
            raise BaguError(
                "--allow-adapter-loading without --adapter-root",
                hint="give --adapter-root DIR alone: requests load adapters from folders below it",
            )
        print("bagu serve: --allow-adapter-loading is deprecated; --adapter-root is enough", file=sys.stderr)
    if root is not None and not root.expanduser().is_dir():
        raise BaguError(f"--adapter-root {root} is not a folder", hint="give a folder of adapters")
    pairs = []
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise BaguError(f"--adapter {text!r}", hint="write NAME=PATH, the name for requests and the folder")
        pairs.append((name, path))
    room = max(len(pairs), DEFAULT_ADAPTERS if root is not None else 0) if max_adapters is None else max_adapters
    if root is not None and not room:
        raise BaguError("--adapter-root with --max-adapters 0", hint="allow 1 or more, or leave one out")
    return {
        "adapters": tuple(pairs), "max_adapters": room, "max_adapter_rank": max_rank,
        "adapter_root": None if root is None else str(root.expanduser().absolute()),
    }  # fmt: skip


def serve_main(
    model: str, *, loader: Loader, engine: dict[str, Any], server: dict[str, Any], generation_config: str = "auto"
) -> None:
    """Run the HTTP server for a model or a repository (serve/repository), with the engines in separate processes.

    `generation_config` is "auto" (read generation_config.json from the model's folder), "none", or a folder that
    contains the file.
    """
    wait_briefly()  # the engine process inherits this environment
    from bagu.machine.hub import find_adapter
    from bagu.recipes.find import find_model
    from bagu.recipes.generation import check_generation_config, generation_defaults
    from bagu.serve.config import EngineConfig
    from bagu.serve.http.server import main
    from bagu.serve.repository.layout import is_repository

    loader = replace(loader, max_len=engine.get("max_model_len"))
    tp = engine.get("tp", 1)
    if tp > 1:
        engine = {**engine, "device": loader.device or "auto"}
        loader = replace(loader, on_host=True)
    spare = max(1, (available_cores() - 1) // max(tp, 1))  # one core is left for the HTTP server and tokenizer
    if engine.get("threads") is None:
        engine = {**engine, "threads": spare}
    if is_repository(Path(model)):
        from bagu.recipes.repository import repository_main

        check_generation_config(generation_config)
        repository_main(Path(model), loader=loader, engine=engine, server=server, generation_config=generation_config)
        return
    found = find_model(model)  # a wrong name is reported here, before anything starts
    engine = {**engine, "generation": generation_defaults(found, generation_config)}
    for _, path in engine.get("adapters", ()):
        find_adapter(path)
    config = EngineConfig(**engine)
    draft = config.draft_model
    if draft is not None:
        find_model(draft)
    main(
        Path(model).name or model, load=loader, config=config,
        load_draft=None if draft is None else replace(loader, model=draft, tokenizer=None, allow_reward=False),
        **server,
    )  # fmt: skip


def chat_main(
    model: str,
    *,
    loader: Loader,
    system: str,
    settings: dict[str, float | int],
    prompt: str | None,
    api_key: str | None,
) -> int:
    """Chat in the terminal with a local model, or with a server if `model` is a URL. A setting that is not in
    `settings` takes the server's default, or for a local model that of its generation_config.json."""
    wait_briefly()
    from bagu.recipes.find import find_model
    from bagu.recipes.generation import read_generation
    from bagu.serve.chat import terminal
    from bagu.serve.chat.clients import EngineChat, HttpChat

    if model.startswith(("http://", "https://")):
        given = [f"--{k}" for k in ("tokenizer", "device", "dtype") if getattr(loader, k) not in (None, "auto")]
        if given:
            raise BaguError(
                f"{', '.join(given)} cannot be used with a server's URL", hint="set it where the server is started"
            )
        return terminal.main(HttpChat(model, api_key=api_key), system=system, settings=settings, prompt=prompt)
    from bagu.serve.config import EngineConfig
    from bagu.serve.engine import Engine

    loaded, tokenizer, encoder = loader()
    if encoder is None:
        raise BaguError(
            f"the tokenizer of {model} has no chat template", hint="use a chat model, or fine-tune this one"
        )
    generation = read_generation(find_model(model))
    engine = Engine(loaded, tokenizer, EngineConfig(generation=generation))
    settings = {"temperature": TEMPERATURE, **generation.sampling, **settings}
    name = Path(model).name or model
    chat = EngineChat(
        engine, encoder.prompt, name=name, max_len=engine.max_model_len, turn_ends=encoder.turn_ends
    )  # fmt: skip
    return terminal.main(chat, system=system, settings=settings, prompt=prompt)
