"""How the chat page looks: colour schemes, languages, a phone, contrast and accessible names."""

from __future__ import annotations

import re
from typing import Any

import pytest
from page_driver import ask, finished, opened, shot
from page_stub import ANSWER, THOUGHT, Stub

from bagu.serve.page import assets


def test_dark_chinese_and_a_phone(browser: Any, server: Stub) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "color_scheme": "dark"}
    context = browser.new_context(locale="zh-CN", **phone)
    page = opened(context, server.url)
    assert page.locator("#empty h2").inner_text() == "问点什么"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 22, 21)"
    ask(page, "你好")
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("#sidebar").is_hidden()
    shot(page, "phone")
    page.tap("#menu")
    page.tap("#language")
    page.tap("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.locator("#chats .open").tap()
    assert page.locator("#sidebar").is_hidden()
    page.tap("#open-engine")
    page.wait_for_selector("#engine-rows dd")
    assert page.locator("#engine").bounding_box()["width"] <= 390
    context.close()


def test_the_logo_and_the_english_page_need_no_chinese_font(page: Any) -> None:
    for seal in page.locator("img.seal").all():
        assert seal.evaluate("image => image.complete && image.naturalWidth > 0")
        assert seal.is_visible()
    assert b"<text" not in assets()["/favicon.svg"].body
    assert not re.search(r"[\u2e80-\u9fff]", page.locator("body").inner_text())


CONTRAST = """() => {
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const rgb = (colours) => {  // painted one over the other
        colours.forEach((colour) => ((canvas.fillStyle = colour), canvas.fillRect(0, 0, 1, 1)));
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (colours) => {
        const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = rgb(colours).map((v) => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const poor = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const element = node.parentElement;
        const shown = element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
        if (!node.data.trim() || !shown) continue;
        if (element.closest('[disabled], noscript')) continue;
        const behind = [];
        for (let at = element; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
        const under = light(behind);
        const text = light([...behind, getComputedStyle(element).color]);
        const ratio = Math.max(text, under) / Math.min(text, under);
        if (ratio < 4.5) poor.push([node.data.trim().slice(0, 30), ratio.toFixed(2)]);
    }
    return poor;
}"""  # 4.5 is the AA level of WCAG 2.2, 1.4.3
UNNAMED = """nodes => nodes
    .filter((node) => node.checkVisibility() && !node.getAttribute('aria-label') && !node.textContent.trim())
    .filter((node) => ![...(node.labels ?? [])].some((label) => label.textContent.trim()))
    .map((node) => node.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_everything_has_a_name_and_enough_contrast(browser: Any, server: Stub, scheme: str) -> None:
    server.answer = THOUGHT + "\n\n" + ANSWER + "\n\n$\\alpha$ $\\unknown$ > quoted\n\n> quoted\n\n[a](https://e.org)"
    context = browser.new_context(viewport={"width": 1500, "height": 900}, locale="en-US", color_scheme=scheme)
    page = opened(context, server.url)
    assert page.evaluate(CONTRAST) == []
    ask(page, "go")
    finished(page).locator("summary").click()
    for panel in ("settings", "engine"):
        page.click(f"#open-{panel}")
        unnamed = page.locator("button, input, select, textarea, summary, canvas").evaluate_all(UNNAMED)
        assert unnamed == []
        assert page.evaluate(CONTRAST) == []
    ask(page, "refuse")
    finished(page)
    assert page.evaluate(CONTRAST) == []
    page.click("#engine .close")
    assert page.evaluate("document.activeElement.id") == "open-engine"  # the focus is not lost with the button
    context.close()
