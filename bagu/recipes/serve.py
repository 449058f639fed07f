"""`bagu serve` and `bagu chat`: load the model and its tokenizer, then start the server or the terminal chat."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from bagu.config.options import API_KEY, DEVICE, MODEL_DTYPE, TOKENIZER, Argument, Option
from bagu.errors import BaguError
from bagu.machine.cores import available_cores
from bagu.machine.openmp import wait_briefly
from bagu.recipes.loader import Loader
from bagu.retrieve.prompt import most_passages
from bagu.serve.config import EngineConfig
from bagu.serve.http.options import ServerOptions
from bagu.serve.replicas.options import ReplicaOptions

TEMPERATURE = 0.7  # default of `bagu chat` with a local model, if neither the user nor generation_config.json sets one


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `bagu serve` besides those of the loader, the engine and the HTTP server."""

    # auto: generation_config.json in the model's folder
    generation_config: Annotated[str, Option("Sampling defaults: auto (the model's own), none, or a folder.")] = "auto"
    allow_adapter_loading: Annotated[
        bool, Option("Deprecated: --adapter-root is enough.", flags=("--allow-adapter-loading",), hidden=True)
    ] = False


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    model: Annotated[str, Argument("A model (as for `bagu serve`), or the URL of a server.", metavar="MODEL")]
    system: Annotated[str, Option("The system prompt.")] = ""
    temperature: Annotated[float | None, Option("0 is greedy. Default: the server's or model's, or 0.7.")] = None
    max_tokens: Annotated[int | None, Option("Maximum answer length. Default: the rest of the context.")] = None
    prompt: Annotated[str | None, Option("Answer this one prompt and exit.")] = None
    index: Annotated[
        Path | None,
        Option("Answer from the documents of this index, with sources.", flags=("--with",), metavar="INDEX"),
    ] = None
    passages: Annotated[int | None, Option("Most passages of --with for a question. Default: 4.")] = None
    tokenizer: Annotated[str | None, TOKENIZER] = None
    dtype: Annotated[str, MODEL_DTYPE] = "auto"
    api_key: Annotated[str | None, API_KEY] = None
    device: Annotated[str | None, DEVICE] = None

    @property
    def sampling(self) -> dict[str, float | int]:
        """The settings that are given."""
        given: dict[str, float | int | None] = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {name: value for name, value in given.items() if value is not None}


def with_adapters(config: EngineConfig, *, allow_loading: bool = False) -> EngineConfig:
    """The configuration with an absolute `adapter_root`, if that is a folder. `allow_loading` is the deprecated
    `--allow-adapter-loading`."""
    root = config.adapter_root
    if allow_loading:
        if root is None:
            raise BaguError(
                "--allow-adapter-loading without --adapter-root",
                hint="give --adapter-root DIR alone: requests load adapters from folders below it",
            )
        print("bagu serve: --allow-adapter-loading is deprecated; --adapter-root is enough", file=sys.stderr)
    if root is None:
        return config
    if not root.expanduser().is_dir():
        raise BaguError(f"--adapter-root {root} is not a folder", hint="give a folder of adapters")
    return replace(config, adapter_root=root.expanduser().absolute())


def serve_main(
    loader: Loader,
    engine: EngineConfig,
    server: ServerOptions,
    more: ServeOptions | None = None,
    replicas: ReplicaOptions | None = None,
) -> None:
    """Run the HTTP server for a model or a repository (serve/repository), with the engines in separate processes."""
    wait_briefly()  # the engine process inherits this environment
    from bagu.machine.hub import find_adapter
    from bagu.recipes.find import find_model
    from bagu.recipes.generation import check_generation_config, generation_defaults
    from bagu.recipes.replicas import find_replication, replicas_of
    from bagu.serve.http.server import main
    from bagu.serve.repository.layout import is_repository

    more = more or ServeOptions()
    engine = with_adapters(engine, allow_loading=more.allow_adapter_loading)
    model, replication = loader.model, find_replication(replicas or ReplicaOptions())
    loader = replace(loader, allow_reward=True, on_host=engine.tp > 1)
    if engine.tp > 1:
        engine = replace(engine, device=loader.device or "auto")
    if engine.threads is None:  # one core is left for the HTTP server and tokenizer
        engine = replace(engine, threads=max(1, (available_cores() - 1) // engine.tp))
    if is_repository(Path(model)):
        from bagu.recipes.repository import repository_main

        check_generation_config(more.generation_config)
        repository_main(
            Path(model),
            loader=loader,
            engine=engine,
            server=server,
            generation_config=more.generation_config,
            replication=replication,
        )
        return
    found = find_model(model)  # a wrong name is reported here, before anything starts
    engine = replace(engine, generation=generation_defaults(found, more.generation_config))
    for _, path in engine.adapters:
        find_adapter(path)
    draft = engine.draft_model
    if draft is not None:
        find_model(draft)
    load_draft = None if draft is None else replace(loader, model=draft, tokenizer=None, allow_reward=False)
    main(
        Path(model).name or model,
        load=loader,
        config=engine,
        load_draft=load_draft,
        options=server,
        replicas=replicas_of(replication, loader, engine, load_draft),
    )


def chat_main(options: ChatOptions) -> int:
    """Chat in the terminal with a local model, or with a server if the model is a URL. A setting that is not given
    takes the server's default, or for a local model that of its generation_config.json."""
    wait_briefly()
    from bagu.recipes.find import find_model
    from bagu.recipes.generation import read_generation
    from bagu.serve.chat import terminal
    from bagu.serve.chat.clients import EngineChat, HttpChat

    model, settings = options.model, options.sampling
    most, documents = most_passages(options.passages, options.index), None
    if options.index is not None:
        from bagu.recipes.embedder import ModelEmbedder
        from bagu.retrieve.command import open_embedder
        from bagu.retrieve.conversation import Conversation
        from bagu.retrieve.store import Store

        store = Store(options.index, read_only=True)
        documents = Conversation(store, open_embedder(store, None, ModelEmbedder), k=most)
    show = partial(terminal.main, system=options.system, prompt=options.prompt, documents=documents)
    if model.startswith(("http://", "https://")):
        given = [f"--{k}" for k in ("tokenizer", "device", "dtype") if getattr(options, k) not in (None, "auto")]
        if given:
            raise BaguError(
                f"{', '.join(given)} cannot be used with a server's URL", hint="set it where the server is started"
            )
        return show(HttpChat(model, api_key=options.api_key), settings=settings)
    from bagu.serve.engine import Engine

    loader = Loader(model=model, tokenizer=options.tokenizer, dtype=options.dtype, device=options.device)
    loaded, tokenizer, encoder = loader()
    if encoder is None:
        raise BaguError(
            f"the tokenizer of {model} has no chat template", hint="use a chat model, or fine-tune this one"
        )
    generation = read_generation(find_model(model))
    engine = Engine(loaded, tokenizer, EngineConfig(generation=generation))
    if documents is not None:
        documents.longest = engine.max_model_len
    name = Path(model).name or model
    chat = EngineChat(engine, encoder.prompt, name=name, max_len=engine.max_model_len, turn_ends=encoder.turn_ends)
    return show(chat, settings={"temperature": TEMPERATURE, **generation.sampling, **settings})
