"""Drives the chat page in a real browser: chromium, through playwright, with a stub server.

Without chromium or playwright the tests are skipped with a warning; BAGU_REQUIRE_BROWSER=1 makes them fail instead.
BAGU_SCREENSHOTS=FOLDER saves screenshots.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

SHOTS = os.environ.get("BAGU_SCREENSHOTS")


def missing(reason: str) -> None:
    if os.environ.get("BAGU_REQUIRE_BROWSER", "0") not in ("", "0"):
        pytest.fail(f"the browser tests cannot run: {reason}")
    warnings.warn(f"THE CHAT PAGE IS NOT TESTED: {reason}", stacklevel=2)
    pytest.skip(reason)


def opened(context: Any, url: str, key: str | None = None) -> Any:
    """Open the chat page in `context`, and type the API key if the server has one; any script error or external request
    fails the test."""
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: pytest.fail(f"the page threw: {error}"))
    page.on("request", lambda r: r.url.startswith((url, "blob:", "data:")) or pytest.fail(f"outside request: {r.url}"))
    page.goto(url)
    if key is not None:
        page.click("#open-settings")
        page.fill("#key", key)
        page.press("#key", "Tab")
    page.wait_for_selector("#model option", state="attached")
    return page


def opened_again(page: Any, url: str) -> Any:
    """Reset everything that a test may have changed, and load the page again."""
    page.context.set_offline(False)
    page.context.clear_permissions()
    page.context.clear_cookies()
    page.emulate_media(reduced_motion="null")
    page.goto(
        f"{url}/favicon.svg"
    )  # of the same origin, without scripts: nothing is written after the storage is cleared
    page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    return page


def ask(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def finished(page: Any) -> Any:
    """Wait until the last answer is complete, and return it."""
    page.wait_for_selector(".message.assistant:last-child[aria-busy=false]")
    return page.locator(".message.assistant").last


def shot(page: Any, name: str) -> None:
    if SHOTS:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{SHOTS}/{name}.png")
