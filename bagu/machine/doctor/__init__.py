"""`bagu doctor`: what this machine is and what is wrong with it.

Three stages: `collect` looks (and measures), `diagnose` judges, `render` shows.
"""

from __future__ import annotations

from bagu.machine.doctor.diagnose import Finding, diagnose
from bagu.machine.doctor.render import render, to_json
from bagu.machine.doctor.report import Report, collect

__all__ = ["Finding", "Report", "collect", "diagnose", "main", "render", "to_json"]


def main(*, as_json: bool, measure: bool) -> int:
    """Print the report; the exit status is 1 when there is a fault, else 0. A machine without a GPU has no fault."""
    report = collect(measure=measure)
    findings = diagnose(report)
    if as_json:
        print(to_json(report, findings))
    else:
        from rich.console import Console

        render(report, findings, Console())
    return int(any(finding.level == "fault" for finding in findings))
