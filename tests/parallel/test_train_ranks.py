"""`bagu train` over ranks: the whole command with a kill in the middle, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_bagu

from bagu import config as configs
from bagu.errors import BaguError
from bagu.parallel.mesh import MeshConfig
from bagu.parallel.sizes import Sizes
from bagu.parallel.supervise import Job, Start
from bagu.recipes import ranks
from bagu.recipes.catalogue import recipe
from bagu.recipes.command import train_main
from bagu.recipes.models import load_model
from bagu.recipes.verbs import TrainOptions
from bagu.runs.folder import RunFolder

SMALL = {
    "tokenizer.vocab_size": 300, "model.vocab_size": 300, "model.hidden_size": 32, "model.num_layers": 2,
    "model.num_heads": 2, "model.num_kv_heads": 1, "model.head_dim": 16, "model.intermediate_size": 64,
    "model.max_len": 32, "data.context": 32, "data.rows": 1, "data.micro_batches": 4, "train.eval_every": "null",
    "train.sample_every": "null", "dtype": "fp32", "dedup": "null", "data.packing": "joined",
}  # fmt: skip


def flags(**changes: Any) -> list[str]:
    settings = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], limit: float = 240) -> Any:
    """The first true value of `condition`; fails if the process ends before."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if found := condition():
            return found
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    raise TimeoutError


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def beat_of(folder: Path, rank: int, other: int = 0) -> dict[str, Any] | None:
    """The last heartbeat of a rank whose process is not `other`."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"bagu-ranks-*/rank-{rank}.json")]
    return next((beat for beat in found if beat["pid"] != other), None)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    """Two ranks, ZeRO-3. Rank 1 is killed after a checkpoint; the job goes on by itself; Ctrl-C ends it, saved."""
    data, out = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    (data / "a.txt").write_text("\n\n".join(f"{i} and {i * i} are {i + i * i}. " * 5 for i in range(300)))
    command = [
        sys.executable, "-m", "bagu", "train", str(data), *flags(train__steps=1000000, train__save_every=5),
        "--out", str(out), "--nproc", "2", "--mesh", "shard=2",
    ]  # fmt: skip
    environ = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: list(out.glob("checkpoints/step-*")), job)
        victim = wait_for(lambda: beat_of(tmp_path, 1), job)["pid"]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: [e for e in rows(out / "events.jsonl") if e["kind"] == "resume"], job)
        (resumed,) = [e for e in rows(out / "events.jsonl") if e["kind"] == "resume"]
        wait_for(
            lambda: rows(out / "metrics.jsonl")[-1:] and rows(out / "metrics.jsonl")[-1]["step"] > resumed["step"], job
        )
        job.send_signal(signal.SIGINT)
        said = job.communicate(timeout=240)[1]
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 130, said
    assert "rank 1 (SIGKILL) was killed: starting again from the last checkpoint (1 of 3)" in said
    assert "Traceback" not in said
    steps = [row["step"] for row in rows(out / "metrics.jsonl")]
    assert steps == list(range(len(steps))), "every step once, in order"
    assert resumed["step"] % 5 == 0
    assert list(out.glob("checkpoints/step-*/model-00001-of-00002.safetensors"))
    assert (out / "model" / "config.json").exists()


@pytest.mark.slow
def test_a_divided_model_is_loaded_by_parts_evaluated_and_exported(tmp_path: Path) -> None:
    """A model of tp=2, then adapters of it (`--from`) over pp=2: the held-out losses and weights of one process."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("\n\n".join(f"{i} and {i * i} are {i + i * i}. " * 5 for i in range(300)))
    settings = flags(model__num_kv_heads=2, train__steps=2, train__eval_every=1, train__sample_every=2)
    rest = [
        word for pair in zip(settings[::2], settings[1::2], strict=True) if "model." not in pair[1] for word in pair
    ]
    rest = [*rest, "--set", "lora.rank=4", "--prompt", "7 and", "--from", str(tmp_path / "tp")]
    words = ["train", str(data), "--out"]
    said = tmp_path / "log"
    first = [*words, str(tmp_path / "tp"), *settings, "--prompt", "7 and", "--mesh", "tp=2"]
    assert run_bagu(2, first, said) == [0, 0], said.read_text()
    assert run_bagu(2, [*words, str(tmp_path / "pp"), *rest, "--mesh", "pp=2"], said) == [0, 0], said.read_text()
    assert run_bagu(1, [*words, str(tmp_path / "one"), *rest], said) == [0], said.read_text()
    pp, one = (rows(tmp_path / name / "metrics.jsonl") for name in ("pp", "one"))
    assert [r["val_loss_nats"] for r in pp] == pytest.approx([r["val_loss_nats"] for r in one], rel=1e-5)
    assert list(tmp_path.glob("pp/samples/*.json")) and (tmp_path / "pp" / "adapter").is_dir()
    divided, whole = (load_model(tmp_path / name).state_dict() for name in ("pp", "one"))
    assert all(torch.allclose(divided[name], whole[name], atol=1e-5) for name in whole)


