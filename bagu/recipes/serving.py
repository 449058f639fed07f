"""From MODEL to a server or a chat: the one place where models, tokenizers and the engine meet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagu.errors import BaguError
from bagu.machine.openmp import wait_briefly

__all__ = ["Loader", "chat_main", "serve_main"]

TEMPERATURE = 0.7  # of `bagu chat` with a model here, where neither the user nor the model says another


@dataclass(frozen=True, kw_only=True)
class Loader:
    """What the engine's process calls to get its model, tokenizer and chat encoder. Plain values: it is pickled."""

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str | None = None

    def __call__(self) -> tuple[Any, Any, Any]:

        from bagu.data.chat import ChatEncoder
        from bagu.data.tokenizer import BpeTokenizer
        from bagu.machine.device import named_device, named_dtype
        from bagu.machine.fast_dtype import compute_dtype
        from bagu.recipes.models import find_model, load_model, tokenizer_folder

        device = named_device(self.device)
        dtype = compute_dtype(device) if self.dtype == "auto" else named_dtype(self.dtype)
        found = find_model(self.model)
        model = load_model(found, dtype=dtype, device=device)
        place = Path(self.tokenizer) if self.tokenizer else tokenizer_folder(found)
        if place is None:
            raise BaguError(f"there is no tokenizer.json in {found}", hint="name one with --tokenizer")
        tokenizer = BpeTokenizer.load(place)
        return model, tokenizer, ChatEncoder(tokenizer) if tokenizer.chat_template is not None else None


def serve_main(
    model: str, *, loader: Loader, engine: dict[str, Any], server: dict[str, Any], generation_config: str = "auto"
) -> None:
    """`bagu serve`: the HTTP server, with the engine in a process of its own. `generation_config` is a folder that has
    one, "auto" for the model's own, or "none"."""
    wait_briefly()  # inherited by the engine
    from bagu.recipes.generation import GENERATION_CONFIG, read_generation
    from bagu.recipes.models import find_model
    from bagu.serve.config import EngineConfig
    from bagu.serve.http.server import main

    found = find_model(model)  # a wrong name is reported here, before anything starts
    if generation_config != "none":
        folder = found if generation_config == "auto" else Path(generation_config)
        if generation_config != "auto" and not (folder / GENERATION_CONFIG).is_file():
            raise BaguError(f"there is no {folder / GENERATION_CONFIG}", hint="auto, none, or a folder that has one")
        engine = {**engine, "generation": read_generation(folder)}
    threads = max(1, (os.cpu_count() or 2) - 1)  # one core is the server's and the tokenizer's
    main(Path(model).name or model, load=loader, config=EngineConfig(threads=threads, **engine), **server)


def chat_main(
    model: str,
    *,
    loader: Loader,
    system: str,
    settings: dict[str, float | int],
    prompt: str | None,
    api_key: str | None,
) -> int:
    """`bagu chat`: MODEL, or the address of a server, in the terminal. What `settings` leave out is the server's
    default, or the model's own, as its generation_config.json has it."""
    wait_briefly()
    from bagu.recipes.generation import read_generation
    from bagu.recipes.models import find_model
    from bagu.serve.chat import terminal
    from bagu.serve.chat.clients import EngineChat, HttpChat

    if model.startswith(("http://", "https://")):
        given = [f"--{k}" for k in ("tokenizer", "device", "dtype") if getattr(loader, k) not in (None, "auto")]
        if given:
            raise BaguError(f"{', '.join(given)}: given with the address of a server", hint="the server has chosen it")
        return terminal.main(HttpChat(model, api_key=api_key), system=system, settings=settings, prompt=prompt)
    from bagu.serve.config import EngineConfig
    from bagu.serve.engine import Engine
    from bagu.serve.http.worker import Ready

    loaded, tokenizer, encoder = loader()
    if encoder is None:
        raise BaguError(f"the tokenizer of {model} has no chat template", hint="fine-tune it on chats first")
    generation = read_generation(find_model(model))
    engine = Engine(loaded, tokenizer, EngineConfig(generation=generation))
    settings = {"temperature": TEMPERATURE, **generation.sampling, **settings}
    length, vocabulary = engine.max_model_len, loaded.config.vocab_size
    ready = Ready(tokenizer=tokenizer, chat=encoder, generates=True, max_model_len=length, vocab_size=vocabulary)
    name = Path(model).name or model
    chat = EngineChat(engine, encoder.prompt, name=name, max_len=length, turn_ends=ready.turn_ends)
    return terminal.main(chat, system=system, settings=settings, prompt=prompt)
