"""The report: it stands alone, shows texts and does not obey them, and its charts stay inside their frame."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.errors import BaguError
from bagu.runs.charts import HEIGHT, WIDTH, Chart, Line, Mark, Reference, downsample, human, ticks
from bagu.runs.display import Table
from bagu.runs.folder import RunFolder, RunRecorder
from bagu.train.report import Card, Comparison, ReportData, Run, read_run, render, summary, write_report

NASTY = '</script><script>alert(1)</script><b onclick="x">bold</b> & \x00\x1b[31m \ud800 "中文"\n\tindented  twice'
SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Checks that every tag is closed in order, and collects tags, attributes and texts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def a_run(steps: int = 20, **changes: Any) -> Run:
    rows = [
        {
            "step": s,
            "loss_nats": 3.0 / (s + 1),
            "bits_per_byte": 1.2 / (s + 1),
            "val_bits_per_byte": 1.3 / (s + 1) if s % 5 == 4 else None,
            "grad_norm": 0.1 + s,
            "tokens_per_s": 1000.0 + s,
            "memory_bytes": 2**30 + s,
            "padding_percent": 0.0,
        }
        for s in range(steps)
    ]
    environment = {"machine": "cpu", "torch": "2", "time": "2026-01-02T03:04:05+00:00"}
    events = [{"step": None, "kind": "start", "time": environment["time"], "changed": []}]
    events += [{"step": 7, "kind": "skip", "time": environment["time"], "reason": NASTY.replace("\ud800", "")}]
    fields = {
        "name": "run",
        "config": {"lr": 1e-3, "objective": {"kind": "pretrain"}},
        "environment": environment,
        "metrics": rows,
        "events": events,
    }
    return Run(**{**fields, **changes})


def frame_of(svg: str) -> list[tuple[float, float]]:
    """Every corner of what the chart draws; texts by the place they are anchored at."""
    places: list[tuple[float, float]] = []
    for node in ElementTree.fromstring(svg).iter():
        get = {k: float(v) for k, v in node.attrib.items() if re.fullmatch(r"-?[\d.]+", v)}
        if node.tag == f"{SVG}text":
            places.append((get["x"], get["y"]))
        elif node.tag == f"{SVG}circle":
            places += [(get["cx"] - get["r"], get["cy"] - get["r"]), (get["cx"] + get["r"], get["cy"] + get["r"])]
        elif node.tag == f"{SVG}rect":
            places += [(get["x"], get["y"]), (get["x"] + get["width"], get["y"] + get["height"])]
        elif node.tag == f"{SVG}path":
            x = y = 0.0
            for command, numbers in re.findall(r"([MLHVhv])([^MLHVhv]*)", node.attrib["d"]):
                values = [float(n) for n in numbers.split()]
                assert all(map(math.isfinite, values))
                x = {"H": values[0], "h": x + values[0]}.get(command, values[0] if command in "ML" else x)
                y = {"V": values[0], "v": y + values[0]}.get(command, values[1] if command in "ML" else y)
                places.append((x, y))
    return places


ys = st.floats(-1e6, 1e6) | st.floats(1e-9, 1e-3) | st.just(0.0)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 10**6), ys), min_size=1, max_size=60), min_size=1, max_size=4),
    st.lists(ys, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_a_chart_stays_inside_its_frame(
    data: list[list[tuple[int, float]]], references: list[float], zero: bool, log: bool
) -> None:
    lines = [Line(name=f"<{n}>", points=sorted(points)) for n, points in enumerate(data)]
    beside = [Reference(name="a & b", y=y) for y in references]
    marks = [Mark(name="<skip>", x=lines[0].points[0][0]), Mark(name="far", x=1e9)]
    svg = Chart(lines=lines, unit="nats", references=beside, marks=marks, zero=zero, log=log).svg()
    assert all(-0.05 <= x <= WIDTH + 0.05 and -0.05 <= y <= HEIGHT + 0.05 for x, y in frame_of(svg))


def test_a_chart_puts_points_where_they_belong() -> None:
    svg = Chart(lines=[Line(name="a", points=[(0, 0.0), (5, 5.0), (10, 10.0)])], unit="", zero=True).svg()
    dots = [n for n in ElementTree.fromstring(svg).iter(f"{SVG}circle") if "dot" in n.attrib["class"]]
    (x0, y0), (x1, y1), (x2, y2) = [(float(d.attrib["cx"]), float(d.attrib["cy"])) for d in dots]
    assert x0 < x1 < x2
    assert y0 > y1 > y2, "up is more"
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)


def test_names_of_close_references_do_not_overlap_and_stay_in_the_plot() -> None:
    for values in ((2.08, 1.72, 1.61), (1.0, 1.0, 1.0, 1.0), (9.9, 9.8, 1.1, 1.0)):
        beside = [Reference(name=f"reference {n}", y=y) for n, y in enumerate(values)]
        svg = Chart(lines=[Line(name="a", points=[(0, 1.0), (1, 10.0)])], unit="", references=beside).svg()
        at = sorted(float(y) for y in re.findall(r'y="([\d.]+)" class="halo"', svg))
        assert len(at) == len(values) and at[0] > 26 and at[-1] < HEIGHT - 30
        assert all(b - a >= 11 for a, b in itertools.pairwise(at)), at


def test_the_legend_names_every_line() -> None:
    names = ["chosen", "rejected", "chosen, validation", "rejected, validation"]
    lines = [Line(name=name, points=[(0, n), (1, n + 1)]) for n, name in enumerate(names)]
    svg = Chart(lines=lines, unit="nats").svg()
    legend = svg[svg.index('class="legend"') :].partition("</g>")[0]
    assert all(f">{name}</text>" in legend for name in names)
    assert all(0 <= float(x) <= WIDTH for x in re.findall(r'x="([-\d.]+)"', legend))


def test_a_log_axis_is_even_in_ratios() -> None:
    svg = Chart(lines=[Line(name="a", points=[(0, 1.0), (1, 10.0), (2, 100.0)])], unit="", log=True).svg()
    dots = [float(n.attrib["cy"]) for n in ElementTree.fromstring(svg).iter(f"{SVG}circle")]
    assert dots[0] - dots[1] == pytest.approx(dots[1] - dots[2], abs=0.2)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=3000), st.integers(4, 700))
@settings(max_examples=30)
def test_downsampling_keeps_the_extremes_and_the_ends(values: list[float], limit: int) -> None:
    points = list(enumerate(values))
    kept = downsample(points, limit)
    assert len(kept) <= max(limit, 4)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert kept == sorted(set(kept)), "a part of the points, in their order"
    assert set(kept) <= set(points)
    assert {min(values), max(values)} <= {y for _, y in kept}


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 10))
def test_ticks_are_round_and_inside(low: float, span: float, count: int) -> None:
    values = ticks(low, low + span, count)
    slack = span * 1e-6 + 2 * math.ulp(abs(low) + span)  # a tick is a product that was rounded
    assert all(low - slack <= v <= low + span + slack for v in values)
    assert count / 3 - 1 <= len(values) <= count + 1
    if len(values) > 1:
        step = values[1] - values[0]
        mantissa = step / 10 ** math.floor(math.log10(step * 1.0001))
        assert min(abs(mantissa - m) for m in (1, 2, 2.5, 5, 10)) < 0.01


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (3e-4, "3e-4"), (0.001, "0.001"), (2.5, "2.5"), (8000, "8000"), (12500, "12.5k"), (-2e6, "-2M")],
)
def test_numbers_on_axes_are_short(value: float, words: str) -> None:
    assert human(value) == words


def test_the_page_stands_alone_and_shows_texts_as_they_are() -> None:
    data = ReportData(
        title=NASTY,
        subtitle=NASTY,
        runs=[a_run(name=NASTY, config={NASTY.replace("\ud800", ""): NASTY.replace("\ud800", "")}), a_run()],
        cards=[Card(name=NASTY, value=NASTY, note=NASTY)],
        references={NASTY: 1.0},
        comparisons=[Comparison(prompt=NASTY, before=NASTY, after="after")],
        compared=(NASTY, NASTY),
        tables=[Table(title=NASTY, columns=(NASTY, "n"), rows=[(NASTY, 1), (None, 2.5)], note=NASTY)],
    )
    html = render(data)
    html.encode("utf-8")
    page = Page(html)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert "url(" not in html
    assert "@import" not in html
    assert page.words.count("</script><script>alert(1)</script>") >= 10
    assert "␀␛[31m" in page.words
    assert '"中文"\n\tindented  twice' in page.words, "line breaks, tabs and spaces are kept"
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.S):
        ElementTree.fromstring(svg)


def test_the_page_has_what_was_measured() -> None:
    page = Page(render(ReportData(title="t", runs=[a_run()], references={"gzip": 2.31})))
    for words in ("Loss", "Bits per byte", "gzip 2.31", "Speed", "tokens/s", "GiB", "step 7: skip", "Configuration"):
        assert words in page.words
    assert "0 % of tokens, at every step" in page.words, "a flat line is told in words"
    assert "Learning rate" not in page.words, "what was not measured is not there"
    assert "2026-01-02 03:04 UTC" in page.words


def test_the_summary_is_of_the_last_values_with_units() -> None:
    cards = {card.name: card.value for card in summary(a_run())}
    assert cards == {
        "Validation": "0.065 bits/byte",
        "Training loss": "0.150 nats",
        "Steps": "20 steps",
        "Speed": "1,010 tokens/s",
        "Memory": "1.00 GiB",
    }
    assert summary(a_run(0)) == []


def test_losses_of_masked_language_modelling_are_said_to_be_of_masked_positions() -> None:
    run = a_run(config={"objective": {"kind": "mlm", "mask_rate": 0.15}})
    notes = {card.name: card.note for card in summary(run)}
    assert notes["Training loss"] == "of the 15 % of positions that are masked" and notes["Steps"] == ""
    assert "nats per masked position" in Page(render(ReportData(title="t", runs=[run]))).words
    causal = Page(render(ReportData(title="t", runs=[a_run(config={"objective": {"kind": "pretrain"}})]))).words
    assert "nats per token" in causal and "masked" not in causal


def test_metrics_of_an_unknown_objective_have_a_chart_each() -> None:
    rows = [{"step": s, "reward": 0.1 * s, "lr": 1e-3, "val_reward": None} for s in range(3)]
    page = Page(
        render(ReportData(title="t", runs=[a_run(config={"objective": {"kind": "later"}}, metrics=rows)]))
    ).words
    assert "reward" in page and "Learning rate" in page and "val_reward" not in page


@pytest.mark.parametrize("steps", [0, 1, 2, 5000])
def test_runs_of_any_length_have_a_page(steps: int) -> None:
    html = render(ReportData(title="t", runs=[a_run(steps)]))
    Page(html)
    assert len(html) < 300_000


def test_samples_of_a_run_are_compared_first_and_last() -> None:
    page = Page(render(ReportData(title="t", runs=[a_run(samples={0: ["noise"], 9: ["mid"], 19: ["def f(): pass"]})])))
    assert "after step 0" in page.words
    assert "def f(): pass" in page.words
    assert "mid" not in page.words


def test_a_run_folder_becomes_a_page(tmp_path: Path) -> None:
    with RunRecorder(RunFolder.create(tmp_path / "预训练", {"lr": 1e-3}), tensorboard=False) as run:
        for step in range(3):
            run.on_step(step, {"loss_nats": float("nan") if step == 1 else 2.0 - step / 10})
    path = write_report(tmp_path / "预训练")
    assert path == tmp_path / "预训练" / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert "预训练" in page.words
    assert "non finite" in page.words
    assert read_run(tmp_path / "预训练").metrics[1]["loss_nats"] is None
    with pytest.raises(BaguError, match="is not the folder of a run"):
        write_report(tmp_path)


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs a browser")
def test_no_text_runs_out_of_a_phone(tmp_path: Path) -> None:
    """In a real browser the page is as wide as the window: nothing makes a phone scroll sideways."""
    page = render(ReportData(title="t", runs=[a_run()], tables=[Table(title="t", columns=["c" * 90], rows=[])]))
    probe = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script>"
    page = re.sub(r"<meta http-equiv=.*?>", "", page).replace("</body>", probe + "</body>")
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900", "--dump-dom"]
    done = subprocess.run([*chromium, path.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    width, _, window = re.search(r"<title>(.*?)</title>", done.stdout)[1].split()  # type: ignore[index]
    assert int(width) <= int(window)
