"""`bagu doctor`: describe this machine and list its problems.

Three stages: `collect` reads (and measures) the machine, `diagnose` finds problems, `render` prints them.
"""

from bagu.machine.doctor.diagnose import Finding, diagnose
from bagu.machine.doctor.render import render, to_json
from bagu.machine.doctor.report import Report, collect

__all__ = ["Finding", "Report", "collect", "diagnose", "main", "render", "to_json"]


def main(*, as_json: bool, measure: bool) -> int:
    """Print the report. The exit status is 1 if there is a fault, else 0. A missing GPU is not a fault."""
    report = collect(measure=measure)
    findings = diagnose(report)
    if as_json:
        print(to_json(report, findings))
    else:
        from bagu.machine.terminal import Terminal

        render(report, findings, Terminal())
    return int(any(finding.level == "fault" for finding in findings))
