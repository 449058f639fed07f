"""Verbs that run a model: serve, chat."""

from pathlib import Path

import typer

from bagu.cli.config_file import ConfigFile
from bagu.cli.found import check_files, check_model
from bagu.cli.options import takes
from bagu.cli.process import one_thread
from bagu.recipes import serve as recipe
from bagu.recipes.loader import Loader
from bagu.recipes.serve import ChatOptions, ServeOptions
from bagu.serve.config import EngineConfig
from bagu.serve.http.options import ServerOptions
from bagu.serve.replicas.options import ReplicaOptions


@takes(
    ServerOptions,
    Loader,
    EngineConfig,
    ReplicaOptions,
    ServeOptions,
    config=ConfigFile,
    groups={
        "KV cache": "kv_dtype kv_memory num_blocks block_size gpu_memory_utilization prefix_cache",
        "Long texts": "attention window attention_sinks",
        "Engine": "max_num_batched_tokens threads invariant seed speculative speculative_tokens",
        "Replicas": "replicas router min_replicas max_replicas ray",
        "Adapters": "adapters max_adapters max_adapter_rank adapter_root",
        "Requests": "generation_config tool_parser reasoning_parser embeddings served_model_name",
        "HTTP": "api_keys open_metrics allowed_origins max_queue shutdown_timeout",
        "Logs and traces": "log_level log_format otlp_endpoint",
    },
)
def serve(
    server: ServerOptions, loader: Loader, engine: EngineConfig, replicas: ReplicaOptions, more: ServeOptions
) -> None:
    """Start an OpenAI-compatible server, with a chat page at /. MODEL may be a model repository (docs/running.md).

    Examples:
      bagu serve runs/demo/grpo
      bagu serve Qwen/Qwen3-0.6B --port 9000 --quantization int8
    """
    if (Path(loader.model) / "process.json").is_file():  # a run of process data has a page of its own
        one_thread()
        from bagu.process.http import main

        main(Path(loader.model), server)
        return
    recipe.serve_main(loader, engine, server, more, replicas)


@takes(ChatOptions)
def chat(options: ChatOptions) -> None:
    """Chat with a model in the terminal.

    Examples:
      bagu chat runs/demo/grpo
      bagu chat http://127.0.0.1:8000 --prompt "What is a KV cache?"
    """
    check_model(options.model)
    check_files(options.index)
    raise typer.Exit(recipe.chat_main(options))
