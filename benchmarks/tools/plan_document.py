"""`python -m benchmarks.tools.plan_document [--check]`: the figures in docs/planner.md, from `bagu plan validate`.

This module owns the text between the two marks. `--check` writes nothing and fails if the document is out of date.
"""

import sys
from pathlib import Path

from bagu.errors import BaguError
from bagu.parallel.planner.calibration import CALIBRATION
from bagu.parallel.planner.validate import Report, validate

BEGIN, END = "<!-- planner:begin -->", "<!-- planner:end -->"
DOCUMENT = Path("docs/planner.md")


def render(report: Report) -> str:
    """The generated part, in Markdown."""
    lines = ["| source | used for | rows | mean error of the step time | signed |", "|---|---|--:|--:|--:|"]
    for name, (judges, rows, error, bias) in report.errors.items():
        use = "judging" if judges else "calibration"
        lines.append(f"| {name} | {use} | {rows} | {100 * error:.1f} % | {100 * bias:+.1f} % |")
    judged = sum(1 for x in report.done if x.row.judge)
    lines.append(f"| **all that judge** | | {judged} | **{100 * report.judged_error:.1f} %** | |")
    lines += ["", "| pairs of rows of the | sets | pairs | in the right order |", "|---|--:|--:|--:|"]
    for title, share, pairs, sets in report.rankings:
        lines.append(f"| {title} | {len(sets)} | {pairs} | {100 * share:.1f} % |")
    lines += ["", "| memory per GPU | rows | mean error | signed |", "|---|--:|--:|--:|"]
    for name, (rows, error, bias) in report.memory.items():
        lines.append(f"| {name} | {rows} | {100 * error:.1f} % | {100 * bias:+.1f} % |")
    lines += ["", report.out_of_memory, ""]
    lines += [
        "| bagu on one H200 | precision | micro-batches | step, s | predicted | peak, GB | predicted |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for x in report.own:
        lines.append(
            f"| {x.model} | {x.precision} | {x.micro_batches} | {x.measured_s:.3f} | {x.predicted_s:.3f} "
            f"({100 * x.time_error:+.1f} %) | {x.measured_bytes / 1e9:.1f} | {x.predicted_bytes / 1e9:.1f} "
            f"({100 * x.memory_error:+.1f} %) |"
        )
    constants = ", ".join(f"`{name}` {value:g}" for name, value in vars(CALIBRATION).items())
    return "\n".join([*lines, "", f"Constants: {constants}.", ""])


def updated(text: str, report: Report) -> str:
    """`text` with the generated part replaced."""
    if BEGIN not in text or END not in text:
        raise BaguError(f"{DOCUMENT} has no {BEGIN} … {END}", hint="put both marks where the tables belong")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{render(report)}{END}{rest.partition(END)[2]}"


def main(argv: list[str]) -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    new = updated(text, validate())
    if "--check" in argv:
        if new != text:
            print(f"{DOCUMENT} is out of date: run python -m benchmarks.tools.plan_document", file=sys.stderr)
        return int(new != text)
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
