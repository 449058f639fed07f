"""The chat page while an answer streams: thoughts, the caret, reloads, a lost connection."""

from __future__ import annotations

import re
import threading
from typing import Any

from page_driver import ask, finished, shot
from page_stub import ANSWER, THOUGHT, Stub


def test_a_thought_is_folded_and_timed_during_and_after_streaming(page: Any, server: Stub) -> None:
    server.answer, server.pause_after = THOUGHT, "<b>is"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "2 + 2")
    thought = page.locator("details.thought")
    page.wait_for_selector("details.thought:has-text('Two and two <b>is')", state="attached")
    assert re.fullmatch(r"Thinking… \d+\.\d s", thought.locator("summary").inner_text())
    assert not thought.locator(".markdown").is_visible()
    shot(page, "thinking")
    thought.locator("summary").focus()
    page.keyboard.press("Enter")
    assert thought.locator("p").inner_text() == "Two and two <b>is"
    server.resume.set()
    answer = finished(page)
    assert re.fullmatch(r"Thought for \d+\.\d s", thought.locator("summary").inner_text())
    assert thought.locator("li").is_visible()  # still as the reader left it
    assert thought.locator("b").count() == 0
    assert answer.locator(".text > .markdown").inner_text() == "It is 4."
    assert "think>" not in answer.inner_text()
    answer.get_by_label("Copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == "It is **4**."
    page.reload()
    assert re.fullmatch(r"Thought for \d+\.\d s", thought.locator("summary").inner_text())
    assert not thought.locator("li").is_visible()


PARTS = {  # content: its thoughts, and the other parts
    "<think>a</think>b": (["a"], ["b"]),
    "<think>a": (["a"], []),
    "a\n</think>\nb": (["a"], ["b"]),  # the template wrote <think>
    "a\n</think>b": (["a"], ["b"]),
    "<think>\n\n</think>\n\nb": ([], ["b"]),
    "x\n<think>a</think>\ny\n<think>b</think>\nz": (["a", "b"], ["x", "y", "z"]),
    "the tag `<think>` and </think>": ([], ["the tag `<think>` and </think>"]),
    "```\n<think>\n</think>\n```": ([], ["```\n<think>\n</think>\n```"]),
    "```\n<think>\n```\n<think>a</think>b": (["a"], ["```\n<think>\n```", "b"]),
    "1 < 2 <b> <": ([], ["1 < 2 <b> <"]),
}


def test_thoughts_are_found_wherever_models_write_them(modules: Any) -> None:
    split = """async ([content, streaming]) => (await import('/think.js')).parts(content, streaming)"""
    for content, (thoughts, said) in PARTS.items():
        parts = modules.evaluate(split, [content, False])
        assert [part["text"].strip() for part in parts if part["thought"] is not None] == thoughts, content
        assert [part["text"].strip() for part in parts if part["thought"] is None] == said, content
    for end in range(1, len(THOUGHT)):  # no part of a tag is shown while it streams
        for part in modules.evaluate(split, [THOUGHT[:end], True]):
            assert not re.search(r"<(?!/?b)", part["text"]), THOUGHT[:end]


def test_a_caret_follows_the_text_while_it_streams(page: Any, server: Stub) -> None:
    last = "nodes => nodes.map(node => [node.parentElement.localName, node.parentElement.textContent])"
    # In this answer (those before it have the text too), and before the pause is over: each text makes a new caret.
    here = "text => document.querySelector('.message:last-child:has(.caret)')?.textContent.includes(text)"
    for after, parent in (("*block table", "li"), ("last block", "code"), ("0.8 %", "td"), ("逻辑块", "p")):
        server.pause_after, server.resume = after, threading.Event()
        ask(page, "go")
        page.wait_for_function(here, arg=after)
        [(name, text)] = page.locator(".caret").evaluate_all(last)
        assert (name, text.endswith(after)) == (parent, True), (name, text)
        assert page.locator(".caret").evaluate("node => getComputedStyle(node).animationName") == "blink"
        if parent == "code":
            shot(page, "caret")
        server.resume.set()
        finished(page)
        assert page.locator(".caret").count() == 0
    page.emulate_media(reduced_motion="reduce")
    server.resume = threading.Event()
    ask(page, "go")
    page.wait_for_function(here, arg=after)
    assert page.locator(".caret").evaluate("node => getComputedStyle(node).animationName") == "none"
    assert page.locator(".caret").is_visible()


def test_a_reload_returns_to_the_chat_and_its_scroll_position(page: Any, server: Stub) -> None:
    top = "document.getElementById('scroll').scrollTop"
    server.answer = THOUGHT + "\n\n" + ANSWER
    for text in ("alpha", "again"):
        ask(page, text)
        finished(page)
    page.keyboard.press("Control+k")
    ask(page, "beta")
    finished(page)
    page.locator("#chats .open").nth(1).click()
    assert page.evaluate(top) > 0
    page.reload()
    assert page.locator("#title").inner_text() == "alpha"
    assert (
        page.evaluate(
            f"{top} + scroll.clientHeight - scroll.scrollHeight".replace(
                "scroll.", "document.getElementById('scroll')."
            )
        )
        >= -1
    )
    page.evaluate(f"{top} = 333")
    page.reload()
    assert page.locator(".message.user .body").all_inner_texts() == ["alpha", "again"]
    assert abs(page.evaluate(top) - 333) <= 1
    page.locator("details summary").first.click()  # a reload folds it again: the same message stays at the top
    page.evaluate("document.querySelectorAll('.message.user')[1].scrollIntoView()")
    edge = "document.querySelectorAll('.message.user')[1].getBoundingClientRect().top"
    before = page.evaluate(edge)
    page.reload()
    assert abs(page.evaluate(edge) - before) <= 1
    page.go_back()
    assert page.locator("#title").inner_text() == "beta"
    page.locator("#chats li.current").hover()
    page.locator("#chats li.current").get_by_label("Delete").click()
    page.reload()
    assert page.locator("#title").inner_text() == "alpha"
    page.goto(f"{server.url}#chat=gone")
    page.reload()
    assert page.locator("#empty").is_visible()
    assert page.url == server.url


def test_a_reload_during_an_answer_keeps_its_text_so_far(page: Any, server: Stub) -> None:
    server.pause_after = "*block table"
    ask(page, "go")
    page.wait_for_selector("li:has-text('block table')")
    page.reload()
    answer = finished(page)
    assert "A sequence has a *block table" in answer.inner_text()
    assert "stopped" in answer.locator(".meta").inner_text()


def test_without_a_connection_the_page_stays_readable_with_a_notice(page: Any, server: Stub) -> None:
    ask(page, "alpha")
    finished(page)
    page.context.set_offline(True)
    ask(page, "beta")
    answer = finished(page)
    assert answer.locator(".error").inner_text().startswith("The server cannot be reached.")
    page.keyboard.press("Control+k")
    page.locator("#chats .open").click()
    assert page.locator(".message.user .body").all_inner_texts() == ["alpha", "beta"]
    page.context.set_offline(False)
    finished(page).get_by_text("Try again").click()
    assert finished(page).locator("strong").first.inner_text() == "KV cache"
