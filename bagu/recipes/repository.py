"""`bagu serve REPOSITORY`: how the engines of a model repository's versions are made."""

from dataclasses import dataclass, replace
from pathlib import Path

from bagu.errors import ArgumentError
from bagu.recipes.find import find_model
from bagu.recipes.generation import generation_defaults
from bagu.recipes.loader import Loader
from bagu.recipes.replicas import replicas_of
from bagu.serve.config import EngineConfig
from bagu.serve.http.options import ServerOptions
from bagu.serve.replicas.options import Replication
from bagu.serve.repository.layout import Settings
from bagu.serve.repository.version import Engine

OVERRIDES = ("max_num_seqs", "max_model_len", "quantization")  # options of `bagu serve` that model.toml may set


@dataclass(frozen=True, kw_only=True)
class VersionEngines:
    """Makes the engine of a version. The fields are the options that all versions share; the sampling of `model.toml`
    takes precedence over `generation_config`."""

    loader: Loader
    engine: EngineConfig
    generation_config: str = "auto"
    replication: Replication | None = None

    def __call__(self, folder: Path, settings: Settings, share: float) -> Engine:
        found = find_model(folder)
        generation = replace(generation_defaults(found, self.generation_config), **settings.sampling.sampling)
        own = {name: value for name in OVERRIDES if (value := getattr(settings, name)) is not None}
        config = replace(
            self.engine, generation=generation, memory_share=share, warmup_prompts=settings.warmup_prompts, **own
        )
        loader = replace(self.loader, model=str(folder))
        return Engine(loader, config, replicas_of(self.replication, loader, config))


def repository_main(
    folder: Path,
    *,
    loader: Loader,
    engine: EngineConfig,
    server: ServerOptions,
    generation_config: str = "auto",
    replication: Replication | None = None,
) -> None:
    """Run the HTTP server with the models of a repository; each loaded version has an engine process."""
    from bagu.machine.device import named_device, this_machine
    from bagu.serve.repository.server import main

    if server.served_model_name:
        raise ArgumentError("a repository has its own model names", hint="leave out --served-model-name")
    if engine.draft_model is not None:
        raise ArgumentError("a draft model cannot be used with a repository", hint="use --speculative ngram")
    if engine.adapter_slots:
        raise ArgumentError(
            "adapters cannot be used with a repository", hint="serve the base model alone, or merge them"
        )
    machine = this_machine()
    on_gpu = named_device(loader.device).type == "cuda" and machine.gpus
    main(
        folder,
        prepare=VersionEngines(
            loader=loader, engine=engine, generation_config=generation_config, replication=replication
        ),
        memory_bytes=machine.gpus[0].memory_bytes if on_gpu else machine.memory_bytes,
        options=server,
    )
