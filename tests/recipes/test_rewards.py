"""Rewards of a user's file and the built-in ones: what they score, and what becomes of a sample that cannot be."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bagu import ops
from bagu.data import DEFAULT_TEMPLATE, BpeTokenizer, ChatEncoder
from bagu.errors import BaguError
from bagu.machine.sandbox import SandboxUnavailable
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.nn.score import with_score_head
from bagu.recipes import code_rewards
from bagu.recipes.code_rewards import PythonReward
from bagu.recipes.model_reward import ModelReward
from bagu.recipes.models import load_model, save_model
from bagu.recipes.rewards import load_reward
from bagu.train.rl.reward_function import RewardFunction, Sample

FILE = """
import math, os, sys, time
from fractions import Fraction

def score(prompt, completion, facts):
    print("not part of the answer")
    match completion:
        case "raise": raise ValueError("too long\\nsecond line")
        case "exit": sys.exit(0)
        case "hang": time.sleep(1e6)
        case "spin":
            while True: pass
        case "crash": os._exit(3)
        case "nan": return math.nan
        case "inf": return -math.inf
        case "none": return None
        case "text": return "0.5"
        case "list": return [0.5]
        case "bool": return True
        case "fraction": return Fraction(1, 4)
    return len(prompt) + facts["bonus"]

def batch(prompts, completions, facts):
    if "raise" in completions: raise ValueError("no")
    if "short" in completions: return [1.0]
    return [float("nan") if c == "nan" else len(p) + f["bonus"] for p, c, f in zip(prompts, completions, facts)]

