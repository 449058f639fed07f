"""The tables of docs/benchmarks.md: generated from small results, --check finds old ones, a line uses one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagu.errors import BaguError
from benchmarks.tools import demo_table, formats_table, quantization_table, serve_table, tables, train_table

DOCUMENTS = {
    "docs/parallel/data_parallel.md": "parallel", "docs/formats.md": "formats", "docs/planner.md": "plan",
    "docs/quantization.md": "quantization", "docs/tuning.md": "tuning",
}  # fmt: skip


def marked(*names: str) -> str:
    """A document with old tables between these marks."""
    return "\n".join("{}\nold\n{}".format(*tables.marks_of(name)) for name in names)


PAGE = f"# bagu\n\nbefore\n{marked('ops', 'train', 'serve', 'demo')}\nafter\n"


def row(**changes: Any) -> dict[str, Any]:
    """One row as `bagu bench ops` records it on a GPU."""
    env = {"machine": "nvidia-h200", "commit": "0123456789abcdef", "torch": "2.11.0", "triton": "3.6.0"}
    ceilings = {
        "read": 4.4e12,
        "write": 4.3e12,
        "copy": 4.28e12,
        "matmul": 788e12,
        "dtype": "bfloat16",
        "device": "cuda:0",
    }
    made = {
        "op": "rms_norm", "case": "llama_8b", "shape": "16384×4096", "dtype": "bf16", "device": "cuda:0", "pass": "fwd",
        "backend": "triton", "peer": None, "yardstick": False, "median_s": 6.8e-5, "gb_per_s": 3947.0,
        "tflop_per_s": None, "bound": "memory", "ceiling": "copy", "share": 0.922, "fault": False, "quick": False,
        "ceilings": ceilings, "env": env | {"time": changes.pop("time", "2026-08-01T10:00:00+00:00")},
    }  # fmt: skip
    return made | changes


def checkout(folder: Path, rows: list[dict[str, Any]]) -> Path:
    results = folder / "benchmarks/results"
    results.mkdir(parents=True)
    (results / "nvidia-h200.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for name, part in DOCUMENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{marked(part)}\n")
    for name in tables.FILES:
        (folder / name).write_text(PAGE, encoding="utf-8")
    return folder


def test_it_writes_both_pages_and_check_then_passes(tmp_path: Path) -> None:
    root = checkout(tmp_path, [row(), row(backend=None, peer="eager", gb_per_s=1718.4)])
    assert tables.main(["--check", "--root", str(root)]) == 1
    assert (root / "docs/benchmarks.md").read_text() == PAGE, "--check wrote"
    assert tables.main(["--root", str(root)]) == 0
    assert tables.main(["--check", "--root", str(root)]) == 0
    english, chinese = ((root / name).read_text(encoding="utf-8") for name in tables.FILES)
    line = "| `rms_norm` | 16384×4096 | fwd | **3,947 GB/s** | 0.92 copy | 1,718 GB/s | – | – |"
    assert line in english and line in chinese
    assert "nvidia-h200" in english and "`012345678`" in english and "copy bandwidth 4,280 GB/s" in english
    assert "拷贝带宽" in chinese
    assert english.startswith("# bagu\n\nbefore\n") and english.endswith("\nafter\n") and "old" not in english


def test_host_times_are_shown_where_they_are_recorded() -> None:
    rows = [
        row(host_s=1.41e-5),
        row(host_s=1.2e-4, **{"pass": "fwd+bwd"}),
        row(backend="torch", host_s=9e-5),
        row(backend=None, peer="eager", host_s=1.45e-5),
        row(backend=None, peer="eager", host_s=1.25e-4, **{"pass": "fwd+bwd"}),
        row(op="softmax", host_s=None),
    ]
    for words in (tables.ENGLISH, tables.CHINESE):
        text = tables.render(rows, words)
        assert words.host in text and "| `rms_norm` | **14 / 120** | 14 / 125 | – | – |" in text
        assert words.host not in tables.render([row(), row(host_s=None)], words)


def test_without_gpu_results_it_says_so() -> None:
    rows = [row(device="cpu"), row(quick=True)]
    assert tables.render(rows, tables.ENGLISH) == tables.ENGLISH.nothing
    assert tables.render([], tables.CHINESE) == tables.CHINESE.nothing


def test_a_line_uses_only_the_latest_run() -> None:
    old = [row(gb_per_s=1000.0), row(backend=None, peer="liger", gb_per_s=900.0)]
    new = [row(gb_per_s=2000.0, time="2026-08-02T10:00:00+00:00")]
    torch_only = [row(gb_per_s=1.0, backend="torch", time="2026-08-03T10:00:00+00:00")]
    text = tables.render(old + new + torch_only, tables.ENGLISH)
    assert "2,000 GB/s" in text
    assert "1,000 GB/s" not in text and "900 GB/s" not in text, (
        "a line mixes a peer of an older run with a newer result"
    )
    assert "**1 GB/s**" not in text, "a run of only the torch backend replaced that of the kernel"


def test_the_short_table_has_the_first_case_and_the_folded_one_has_all() -> None:
    rows = [
        row(), row(**{"pass": "bwd"}), row(**{"pass": "fwd+bwd"}), row(case="odd", shape="16384×4095"),
        row(op="linear_cross_entropy", bound="compute", gb_per_s=None, tflop_per_s=600.0, ceiling="matmul"),
        row(op="linear_cross_entropy", gb_per_s=7.0, **{"pass": "bwd"}),
        row(op="linear_cross_entropy", bound="compute", gb_per_s=None, tflop_per_s=650.0, **{"pass": "fwd+bwd"}),
    ]  # fmt: skip
    short, folded = (tables.render(rows, tables.ENGLISH, every=every) for every in (False, True))
    assert [short.count(t) for t in ("| fwd |", "| bwd |", "| fwd+bwd |", "16384×4095")] == [1, 1, 1, 0]
    assert "650.0 TFLOP/s" in short and "600.0 TFLOP/s" not in short
    assert [folded.count(t) for t in ("| fwd |", "| bwd |", "| fwd+bwd |", "16384×4095")] == [3, 2, 2, 1]


def test_faults_and_failures_show_no_number() -> None:
    rows = [row(fault=True), row(backend=None, peer="compile", median_s=None, share=None, gb_per_s=None)]
    text = tables.render(rows, tables.ENGLISH)
    assert "| **fault** |  | – | failed | – |" in text
    assert "3,947" not in text


def test_a_yardstick_has_no_line_of_its_own() -> None:
    work = {"op": "linear_cross_entropy", "pass": "fwd+bwd", "gb_per_s": None}
    rows = [
        row(**work, bound="compute", tflop_per_s=660.0, ceiling="matmul", share=0.84, median_s=1.1e-2),
        row(**work, bound=None, backend=None, peer="four_gemms", yardstick=True, share=None, median_s=1.0e-2),
    ]
    short = tables.render(rows, tables.ENGLISH)
    assert "| **660.0 TFLOP/s** | 0.84 matmul, 0.91× four_gemms | – | – | – |" in short
    assert short.count("linear_cross_entropy") == 1


def test_a_page_without_marks_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = checkout(tmp_path, [])
    (root / "docs/benchmarks.zh.md").write_text("no marks")
    assert tables.main(["--root", str(root)]) == 2
    assert "docs/benchmarks.zh.md has no marks for the table" in capsys.readouterr().err
    with pytest.raises(BaguError, match="benchmarks"):
        tables.updated("".join(reversed(tables.marks_of("ops"))), "", "docs/benchmarks.md")


def trained(implementation: str, rate: float, **changes: Any) -> dict[str, Any]:
    """One row as `bagu bench train` records it."""
    env = {"machine": "nvidia-h200", "commit": "0123456789abcdef", "time": changes.pop("time", "2026-08-01T10:00:00")}
    made = {
        "system": "train", "implementation": implementation, "shape": "llama_1b", "tokens": 32768, "tokens_per_s": rate,
        "tflop_per_s": 500.0, "peak_bytes": 2**35, "model": {"num_layers": 22, "hidden_size": 2048}, "env": env,
    }  # fmt: skip
    return made | changes


def test_training_speed_is_relative_to_the_fastest_peer_of_the_run() -> None:
    rows = [
        trained("bagu", 1.0, time="2026-07-01T10:00:00"), trained("bagu", 75000.0, micro_batches=1),
        trained("bagu", 80000.0, micro_batches=1), trained("bagu", 70000.0, micro_batches=2),
        trained("transformers", 50000.0), trained("transformers-compile", 64000.0),
    ]  # fmt: skip
    text = train_table.render(rows, "en")
    assert "| **bagu** | **80,000** | 500.0 | 32.0 GiB | 1.25× |" in text
    assert "**bagu, 2 micro-batches** | **70,000** | 500.0 | 32.0 GiB | 1.09× |" in text
    assert "75,000" not in text and "transformers | 50,000" in text and "`012345678`" in text
    again = train_table.render([*rows, trained("bagu", 71000.0, micro_batches=2, time="2026-09-01T10:00:00")], "en")
    assert (
        "micro-batches** | **71,000** | 500.0 | 32.0 GiB | – |" in again
        and "**80,000** | 500.0 | 32.0 GiB | 1.25×" in again
    )
    assert "微批" in train_table.render(rows, "zh")
    assert "bagu bench train" in train_table.render([], "en")


def generated(implementation: str, rate: float, streams: int | None = 32, **changes: Any) -> dict[str, Any]:
    """One row as `bagu bench engine` records it."""
    env = {"commit": "a" * 40, "machine": "h200", "time": changes.pop("time", "2026-08-01T10:00:00")}
    span = {"low": 100, "high": 1024}
    engine = {"quantization": None, "invariant": False, "prefix_cache": True} | changes.pop("engine", {})
    return {
        "system": "engine", "implementation": implementation, "model": "cpu_8m", "streams": streams,
        "tokens_per_s": rate, "dtype": "float32", "engine": engine, "step_s": 0.01, "env": env,
        "case": {"requests": 256, "inputs": span, "outputs": span, "shared_prefix": 0, "prompt": 64},
    } | changes  # fmt: skip


def test_inference_speed_is_the_median_of_the_latest_run() -> None:
    rows = [
        generated("bagu", 1.0, time="2026-07-01T10:00:00"), generated("bagu", 90.0), generated("bagu", 120.0),
        generated("bagu", 100.0), generated("plain.py", 40.0), generated("plain.py", 50.0), generated("plain.py", 60.0),
        generated("bagu", 300.0, engine={"quantization": "int8"}, time="2026-08-01T11:00:00"),
        generated("bagu", 9000.0, streams=None, dtype="bfloat16"),
    ]  # fmt: skip
    text = serve_table.render(rows, "en")
    assert "| **bagu, fp32** | **100** | 10.00 ms | 2.00× |" in text
    assert "| **bagu, int8** | **300** | 10.00 ms | – |" in text, "the peer ran in another run"
    assert "256 requests, 100–1024 in, 100–1024 out | **bagu, bf16** | **9,000**" in text
    assert "路解码" in serve_table.render(rows, "zh")
    assert "bagu bench engine" in serve_table.render([], "en")


def test_speeds_of_known_text_are_apart_from_those_of_random_prompts() -> None:
    case = generated("bagu", 1.0)["case"]
    rows = [
        generated("bagu", 500.0, 1, engine={"speculative": "ngram"}, case=case | {"prompt": 512, "text": "edit"}),
        generated("bagu without drafts", 250.0, 1, case=case | {"prompt": 512, "text": "edit"}),
        generated("bagu", 700.0, 1), generated("bagu", 3.0, 1, time="2026-09-01T10:00:00"),
        generated("eager", 2.0, 1, time="2026-09-01T10:00:00"),
    ]  # fmt: skip
    text = serve_table.render(rows, "en")
    repeats = "decode, streams: 1, prompts of 512, text that repeats the prompt"
    assert f"{repeats} | **bagu, fp32, drafts** | **500** | 10.00 ms | – |" in text
    assert "decode, streams: 1, prompts of 64 | **bagu, fp32** | **700** | 10.00 ms | – |" in text
    assert "eager" not in text and "**3**" not in text, "a run that times a prompt has no decode rate to show"


def test_output_to_a_schema_has_its_own_table() -> None:
    constrained = {
        "system": "constrained", "model": "cpu_8m", "streams": 32, "ratio": 0.9876, "free_tokens_per_s": 5000.0,
        "constrained_tokens_per_s": 4938.0, "valid": 160, "outputs": 160, "env": generated("bagu", 1.0)["env"],
    }  # fmt: skip
    older = constrained | {"ratio": 0.5, "env": constrained["env"] | {"time": "2026-07-01T10:00:00"}}
    text = serve_table.render([generated("bagu", 1.0), constrained, older], "en")
    assert "| h200 | `cpu_8m`: streams: 32 | 5,000 | 4,938 | 0.988 | 160 / 160 |" in text and "0.500" not in text


def test_latencies_have_their_own_table() -> None:
    waits = {f"{p}_{name}_ms": 1.5 for p in ("p50", "p99") for name in ("ttft", "tpot")}
    server = {
        "system": "serve", "model_id": "demo", "max_concurrency": 8, "request_rate": "inf", "inputs": "32-128",
        "output_throughput": 1234.0, "server_cpu_us_per_token": 38.4, "env": generated("bagu", 1.0)["env"], **waits,
    }  # fmt: skip
    text = serve_table.render([generated("bagu", 1.0), server], "en")
    assert "| h200 | `demo`: closed loop of 8 | 1,234 | 1.5 / 1.5 ms | 1.5 / 1.5 ms | 38 µs |" in text


def scored(task: str, stage: str, score: float, **changes: Any) -> dict[str, Any]:
    """One row as `bagu demo` records it."""
    env = {"machine": "nvidia-h200", "commit": "0123456789abcdef", "time": changes.pop("time", "2026-08-01T10:00:00")}
    return {
        "system": "demo", "quick": False, "size": "large", "budget_s": 300.0, "seconds": 187.4, "parameters": 5_900_000,
        "pretrain_tokens": 19_660_800, "bits_per_byte": 1.2345, "gzip_bits_per_byte": 2.0807, "stage": stage,
        "steps": 100, "task": task, "items": 102, "score": score, "low": score - 0.04, "high": score + 0.05,
        "change": None, "change_low": None, "change_high": None, "p_value": None,
        "different": 0.96 if task == "write" else None, "env": env,
    } | changes  # fmt: skip


def test_a_demo_is_a_line_for_each_task_and_a_column_for_each_stage() -> None:
    rows = [
        scored("write", "pretrain", 0.9, time="2026-07-01T10:00:00"), scored("write", "SFT", 0.8, quick=True),
        scored("continue4", "pretrain", 0.3), scored("write", "pretrain", 0.04),
        scored("continue4", "SFT", 0.31, change_low=-0.02), scored("write", "SFT", 0.14, change_low=0.07),
        scored("write", "pretrain", 0.02, budget_s=1800.0, time="2026-07-02T10:00:00"),
    ]  # fmt: skip
    text = demo_table.render(rows, "en")
    assert "| machine | task | items | pretrain | SFT | different |" in text
    machine = "nvidia-h200, `--minutes 5`: 5.9 M parameters, 19.7 M tokens, 1.234 bits/byte (gzip 2.081), 3 min 07 s"
    assert f"| {machine} | `continue4` | 102 | 30 % (26–35) | 31 % (27–36) | – |" in text
    assert "|  | `write` | 102 | 4 % (0–9) | **14 % (10–19)** | 96 % |" in text  # bold: the change is above 0
    assert "90 %" not in text and "80 %" not in text, "an older or a quick demo is shown"
    assert "| nvidia-h200, `--minutes 30`: " in text, "a demo with another limit is not shown"
    assert "3 分 07 秒" in demo_table.render(rows, "zh")
    assert "--demo" in demo_table.render([], "en")


def test_the_record_of_a_demo_is_added_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, demo = checkout(tmp_path / "checkout", []), tmp_path / "demo"
    assert tables.main(["--demo", str(demo), "--root", str(root)]) == 2
    assert "record.jsonl does not exist" in capsys.readouterr().err
    demo.mkdir()
    (demo / "record.jsonl").write_text(json.dumps(scored("write", "SFT", 0.14)) + "\n")
    assert tables.main(["--demo", str(demo), "--root", str(root)]) == 0
    assert "14 % (10–19)" in (root / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert (root / "benchmarks/results/demo/nvidia-h200.jsonl").exists()
    assert tables.main(["--demo", str(demo), "--root", str(root)]) == 2
    assert "has the record" in capsys.readouterr().err


def test_the_documents_of_this_checkout_are_up_to_date() -> None:
    assert tables.main(["--check", "--root", str(Path(__file__).parents[2])]) == 0


def stream(implementation: str, rate: float, prompt: float, time: str, **changes: Any) -> dict[str, Any]:
    return {
        "system": "engine", "model": "smollm_135m", "implementation": implementation, "streams": 1, "dtype": "float32",
        "tokens_per_s": rate, "prompt_tokens_per_s": prompt, "engine": {"quantization": "int8"},
        "env": {"machine": "a", "time": time},
    } | changes  # fmt: skip


def test_formats_have_size_quality_and_speed_beside_llama_cpp() -> None:
    quality = [
        {"format": name, "loss_bits_per_byte": loss, "continue4_percent": 40.0}
        for name, loss in (("fp32", 1.5), ("int4", 1.53))
    ]
    rows = [
        stream("bagu", 1.0, 1.0, "1"), stream("bagu", 90.0, 300.0, "2"),
        stream("llama.cpp", 100.0, 200.0, "2", gguf_type="q8_0"), stream("llama.cpp", 5.0, 5.0, "1", gguf_type="q8_0"),
    ]  # fmt: skip
    text = formats_table.render(rows, quality)
    assert "| int4 | 4.25 | 85 MB | +0.0300 | 40.0 % |" in text  # 106.2 M weights of 4.25 bits, 28.3 M of 8
    assert "| int8 | 8 | 134 MB | – | – |" in text
    assert "| a | int8 | 90 | 300 | Q8_0 | 100 | 200 | 0.90× | 1.50× |" in text, "both of the latest run"
    assert formats_table.NO_SPEED in formats_table.render([], quality)
    assert "continue4" in text and "continue4" not in formats_table.render(rows, [])


def lab_result(rows: list[dict[str, Any]], time: str, machine: str = "a") -> dict[str, Any]:
    return {"rows": rows, "machine": machine, "environment": {"time": time}}


def test_quantization_has_errors_by_scale_and_outliers_and_speeds() -> None:
    errors = [
        {"weights": "Gaussian", "format": "int8", "scale_per": sharing, "output_error_percent": error + seed,
         "predicted_error_percent": error}
        for sharing, error in (("tensor", 3.0), ("row", 2.0), ("group", 1.0)) for seed in (0.0, 0.5)
    ]  # fmt: skip
    products = [
        {"part": "error", "method": method, "outlier_percent": 1.0, "error_percent": error,
         "predicted_error_percent": 2.0}
        for method, error in (("plain", 5.0), ("smooth", 2.0), ("rotate", 1.0))
    ] + [{"part": "speed", "method": "int8", "size": 4096, "time_us": 98.0, "rate_top_per_s": 1402.4, "speedup": 1.8,
          "speedup_low": 1.7, "speedup_high": 1.9}]  # fmt: skip
    results = {
        "quantization_error": [
            lab_result(errors, "2026-08-02T10:00:00+00:00"),
            lab_result([], "2026-08-01T10:00:00+00:00"),
        ],
        "int8_matmul": [lab_result(products, "1", "b"), lab_result(products, "1", "c")],
    }
    text = quantization_table.render(results)
    assert "| Gaussian | int8 | 3.25 (3.00–3.50) | 2.25 (2.00–2.50) | 1.25 (1.00–1.50) | 3.00 / 2.00 / 1.00 |" in text
    assert "| 1 % | 5.00 (5.00–5.00), 2.00 | 2.00 (2.00–2.00), 2.00 | 1.00 (1.00–1.00), 2.00 |" in text
    assert all(f"| {machine} | int8 | 4096³ | 98 | 1,402.40 | 1.80× (1.70–1.90) |" in text for machine in "bc")
    assert "on a, 2026-08-02." in text
    assert quantization_table.render({}) == quantization_table.NOTHING


def test_the_chart_compares_with_the_fastest_peer() -> None:
    from benchmarks.tools.chart import ratios

    def row(backend: str | None, peer: str | None, seconds: float, step: str = "fwd") -> dict[str, Any]:
        common = {
            "op": "softmax",
            "case": "a",
            "device": "cuda:0",
            "quick": False,
            "fault": False,
            "env": {"time": "1"},
        }
        return {**common, "backend": backend, "peer": peer, "median_s": seconds, "pass": step}

    forward = [row("triton", None, 2.0), row("torch", None, 1.0), row(None, "eager", 6.0), row(None, "compile", 4.0)]
    assert ratios(forward) == {"softmax": [2.0]}
    both = [
        row("triton", None, 4.0, "fwd+bwd"),
        row(None, "eager", 2.0, "fwd+bwd"),
        row(None, "four_gemms", 1.0, "fwd+bwd"),
    ]
    assert ratios(forward + both) == {"softmax": [0.5]}
