"""The tables of inference speed in the documents, from the rows of `bagu bench engine`, `constrained` and `serve`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bagu.bench.engine_peers import EAGER
from benchmarks.tools.markdown import commit_words, markdown_table

Row = Mapping[str, Any]
WORDS = {
    "en": {
        "engine": ("machine", "model and load", "implementation", "output tokens/s", "step", "vs. best peer"),
        "server": ("machine", "model and load", "output tokens/s", "TTFT p50 / p99", "TPOT p50 / p99",
                   "server CPU per token"),
        "schema": ("machine", "model and load", "free text, tokens/s", "JSON schema, tokens/s", "of free text",
                   "valid"),
        "caption": "The first table is the engine without HTTP; then come output to a JSON schema against free text, "
                   "and the server. Values are medians over the rounds of a run, at commit {commit}. Reproduce with "
                   "`bagu bench engine`, `bagu bench constrained` and `bagu bench serve`.",
        "nothing": "No inference speed is recorded yet: `bagu bench engine` writes it to `benchmarks/results/serve`.",
        "streams": "decode, streams: {n}, prompts of {p}", "new": ", text that does not repeat",
        "edit": ", text that repeats the prompt", "requests": "{n} requests, {i} in, {o} out",
        "shared": ", {n} tokens shared",
        "many": "streams: {n}", "closed": "closed loop of {n}", "poisson": "{n:g} requests/s",
        "trace": "trace {n}",
    },
    "zh": {
        "engine": ("机器", "模型与负载", "实现", "输出 tokens/s", "每步", "与最快对照之比"),
        "server": ("机器", "模型与负载", "输出 tokens/s", "TTFT p50 / p99", "TPOT p50 / p99", "每 token 的服务器 CPU"),
        "schema": ("机器", "模型与负载", "自由文本 tokens/s", "JSON schema tokens/s", "与自由文本之比", "合法"),
        "caption": "第一张表为引擎本身（不经 HTTP），其后为按 JSON schema 输出与自由文本之比，以及服务器；"
                   "取各轮中位数，提交 {commit}。"
                   "用 `bagu bench engine`、`bagu bench constrained` 与 `bagu bench serve` 复现。",
        "nothing": "尚无推理速度的记录：`bagu bench engine` 会写入 `benchmarks/results/serve`。",
        "streams": "{n} 路解码，提示 {p} tokens", "new": "，文本不重复", "edit": "，文本重复提示",
        "requests": "{n} 个请求，输入 {i}，输出 {o}", "shared": "，共享前缀 {n} tokens",
        "many": "{n} 路", "closed": "闭环 {n} 路", "poisson": "每秒 {n:g} 个请求",
        "trace": "轨迹 {n}",
    },
}  # fmt: skip


def render(rows: Sequence[Row], language: str) -> str:
    """A block of lines per machine, model and load; each implementation from its latest run."""
    words: dict[str, Any] = WORDS[language]
    engine, schema, server = (
        [r for r in rows if r["system"] == system] for system in ("engine", "constrained", "serve")
    )
    prompts = {_run(r) for r in engine if r["implementation"] == EAGER}  # runs that time a prompt, not decoding
    engine = [r for r in engine if _run(r) not in prompts]
    if not engine:
        return str(words["nothing"])
    blocks = [line for block in _blocks(engine, words) for line in block]
    parts = [words["caption"].format(commit=commit_words(r["env"]["commit"] for r in rows))]
    parts.append(markdown_table(words["engine"], blocks, names=3))
    if schema:
        latest = {(r["env"]["machine"], r["model"], r["streams"]): r for r in _by_time(schema)}
        parts.append(markdown_table(words["schema"], [_schema_line(r, words) for r in latest.values()], names=2))
    if server:
        parts.append(markdown_table(words["server"], [_server_line(r, words) for r in _latest(server)], names=2))
    return "\n\n".join(parts)


def _blocks(rows: Sequence[Row], words: Mapping[str, Any]) -> list[list[list[str]]]:
    loads: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        loads.setdefault((row["env"]["machine"], row["model"], _load(row, words)), []).append(row)
    # not sorted by the load's text, which differs between languages; the order of the record is kept
    return [_block(key, loads[key]) for key in sorted(loads, key=lambda k: (k[0] != "nvidia-h200", k[:2]))]


def _block(key: tuple[str, str, str], rows: Sequence[Row]) -> list[list[str]]:
    """Bagu's settings, and the peers of the same runs. A ratio is to the fastest peer of the same run."""
    machine, model, load = key
    implementations: dict[str, list[Row]] = {}
    for row in rows:
        implementations.setdefault(_name(row), []).append(row)
    lines: list[list[str]] = []
    for name, all_of in implementations.items():
        run = [r for r in all_of if r["env"]["time"] == max(r["env"]["time"] for r in all_of)]
        ours, rate = run[0]["implementation"] == "bagu", statistics.median(r["tokens_per_s"] for r in run)
        peers = [r for r in rows if r["env"]["time"] == run[0]["env"]["time"] and r["implementation"] != "bagu"]
        rivals: dict[str, list[float]] = {}
        for r in peers:
            if r["implementation"].startswith("bagu"):  # bagu without a feature is no peer
                continue
            rivals.setdefault(r["implementation"], []).append(r["tokens_per_s"])
        best = max(map(statistics.median, rivals.values()), default=None)
        step = [r["step_s"] for r in run if r.get("step_s")]
        lines.append([
            "" if lines else machine, "" if lines else f"`{model}`: {load}", f"**{name}**" if ours else name,
            f"**{rate:,.0f}**" if ours else f"{rate:,.0f}", f"{1e3 * statistics.median(step):.2f} ms" if step else "–",
            f"{rate / best:.2f}×" if best and ours else "–",
        ])  # fmt: skip
    return lines


