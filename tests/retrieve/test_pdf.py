"""PDF files: text of several pages, a scan, a file that is cut."""

from __future__ import annotations

import io
import sys

import pytest

from bagu.retrieve.read import Unreadable, extract

pytest.importorskip("pypdf")
pyplot = pytest.importorskip("matplotlib.pyplot")


def made(*texts: str) -> bytes:
    from matplotlib.backends.backend_pdf import PdfPages

    out = io.BytesIO()
    with PdfPages(out) as pages:
        for text in texts:
            figure = pyplot.figure()
            figure.text(0.1, 0.8, text)
            pages.savefig(figure)
            pyplot.close(figure)
    return out.getvalue()


def test_the_text_of_all_pages_in_order() -> None:
    assert extract(made("The valve opens.", "The pump needs 12 litres."), "pdf").split("\n\n") == [
        "The valve opens.",
        "The pump needs 12 litres.",
    ]


@pytest.mark.parametrize(
    ("cut", "why"), [(False, "hold no text, as in a scan"), (True, "not a PDF that pypdf can read")]
)
def test_what_has_no_text_is_one_sentence(cut: bool, why: str, capfd: pytest.CaptureFixture[str]) -> None:
    data = made("")
    with pytest.raises(Unreadable, match=why):
        extract(data[: len(data) // 2] if cut else data, "pdf")
    assert capfd.readouterr() == ("", "")


def test_without_pypdf_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(Unreadable, match=r"bagu\[pdf\]"):
        extract(b"%PDF-", "pdf")
