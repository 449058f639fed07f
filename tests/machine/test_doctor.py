"""`bagu doctor`: its output, JSON and exit status."""

from __future__ import annotations

import json
import warnings

import pytest
from sample_reports import AFFINITY, laptop, node, shown, with_gpu

from bagu.machine import doctor, native
from bagu.machine.device import default_device
from bagu.machine.doctor.diagnose import Finding, diagnose
from bagu.machine.doctor.render import to_json
from bagu.machine.doctor.report import Report
from bagu.machine.fast_dtype import compute_dtype_name


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("report", [node(), laptop(), node(nvml=None), with_gpu(1, throttle=("power brake",))])
def test_output_is_complete_and_fits_the_width(report: Report, width: int) -> None:
    text = shown(report, width)
    assert max(len(line) for line in text.splitlines()) <= width
    if report.nvml:
        assert text.count("NV18") == 56
        assert text.count("18 of 18") == 8
        assert AFFINITY in text
        assert text.count("140.0/141.0 GiB") == 8
        assert "…" not in text
        assert "26.56 GB/s" in text
    if report.ceilings:
        assert "4.30 TB/s" in text
        assert "780.00 TFLOP/s" in text
    for finding in diagnose(report):
        assert finding.title.split()[0] in text


def test_json_has_report_and_findings() -> None:
    value = json.loads(to_json(node(), [Finding("ok", "a", "b")]))
    assert value["findings"] == [{"level": "ok", "title": "a", "advice": "b"}]
    assert value["report"]["nvml"]["gpus"][7]["nvlinks"][17]["remote"] == "switch"
    assert value["report"]["ceilings"][0]["copy"] == 4.3e12


@pytest.mark.parametrize("as_json", [True, False])
def test_doctor_on_this_machine(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.main(as_json=as_json, measure=False)
    out = capsys.readouterr().out
    if as_json:
        value = json.loads(out)
        assert status == any(finding["level"] == "fault" for finding in value["findings"])
        assert value["report"]["ceilings"] == []
        assert value["report"]["machine"]["cpu"] not in ("aarch64", "x86_64", "arm64", "unknown CPU")
        assert value["report"]["fast_dtype"].startswith(compute_dtype_name(default_device()))
        assert value["report"]["native"]
    else:
        assert "Findings" in out and "fast dtype" in out and "C++ decode" in out


def test_native_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGU_NATIVE", "0")
    assert native.status("serve/cpu/step.cpp") == "off: BAGU_NATIVE=0"
    monkeypatch.setenv("BAGU_NATIVE", "1")
    monkeypatch.setenv("CXX", "no-such-compiler")
    native.library.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert "no-such-compiler" in native.status("serve/cpu/step.cpp")
    finally:
        native.library.cache_clear()


def test_exit_status_is_1_for_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "collect", lambda *, measure: with_gpu(0, ecc_uncorrected=1))
    assert doctor.main(as_json=True, measure=False) == 1
    monkeypatch.setattr(doctor, "collect", lambda *, measure: node())
    assert doctor.main(as_json=True, measure=False) == 0