def _name(row: Row) -> str:
    """The implementation, and bagu's settings."""
    if row["implementation"] != "bagu":
        kind = row.get("gguf_type")
        return f"{row['implementation']}, {kind.upper()}" if kind else str(row["implementation"])
    engine = row["engine"]
    kind = engine["quantization"] or {"bfloat16": "bf16", "float32": "fp32"}[row["dtype"]]
    extras = [kind, *(["invariant"] if engine["invariant"] else []), *([] if engine["prefix_cache"] else ["no cache"])]
    if engine.get("max_adapters"):  # rows of earlier versions have no such field
        extras.append(f"{engine['max_adapters']} adapters")
    if engine.get("speculative"):
        extras.append("drafts")
    return f"bagu, {', '.join(extras)}"


def _load(row: Row, words: Mapping[str, Any]) -> str:
    case = row["case"]
    if row["streams"]:
        text = words[case["text"]] if case.get("text") else ""  # rows of earlier versions have no such field
        return f"{words['streams'].format(n=row['streams'], p=case['prompt'])}{text}"
    spans = [case["inputs"], case["outputs"]]
    inputs, outputs = (f"{x['low']}–{x['high']}" if x["low"] < x["high"] else str(x["low"]) for x in spans)
    shared = words["shared"].format(n=case["shared_prefix"]) if case["shared_prefix"] else ""
    return str(words["requests"].format(n=case["requests"], i=inputs, o=outputs)) + str(shared)


def _latest(rows: Sequence[Row]) -> list[Row]:
    """The latest row of each machine, model and load."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in _by_time(rows):
        key = (row["env"]["machine"], row["model_id"], row["max_concurrency"], row["request_rate"], row["inputs"],
               row.get("trace"))  # fmt: skip
        found[key] = row
    return list(found.values())


def _run(row: Row) -> tuple[str, str]:
    return str(row["env"]["machine"]), str(row["env"]["time"])


def _by_time(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda r: str(r["env"]["time"]))


def _schema_line(row: Row, words: Mapping[str, Any]) -> list[str]:
    return [
        row["env"]["machine"], f"`{row['model']}`: {words['many'].format(n=row['streams'])}",
        f"{row['free_tokens_per_s']:,.0f}", f"{row['constrained_tokens_per_s']:,.0f}", f"{row['ratio']:.3f}",
        f"{row['valid']} / {row['outputs']}",
    ]  # fmt: skip


def _server_line(row: Row, words: Mapping[str, Any]) -> list[str]:
    poisson = row["request_rate"] != "inf"
    load = (
        words["trace"].format(n=row["trace"]) if row.get("trace")
        else words["poisson"].format(n=row["request_rate"]) if poisson
        else words["closed"].format(n=row["max_concurrency"])
    )  # fmt: skip
    pair = lambda name: f"{row[f'p50_{name}_ms']:.1f} / {row[f'p99_{name}_ms']:.1f} ms"  # noqa: E731
    cpu = row.get("server_cpu_us_per_token")
    return [
        row["env"]["machine"], f"`{row['model_id']}`: {load}", f"{row['output_throughput']:,.0f}", pair("ttft"),
        pair("tpot"), "–" if cpu is None else f"{cpu:.0f} µs",
    ]  # fmt: skip