def train(*settings: str, **options: Any) -> None:
    train_main(TrainOptions(settings=settings, **{"out": Path("never")} | options))


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ({"mesh": "dp=2,shard=2"}, [], "the mesh dp=2,shard=2 has 4 ranks (dp 2 x shard 2), and 1 are running"),
        ({"mesh": "dp=2", "nproc": 3}, [], "the mesh dp=2 has 2 ranks (dp 2), and 3 are running"),
        ({"mesh": "dq=2", "nproc": 2}, [], "there is no mesh dimension 'dq'"),
        ({"nproc": 0}, [], "--nproc is 0"),
        ({"nproc": 2, "max_restarts": -1}, [], "--max-restarts is -1"),
        ({"nproc": 2, "hang_timeout": 0.0}, [], "--hang-timeout is 0 s"),
        ({"nproc": 3}, ["data.micro_batches=4"], "a step has 4 micro-batches, and the mesh dp=3 divides them over 3"),
        ({"mesh": "tp=2", "nproc": 2}, ["model.num_kv_heads=1"], "tp=2 does not divide 1 KV heads"),
        ({"mesh": "pp=8", "nproc": 8}, ["model.num_layers=6"], "8 stages for 6 layers"),
        ({"mesh": "pp=2", "nproc": 2}, ["data.micro_batches=1"], "1 micro-batches for a 1f1b pipeline of 2 ranks"),
        ({"mesh": "ep=2", "nproc": 2}, [], "ep=2 with a model that has no experts"),
        ({"mesh": "cp=2", "nproc": 2}, ["model.dropout=0.1"], "cp=2 by ring with dropout"),
        ({"mesh": "cp=2", "nproc": 2}, ["model.windows=[4]"], "cp=2 by ring with a window"),
        ({"mesh": "tp=2", "nproc": 2}, ["data.rows=1", "data.context=33"], "a micro-batch has 33 tokens"),
        ({"mesh": "tp=2", "nproc": 2}, ["train.compile=true"], "compile and the mesh tp=2 do not go together"),
        ({"mesh": "dp=2", "nproc": 2}, ["train.pipeline=gpipe"], "pipeline is gpipe, and the mesh dp=2 has no pp"),
        ({"mesh": "pp=2,shard=2", "nproc": 4}, ["train.zero=3"], "pp and ZeRO stage 3 do not go together"),
        (
            {"mesh": "pp=2", "nproc": 2},
            ["train.pipeline=zero_bubble", "train.activation_checkpointing=selective"],
            "pipeline zero_bubble and activation_checkpointing selective do not go together",
        ),
        (
            {"mesh": "tp=2", "nproc": 2, "recipe": "dpo", "start": "x"},
            [],
            "objective 'dpo' and tp=2 do not go together: the loss needs whole sequences and the whole head",
        ),
        (
            {"mesh": "tp=2", "nproc": 2, "recipe": "grpo", "start": "x"},
            [],
            "'grpo' and the mesh tp=2 do not go together",
        ),
        ({"nproc": 2}, ["train.zero=2"], "zero is 2, and the mesh dp=2 has no shard dimension"),
        ({"mesh": "shard=2", "nproc": 2}, ["train.compile=true"], "compile and ZeRO stage 3 do not go together"),
        ({"nproc": 2, "recipe": "grpo", "start": "x"}, [], "objective 'grpo' and the mesh dp=2 do not go together"),
    ],
)
def test_what_does_not_go_together_is_refused_before_ranks_start(
    options: dict[str, Any], settings: list[str], words: str
) -> None:
    with pytest.raises(BaguError) as error:
        train(*settings, **options)
    assert words in str(error.value)


