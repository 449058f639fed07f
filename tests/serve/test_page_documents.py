"""Answers from documents on the chat page: the store that is searched, the sources, and the file of one."""

from __future__ import annotations

from typing import Any

from page_driver import ask, finished, opened_again, shot
from page_stub import PASSAGE, SOURCE, Stub


def test_sources_stand_under_the_answer_and_open_at_the_passage(page: Any, server: Stub) -> None:
    server.stores = [{"id": "vs_docs", "name": "docs"}, {"id": "vs_" + "0" * 24, "name": "mine"}]
    server.answer = "The valve opens at 9 bar [1]."
    page = opened_again(page, server.url)
    ask(page, "When does the valve open?")
    finished(page)
    assert server.bodies[-1]["file_search"] == {"vector_store_ids": ["vs_docs"]}
    source = page.locator(".sources li")
    assert source.locator("button").inner_text() == "[1] docs/guide.md:3"
    assert "not verified: '9' is not in it" in source.inner_text()
    assert source.locator(".passage").is_hidden()
    source.hover()
    assert source.locator(".passage").inner_text() == PASSAGE["text"]
    shot(page, "sources")
    source.locator("button").click()
    page.wait_for_selector("#document-text .here")  # the text comes from the server
    assert page.locator("#document-title").inner_text() == "docs/guide.md:3"
    assert page.locator("#document-text .here").inner_text() == PASSAGE["text"]
    assert page.locator("#document img, .sources img").count() == 0  # text of a document is never HTML
    shot(page, "document")
    page.keyboard.press("Escape")
    ask(page, "zebra")
    finished(page)
    assert server.bodies[-1]["messages"][1]["sources"] == [SOURCE]  # so that the server writes the question as before
    assert "Nothing was found" in page.locator(".sources.none").inner_text()
    page.click("#open-settings")
    page.select_option("#documents", "")
    ask(page, "and without?")
    finished(page)
    assert "file_search" not in server.bodies[-1] and page.locator(".sources").count() == 2
