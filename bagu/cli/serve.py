"""Verbs that run a model: serve, chat."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.cli.config_file import ConfigFile
from bagu.cli.options import ApiKey, Device, KVDtype, Model, ModelDtype, PrefixCaching, TensorParallel, TokenizerFolder


def serve(
    model: Model,
    config: ConfigFile = None,
    host: Annotated[str, Option(help="The address to listen on; 0.0.0.0 is all interfaces.")] = "127.0.0.1",
    port: Annotated[int, Option(help="The port to listen on; 0 picks a free one.")] = 8000,
    api_key: Annotated[str | None, Option(envvar="BAGU_API_KEY", help="Require this key from clients.")] = None,
    api_keys: Annotated[
        Path | None, Option(help="TOML file of API keys with request rates, token quotas and models.")
    ] = None,
    open_metrics: Annotated[bool, Option("--open-metrics", help="/metrics and /engine need no API key.")] = False,
    served_model_name: Annotated[list[str] | None, Option(help="Model name in the API; repeatable.")] = None,
    allowed_origins: Annotated[list[str] | None, Option(help="Allowed CORS origin; repeatable, or JSON.")] = None,
    tokenizer: TokenizerFolder = None,
    dtype: ModelDtype = "auto",
    quantization: Annotated[str | None, Option(help="int8, int4 or fp8 weights in linear layers.")] = None,
    tp: TensorParallel = 1,
    max_model_len: Annotated[int | None, Option(help="Maximum tokens of a prompt plus its output.")] = None,
    max_num_seqs: Annotated[int, Option(help="Maximum number of sequences that run at once.")] = 256,
    max_num_batched_tokens: Annotated[
        int | None, Option(help="Maximum tokens per step. Default: 2048, on a GPU 16384.")
    ] = None,
    block_size: Annotated[int | None, Option(help="Tokens per KV block. Default: 16.")] = None,
    threads: Annotated[int | None, Option(help="CPU threads of the engine. Default: one fewer than cores.")] = None,
    kv_dtype: KVDtype = "auto",
    gpu_memory_utilization: Annotated[float, Option(help="Fraction of the GPU's memory to use.")] = 0.9,
    kv_memory: Annotated[
        str | None, Option(help="KV cache size, e.g. 2GB. Default: free memory, on a CPU up to 1GiB.")
    ] = None,
    num_blocks: Annotated[int | None, Option(help="Size of the KV cache in blocks, instead of bytes.")] = None,
    enable_prefix_caching: PrefixCaching = True,
    speculative: Annotated[
        str | None, Option(help="Draft tokens by prompt lookup (ngram), or by the model at this path.")
    ] = None,
    speculative_tokens: Annotated[int, Option(help="Maximum drafted tokens per sequence and step.")] = 7,
    adapter: Annotated[
        list[str] | None, Option(metavar="NAME=PATH", help="A LoRA adapter (PEFT, or a LoRA run); repeatable.")
    ] = None,
    max_adapters: Annotated[
        int | None, Option(help="Maximum adapters at once. Default: the given ones; 8 if requests load them.")
    ] = None,
    max_adapter_rank: Annotated[int, Option(help="Maximum rank of an adapter.")] = 16,
    adapter_root: Annotated[
        Path | None, Option(help="Let requests (with keys: of an admin) load adapters from folders below this one.")
    ] = None,
    allow_adapter_loading: Annotated[
        bool, Option("--allow-adapter-loading", help="Deprecated: --adapter-root is enough.")
    ] = False,
    embeddings: Annotated[
        bool, Option("--embeddings", help="Serve a decoder's embeddings (its last token's state), not its text.")
    ] = False,
    invariant: Annotated[bool, Option("--invariant", help="Bitwise equal results at any batch size; slower.")] = False,
    seed: Annotated[int, Option(help="Seed for the requests that do not set one.")] = 0,
    generation_config: Annotated[
        str, Option(help="Sampling defaults: auto (the model's own), none, or a folder.")
    ] = "auto",
    tool_parser: Annotated[
        str, Option(help="Form of tool calls: auto, none, hermes, llama3, mistral, deepseek_v3, ...")
    ] = "auto",
    reasoning_parser: Annotated[str, Option(help="Reasoning in <think> tags: auto, none or think.")] = "auto",
    max_num_queued_reqs: Annotated[int, Option(help="Maximum waiting sequences (encoder: calls); more get 429.")] = 256,
    shutdown_timeout: Annotated[float, Option(help="Seconds to let running requests finish on shutdown.")] = 30.0,
    log_level: Annotated[str, Option(help="debug, info, warning or error.")] = "warning",
    log_format: Annotated[str, Option(help="text, or json: one line per request on stderr.")] = "text",
    otlp_endpoint: Annotated[
        str | None, Option(help="Send OpenTelemetry traces to this OTLP/HTTP URL, e.g. http://localhost:4318.")
    ] = None,
    device: Device = None,
) -> None:
    """Start an OpenAI-compatible server, with a chat page at /. MODEL may be a model repository (docs/running.md)."""
    from bagu.recipes.serve import Loader, adapter_settings, serve_main
    from bagu.serve.config import parse_bytes

    serve_main(
        model,
        loader=Loader(model=model, tokenizer=tokenizer, dtype=dtype, device=device, allow_reward=True),
        engine={
            "block_size": block_size, "threads": threads, "kv_dtype": kv_dtype,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_memory": None if kv_memory is None else parse_bytes(kv_memory), "num_blocks": num_blocks,
            "max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens, "prefix_cache": enable_prefix_caching,
            "quantization": quantization, "invariant": invariant, "seed": seed, "tp": tp, "speculative": speculative,
            "speculative_tokens": speculative_tokens, "tool_parser": tool_parser,
            "reasoning_parser": reasoning_parser, "embeddings": embeddings,
            **adapter_settings(
                adapter or (), max_adapters=max_adapters, max_rank=max_adapter_rank, root=adapter_root,
                allow_loading=allow_adapter_loading,
            ),
        },
        server={
            "host": host, "port": port, "api_key": api_key, "api_keys": api_keys, "open_metrics": open_metrics,
            "served_model_name": served_model_name or (),
            "allowed_origins": allowed_origins or (), "max_queue": max_num_queued_reqs,
            "shutdown_timeout": shutdown_timeout, "log_level": log_level, "log_format": log_format,
            "otlp_endpoint": otlp_endpoint,
        },
        generation_config=generation_config,
    )  # fmt: skip


def chat(
    model: Annotated[str, Argument(metavar="MODEL", help="A model (as for `bagu serve`), or the URL of a server.")],
    system: Annotated[str, Option(help="The system prompt.")] = "",
    temperature: Annotated[float | None, Option(help="0 is greedy. Default: the server's or model's, or 0.7.")] = None,
    max_tokens: Annotated[int | None, Option(help="Maximum answer length. Default: the rest of the context.")] = None,
    prompt: Annotated[str | None, Option(help="Answer this one prompt and exit.")] = None,
    tokenizer: TokenizerFolder = None,
    dtype: ModelDtype = "auto",
    api_key: ApiKey = None,
    device: Device = None,
) -> None:
    """Chat with a model in the terminal."""
    from bagu.recipes.serve import Loader, chat_main

    given: dict[str, float | int | None] = {"temperature": temperature, "max_tokens": max_tokens}
    settings = {name: value for name, value in given.items() if value is not None}
    loader = Loader(model=model, tokenizer=tokenizer, dtype=dtype, device=device)
    status = chat_main(model, loader=loader, system=system, settings=settings, prompt=prompt, api_key=api_key)
    raise typer.Exit(status)
