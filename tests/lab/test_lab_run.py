"""Every lab runs, decides, writes and plots; errors are reported."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from rich.console import Console

from bagu.errors import BaguError, UnknownName
from bagu.lab import catalogue, run
from bagu.lab.core import SCHEMA, Kind, Lab, Result, Row, Setting, Verdict
from bagu.lab.listing import list_labs
from bagu.lab.report import write_report
from bagu.lab.run import run_labs
from bagu.machine.device import this_machine
from tests.lab import (
    test_dpo_reward_model,
    test_parallel_labs,
    test_ppo_grpo,
    test_quantization_error,
    test_quantization_quality,
    test_reward_hacking,
    test_rollout_parity,
    test_tensor_parallel_lab,
)

# Verdicts that are valid on any machine. Other labs may have any verdict: `fusion` depends on speed.
EXPECTED: dict[str, set[str]] = {
    "batchnorm_layernorm": {"holds only where"},
    "numpy_lists": {"did not hold", "holds only where"},  # contiguity is never the largest factor at 1,000 elements
    "safe_softmax": {"did not hold"},
}


# Rows that are known on any machine.
ROWS: dict[str, dict[str, list[int]]] = {
    "kv_cache": {"cache_bytes": [n * 4 * 2 * 2 * 64 * 4 for n in (64, 256, 512)]},
}
CHECKS: dict[str, Callable[[Sequence[Row]], None]] = {  # of the rows of one lab
    "dpo_reward_model": test_dpo_reward_model.check_rows,
    "gradient_accumulation": test_parallel_labs.check_accumulation_rows,
    "invariance_cost": test_parallel_labs.check_invariance_rows,
    "ppo_grpo": test_ppo_grpo.check_rows,
    "quantization_error": test_quantization_error.check_rows,
    "quantization_quality": test_quantization_quality.check_rows,
    "recomputation": test_parallel_labs.check_recomputation_rows,
    "reward_hacking": test_reward_hacking.check_rows,
    "ring_all_reduce": test_parallel_labs.check_ring_rows,
    "rollout_parity": test_rollout_parity.check_rows,
    "tensor_parallel": test_tensor_parallel_lab.check_rows,
    "zero_stages": test_parallel_labs.check_zero_rows,
}
# Labs of 2 to 9 s of CPU time, which run in `make test-full`, and the tests that run what they measure in `make test`.
LONG = {
    "attention_complexity": "test_serving_labs.py, where all its ways run",
    "attention_kinds": "test_lab_attention_kinds.py, nn/test_model.py",
    "attention_sinks": "test_context_labs.py, where its mask is the op's window",
    "autoscaling": "serve/test_replica_scale.py, with the same scaler",
    "batch_invariance": "test_serving_labs.py, ops/test_invariant.py, serve/test_parity.py",
    "batch_noise": "test_training_claims.py, test_lab_attention_kinds.py",
    "block_sparse": "test_context_labs.py, nn/test_model.py, ops (block_attention)",
    "chunk_size": "test_chunk_size_lab.py",
    "cold_start": "test_training_claims.py, where a new engine answers",
    "constrained_decoding": "test_constrained_decoding_lab.py, serve/test_constrain.py",
    "continuous_batching": "test_serving_labs.py, where each way generates all tokens",
    "contrastive_batch": "test_claim_labs.py, recipes/test_vision_recipes.py; patch_size trains the same way",
    "decode_bandwidth": "test_decoding_labs.py",
    "dpo_reward_model": "test_dpo_reward_model.py, recipes/test_dpo.py, recipes/test_reward_model.py",
    "failover": "parallel/server/test_processes.py, with the same kills",
    "few_shot_noise": "test_few_shot_noise.py; ab_noise scores the same way",
    "finetune_or_retrieve": "test_retrieval_labs.py; rag_or_long trains the same reader",
    "flop_rules": "test_flop_rules.py, nn/test_count.py",
    "fp8_training": "test_training_claims.py, train/test_fp8.py",
    "fusion": "test_kernel_labs.py; occupancy times the same way",
    "gradient_accumulation": "train/test_step.py, where micro-batches equal one batch",
    "groupnorm_batch": "test_tuning_labs.py",
    "how_much_changes": "test_training_claims.py; reward_hacking and dpo_reward_model train the same way",
    "implicit_gemm": "test_kernel_labs.py, ops (conv2d)",
    "invariance_cost": "ops/test_invariant.py",
    "kv_cache": "nn/test_dense_kv.py",
    "loss_spikes": "test_training_claims.py, train/test_stability.py",
    "lost_in_the_middle": "test_retrieval_labs.py; rag_or_long trains the same reader",
    "lr_sensitivity": "test_tuning_labs.py; batch_noise trains the same way",
    "maximize_prediction": "test_process_labs.py, process/test_recommend.py",
    "mean_embedding": "test_retrieval_labs.py, serve/test_embeddings.py",
    "mixing_forgetting": "test_mixing_forgetting.py, data/test_mix.py; contamination trains the same way",
    "norm_final_loss": "test_training_claims.py; vocab_size trains the same way",
    "normalization": "test_normalization_lab.py; ab_noise scores the same way",
    "optimizers": "test_optimizers_lab.py, train/test_optim.py",
    "packing": "test_packing_lab.py, where padded, packed and joined steps run",
    "patch_size": "test_claim_labs.py, recipes/test_vision_recipes.py, where towers of all recipes are trained",
    "pipeline_bubbles": "test_pipeline_bubbles_lab.py, parallel/test_pipeline.py",
    "positions": "test_lab_positions.py",
    "ppo_grpo": "test_ppo_grpo.py, recipes/test_ppo.py; reward_hacking trains the same way",
    "quantile_signs": "test_process_labs.py, process/test_models.py",
    "quantization_quality": "test_quantization_quality.py, serve/test_quantize.py; quantization_error",
    "queueing": "test_queueing_labs.py",
    "recomputation": "test_parallel_labs.py, train/test_step.py",
    "rope_linear": "test_training_claims.py, ops (linear_attention)",
    "server_or_all_reduce": "bench/test_wait_benches.py; most of its 50 s are waits and starts of servers",
    "swiglu": "test_training_claims.py, test_lab_attention_kinds.py",
    "trees_or_gp": "test_process_labs.py, process/test_models.py",
    "triton_targets": "ops/test_gate.py",
    "unlike_workers": "bench/test_wait_benches.py; most of its 28 s are waits",
    "vocab_size": "test_training_claims.py, nn/test_count.py",
    "window_reach": "test_context_labs.py",
    "yarn": "test_context_labs.py, test_lab_positions.py",
    "zero_stages": "test_parallel_labs.py, parallel/test_traffic.py, parallel/test_equality.py",
}
QUICKEST = ["batch_latency", "safe_softmax", "tensor_parallel"]


def run_quick(names: list[str], out: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run_labs(names, out=out, quick=True, console=Console(file=io.StringIO())) == 0


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a run without names, where the catalogue has a few labs only: all would take minutes."""
    folder = tmp_path_factory.mktemp("labs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "names", lambda: QUICKEST)
        run_quick([], folder)
    return folder


def runnable() -> list[Any]:
    """The labs that run on this machine."""
    names = [name for name in catalogue.names() if torch.cuda.is_available() or not catalogue.load(name).needs_gpu]
    return [
        pytest.param(name, marks=[pytest.mark.slow] if name in LONG or name in SECONDS else [], id=name)
        for name in names
    ]


def check_pair(name: str, en: str, zh: str) -> None:
    """A text is there in both languages or in neither, and each in its own."""
    assert bool(en) == bool(zh), name
    assert not any("\u4e00" <= letter <= "\u9fff" for letter in en), (name, en)
    assert not zh or any("\u4e00" <= letter <= "\u9fff" for letter in zh), (name, zh)


def test_without_names_every_runnable_lab_leaves_a_result(out: Path) -> None:
    assert sorted(folder.name for folder in (out / this_machine().name).iterdir()) == QUICKEST


# a quick run of these takes 3 s or more
SECONDS = {
    "autotuning", "feature_scaling", "flash_attention", "jit_cost", "kl_estimators", "memory_by_formula", "numpy_lists",
    "paging", "prefix_cache", "prenorm_postnorm", "reward_hacking", "rollout_parity", "speculation", "triton_auto",
    "triton_debug",
}  # fmt: skip


# Drawing the figure again as a bitmap takes a fifth of the time of a quick lab. These have it in `make test`: bars,
# lines, areas, layers and a grid of percentages; the labs that are slow, and by the test below all others, have it too.
BITMAPS = {*QUICKEST, "kv_kinds", "layout_scaling", "what_limits"}


def has_bitmap(name: str) -> bool:
    return name in BITMAPS or name in LONG or name in SECONDS


def is_bitmap(file: Path) -> bool:
    return file.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def no_bitmap(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which plots are SVG files alone."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    save = figure.savefig

    def without(self: Any, path: Path, **how: Any) -> None:
        if path.suffix != ".png":
            save(self, path, **how)

    return lambda: monkeypatch.setattr(figure, "savefig", without)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", runnable())
def test_a_lab_runs_and_decides(tmp_path: Path, name: str, no_bitmap: Callable[[], None]) -> None:
    if not has_bitmap(name):
        no_bitmap()
    run_quick([name], tmp_path)
    folder = tmp_path / this_machine().name / name
    assert json.loads((folder / "result.json").read_text(encoding="utf-8"))["schema"] == SCHEMA
    result = Result.read(folder / "result.json")
    assert result.lab == catalogue.load(name).record()
    assert result.rows
    for key, known in ROWS.get(name, {}).items():
        assert [row[key] for row in result.rows] == known
    CHECKS.get(name, lambda rows: None)(result.rows)
    assert result.quick
    assert result.environment["torch"]
    lab = catalogue.load(name)
    assert result.verdict == run.judged(lab, result.rows, quick=True)  # from the stored rows only
    if lab.evidence in ("training", "model"):  # a few steps decide nothing, and the size is said
        assert result.verdict.kind == "not decided"
        assert "steps" in result.verdict.size and "parameters" in result.verdict.size
    assert result.code == catalogue.code_digest(name)
    texts = {**vars(result.verdict), **vars(result.lab)}
    assert not [key for key, text in texts.items() if "nan" in str(text).split()], "no number that is missing is said"
    for key in (key.removesuffix("_en") for key in texts if key.endswith("_en")):
        check_pair(key, texts[f"{key}_en"], texts[f"{key}_zh"])
    assert result.verdict.kind in EXPECTED.get(name, set(get_args(Kind)))
    assert is_bitmap(folder / "plot.png") if has_bitmap(name) else not (folder / "plot.png").exists()
    assert "<svg" in (folder / "plot.svg").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", [p for p in runnable() if not has_bitmap(p.id)])
def test_a_lab_has_a_bitmap(tmp_path: Path, name: str) -> None:
    run_quick([name], tmp_path)
    assert is_bitmap(tmp_path / this_machine().name / name / "plot.png")


@pytest.mark.parametrize("name", catalogue.names())
def test_a_record_has_text_in_both_languages(name: str) -> None:
    lab = vars(catalogue.load(name))
    assert all(lab[key] for key in ("claim_en", "title_en", "regime", "varies", "measures"))
    for key in (key.removesuffix("_en") for key in lab if key.endswith("_en")):
        if key != "title":  # a title may be a name: FlashAttention
            check_pair(key, lab[f"{key}_en"], lab[f"{key}_zh"])


def test_the_report_has_every_result(out: Path) -> None:
    page = write_report(out).read_text(encoding="utf-8")
    for name in QUICKEST:
        assert f'<article id="{name}">' in page
    assert page.count("<svg") == len(QUICKEST)


def test_an_unknown_name_gives_a_hint_and_nothing_runs(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="no lab 'safe_softmx'") as caught:
        run_labs(["numpy_lists", "safe_softmx"], out=tmp_path, quick=True)
    assert "safe_softmax" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def listed(**options: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    list_labs(console, **options)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_list_is_a_line_a_lab_by_theme() -> None:
    lines = listed()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(catalogue.sources())
    assert [line for line in lines if not line.startswith("  ")][:-1] == list(catalogue.THEMES)
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in listed(theme="gpu")[1:-1]] == [
        name for name in catalogue.sources() if catalogue.theme_of(name) == "gpu"
    ]
    with pytest.raises(UnknownName, match="no theme 'gpus'"):
        listed(theme="gpus")
    whole = "\n".join(listed(long=True, theme="numerics"))
    assert "注意力分数除以 √d" in whole and "Causal attention scores of normal q and k" in whole


def test_missing_lists_labs_without_a_full_result_of_their_code(out: Path, tmp_path: Path) -> None:
    result = Result.read(out / this_machine().name / "safe_softmax" / "result.json")
    kept = tmp_path / "machine" / "safe_softmax" / "result.json"
    kept.parent.mkdir(parents=True)
    for change, missing in (({}, True), ({"quick": False}, False), ({"quick": False, "code": "old"}, True)):
        kept.write_text(replace(result, **change).to_json(), encoding="utf-8")  # type: ignore[arg-type]
        assert any("safe_softmax" in line for line in listed(missing=tmp_path)) == missing


def test_a_run_resumes_after_a_kill(tmp_path: Path) -> None:
    said = Console(file=io.StringIO())
    assert run_labs(["safe_softmax"], out=tmp_path, quick=True, console=said) == 0
    again = Console(file=io.StringIO(), width=80)
    folder = tmp_path / this_machine().name
    (folder / "tensor_parallel").mkdir()
    (folder / "tensor_parallel" / "result.json").write_text("{")  # killed while it was written
    names = ["safe_softmax", "tensor_parallel"]
    assert run_labs(names, out=tmp_path, quick=True, resume=True, console=again) == 0
    text = again.file.getvalue()  # type: ignore[attr-defined]
    assert "Safe softmax" not in text and "Tensor or data parallelism" in text


def test_labs_run_beside_each_other_except_those_of_times(tmp_path: Path) -> None:
    said = Console(file=io.StringIO(), width=200)
    names = ["numpy_parallel", "safe_softmax", "tensor_parallel"]  # the first measures times
    assert run_labs(names, out=tmp_path, quick=True, jobs=2, console=said) == 0
    text = said.file.getvalue()  # type: ignore[attr-defined]
    last = text.index("NumPy and threads")
    assert text.index("Safe softmax") < last and text.index("Tensor or data parallelism") < last
    for name in names:
        result = Result.read(tmp_path / this_machine().name / name / "result.json")
        assert result.rows and result.verdict.sentence_en in " ".join(text.split())


@pytest.mark.parametrize(("evidence", "seeds", "quick", "kind"), [
    ("counting", 1, True, "held"), ("training", 3, False, "held"), ("training", 2, False, "not decided"),
    ("training", 3, True, "not decided"), ("model", 1, False, "held"), ("model", 1, True, "not decided"),
])  # fmt: skip
def test_numbers_that_cannot_decide_leave_the_claim_open(evidence: Any, seeds: int, quick: bool, kind: str) -> None:
    said = Verdict(kind="held", sentence_en="Yes.", sentence_zh="是。")
    lab: Lab = replace(catalogue.load("safe_softmax"), evidence=evidence, verdict=lambda rows: said)
    rows: list[Row] = [{"seed": seed, "steps": 7, "parameters": 1000} for seed in range(seeds)]
    found = run.judged(lab, rows, quick=quick)
    assert found.kind == kind and bool(found.size) == (evidence != "counting")
    assert not found.size or found.size.startswith("1,000 parameters, 7 steps")


def test_times_of_a_loaded_machine_are_marked(out: Path) -> None:
    result = Result.read(out / this_machine().name / "batch_latency" / "result.json")
    for load, marked in ((0.2, False), (9.0, True)):
        console = Console(file=io.StringIO(), width=80)
        run.show(replace(result, load=load), console)
        assert ("loaded" in console.file.getvalue()) == marked  # type: ignore[attr-defined]
    assert not replace(result, load=9.0, lab=replace(result.lab, evidence="counting")).loaded


def test_another_code_has_another_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the lab's own file and of the labs' files that it imports."""
    digests = {name: catalogue.code_digest(name) for name in ("queueing", "batch_latency", "safe_softmax")}
    read = Path.read_text
    changed = lambda path, **how: read(path, **how) + "#" * (path.name == "engine_load.py")  # noqa: E731
    monkeypatch.setattr(Path, "read_text", changed)
    catalogue.code_digest.cache_clear()
    stale = {name for name, digest in digests.items() if catalogue.code_digest(name) != digest}
    catalogue.code_digest.cache_clear()
    assert stale == {"queueing", "batch_latency"}


def unrunnable(setting: Setting) -> list:
    raise AssertionError("it must be skipped")


def test_a_lab_that_needs_a_gpu_is_skipped_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab: Lab = replace(catalogue.load("safe_softmax"), needs_gpu=True, run=unrunnable)
    monkeypatch.setattr(catalogue, "load", lambda name: lab)
    monkeypatch.setattr(run, "default_device", lambda: torch.device("cpu"))
    console = Console(file=io.StringIO(), width=80)
    assert run_labs(["safe_softmax"], out=tmp_path, quick=True, console=console) == 0
    assert "skipped" in console.file.getvalue()  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_is_not_finite_is_refused(out: Path) -> None:
    result = Result.read(out / this_machine().name / "safe_softmax" / "result.json")
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(result, rows=[{"time_s": float("nan")}]).to_json()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "schema None"),
        ('{"schema": "bagu.lab/0"}', "bagu.lab/0"),
        (f'{{"schema": "{SCHEMA}"}}', "is not a lab result"),
    ],
)
def test_a_broken_result_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(BaguError, match=says) as caught:
        Result.read(tmp_path / "result.json")
    assert str(tmp_path) in str(caught.value)


def test_plots_of_an_earlier_run_do_not_stay(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result.read(out / this_machine().name / "safe_softmax" / "result.json")
    (tmp_path / "plot.svg").write_text("old")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    reason = run.store(catalogue.load("safe_softmax"), result, tmp_path)
    assert reason is not None
    assert "matplotlib" in reason
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_it_runs_without_matplotlib(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "matplotlib":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Absent())
        from bagu.lab.report import write_report
        from bagu.lab.run import run_labs

        out = Path(sys.argv[1])
        assert run_labs(["safe_softmax"], out=out, quick=True) == 0
        print(write_report(out).read_text(encoding="utf-8"))
    """
    command = [sys.executable, "-X", "utf8", "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "no plot" in done.stdout
    assert "No plot was drawn" in done.stdout
    assert len(list(tmp_path.glob("*/safe_softmax/result.json"))) == 1
