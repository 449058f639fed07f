"""Fixtures: one tiny server for all tests that need one, and a browser with the chat page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # httpx, uvicorn and openai are not on every machine with a GPU, where only the engine is tested
    import openai
    from page_stub import Stub
    from tiny_server import Running


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server where 8 choices run and 8 more wait. A test that breaks it must wait until it is healthy again."""
    from tiny_server import KEY, ORIGIN, running_server

    log = tmp_path_factory.mktemp("server") / "stderr"
    with running_server(
        log, "--api-key", KEY, "--open-metrics", "--max-num-seqs", "8", "--max-queue", "8", "--allowed-origins", ORIGIN
    ) as running:
        yield running


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    from tiny_server import running_server

    with running_server(tmp_path_factory.mktemp("encoder") / "stderr", "--kind", "encoder") as running:
        yield running


@pytest.fixture
def client(tiny: Running) -> Iterator[openai.OpenAI]:
    from tiny_server import KEY, openai_client

    with openai_client(tiny.url, KEY) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from page_driver import missing

    try:
        from playwright.sync_api import Error, sync_playwright
    except ModuleNotFoundError:
        missing("playwright is not installed (pip install playwright)")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        missing("there is no chromium, chromium-browser or google-chrome on the path (apt-get install chromium)")
    with sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # CI is root in a container
        except Error as error:
            missing(f"{path} does not start: {error}")
        yield found
        found.close()


@pytest.fixture(scope="module")
def one_server() -> Iterator[Stub]:
    from page_stub import stub

    with stub() as found:
        yield found


@pytest.fixture
def server(one_server: Stub) -> Iterator[Stub]:
    one_server.reset()
    yield one_server
    one_server.resume.set()  # a failed test may have left an answer paused


@pytest.fixture(scope="module")
def modules(browser: Any, one_server: Stub) -> Iterator[Any]:
    """One page for all tests of a file that only call functions of its modules."""
    from page_driver import opened

    context = browser.new_context(locale="en-US")
    yield opened(context, one_server.url)
    context.close()


@pytest.fixture(scope="module")
def one_page(browser: Any, one_server: Stub) -> Iterator[Any]:
    """A page with a renderer process takes 2.4 s of CPU time, loading it again 1.2 s."""
    from page_driver import opened

    context = browser.new_context(viewport={"width": 1360, "height": 860}, locale="en-US")
    yield opened(context, one_server.url)
    context.close()


@pytest.fixture
def page(one_page: Any, server: Stub) -> Any:
    """The chat page as in a browser that has never seen it."""
    from page_driver import opened_again

    return opened_again(one_page, server.url)