def test_a_step_of_one_micro_batch_is_divided_over_the_ranks_with_the_same_rows() -> None:
    """Not where the user says how a step is divided: that is refused above."""
    run = configs.override(recipe("small"), ["data.rows=8", "data.micro_batches=1"])
    asked = TrainOptions(mesh="dp=2,shard=2", nproc=4, max_restarts=0, hang_timeout=1.0)
    divided = configs.override(run, ranks.mesh_settings(run, asked, None, divide=True))
    assert (divided.data.micro_batches, divided.data.rows) == (4, 2)
    assert divided.train.mesh.size("data") == 4
    stages = TrainOptions(mesh="dp=2,pp=2", nproc=4, max_restarts=0, hang_timeout=1.0)  # two for each pipeline
    divided = configs.override(run, ranks.mesh_settings(run, stages, None, divide=True))
    assert (divided.data.micro_batches, divided.data.rows) == (4, 2)
    kept = configs.override(run, ["data.micro_batches=8"])
    assert not [x for x in ranks.mesh_settings(kept, asked, None, divide=True) if x.startswith("data.")]
    assert not [x for x in ranks.mesh_settings(run, asked, None, divide=False) if x.startswith("data.")]


def test_starts_that_make_no_checkpoint_go_on_with_fewer_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of each start, without processes: the run is resumed, and after two starts in vain it is smaller."""
    out, said, starts = tmp_path / "run", list[str](), list[Start]()
    run = configs.override(recipe("small"), ["data.micro_batches=4", "train.mesh.dp=4"])

    def run_job(job: Job, say: Callable[[str], None]) -> int:
        starts.append(job.plan(0))
        RunFolder.create(out, run).close()
        starts.extend(job.plan(attempt) for attempt in (1, 2))
        (out / "checkpoints" / "step-000000005").mkdir(parents=True)
        starts.append(job.plan(3))
        return 0

    monkeypatch.setattr(ranks, "supervise", run_job)
    options = TrainOptions(out=out, nproc=4, max_restarts=3, hang_timeout=1)
    assert ranks.start_ranks(run, options, lambda mesh: ["train", "DATA", "--mesh", str(mesh)], said.append) == 0
    assert [start.ranks for start in starts] == [4, 4, 2, 4], "all again after a checkpoint"
    assert starts[0].command[-4:] == ["train", "DATA", "--mesh", "dp=4"]
    assert starts[2].command[-6:] == ["train", "--resume", "--out", str(out), "--mesh", "dp=2"]
    assert said == [
        "the last two starts made no progress: going on with 2 instead of 4 ranks",
        "a start with 2 ranks made progress: going on with 4",
    ]


def test_a_smaller_run_tries_all_ranks_again_and_waits_longer_each_time() -> None:
    sizes = Sizes(MeshConfig(dp=4), 4)
    assert [sizes.next(0).ranks for _ in range(3)] == [4, 4, 2] and not sizes.may_grow(1) and sizes.may_grow(2)
    assert [sizes.next(2).ranks for _ in range(3)] == [4, 4, 2] and not sizes.may_grow(5) and sizes.may_grow(6)
