"""A real server with a repository of tiny random models, for tests. A file in a version's folder is its fault.

>>> python tests/serve/tiny_repository.py FOLDER
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import tiny_server

from bagu.serve.config import EngineConfig
from bagu.serve.http.options import ServerOptions
from bagu.serve.repository.layout import Settings
from bagu.serve.repository.server import main
from bagu.serve.repository.version import Engine


def load(folder: Path) -> tuple[Any, Any, Any]:
    """Called in the engine process."""
    if (folder / "disk_full").exists():
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"x")
    model, tokenizer, chat = tiny_server.load()
    if (folder / "broken_weights").exists():
        model.embedding.weight.data.fill_(float("nan"))
    return model, tokenizer, chat


def prepare(folder: Path, settings: Settings, share: float) -> Engine:
    config = EngineConfig(
        max_num_seqs=settings.max_num_seqs or 8, num_blocks=1024, max_num_batched_tokens=512, memory_share=share,
        warmup_prompts=settings.warmup_prompts,
    )  # fmt: skip
    return Engine(partial(load, folder), config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--api-key")
    parser.add_argument("--api-keys", type=Path)
    parser.add_argument("--open-metrics", action="store_true")
    parser.add_argument("--shutdown-timeout", type=float, default=20.0)
    given = parser.parse_args()
    main(
        given.folder, prepare=prepare, memory_bytes=10**10,
        options=ServerOptions(
            port=0, api_key=given.api_key, api_keys=given.api_keys, open_metrics=given.open_metrics, max_queue=2000,
            shutdown_timeout=given.shutdown_timeout,
        ),
    )  # fmt: skip
