"""The chat page in a real browser: search, import, storage limits, comparison, tools, schemas and the keyboard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from page_driver import ask, finished, opened, shot
from page_stub import ANSWER, Stub


def imported(page: Any, path: Path, content: Any) -> str:
    """Import a file with `content`; returns the notice."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    page.locator("#toast").evaluate("node => (node.hidden = true)")
    page.set_input_files("#file", path)
    page.wait_for_selector("#toast:not([hidden])")
    return page.locator("#toast").inner_text()


def test_the_prompts_that_a_model_suggests_are_offered_and_sent(page: Any, server: Stub) -> None:
    assert page.locator("#examples button").count() == 3, "the page's own"
    server.suggested = ["Write a function f(x): double x.", "<b>bold</b>"]
    page.reload()
    page.wait_for_function("() => document.querySelectorAll('#examples button').length === 2")
    assert page.locator("#examples button").all_inner_texts() == server.suggested
    page.locator("#examples button").first.click()
    finished(page)
    assert server.bodies[-1]["messages"][-1]["content"] == server.suggested[0]


def test_two_models_answer_side_by_side_and_one_is_chosen(page: Any, server: Stub) -> None:
    server.models, server.answer = ["one", "two", "three"], "I am {model}."
    page.reload()
    page.click("#compare")
    page.select_option("#second-model", "three")
    ask(page, "who?")
    answers = page.locator(".pair .message")
    page.wait_for_function("() => document.querySelectorAll('.pair .solid-button').length === 2")
    assert answers.locator(".markdown").all_inner_texts() == ["I am one.", "I am three."]
    assert len({answers.nth(n).bounding_box()["y"] for n in (0, 1)}) == 1
    ask(page, "and now?")  # one must be chosen first
    assert "Choose one" in page.locator("#toast").inner_text()
    page.reload()
    answers.nth(1).get_by_text("Continue with this").click()
    assert page.locator(".assistant .markdown").all_inner_texts() == ["I am three."]
    assert page.locator(".assistant .branches").inner_text() == "2/2"
    page.click("#compare")
    ask(page, "and now?")
    assert finished(page).locator(".markdown").inner_text() == "I am one."
    assert sorted(body["model"] for body in server.bodies[:2]) == ["one", "three"]
    assert [m["content"] for m in server.bodies[2]["messages"]] == ["who?", "I am three.", "and now?"]


def test_reasoning_and_tool_calls_are_folded_and_results_are_sent(page: Any, server: Stub) -> None:
    page.click("#open-settings")
    page.fill("#tools", "{}")
    assert page.locator("#tools-state").inner_text() == "The tools are not a JSON list of objects."
    page.click("#tools-example")
    ask(page, "reason about it")
    answer = finished(page)
    assert answer.locator("details:not([open])").count() == 3
    assert answer.locator("details.thought summary").inner_text().startswith("Thought for")
    assert answer.locator("details.thought p").text_content() == "Two and two <b>is</b>"
    assert answer.locator("details.call summary code").all_inner_texts() == ["get_weather", "get_time"]
    answer.locator("details.call summary").first.click()
    assert json.loads(answer.locator("details.call pre").first.inner_text()) == {"city": "<b>Lima"}
    assert answer.locator("b").count() == 0
    page.get_by_label("Result of get_weather").fill("21 °C")
    page.click(".results button")
    finished(page)
    sent = server.bodies[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "<b>Lima"}'}
    assert sent[2] == {"role": "tool", "tool_call_id": "c1", "content": "21 °C"}
    assert server.bodies[-1]["tools"][0]["function"]["name"] == "get_weather"
    shot(page, "tools")


def test_a_schema_constrains_the_answer_and_errors_are_shown(page: Any, server: Stub) -> None:
    page.click("#open-settings")
    page.fill("#schema", '{"type": ')
    assert page.locator("#schema-state").inner_text().startswith("Not valid JSON")
    ask(page, "go")
    assert server.bodies == []  # nothing is sent with a schema that is not JSON
    assert page.input_value("#input") == "go"
    page.click("#schema-example")
    page.press("#input", "Enter")
    answer = finished(page)
    assert server.bodies[0]["response_format"]["json_schema"]["schema"]["required"] == ["city", "population"]
    assert answer.locator("pre").inner_text() == server.json
    assert answer.locator(".verdict").inner_text() == "Valid JSON"
    server.json = '{"city": "Li'
    ask(page, "cut")
    assert finished(page).locator(".verdict.bad").inner_text().startswith("Not valid JSON")
    page.fill("#schema", '{"oneOf": []}')
    ask(page, "again")
    assert "oneOf is not supported" in finished(page).locator(".error").inner_text()
    page.keyboard.press("Control+k")
    assert page.input_value("#schema") == ""  # a schema belongs to its conversation
    shot(page, "schema")


def test_search_finds_titles_and_messages_of_all_branches(page: Any, server: Stub) -> None:
    server.answer = "Lima is <b>far</b>"
    ask(page, "alpha")
    finished(page)
    page.keyboard.press("ArrowUp")
    page.fill(".editor textarea", "beta")
    page.keyboard.press("Enter")
    finished(page)
    page.keyboard.press("Control+k")
    server.answer = "nothing"
    ask(page, "gamma")
    finished(page)
    page.locator("#scroll").click()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    for query, titles in (("lima", ["alpha"]), ("BETA far", ["alpha"]), ("a", ["gamma", "alpha"]), ("zzz", [])):
        page.fill("#search", query)
        assert page.locator("#chats .name").all_inner_texts() == titles, query
        assert page.locator("#found").inner_text() == f"{len(titles)} conversations found"
    page.fill("#search", "far")
    assert page.locator("#chats small").inner_text() == "Lima is <b>far</b>"
    page.keyboard.press("Escape")
    assert page.locator("#chats .name").count() == 2


