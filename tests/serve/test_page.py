"""The chat page in a real browser: conversations, settings, panels and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from page_driver import ask, finished, opened, shot
from page_stub import ANSWER, BLOCKS, DEFAULT_SAMPLING, Stub, tokens
from tiny_server import KEY, Running

from bagu.serve.page import HEADERS, assets


def test_the_page_is_in_the_package_and_loads_nothing_external() -> None:
    found = assets()
    assert {"/", "/app.js", "/style.css", "/markdown.js", "/favicon.svg"} <= found.keys()
    assert "connect-src 'self'" in HEADERS["Content-Security-Policy"]
    for path, asset in found.items():
        text = asset.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"""(src|href|from|import|url\()\s*=?\s*["'(]*(https?:)?//""", text), path
        assert not re.search(r"\son\w+=[\"']|innerHTML|insertAdjacentHTML|document\.write", text), path


def test_an_answer_is_rendered_as_markdown_and_never_as_html(page: Any, server: Stub) -> None:
    ask(page, "Explain **PagedAttention** <i>please</i>")
    answer = finished(page)
    assert page.locator(".message.user .body").inner_text() == "Explain **PagedAttention** <i>please</i>"
    assert answer.locator("strong").first.inner_text() == "KV cache"
    assert answer.locator("ol > li").count() == 2
    assert answer.locator("td.right").all_inner_texts() == ["0.8 %", "12.4 %"]
    assert answer.locator("pre .keyword").all_inner_texts() == ["def", "return"]
    assert answer.locator("pre").inner_text() == re.search(r"```python\n(.*?)\n```", ANSWER, re.S)[1]
    assert "块表把逻辑块映射到物理块 👍 <img src=x onerror=alert(1)>" in answer.inner_text()
    assert answer.locator("img").count() == 0
    assert f"{len(tokens(ANSWER))} tokens" in answer.locator(".meta").first.inner_text()
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Explain **PagedAttention** <i>please</i>"}]
    assert "logprobs" not in server.bodies[0]
    shot(page, "light")


def test_escape_stops_an_answer_and_disconnects(page: Any, server: Stub) -> None:
    ask(page, "count")
    page.wait_for_selector(".assistant .markdown:has-text('4 5 6')")
    assert page.locator("#stop").is_visible()
    page.keyboard.press("Escape")
    answer = finished(page)
    assert server.left.wait(30)
    assert "stopped" in answer.locator(".meta").inner_text()
    assert page.locator("#send").is_visible()


def test_edit_and_regenerate_add_branches(page: Any, server: Stub) -> None:
    ask(page, "first")
    finished(page)
    page.keyboard.press("ArrowUp")
    page.fill(".editor textarea", "second")
    page.keyboard.press("Enter")
    finished(page)
    assert page.locator(".message").count() == 2
    page.click(".assistant [aria-label=Regenerate]")
    finished(page)
    assert [[m["content"] for m in body["messages"]] for body in server.bodies] == [["first"], ["second"], ["second"]]
    ask(page, "third")
    finished(page)
    assert page.locator(".branches").all_inner_texts() == ["2/2", "2/2"]
    page.locator(".message.user").first.get_by_label("Previous version").click()
    assert page.locator(".message.user .body").all_inner_texts() == ["first"]
    page.keyboard.press("Tab")  # the focus is still at the switcher
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Copy"
    page.reload()
    assert page.locator(".message.user .body").all_inner_texts() == ["first"]
    page.locator(".message.user").first.get_by_label("Next version").press("Enter")
    assert page.locator(".message.user .body").all_inner_texts() == ["second", "third"]
    page.locator(".message.assistant").first.get_by_label("Previous version").click()
    assert page.locator(".message").count() == 2
    ask(page, "fourth")
    finished(page)
    sent = [message["content"] for message in server.bodies[-1]["messages"]]
    assert sent == ["second", ANSWER, "fourth"]


def test_settings_and_the_system_prompt_are_sent(page: Any, server: Stub) -> None:
    page.click("#open-settings")
    page.fill("#system", "Answer in verse.")
    wanted = {"temperature": 0.3, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 77, "seed": 7,
              "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5}  # fmt: skip
    for name, value in wanted.items():
        page.fill(f"#{name}", str(value))
    page.fill("#top_p", "7")  # out of range: the last valid value stays
    shot(page, "settings")
    ask(page, "go")
    finished(page)
    body = server.bodies[0]
    assert {name: body[name] for name in wanted} == wanted
    assert body["messages"][0] == {"role": "system", "content": "Answer in verse."}
    page.reload()
    assert page.input_value("#seed") == "7"
    page.click("#reset")
    assert (page.input_value("#seed"), page.input_value("#temperature")) == ("", "")


def test_sampling_uses_the_servers_defaults_until_the_user_sets_it(page: Any, server: Stub) -> None:
    page.click("#open-settings")
    slider = page.locator("#temperature + input")
    assert page.locator("#temperature").get_attribute("placeholder") == "0.6" == slider.input_value()
    assert page.locator("#top_k").get_attribute("placeholder") == "20"
    assert page.locator("#seed").get_attribute("placeholder") == "random"
    ask(page, "one")
    finished(page)
    slider.fill("1.2")
    ask(page, "two")
    finished(page)
    page.fill("#temperature", "")
    assert slider.input_value() == "0.6"
    ask(page, "three")
    finished(page)
    given = [{name: body[name] for name in body if name in DEFAULT_SAMPLING} for body in server.bodies]
    assert given == [{}, {"temperature": 1.2}, {}]


def test_conversations_are_kept_renamed_exported_and_deleted(page: Any, server: Stub, tmp_path: Path) -> None:
    ask(page, "alpha")
    finished(page)
    page.keyboard.press("Control+k")
    assert page.locator("#empty").is_visible()
    ask(page, "beta")
    finished(page)
    page.reload()
    assert page.locator("#chats .open").all_inner_texts() == ["beta", "alpha"]
    page.locator("#chats .open").nth(1).click()
    assert page.locator(".message.user .body").inner_text() == "alpha"
    page.locator("#chats .open").nth(1).dblclick()
    page.fill("#chats input", "gamma")
    page.keyboard.press("Enter")
    assert page.locator("#title").inner_text() == "gamma"
    page.locator("#chats li").nth(1).hover()
    with page.expect_download() as download:
        page.locator("#chats li").nth(1).get_by_label("Export").click()
        page.click("#export [data-export=json]")
    download.value.save_as(tmp_path / "chat.json")
    [exported] = json.loads((tmp_path / "chat.json").read_text())["chats"]
    first, second = exported["messages"]
    assert (first["role"], first["content"], first["parent"]) == ("user", "alpha", None)
    assert (second["role"], second["content"], second["parent"]) == ("assistant", ANSWER, first["id"])
    page.locator("#chats li").nth(1).hover()
    page.locator("#chats li").nth(1).get_by_label("Delete").click()
    assert page.locator("#chats .open").all_inner_texts() == ["beta"]
    page.click("#toast button")
    assert sorted(page.locator("#chats .open").all_inner_texts()) == ["beta", "gamma"]


def test_tokens_show_their_probability_and_alternatives(page: Any, server: Stub) -> None:
    page.click("#probabilities")
    ask(page, "go")
    answer = finished(page)
    assert (server.bodies[0]["logprobs"], server.bodies[0]["top_logprobs"]) == (True, 5)
    spans = answer.locator(".tokens .token")
    assert spans.count() == len(tokens(ANSWER))
    assert answer.locator(".tokens").inner_text().replace("⋅", "") == ANSWER
    page.evaluate("document.getElementById('scroll').scrollTop = 0")
    spans.nth(4).hover()
    card = page.locator(".token-card")
    assert card.locator("strong").inner_text() == "8.0 %"
    assert card.locator("tr").count() == 5
    assert card.locator("tr.chosen td").last.inner_text() == "8.0 %"
    assert "s3" in spans.nth(4).get_attribute("class")
    shot(page, "hover")
    answer.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert spans.nth(5).get_attribute("class").split()[-1] == "current"
    page.click("#probabilities")
    assert answer.locator(".markdown strong").first.inner_text() == "KV cache"


def test_the_engine_panel_polls_only_while_it_is_open(page: Any, server: Stub) -> None:
    assert server.engine_calls == 0
    page.click("#open-engine")
    page.wait_for_selector("#engine-rows dd:nth-of-type(4)")
    assert page.locator("#rate").inner_text().isdigit()
    assert page.locator("#engine-rows dd").all_inner_texts() == ["3", "3", "1", "23 ms"]
    used, cached, free = (BLOCKS.count(state) for state in "uc.")
    label = page.locator("#block-map").get_attribute("aria-label")
    assert label == f"{used} blocks used, {cached} cached, {free} free of {len(BLOCKS)}"
    painted = """c => new Set(
        c.getContext('2d').getImageData(0, 0, c.width, c.height).data.toString().match(/\\d+,\\d+,\\d+,255/g)
    ).size"""
    assert page.locator("#block-map").evaluate(painted) >= 3  # used, cached, free
    with page.expect_response("**/engine"):
        pass
    shot(page, "engine")
    # what the page asks for from now on; the server may still receive an earlier request after the panel is closed
    page.evaluate(
        """() => {
            const original = window.fetch;
            window.asked = 0;
            window.fetch = (...args) => { window.asked++; return original(...args); };
        }"""
    )
    page.wait_for_function("() => window.asked > 0")
    page.click("#engine .close")
    before = page.evaluate("() => window.asked")
    page.wait_for_timeout(800)  # longer than the interval of the polls
    assert page.evaluate("() => window.asked") == before


def test_errors_are_shown_and_can_be_retried(page: Any, server: Stub) -> None:
    ask(page, "refuse")
    assert "the prompt has 9000 tokens and the model 4096" in finished(page).locator(".error").inner_text()
    page.keyboard.press("Control+k")
    ask(page, "break")
    answer = finished(page)
    assert "half an ans" in answer.inner_text()
    assert "the engine died: out of memory" in answer.locator(".error").inner_text()
    answer.get_by_text("Try again").click()
    finished(page)
    assert len(server.bodies) == 3


def test_an_api_key_is_asked_for(browser: Any, server: Stub) -> None:
    server.key = "secret"
    context = browser.new_context(locale="en-US")
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("#banner:not([hidden])")
    assert "API key" in page.locator("#banner").inner_text()
    page.click("#open-settings")
    page.fill("#key", "secret")
    page.press("#key", "Tab")
    page.wait_for_selector("#model option", state="attached")
    assert page.locator("#banner").is_hidden()
    page.click("#settings .close")
    page.click("#open-engine")
    page.wait_for_selector("#engine-rows dd")  # /engine has the key too
    context.close()


def test_with_the_real_server(browser: Any, tiny: Running) -> None:
    context = browser.new_context(viewport={"width": 1360, "height": 860}, locale="en-US")
    page = opened(context, f"{tiny.url}/", KEY)
    page.fill("#max_tokens", "48")
    page.fill("#seed", "1")
    page.click("#open-engine")
    page.click("#probabilities")
    ask(page, "hello")
    answer = finished(page)
    assert answer.locator(".error").count() == 0
    drawn = answer.locator(".tokens .token").count()
    assert 1 <= drawn <= 48
    assert f"{drawn} tokens" in answer.locator(".meta").first.inner_text()
    page.wait_for_selector("#block-map[aria-label$='free of 1024']")
    page.wait_for_selector("#engine-rows dt:has-text('TTFT p50')")  # after the first answer
    shot(page, "real")
    context.close()