def one_argument(completion): return 1.0
def four(prompt, completion, facts, more): return 1.0
def defaults(prompt, completion, facts, scale=2.0): return scale
LIMIT = 3
"""
GENEROUS_S = 300.0  # a limit that no working call reaches, however loaded the machine is


def samples(*completions: str) -> list[Sample]:
    return [Sample(prompt="four", completion=c, facts={"bonus": 0.5}) for c in completions]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def reward(file: Path) -> RewardFunction:
    made = load_reward(f"{file}:score", default=-1.0, timeout_s=GENEROUS_S)
    yield made
    made.close()


def test_a_function_of_a_file_scores_each_sample(reward: RewardFunction, capfd: pytest.CaptureFixture[str]) -> None:
    assert reward.name == "mine.py:score"
    assert [s.reward for s in reward(samples("a", "bool", "fraction"))] == [4.5, 1.0, 0.25]
    assert all(s.fault is None for s in reward(samples("a", "b"))) and reward([]) == []


FAULTS = {
    "raise": r"raised ValueError: too long \(mine.py:8\)",
    "exit": "raised SystemExit: 0",
    "crash": "ended its process with status 3",
    "nan": "returned nan",
    "inf": "returned -inf",
    "none": "returned None",
    "text": "returned a str",
    "list": "returned a list",
}


def test_a_sample_that_cannot_be_scored_has_the_default_and_the_reason(reward: RewardFunction) -> None:
    with pytest.warns(RuntimeWarning, match="that sample has the reward -1") as warned:
        scored = reward(samples(*FAULTS, "good"))
    assert len(warned) == 1  # not one for each sample of a long run
    assert [s.reward for s in scored] == [-1.0] * len(FAULTS) + [4.5] and scored[-1].fault is None
    for found, expected in zip(scored, FAULTS.values(), strict=False):
        assert found.fault is not None
        assert re.match(expected, found.fault), found.fault


@pytest.mark.parametrize("how", ["hang", "spin"])
def test_a_hang_costs_one_sample(reward: RewardFunction, how: str) -> None:
    reward.timeout_s = 0.2  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match="took longer than 0.2 s"):
        (scored,) = reward(samples(how))
    assert (scored.reward, scored.fault) == (-1.0, "took longer than 0.2 s")
    reward.timeout_s = GENEROUS_S  # type: ignore[attr-defined]
    assert [s.reward for s in reward(samples("a"))] == [4.5]  # in a new process


def test_a_function_of_lists_is_called_once(file: Path) -> None:
    reward = load_reward(f"{file}:batch", default=-1.0, timeout_s=GENEROUS_S)
    assert [s.reward for s in reward(samples("a", "b"))] == [4.5, 4.5]
    with pytest.warns(RuntimeWarning, match="returned nan"):
        assert [s.reward for s in reward(samples("a", "nan"))] == [4.5, -1.0]
    for completion, fault in (("raise", "raised ValueError: no"), ("short", "returned 1 values for 2 samples")):
        scored = reward(samples("a", completion))
        assert [s.reward for s in scored] == [-1.0, -1.0]
        assert all(s.fault is not None and s.fault.startswith(fault) for s in scored)
    reward.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine.py:scores", "has no function 'scores'; it has: score, batch"),
        ("mine.py:LIMIT", "'LIMIT' of .*mine.py is a int, not a function"),
        ("mine.py:one_argument", r"one_argument\(completion\) cannot be called with three arguments; it takes"),
        ("mine.py:four", r"four\(prompt, completion, facts, more\) cannot be called with three arguments"),
        ("other.py:score", "there is no Python file .*other.py"),
        ("broken.py:score", "importing .*broken.py failed: SyntaxError"),
        ("raises.py", r"importing .*raises.py failed: ModuleNotFoundError: No module named 'nowhere'"),
        ("exits.py", "importing it ended the process with status 4"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_in_one_sentence(file: Path, name: str, said: str) -> None:
    (file.parent / "broken.py").write_text("def score(:")
    (file.parent / "raises.py").write_text("import nowhere")
    (file.parent / "exits.py").write_text("import os; os._exit(4)")
    with pytest.raises(BaguError, match=said):
        load_reward(str(file.parent / name))


def test_further_parameters_may_have_defaults_and_the_file_may_import_its_neighbour(file: Path) -> None:
    (file.parent / "helper.py").write_text("WEIGHT = 2.0")
    (file.parent / "near.py").write_text(
        "from helper import WEIGHT\ndef score(prompt, completion, facts): return WEIGHT"
    )
    for spec, value in ((f"{file}:defaults", 2.0), (str(file.parent / "near.py"), 2.0)):
        reward = load_reward(spec, timeout_s=GENEROUS_S)
        assert [s.reward for s in reward(samples("a"))] == [value]
        reward.close()


def test_an_unknown_reward_is_named() -> None:
    with pytest.raises(BaguError, match="there is no reward 'pythn'"):
        load_reward("pythn")


def test_the_worker_ends_with_its_parent_even_if_the_function_hangs(tmp_path: Path) -> None:
    """It writes its id to a file and hangs; then the parent is killed."""
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, time\n"
        "def score(prompt, completion, facts):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'part').write_text(str(os.getpid()))\n"
        f"    os.rename({str(tmp_path / 'part')!r}, {str(tmp_path / 'pid')!r})\n"
        "    time.sleep(1e6)\n"
    )
    script = (
        "from bagu.recipes.user_reward import UserReward\nfrom bagu.train.rl.reward_function import Sample\n"
        f"from pathlib import Path\nreward = UserReward(Path({str(tmp_path / 'mine.py')!r}), timeout_s=1e6)\n"
        "reward([Sample(prompt='', completion='')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    while not (tmp_path / "pid").exists():
        assert parent.poll() is None
        time.sleep(0.05)
    worker = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    ends = time.monotonic() + GENEROUS_S
    while _alive(worker):
        assert time.monotonic() < ends
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"  # nobody may reap it here


# --- the built-in rewards ---------------------------------------------------------------------------------------------

GOOD = "def double(x):\n    y = x + x\n    return y"
TESTED = {
    "name": "double", "args": ["x"], "docstring": "Double it.\n\n>>> double(2)\n4", "answer": GOOD,
    "doctests": [{"source": "double(2)\n", "want": "4\n"}],
}  # fmt: skip
UNTESTED = {"name": "double", "args": ["x"], "docstring": "Double it."}


def rewards(reward: RewardFunction, *completions: str, **facts: object) -> list[float]:
    return [s.reward for s in reward([Sample(prompt="", completion=c, facts=facts) for c in completions])]


def test_the_strict_reward_is_the_share_of_checks_and_pass_does_not_win_it() -> None:
    reward = load_reward("python")
    assert rewards(reward, GOOD, "def double(): pass", "def other(x): pass", "x = (", **UNTESTED) == [1.0, 0.4, 0.2, 0]
    assert rewards(reward, "def doubt(): pass", "x = 1", **UNTESTED) == [
        (1 + 4 / 6) / 5,
        0.0,
    ]  # the first letters of the name are right
    named_so = GOOD.replace("double", "doubt")  # a body counts under another name too
    assert rewards(reward, named_so, **UNTESTED) == pytest.approx([(4 + 4 / 6) / 5])
    (scored,) = reward([Sample(prompt="", completion=GOOD, facts=UNTESTED)])
    assert list(scored.parts) == ["function", "name", "statements", "arguments", "computes"]
    with pytest.raises(BaguError, match="a prompt has no fact `name`"):
        rewards(reward, GOOD)


def test_the_loose_reward_is_won_by_pass() -> None:
    reward = load_reward("python-loose")
    assert rewards(reward, "def f(): pass", "x = 1", "x = (", "", **UNTESTED) == [1.0, 0.5, 0.0, 0.0]


def test_doctests_run_in_the_sandbox() -> None:
    reward = load_reward("python")
    wrong = "def double(x):\n    y = x * x * x\n    return y"
    exits = "import sys\ndef double(x):\n    y = sys.exit(0)\n    return x + y"
    leaves = f"{GOOD}\nraise SystemExit"
    try:
        assert rewards(reward, GOOD, wrong, exits, leaves, **TESTED) == pytest.approx([1.0, 5 / 6, 5 / 6, 5 / 6])
        other = GOOD.replace("double", "doubl")  # no more than an answer of the asked name that fails the doctests
        assert rewards(reward, other, **TESTED) == pytest.approx([(4 + 5 / 6) / 6])
        # the real function does not pass its doctests on its own, so they are not asked of an answer
        assert rewards(reward, wrong, **{**TESTED, "answer": "def double(x):\n    return helper(x)"}) == [1.0]
        assert reward.name == "python"
    finally:
        reward.close()


def test_without_a_sandbox_doctests_are_left_out_and_the_name_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: object) -> None:
        raise SandboxUnavailable("no isolation here")

    monkeypatch.setattr(code_rewards, "Sandbox", none)
    reward = PythonReward()
    with pytest.warns(RuntimeWarning, match="leaves out doctests: no isolation here"):
        assert rewards(reward, GOOD, "def double(): pass", **TESTED) == [1.0, 0.4]
    assert reward.name == "python (without doctests: no sandbox)"
    assert rewards(reward, GOOD, **TESTED) == [1.0]


# --- a reward model ---------------------------------------------------------------------------------------------------

MODEL = ModelConfig(
    vocab_size=270, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
    max_len=64, init_std=0.2,
)  # fmt: skip


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and a random score head."""
    folder = tmp_path_factory.mktemp("scorer")
    model = with_score_head(init_weights(Transformer(MODEL, dtype=torch.float32), seed=0))
    assert model.score is not None
    model.score.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    save_model(model, BpeTokenizer.train(["what is"], vocab_size=270, chat_template=DEFAULT_TEMPLATE), folder)
    return folder