def test_a_conversation_is_exported_and_imported_with_its_branches(page: Any, server: Stub, tmp_path: Path) -> None:
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    ask(page, "alpha")
    finished(page)
    page.click(".assistant [aria-label=Regenerate]")
    finished(page)
    files = {}
    for kind in ("markdown", "json", "all"):
        page.locator("#chats li").hover()
        with page.expect_download() as download:
            page.locator("#chats li").get_by_label("Export").click()
            page.click(f"#export [data-export={kind}]")
        download.value.save_as(tmp_path / kind)
        files[kind] = (tmp_path / kind).read_text()
    assert files["markdown"] == f"# alpha\n\n> Be brief.\n\n## You\n\nalpha\n\n## Assistant (tiny)\n\n{ANSWER}\n"
    assert files["json"] == files["all"]
    page.locator("#chats li").hover()
    page.locator("#chats li").get_by_label("Delete").click()
    assert imported(page, tmp_path / "in.json", files["json"]) == "Imported: 1"
    assert page.locator(".message.assistant .branches").inner_text() == "2/2"
    assert page.input_value("#system") == "Be brief."
    page.reload()
    assert page.locator("#chats .name").all_inner_texts() == ["alpha"]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "<img src=x onerror=alert(1)>"}]
    assert imported(page, tmp_path / "in.json", {"title": "api", "messages": messages}) == "Imported: 1"
    assert page.locator(".message.user .body").inner_text() == messages[1]["content"]
    assert page.input_value("#system") == "S"


REFUSED = {
    "Not valid JSON": "{",
    "no list of messages": {"title": "x"},
    "message 1: the field “role”": {"messages": [{"role": "root", "content": "x"}]},
    "message 2: the field “content”": {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 1}]},
    "message 1: the field “parent”": {"messages": [{"id": "a", "parent": "a", "role": "user", "content": "x"}]},
    "message 2: the field “id”": {"messages": [{"id": "a", "role": "user", "content": "x"}] * 2},
    "message 1: the field “tool_calls”": {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
    "the field “title” is not a text": {"title": 1, "messages": []},
    "more than 4,000,000 characters": '{"messages": []}' + " " * 4_000_000,
}


def test_a_wrong_file_is_refused_with_the_reason(page: Any, tmp_path: Path) -> None:
    for reason, content in REFUSED.items():
        notice = imported(page, tmp_path / "bad.json", content)
        assert notice.startswith("bad.json was not imported: "), notice
        assert reason in notice
    assert page.locator("#chats .open").count() == 0


def test_full_storage_is_reported_and_nothing_is_deleted_without_consent(page: Any, server: Stub) -> None:
    fill = """size => {
        const message = { id: 'm0', parent: null, role: 'user', content: 'x'.repeat(size) };
        const chat = { id: 'old', title: 'oldest', created: 1, updated: 1, leaf: 'm0', messages: [message] };
        localStorage.setItem('bagu.chat.old', JSON.stringify(chat));
    }"""
    page.evaluate(fill, 3_999_800)
    page.reload()
    ask(page, "alpha")
    finished(page)
    assert "storage is full" in page.locator("#toast").inner_text()
    assert page.locator("#chats .name").all_inner_texts() == ["alpha", "oldest"]
    page.get_by_text("Delete “oldest”").click()
    page.reload()
    assert page.locator("#chats .name").all_inner_texts() == ["alpha"]
    assert page.locator(".message").count() == 2


def test_conversations_stored_as_lists_are_still_read(page: Any) -> None:
    page.evaluate(
        """() => localStorage.setItem('bagu.chat.old', JSON.stringify({ id: 'old', title: 'old', system: 'S',
            updated: 1, messages: [{ role: 'user', content: 'a' }, { role: 'assistant', content: 'b' }] }))"""
    )
    page.reload()
    page.locator("#chats .open").click()
    assert page.locator(".message .body").all_inner_texts() == ["a", "b"]


def test_shortcuts_are_listed_and_the_answer_is_announced(page: Any, server: Stub) -> None:
    page.keyboard.press("Control+/")
    dialog = page.locator("#shortcuts")
    assert dialog.locator("tr").count() == 8
    shot(page, "shortcuts")
    page.keyboard.press("Escape")
    assert dialog.is_hidden()
    page.locator("#help").click()
    dialog.get_by_label("Close").click()
    assert dialog.is_hidden()
    server.answer = "It is **4**."
    ask(page, "2 + 2")
    finished(page)
    page.wait_for_function("() => document.getElementById('announce').textContent.includes('It is')")
    assert page.locator("#announce").get_attribute("role") == "status"  # polite
    first = page.locator("button, a[href], input, select, textarea").first  # in the order of the Tab key
    assert first.get_attribute("id") == "skip"
    first.press("Enter")
    assert page.evaluate("document.activeElement.id") == "input"


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_a_comparison_fits_a_phone(browser: Any, server: Stub, language: str) -> None:
    server.models = ["a-model-with-a-long-name", "another-model-with-a-longer-name"]
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True, locale=language
    )
    page = opened(context, server.url)
    page.tap("#compare")
    ask(page, "go")
    page.wait_for_function("() => document.querySelectorAll('.pair .solid-button').length === 2")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for at in (0, 1):
        box = page.locator(".pair .message").nth(at).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    title, first, second = (page.locator(f"#{id}").bounding_box() for id in ("title", "model", "second-model"))
    assert first["y"] == second["y"] >= title["y"] + title["height"] and title["width"] > 100
    shot(page, f"pair-phone-{language}")
    context.close()
