"""lm-evaluation-harness runs tasks on bagu's model: the same scores as `bagu eval`, and the harness's own definitions
for whole texts and for generation."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from bagu.eval.files import read_task
from bagu.eval.score import evaluate
from bagu.recipes.eval_models import model_of
from bagu.recipes.lm_eval import BaguLM
from bagu.recipes.models import save_model
from bagu.recipes.verbs import EvalOptions
from tests.eval.real_model import naive_logprobs, real_model, tokenizer, transformer

COLOURS = ["red", "lazy red", "quick brown", "the colour of a dog"]
ROWS = [
    {
        "thing": f"{'quick ' * (i % 5)}fox {i}", "colours": [f"{c} {i % 7}" for c in COLOURS], "label": i % 4,
        "text": f"the fox {i} jumps over the lazy dog. " * (1 + 12 * (i % 3 == 0)),  # some are longer than the model
    }
    for i in range(40)
]  # fmt: skip
CHOICE = """
name = "colours"
kind = "choice"
data = "rows.jsonl"
prompt = "question: which colour has the {{ thing }}? answer:"
choices = "{{ colours }}"
answer = "{{ label }}"
normalization = "characters"
"""
GENERATION = """
name = "written"
kind = "generation"
data = "rows.jsonl"
prompt = "question: which colour has the {{ thing }}? answer:"
answer = "{{ colours[label] }}"
max_tokens = 12
stop = ["."]
"""
SHARED = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
num_fewshot: 0
"""
TASKS = {
    "colours": """
task: colours
output_type: multiple_choice
doc_to_text: "question: which colour has the {{ thing }}? answer:"
doc_to_choice: "{{ colours }}"
doc_to_target: "{{ label }}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "written": """
task: written
output_type: generate_until
doc_to_text: "question: which colour has the {{ thing }}? answer:"
doc_to_target: "{{ colours[label] }}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "rolling": """
task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{ text }}"
metric_list: [{metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a data file, and the same tasks in the files of both programs."""
    made = tmp_path_factory.mktemp("peer")
    save_model(transformer(), tokenizer(), made / "model")
    tokenizer().save(made / "model")
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in (("colours", CHOICE), ("written", GENERATION)):
        (made / f"{name}.toml").write_text(text)
    (made / "tasks").mkdir()
    for name, text in TASKS.items():
        (made / f"tasks/{name}.yaml").write_text(SHARED.format(data=made / "rows.jsonl") + text)
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, Any]:
    """The scores and the samples of the harness's command line."""
    command = [
        sys.executable, "-m", "bagu.recipes.lm_eval", "run", "--model", "bagu",
        "--model_args", f"path={folder / 'model'},dtype=fp32,invariant=True", "--tasks", ",".join(TASKS),
        "--include_path", str(folder / "tasks"), "--output_path", str(folder / "out"), "--log_samples",
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (results,) = (folder / "out").rglob("results_*.json")
    found = {"results": json.loads(results.read_text())["results"]}
    for name in TASKS:
        (samples,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
        found[name] = sorted(rows, key=lambda row: row["doc_id"])
    return found


def ours(folder: Path, name: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The metrics and the items of bagu's own runner."""
    model, _ = model_of(EvalOptions(model=str(folder / "model"), tasks=(), dtype="fp32", invariant=True))
    result = evaluate(model, read_task(folder / f"{name}.toml"), out=folder / "ours")
    rows = [json.loads(line) for line in (folder / f"ours/{name}/items.jsonl").read_text().splitlines()][1:]
    return {metric: value.mean for metric, value in result.metrics.items()}, rows


def test_choices_have_the_log_likelihoods_and_accuracies_of_bagu_eval(folder: Path, theirs: dict[str, Any]) -> None:
    metrics, rows = ours(folder, "colours")
    assert len(rows) == len(theirs["colours"]) == len(ROWS)
    for row, sample in zip(rows, theirs["colours"], strict=True):
        found = [float(answer[0][0]) for answer in sample["resps"]]
        assert found == pytest.approx(row["loglikelihood"], rel=0, abs=1e-6)
    results = theirs["results"]["colours"]
    assert results["acc,none"] == metrics["accuracy"]
    assert results["acc_norm,none"] == metrics["accuracy_characters"]
    assert 0 < results["acc,none"] < 1


def test_generation_has_the_answers_of_bagu_eval(folder: Path, theirs: dict[str, Any]) -> None:
    metrics, rows = ours(folder, "written")
    assert [row["answers"] for row in rows] == [sample["resps"][0] for sample in theirs["written"]]
    assert theirs["results"]["written"]["exact_match,none"] == metrics["accuracy"]


def test_whole_texts_are_scored_after_the_end_of_text_token(folder: Path, theirs: dict[str, Any]) -> None:
    """Against one forward per window, in fp64 after the logits: a sum of n fp32 logprobs, each within a few ulps."""
    model = real_model()
    for row, sample in zip(ROWS, theirs["rolling"], strict=True):
        ids = [tokenizer().eos_id, *tokenizer().encode(row["text"])]
        if len(ids) > model.max_len:
            continue
        values = naive_logprobs(model, ids, 1)
        bound = 64 * 2.0**-23 * sum(1 + abs(v) for v in values)
        assert float(sample["resps"][0][0]) == pytest.approx(math.fsum(values), rel=0, abs=bound)
    assert any(len(tokenizer().encode(row["text"])) > model.max_len for row in ROWS)
    nats = -sum(float(sample["resps"][0][0]) for sample in theirs["rolling"])
    size = sum(len(row["text"].encode()) for row in ROWS)
    assert theirs["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(nats / math.log(2) / size)


def test_greedy_continuations_are_marked(folder: Path) -> None:
    lm = BaguLM(str(folder / "model"), dtype="fp32", invariant=True, batch_size=1)
    prompts = [f"the quick brown fox {word}" for word in ("red", "lazy", "dog", "jumps", "over", "add", "return")]
    settings = {"until": [], "max_gen_toks": 1, "do_sample": False}
    texts = lm.generate_until([Asked(prompt, settings) for prompt in prompts])
    kept = [(p, t) for p, t in zip(prompts, texts, strict=True) if added(lm, p, t) == 1]  # one token also when read
    assert kept
    assert all(greedy for _, greedy in lm.loglikelihood([Asked(*pair) for pair in kept]))
    assert not any(greedy for _, greedy in lm.loglikelihood([Asked(p, t + " zzz") for p, t in kept]))


def added(lm: BaguLM, prompt: str, text: str) -> int:
    return len(lm.model.encode(prompt + text)) - len(lm.model.encode(prompt))


def test_chats_are_encoded_with_control_tokens(folder: Path) -> None:
    lm = BaguLM(str(folder / "model"))
    chat = [{"role": "user", "content": "which colour?"}]
    text = lm.apply_chat_template(chat)
    assert lm.model.encode(text) == lm.model.encode_chat(chat)


def test_a_context_that_is_too_long_is_cut_from_the_left(folder: Path) -> None:
    lm = BaguLM(str(folder / "model"), dtype="fp32", invariant=True)
    ids, start = lm._pair("red" + " red" * 300, " dog")
    assert len(ids) == lm.model.max_len and ids[start:] == lm.model.encode(" dog")


def test_the_harness_finds_the_model_by_its_entry_point() -> None:
    """Versions after 0.4.13 read the group; up to it, `python -m bagu.recipes.lm_eval` registers the model."""
    (found,) = entry_points(group="lm_eval.models", name="bagu")
    assert found.load() is BaguLM


class Asked:
    """A request of the harness: all that a model reads of one."""

    def __init__(self, *args: Any) -> None:
        self.args = args
