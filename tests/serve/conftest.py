"""One tiny server for all tests of a worker that need a running one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # httpx, uvicorn and openai are not on every machine with a GPU, where only the engine is tested
    import openai
    from tiny_server import Running

KEY = "sk-test"
ORIGIN = "http://localhost:3000"  # of a page that may call the server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """8 choices run, 8 wait. A test that breaks it waits until it is well again."""
    from tiny_server import serving

    log = tmp_path_factory.mktemp("server") / "stderr"
    with serving(
        log, "--api-key", KEY, "--max-num-seqs", "8", "--max-queue", "8", "--allowed-origins", ORIGIN
    ) as running:
        yield running


@pytest.fixture
def client(tiny: Running) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client
