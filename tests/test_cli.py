"""The program's own errors: one line and a hint, exit status 2, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagu.cli import main


@pytest.mark.parametrize("traceback", ["0", "1"])
def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, traceback: str
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("BAGU_TRACEBACK", traceback)
    with pytest.raises(NotADirectoryError if traceback == "1" else SystemExit):
        main(["lab", "run", "safe_softmax", "--quick", "--out", str(file / "x")])
    if traceback == "0":
        said = capsys.readouterr().err
        assert said.startswith("bagu: ") and str(file) in said and "->" in said
