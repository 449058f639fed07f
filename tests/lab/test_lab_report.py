"""The report: one self-contained page, every text escaped."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bagu.errors import BaguError
from bagu.lab import report
from bagu.lab.core import Record, Result, Verdict
from bagu.lab.plot import FAINT, INK
from bagu.lab.report import write_report
from bagu.runs.html import text_of

EVIL = """<script>alert("x")</script> & 'y'"""
VOID = {"meta", "br", "path", "use", "rect"}


def result_of(name: str, words: str) -> Result:
    return Result(
        lab=Record(
            name=name,
            title_en=words,
            title_zh=words,
            claim_en=words,
            claim_zh=words,
            regime=words,
            varies=words,
            measures=words,
            needs_gpu=False,
        ),
        rows=[{words: words, "time_us": 1.5}, {"n_rows": 12345, "right": True, "error": None}],
        verdict=Verdict(kind="did not hold", sentence_en=words, sentence_zh=words),
        environment={"commit": words, words: [words]},
        machine="test",
        device="cpu",
        quick=True,
        seconds=1.0,
    )


class Balance(HTMLParser):
    """Raises if a closing tag does not match the open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_every_text_is_escaped(tmp_path: Path) -> None:
    page = report.render([(result_of("evil", EVIL), tmp_path)], machine=EVIL)
    assert "alert" in page
    assert "<script" not in page
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert "script" not in parser.tags


def test_number_formats() -> None:
    texts = {0.00001234: "1.234e-05", 12345.6: "12,346", 12345: "12,345", True: "yes", None: "–", "a": "a"}
    assert {value: text_of(value) for value in texts} == texts


def test_a_plot_is_inlined_with_unique_ids_and_page_colours(tmp_path: Path) -> None:
    svg = f"""<?xml version="1.0"?><!DOCTYPE svg><svg><defs><path id="a"/></defs>
        <use xlink:href="#a" style="fill: {INK}; stroke: {FAINT}" clip-path="url(#a)"/></svg>"""
    pages = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "plot.svg").write_text(svg, encoding="utf-8")
        pages.append((result_of(name, "words"), folder))
    page = report.render(pages, machine="test")
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert 'href="#two-0"' in page
    assert "url(#two-0)" in page
    assert "<?xml" not in page
    assert "<!DOCTYPE svg" not in page
    assert INK not in page.split("</style>")[1]
    assert "var(--plot-ink)" in page


def test_the_page_makes_no_network_request(tmp_path: Path) -> None:
    page = report.render([(result_of("plain", "words"), tmp_path)], machine="test")
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)|@import|url\((?!#)""", page)


def test_all_verdicts_have_a_colour_and_a_word(tmp_path: Path) -> None:
    for kind, css in (("held", "held"), ("did not hold", "not"), ("holds only where", "only")):
        verdict = Verdict(kind=kind, sentence_en="a", sentence_zh="b")  # type: ignore[arg-type]
        page = report.render([(replace(result_of("x", "w"), verdict=verdict), tmp_path)], machine="test")
        assert f'<span class="verdict {css}">{kind}</span>' in page


def test_without_results_the_error_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(BaguError, match="no result") as caught:
        write_report(tmp_path)
    assert "bagu lab run" in caught.value.hint
