"""One tiny server for all tests of a worker that need a running one."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from tiny_server import Running, serving

KEY = "sk-test"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """8 choices run, 8 wait. A test that breaks it waits until it is well again."""
    log = tmp_path_factory.mktemp("server") / "stderr"
    with serving(log, "--api-key", KEY, "--max-num-seqs", "8", "--max-queue", "8") as running:
        yield running


@pytest.fixture
def client(tiny: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client
