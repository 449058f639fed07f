"""Images on the chat page, in a real browser: chosen, pasted and dropped, shown, sent, kept."""

from __future__ import annotations

import base64
from typing import Any

from page_driver import ask, finished, opened_again, shot
from page_stub import Stub
from small_vlm import data_url, file_of, picture

PNG = file_of(picture(1, (48, 32)))


def with_images(page: Any, server: Stub) -> Any:
    server.images = True
    return opened_again(page, server.url)


def choose(page: Any, data: bytes, name: str = "a.png", kind: str = "image/png") -> None:
    page.set_input_files("#image-file", {"name": name, "mimeType": kind, "buffer": data})


def test_an_image_is_shown_sent_and_kept(page: Any, server: Stub) -> None:
    page = with_images(page, server)
    choose(page, PNG)
    page.wait_for_selector("#pictures img")
    choose(page, PNG)
    page.wait_for_selector("#pictures span:nth-child(2) img")
    page.click("#pictures button >> nth=0")
    shot(page, "image-waiting")
    ask(page, "what is left of it?")
    finished(page)
    image = {"type": "image_url", "image_url": {"url": data_url(PNG)}}
    sent = server.bodies[0]["messages"][0]["content"]
    assert sent == [image, {"type": "text", "text": "what is left of it?"}]
    assert page.locator("#pictures img").count() == 0 and page.locator(".user .body img").count() == 1
    assert page.evaluate("document.querySelector('.user .body img').naturalWidth") == 48
    shot(page, "image-sent")
    ask(page, "and right?")
    finished(page)
    assert server.bodies[1]["messages"][0]["content"] == sent, "later requests have the image again"
    page.reload()
    page.wait_for_selector(".user .body img")


def test_pasted_and_dropped_images_and_what_is_none(page: Any, server: Stub) -> None:
    page = with_images(page, server)
    script = """([event, data]) => {
      const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
      const transfer = new DataTransfer();
      transfer.items.add(new File([bytes], "a.png", { type: "image/png" }));
      const names = event === "paste" ? { clipboardData: transfer } : { dataTransfer: transfer };
      const Kind = event === "paste" ? ClipboardEvent : DragEvent;
      document.getElementById("input").dispatchEvent(new Kind(event, { ...names, bubbles: true, cancelable: true }));
    }"""
    for count, event in enumerate(("paste", "drop"), 1):
        page.evaluate(script, [event, base64.b64encode(PNG).decode()])
        page.wait_for_selector(f"#pictures span:nth-child({count}) img")
    choose(page, b"no image", "b.png")
    page.wait_for_selector("#toast:has-text('b.png is not an image')")
    large = file_of(picture(2, (900, 300)))
    assert len(large) > 100_000
    choose(page, large)
    page.wait_for_selector("#pictures span:nth-child(3) img")
    assert page.evaluate("[...document.querySelectorAll('#pictures img')].at(-1).naturalWidth") == 768


def test_a_model_of_text_takes_no_image(page: Any, server: Stub) -> None:
    assert page.locator("#attach").is_hidden()
    choose(page, PNG)
    page.wait_for_selector("#toast:has-text('takes text only')")
    assert page.locator("#pictures img").count() == 0
