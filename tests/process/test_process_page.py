"""The page in a real browser: what-if, recommendation, refusal, drift, another language, an uploaded table."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagu.process.plants import PLANTS
from bagu.process.plants.history import csv_text, history

pytest.importorskip("uvicorn")
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT = 120_000  # ms: the machine may be busy


@pytest.fixture
def page(url: str) -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium, chromium-browser or google-chrome on the path")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # CI is root in a container
        found = browser.new_page()
        found.set_default_timeout(WAIT)
        errors: list[str] = []
        found.on("pageerror", lambda error: errors.append(str(error)))
        found.goto(url)
        found.wait_for_selector("#forecast .figure")
        yield found
        browser.close()
    assert errors == []


def test_from_the_sliders_to_a_recommendation_and_a_refusal(page: Any, tmp_path: Path) -> None:
    before = page.inner_text("#forecast .figure")
    page.fill("[aria-label=temperature]", "340")
    page.dispatch_event("[aria-label=temperature]", "change")
    playwright.expect(page.locator("#forecast .figure")).not_to_have_text(before, timeout=WAIT)
    page.click("#ask")
    page.wait_for_selector("#answer .choice")
    assert "at least" in page.inner_text("#answer .choice") and "not proven causes" in page.inner_text("#answer")
    page.click("#language")
    page.wait_for_selector("html[lang=zh-CN]")
    assert "承诺" in page.inner_text("#answer .choice") and "90 % 区间" in page.inner_text("#models")
    recent = tmp_path / "recent.csv"
    recent.write_text("activity,impurity\n" + "\n".join(f"{1.3 + i / 100},0.15" for i in range(10)), encoding="utf-8")
    page.set_input_files("#recent", recent)
    page.wait_for_selector("#recent-name:has-text('recent.csv')")
    page.click("#ask")
    page.wait_for_selector("#answer > .alarm")
    assert "过程已漂移" in page.inner_text("#answer") and "过程已漂移" in page.inner_text("#history")


@pytest.mark.slow
def test_an_uploaded_table_is_fitted_and_recommends(page: Any, tmp_path: Path) -> None:
    data = tmp_path / "coating.csv"
    data.write_text(csv_text(history(PLANTS["coating"], 60, 4, batches=True).table), encoding="utf-8")
    page.set_input_files("#roles input[type=file]", data)
    page.wait_for_selector("[aria-label='batch role']")
    assert page.input_value("[aria-label='batch role']") == "group"
    for name in ("substrate_index", "inner_index"):
        page.select_option(f"[aria-label='{name} role']", "context")
    page.select_option("[aria-label='reflectance goal']", "min")
    page.click("#roles button.main")
    page.wait_for_selector("#title:has-text('upload_')")
    assert "goal reflectance" in page.inner_text("#about")
    page.click("#ask")
    page.wait_for_selector("#answer .choice, #answer > .alarm")
