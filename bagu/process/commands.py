"""The verbs of `bagu process` as functions that yield lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bagu.errors import ArgumentError, UnknownName
from bagu.process.answer import Answer, Refusal, Row
from bagu.process.backtest import backtest
from bagu.process.experiments import experiments
from bagu.process.files import read_table
from bagu.process.guess import guess
from bagu.process.health import examine
from bagu.process.limits import limit_name
from bagu.process.plants import plant
from bagu.process.plants.history import csv_text, history
from bagu.process.recommend import check_inputs, no_skill, recommend, whatif
from bagu.process.report import score_notes, write_report
from bagu.process.run import MODELS, Process, create, open_run
from bagu.process.schema import Schema, read_schema, write_schema
from bagu.process.table import Table
from bagu.process.truth import context_row, shares
from bagu.process.words import Lang, say
from bagu.runs.record import append_rows

MARKS = {"error": "✗", "warning": "!", "note": "·"}


def look_lines(data: Path, targets: Sequence[str], lang: str, *, write: bool) -> Iterator[str]:
    table = read_table(data)
    path = data.with_suffix(".toml")
    known = path.exists() and not targets
    schema = read_schema(path) if known else guess(table, parse_targets(targets))
    yield f"{data}: {table.rows:,} rows, {len(table.columns)} columns"
    yield from role_lines(schema)
    yield ""
    yield from finding_lines(table, schema, language(lang))
    if write and not known and not path.exists():
        write_schema(schema, path)
        yield f"\nroles: {path} (edit it, then `bagu process fit {data}`)"
    elif path.exists():
        yield f"\nroles: {path} is kept as it is"


def fit_lines(
    data: Path, out: Path, lang: str, *, targets: Sequence[str], limits: Sequence[str], groups: Sequence[str],
    times: Sequence[str], models: Sequence[str], minutes: float,
) -> Iterator[str]:  # fmt: skip
    """Fit DATA by its roles (DATA.toml, or guessed), changed by the options."""
    for name in models:
        UnknownName.check("model", name, MODELS)
    table, path = read_table(data), data.with_suffix(".toml")
    schema = read_schema(path) if path.exists() else guess(table, parse_targets(targets))
    schema = with_options(schema, targets=targets, limits=limits, groups=groups, times=times)
    yield f"{data}: {table.rows:,} rows; roles {f'from {path}' if path.exists() else 'guessed'}"
    yield from finding_lines(table, schema, language(lang))
    made = create(data.read_bytes(), schema, out, models=models, minutes=minutes)
    write_report(made, out)
    for name in made.fits:
        yield ""
        yield from score_lines(made, name, language(lang))
    refusal = no_skill(made)
    yield f"\n{refusal.words(language(lang))}" if refusal else f"\nnext: bagu process recommend {out}"
    yield f"report: {out / 'report.html'}; the page: bagu serve {out}"


def with_options(
    schema: Schema, *, targets: Sequence[str], limits: Sequence[str], groups: Sequence[str], times: Sequence[str]
) -> Schema:
    for name, goal in (parse_targets(targets) or {}).items():
        schema = schema.with_field(replace(schema[name], role="target", goal=goal))  # type: ignore[arg-type]
        if goal != "none":  # one goal: that of the command
            for field in schema.of("target"):
                if field.name != name and field.goal != "none" and field.name not in (parse_targets(targets) or {}):
                    schema = schema.with_field(replace(field, goal="none"))
    for role, names in (("group", groups), ("time", times)):
        for name in names:
            schema = schema.with_field(replace(schema[name], role=role))  # type: ignore[arg-type]
    schema = replace(schema, limits=tuple(dict.fromkeys((*schema.limits, *limits))))
    for text in limits:  # a limited column is measured, not set: unless it is a setting
        name = limit_name(text)
        if name in [f.name for f in schema.columns] and schema[name].role in ("context", "ignore"):
            schema = schema.with_field(replace(schema[name], role="target"))
    return schema


def score_lines(made: Process, name: str, lang: Lang) -> Iterator[str]:
    fit = made.fits[name]
    yield f"{name}: held-out rows" + "".join(f"   R² {s.split:8}" for s in fit.scores["mean"])
    for model, scores in fit.scores.items():
        weight = f"{fit.model.weights[model]:.2f}" if model in fit.model.weights else ""
        yield f"  {model:9} {weight:>5}    " + "".join(f"{s.r2:14.3f}" for s in scores)
    for note in score_notes(made, name, lang):
        yield f"  {note}"


def recommend_lines(
    run: Path,
    lang: str,
    *,
    given: Sequence[str],
    now: Sequence[str],
    moves: Sequence[str],
    recent: Path | None,
    probability: float,
) -> Iterator[str]:
    made, words = open_run(run), language(lang)
    limits = {n: v for n, v in pairs(made, moves).items() if not isinstance(v, str)}
    latest = None if recent is None else read_table(recent)
    found = recommend(made, pairs(made, given), pairs(made, now), limits, recent=latest, probability=probability)
    append_rows(run / "answers.jsonl", [{"given": list(given), "now": list(now), "answer": plain(found)}])
    yield from answer_lines(made, found, words)


def answer_lines(made: Process, found: Answer | Refusal, lang: Lang) -> Iterator[str]:
    """A recommendation in words, or the refusal."""
    if isinstance(found, Refusal):
        yield found.words(lang)
        return
    goal, unit = made.goal.name, made.schema.target.unit
    yield "in the context " + (named(made, found.context) or "(none)")
    if found.present is not None:
        yield f"now: {goal} {found.present.mean:.4g} {unit}".rstrip()
    for i, choice in enumerate(found.choices, start=1):
        f = choice.forecast
        bound = "at least" if made.better > 0 else "at most"
        yield f"\n{i}. {named(made, choice.settings)}"
        if choice.moves:
            yield "   moves: " + ", ".join(f"{n} {v:+.4g}" for n, v in choice.moves.items())
        yield f"   promise: {goal} {f.mean:.4g} {unit}, {bound} {f.promise:.4g} (next run: {f.low:.4g} to {f.high:.4g})"
        for text, p in f.limits.items():
            yield f"   {text}: {p:.1%}"
        yield "   one sd of a setting changes it by: " + ", ".join(
            f"{n} {v:+.3g}" for n, v in choice.sensitivity.items()
        )
        yield "   nearest runs:"
        yield from (f"     {named(made, row)}" for row in choice.nearest)
    yield f"\nbest row of the data: {named(made, found.best_run)}; its settings here: {found.best_run_here:.4g} {unit}"
    if found.experiment is not None:
        settings, mean = found.experiment
        yield f"to try as an experiment only (outside of the data): {named(made, settings)}: perhaps {mean:.4g} {unit}"
    yield say("association", {}, lang)


def whatif_lines(run: Path, lang: str, *, values: Sequence[str]) -> Iterator[str]:
    made, words = open_run(run), language(lang)
    row = whole_row(made, pairs(made, values))
    f = whatif(made, row)
    unit = made.schema.target.unit
    yield named(made, row)
    yield f"{made.goal.name}: {f.mean:.4g} {unit}; 90 % of next runs: {f.low:.4g} to {f.high:.4g}"
    yield from (f"{text}: {p:.1%}" for text, p in f.limits.items())
    inside = f.distance <= 1
    yield f"distance to the data: {f.distance:.2f} of its radius" + (
        "" if inside else f"; {say('outside_setting', {'column': f.far_in}, words)}"
    )
    if (refusal := no_skill(made)) is not None:
        yield refusal.words(words)


def experiment_lines(run: Path, lang: str, *, given: Sequence[str], count: int) -> Iterator[str]:
    made = open_run(run)
    found = experiments(made, pairs(made, given), count)
    if isinstance(found, Refusal):
        yield found.words(language(lang))
        return
    unit = made.schema.target.unit
    for i, e in enumerate(found, start=1):
        place = "inside of the data" if e.distance <= 1 else f"{e.distance:.1f} radii from the data"
        yield f"{i}. {named(made, e.settings)}"
        yield f"   expected {e.mean:.4g} ± {e.sd:.2g} {unit}; the result would leave ± {e.after:.2g}; {place}"


def backtest_lines(run: Path) -> Iterator[str]:
    made = open_run(run)
    found, goal = backtest(made), made.goal.name
    yield f"{found.asked} later rows were asked about, {found.refused} refused"
    if found.nearer != found.nearer:
        yield "too few recommendations to compare"
        return
    gap = made.better * (found.nearer - found.farther)
    verdict = "better" if gap > found.half else "worse" if gap < -found.half else "neither better nor worse"
    thirds = f"nearest third {found.nearer:+.3g}, farthest third {found.farther:+.3g}"
    yield f"{goal}, less what the context explains: {thirds}"
    yield f"runs near the recommendations did {verdict}: {gap:+.3g} ± {found.half:.2g} in the wanted direction"


def demo_lines(name: str, out: Path, lang: str) -> Iterator[str]:
    """A plant, its history, a model, three recommendations, and the truth beside them."""
    past = history(plant(name), 300, 0, batches=True)
    out.mkdir(parents=True, exist_ok=True)
    data, run = out / f"{name}.csv", out / "run"
    data.write_text(csv_text(past.table), encoding="utf-8")
    yield f"{data}: 300 runs of a {name} plant by operators with habits; noise 20 % of the spread"
    yield from finding_lines(past.table, past.schema, language(lang))
    made = create(data.read_bytes(), past.schema, run, minutes=1)
    write_report(made, run)
    yield ""
    yield from score_lines(made, past.plant.target, language(lang))
    first = past.c[0]
    found = recommend(made, context_row(past.plant, first))
    yield ""
    yield from answer_lines(made, found, language(lang))
    if isinstance(found, Answer):
        yield "\nthe truth (share of the possible gain: 0 = the operators' mean, 1 = the optimum of this context):"
        low, best = past.operators(first), past.plant.optimum(first)[1]
        for i, choice in enumerate(found.choices, start=1):
            merit = past.plant.merit(shares(past.plant, choice.settings)[None], first[None])[0]
            value = past.plant.truth(shares(past.plant, choice.settings)[None], first[None])[past.plant.target][0]
            yield f"  {i}. {value:.4g} {past.plant.unit} in truth, {(merit - low) / (best - low):.2f} of the gain"
        row = past.plant.merit(past.best_row()[None], first[None])[0]
        yield f"  the best row's settings: {(row - low) / (best - low):.2f} of the gain"
    yield f"\nlook next: {run / 'report.html'}; bagu serve {run}; bagu process look {data}; bagu bench process"


def pairs(made: Process, texts: Iterable[str]) -> Row:
    """NAME=VALUE, several with commas; numbers where the column has numbers."""
    found: Row = {}
    kinds = {f.name: f.kind for f in made.schema.inputs}
    for part in (p for text in texts for p in text.split(",") if p.strip()):
        name, _, value = (w.strip() for w in part.partition("="))
        UnknownName.check("setting or context", name, kinds)
        if kinds[name] != "number":
            found[name] = value
            continue
        try:
            found[name] = float(value)
        except ValueError:
            raise ArgumentError(f"{name} is {value!r}", hint=f"give a number, e.g. {name}=1.5") from None
        if not abs(float(value)) < float("inf"):
            raise ArgumentError(f"{name} is {value!r}", hint="give a finite number")
    return found


def whole_row(made: Process, given: Row) -> Row:
    """The last row of the data with some values changed."""
    check_inputs(made, given)
    at = made.table.rows - 1
    row: Row = {}
    for f in made.encoder.fields:
        value = made.table[f.name].values[at]
        row[f.name] = given.get(f.name, str(value) if f.levels else float(value))
    return row


def named(made: Process, row: Row) -> str:
    names = [f.name for f in made.schema.columns if f.role in ("setting", "context", "target") and f.name in row]
    return ", ".join(f"{n} {row[n] if isinstance(row[n], str) else format(row[n], '.4g')}" for n in names)


def plain(found: Answer | Refusal) -> dict[str, object]:
    """An answer as plain data, for JSON. A refusal has its words in both languages."""
    if isinstance(found, Refusal):
        return {"refused": found.kind, "words": {lang: found.words(lang) for lang in ("en", "zh")}}
    return {"refused": None, **asdict(found)}


def role_lines(schema: Schema) -> Iterator[str]:
    width = min(28, max((len(f.name) for f in schema.columns), default=4))
    for f in schema.columns[:60]:
        words = [f.role + (f":{f.goal}" if f.goal != "none" else ""), f.unit]
        if f.low is not None and f.high is not None:
            words.append(f"{f.low:.5g} to {f.high:.5g}" + (f", step {f.step:g}" if f.step else ""))
        words += [f"{len(f.levels)} levels: {', '.join(f.levels[:4])}"] if f.levels else []
        yield f"  {f.name:{width}}  " + "  ".join(w for w in words if w)
    if len(schema.columns) > 60:
        yield f"  … and {len(schema.columns) - 60} more columns"


def finding_lines(table: Table, schema: Schema, lang: Lang) -> Iterator[str]:
    found = examine(table, schema)
    for finding in found[:40]:
        yield f"{MARKS[finding.level]} {finding.words(lang)}"
    if len(found) > 40:
        yield f"… and {len(found) - 40} more findings"
    if not found:
        yield say("healthy", {}, lang)


def parse_targets(texts: Iterable[str]) -> dict[str, str] | None:
    """`yield:max` and the like; a name alone is a target without a goal, for limits."""
    found = {}
    for text in texts:
        name, _, goal = text.rpartition(":") if text.endswith((":max", ":min")) else (text, "", "none")
        if not name:
            raise ArgumentError(f"--target {text!r} has no name", hint="give NAME:max or NAME:min")
        found[name] = goal
    return found or None


def language(name: str) -> Lang:
    UnknownName.check("language", name, ("en", "zh"))
    return "zh" if name == "zh" else "en"
