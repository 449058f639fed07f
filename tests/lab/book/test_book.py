"""The book: complete in both languages, opens from file:// without a request, found by its search."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from bagu.errors import BaguError
from bagu.lab import catalogue
from bagu.lab.book import content
from bagu.lab.book.build import write_book
from bagu.lab.book.markdown import page
from bagu.lab.book.mathml import mathml
from bagu.lab.book.source import RECORDED, code, highlight
from bagu.lab.drill import catalogue as drills
from bagu.lab.svg import inline

VOID = {"meta", "br", "link", "input", "img", "hr"}


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("book")
    found = write_book(folder, [RECORDED])
    assert found.labs == len(catalogue.names()) and found.size < 15e6
    return folder


class Page(HTMLParser):
    """Links, ids and unbalanced tags of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.inline: list[str] = []
        self.open: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))
        assert self.open == [], file

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.inline += [f"<{tag} {name}>" for name in found if name == "style" or name.startswith("on")]
        self.links += [found["href"] or ""] if tag == "a" else []
        self.loaded += [str(found[key]) for key in ("src", "href") if key in found and tag in ("script", "link", "img")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_every_link_leads_somewhere(book: Path) -> None:
    pages = {file: Page(file) for file in book.rglob("*.html")}
    assert len(pages) > len(catalogue.names())
    found_in = cache(lambda folder, target: (folder / target).resolve())  # most links stand on every page
    there = cache(Path.exists)
    for file, found in pages.items():
        assert len(found.ids) == len(set(found.ids)), file
        assert found.inline == [], file  # the policy of the pages refuses inline styles and handlers
        for link in [link for link in found.links if not re.match("[a-z]+:", link)] + found.loaded:
            target, _, anchor = unquote(link).partition("#")
            aim = found_in(file.parent, target) if target else file
            assert there(aim) and aim.is_relative_to(book), (file, link)
            assert not anchor or aim.suffix != ".html" or file.parts[-2] == "docs" or anchor in pages[aim].ids, (
                file,
                link,
            )
        assert all(not re.match("[a-z]+:", address) for address in found.loaded), file


def test_the_words_are_there_in_both_languages() -> None:
    chinese = re.compile("[\u4e00-\u9fff]")
    pairs = []
    for name, words in content.words().items():
        assert name in catalogue.sources(), f"the book has words of {name}, which is no lab"
        assert words.why.en and len(words.questions) == 2 and words.code, name
        assert chinese.search(words.setup_zh), name
        assert all(code(place).html for place in words.code)
        assert not words.drill or words.drill in drills.written()
        assert mathml(words.formula)
        pairs += [(name, words.why), *((name, text) for q in words.questions for text in q)]
    pairs += [(c.theme, text) for c in content.chapters([]) for text in (c.title, c.intro) if text.en]
    pairs += [(claim.id, text) for claim in content.claims() for text in (claim.said, claim.truth, claim.reason)]
    for name, text in pairs:
        assert bool(text.en) == bool(text.zh), name
        assert not chinese.search(text.en) and (not text.zh or chinese.search(text.zh)), (name, text)


def test_each_claim_of_the_notes_has_a_lab_or_a_reason() -> None:
    claims = content.claims()
    assert len({claim.id for claim in claims}) == len(claims)
    assert {f"2.{n}" for n in range(1, 30)} <= {claim.id for claim in claims}
    for claim in claims:
        assert bool(claim.lab) != bool(claim.reason.en), claim.id
        assert not claim.lab or claim.lab in catalogue.sources(), claim.id
        assert bool(claim.truth.en) == claim.wrong, claim.id


def test_the_reading_path_names_labs_and_drills() -> None:
    days = content.week()
    assert len(days) == 7
    for day in days:
        assert set(day["labs"]) <= catalogue.sources().keys()
        assert set(day["drills"]) <= drills.written().keys()


def test_it_builds_without_torch_and_records(tmp_path: Path) -> None:
    """A lab without a record says how to make one."""
    script = "import sys; from bagu.cli import main; main(sys.argv[1:])"
    blocked = f"import sys; sys.modules['torch'] = sys.modules['matplotlib'] = sys.modules['numpy'] = None; {script}"
    command = [sys.executable, "-c", blocked, "book", "--out", str(tmp_path / "b"), "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert " 0 records" in done.stdout
    text = (tmp_path / "b/labs/safe_softmax.html").read_text(encoding="utf-8")
    assert "not measured yet" in text and "bagu lab run safe_softmax" in text


def test_formulas() -> None:
    assert "<mfrac><mrow><mi>p</mi><mo>−</mo><mn>1</mn></mrow><mi>m</mi></mfrac>" in mathml(r"\frac{p − 1} m")
    assert "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>" in mathml("x_i^2")
    for broken in ("{a", "a}", r"\bar{x}", "x_"):
        with pytest.raises(BaguError):
            mathml(broken)


def test_the_source_of_a_function_is_escaped_and_coloured() -> None:
    assert highlight("if a < 1: pass  # <b>") == (
        '<span class="k">if</span> a &lt; <span class="n">1</span>: <span class="k">pass</span>  '
        '<span class="c"># &lt;b&gt;</span>'
    )
    assert "def forward" in re.sub("<[^>]+>", "", code("bagu/ops/softmax/torch_backend.py:forward").html)
    with pytest.raises(BaguError, match="has no nothing"):
        code("bagu/ops/softmax/torch_backend.py:nothing")


def test_links_of_documents_go_to_pages_of_the_book() -> None:
    source = "# A *b*\n\n[z](parallel/zero.md#x) [c](../bagu/nn/model.py) [w](https://a.b)\n\n|a|\n|-|\n|<b>|\n"
    title, html = page(source, "docs/layers", {"docs/layers", "docs/parallel/zero"})
    assert title == "A b"
    assert '<a href="parallel/zero.html">z</a> c <a href="https://a.b"' in html
    assert "&lt;b&gt;" in html and "<table>" in html


def test_styles_of_a_plot_become_attributes() -> None:
    text = """<text id="a" style="font: 8px 'X'; fill: #2b2f36">t</text><use href="#a" x="1.23456" id="b"/><!-- c -->"""
    svg = f'<svg width="9pt" viewBox="0 0 9 9"><style>*{{}}</style>{text}</svg>'
    found = inline(svg, prefix="p")
    assert 'font-size="8px" fill="var(--plot-ink)"' in found and "style" not in found
    assert (
        'id="p-0"' in found
        and '<use href="#p-0" x="1.23" />' in found
        and "p-1" not in found
        and "c" not in found[-20:]
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        program = None
    if program is None:
        if os.environ.get("BAGU_REQUIRE_BROWSER", "0") not in ("", "0"):
            pytest.fail("the book is not tested: there is no chromium, or no playwright")
        warnings.warn("THE BOOK IS NOT TESTED IN A BROWSER: there is no chromium, or no playwright", stacklevel=2)
        pytest.skip("needs chromium and playwright")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, file: Path, **settings: Any) -> tuple[Any, list[str]]:
    """A page of the book and what went wrong in it: requests that are not of its folder, messages, errors."""
    faults: list[str] = []
    page = browser.new_context(**settings).new_page()
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda r: r.url.startswith("file://") or faults.append(r.url))
    page.goto(file.as_uri())
    return page, faults


@pytest.mark.parametrize(
    "path", ["index.html", "labs/safe_softmax.html", "wrong.html", "docs/layers.html", "print.html"]
)
def test_a_page_loads_nothing_from_outside(book: Path, browser: Any, path: str) -> None:
    page, faults = opened(browser, book / path)
    assert page.locator("main h1").first.is_visible()
    assert faults == []
    page.context.close()


def test_search_finds_words_of_both_languages(book: Path, browser: Any) -> None:
    page, faults = opened(browser, book / "labs/kv_cache.html", locale="en-US")
    for query, name in (
        ("bubble", "pipeline_bubbles"),
        ("显存", "memory_by_formula"),
        ("rope SINUSOIDS", "rope_where"),
    ):
        page.fill("#search", query)
        page.wait_for_selector(f'#hits a[href*="{name}"]')
    page.fill("#search", "zzzz")
    page.wait_for_function("document.getElementById('hits').textContent === 'nothing found'")
    page.fill("#search", "bubble")
    page.wait_for_selector("#hits a")
    page.press("#search", "Enter")
    page.wait_for_url("**/labs/pipeline_bubbles.html")
    assert faults == []
    page.context.close()


def test_the_language_and_the_colours_change_without_a_reload_and_stay(book: Path, browser: Any) -> None:
    page, faults = opened(browser, book / "labs/safe_softmax.html", locale="zh-CN", color_scheme="light")
    assert page.locator("h1:visible").inner_text() == "安全的 softmax"
    page.evaluate("window.same = true")
    page.click("#language")
    page.click("#theme")
    assert page.locator("h1:visible").inner_text() == "Safe softmax"
    assert page.evaluate("[window.same, document.documentElement.dataset.theme, document.title]") == [
        True, "dark", "Safe softmax · 八股 bagu",
    ]  # fmt: skip
    page.goto((book / "wrong.html").as_uri())
    assert page.locator("h1:visible").inner_text() == "Where the notes are wrong"
    assert faults == []
    page.context.close()


@pytest.mark.parametrize("width", [360, pytest.param(1300, marks=pytest.mark.slow)])
def test_no_page_is_wider_than_the_window(book: Path, browser: Any, width: int) -> None:
    page, _ = opened(browser, book / "index.html", viewport={"width": width, "height": 800})
    kinds = (
        "index",
        "labs/flop_rules",
        "wrong",
        "week",
        "drills",
        "machines",
        "questions",
        "chapters/serve",
        "docs/ops",
    )
    for path in (f"{kind}.html" for kind in kinds):
        page.goto((book / path).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    page.context.close()