def test_a_reward_model_scores_the_last_token_of_each_answer(scorer: Path) -> None:
    reward = load_reward(str(scorer), default=-1.0)
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
    asked = [Sample(prompt="2 + 2?", completion=c) for c in ("4", "", "four <|end|>", "a" * 100)]
    asked.append(Sample(prompt="2 + 2?", completion="4", messages=chat))
    model, tokenizer = load_model(scorer), BpeTokenizer.load(scorer)
    assert model.score is not None
    with ops.invariant():
        found = reward(asked)
    for sample, scored in zip(asked, found, strict=True):
        messages = sample.messages or [{"role": "user", "content": sample.prompt}]
        ids = ChatEncoder(tokenizer).encode([*messages, {"role": "assistant", "content": sample.completion}]).ids
        if len(ids) > MODEL.max_len:
            assert scored.reward == -1.0 and scored.fault is not None
            assert scored.fault.startswith(f"has {len(ids)} tokens with its prompt, and the reward model takes 64")
            continue
        T = len(ids)
        with torch.no_grad(), ops.invariant():  # alone, not packed with the others: the same bits in this mode
            hidden = model(torch.tensor(ids), torch.arange(T), torch.tensor([0, T], dtype=torch.int32), T).hidden
            assert (scored.fault, scored.reward) == (None, float(model.score(hidden)[-1]))
    assert reward.name == scorer.name and reward([]) == []


@pytest.mark.parametrize("text", [False, True])
def test_a_reward_model_reads_answers_as_it_was_trained(scorer: Path, tmp_path: Path, text: bool) -> None:
    """objective.text is a setting of its run: with it, prompt and answer are plain text and not turns of a chat."""
    shutil.copytree(scorer, tmp_path / "model")
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"objective": {"kind": "reward", "text": text}}))
    tokenizer = BpeTokenizer.load(scorer)
    found = ModelReward(str(tmp_path))._tokens(Sample(prompt="2 + 2?", completion="4"))
    plain = "2 + 2?4<|endoftext|>"
    assert tokenizer.decode(found.ids) == (plain if text else "<|user|>2 + 2?<|end|><|assistant|>4<|end|>")


def test_a_model_without_a_score_head_is_refused(tmp_path: Path) -> None:
    save_model(init_weights(Transformer(MODEL, dtype=torch.float32), seed=0), None, tmp_path)
    with pytest.raises(BaguError, match="has no score head, and a reward needs one"):
        load_reward(str(tmp_path))
