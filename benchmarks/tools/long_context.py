"""Attention to chosen blocks against attention to everything, both trained from nothing at equal tokens: the loss on
held-out source, and how often the model answers the questions of the task `recall`, by length and by distance.

    python -m benchmarks.tools.long_context run --out long_context.jsonl --parallel 4       # one H200: 7 arms in 6 min
    python -m benchmarks.tools.long_context run --scale blocks --arms dense:0 sparse:0 --out blocks.jsonl
    python -m benchmarks.tools.long_context run --scale trial --out trial.jsonl --arms dense:0 sparse:0  # one core
    python -m benchmarks.tools.long_context run --quick --out quick.jsonl      # every part once, in a minute
    python -m benchmarks.tools.long_context show long_context.jsonl

An arm is `dense:SEED`, `sparse:SEED` or `switch:SEED` (dense for 3/4 of the tokens, then sparse). Each is a process of
its own, which appends lines of JSON to --out as it goes; --parallel arms share the device. Arms of one seed have the
same initial weights and the same texts (recall_texts.py). An arm that has not ended at --seconds stops after its step,
is measured, and says how many tokens it saw.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bagu.data import BpeTokenizer
from bagu.eval.tasks.recall import free_items
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.nn.change import evaluating
from bagu.nn.choices import BlockChoice
from bagu.nn.config import Rope
from bagu.recipes.models import save_model
from bagu.train import OptimizerConfig, ScheduleConfig, StabilityConfig, TrainConfig, fit
from bagu.train.cross_entropy import CrossEntropy, held_out_loss
from benchmarks.tools.long_context_table import show
from benchmarks.tools.recall_texts import Planted, Texts

ARMS = ("dense:0", "sparse:0", "dense:1", "sparse:1", "dense:2", "sparse:2", "switch:0")
SWITCH_AT = 0.75  # of the steps; the learning rate falls from there on
CURVE = 64  # items of a look at recall during training


@dataclass(frozen=True, kw_only=True)
class Scale:
    vocab_size: int = 1024
    hidden: int = 512
    layers: int = 4
    heads: int = 4  # of 128 features, those of the tuned kernels; two share a key head
    ffn: int = 3072
    length: int = 8192
    blocks: BlockChoice = field(default_factory=BlockChoice)
    rows: int = 4  # texts of a micro-batch
    micro_batches: int = 1
    tokens: float = 64e6
    short: tuple[tuple[float, int], ...] = ((0.1, 1024), (0.15, 2048), (0.2, 4096))  # (share of the steps, length)
    lr: float = 0.005
    measured: tuple[tuple[int, int], ...] = ((8192, 2), (4096, 1), (2048, 1))  # (length, its items / 200)
    held_out: int = 96  # rows of `length` tokens for the loss
    looks: int = 8  # at recall during training
    others: tuple[BlockChoice, ...] = ()  # choices of blocks that a dense model is read with as well
    every: int = 1  # module of the library

    @property
    def steps(self) -> int:
        return max(8, round(self.tokens / (self.length * self.rows * self.micro_batches)))

    def model(self, attention: str) -> ModelConfig:
        dense = ModelConfig(
            vocab_size=self.vocab_size, hidden_size=self.hidden, num_layers=self.layers, num_heads=self.heads,
            num_kv_heads=self.heads // 2, head_dim=self.hidden // self.heads, intermediate_size=self.ffn,
            max_len=max(1024, self.length), positions=Rope(base=100_000.0), qk_norm=True,
        )  # fmt: skip
        return replace(dense, attention="blocks", blocks=self.blocks) if attention == "sparse" else dense


SMALL = Scale(
    vocab_size=512, hidden=128, layers=3, ffn=384, length=256, rows=1, micro_batches=8,
    blocks=BlockChoice(size=16, top=3, near=1, dense_below=32),
    tokens=1e6, short=((0.3, 64),), lr=0.02, measured=((256, 2), (128, 1)), held_out=64,
)  # fmt: skip
SCALES = {
    "full": Scale(),
    "blocks": Scale(  # as many keys in smaller blocks, and other choices for the dense model
        blocks=BlockChoice(size=32, top=32, near=16),
        others=(
            BlockChoice(),
            BlockChoice(top=32),
            BlockChoice(size=128, top=8, near=4),
            BlockChoice(size=16, top=64, near=32),
        ),
    ),
    "trial": SMALL,
    "quick": replace(SMALL, layers=2, hidden=64, ffn=128, tokens=3e4, measured=((256, 1),), looks=2, every=16),
}


class Timed(CrossEntropy):
    """Cross-entropy that ends the run at a time of day."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self.deadline = deadline

    @property
    def ended(self) -> Mapping[str, float | int] | None:
        return {"deadline": self.deadline} if time.time() > self.deadline else None


@dataclass(frozen=True)
class Question:
    ids: np.ndarray  # the prompt and the answer
    answer: int  # where the answer begins
    characters: int  # between the line with the value and the end of the prompt


def questions(texts: Texts, length: int, rounds: int) -> list[Question]:
    """Items of the task `recall` whose text has nearly `length` tokens, and at most as many. They are kept in the
    folder of the texts: to encode them takes half a minute."""
    kept = texts.folder / f"questions-{length}-{rounds}.npz"
    if not kept.is_file():
        found = _questions(texts.tokenizer, length, rounds)
        facts = np.array([(len(q.ids), q.answer, q.characters) for q in found])
        np.savez_compressed(kept, ids=np.concatenate([q.ids for q in found]), facts=facts)
    with np.load(kept) as file:
        facts, ids = file["facts"], np.split(file["ids"], np.cumsum(file["facts"][:-1, 0]))
    return [Question(own, int(answer), int(n)) for own, (_, answer, n) in zip(ids, facts, strict=True)]


def _questions(tokenizer: BpeTokenizer, length: int, rounds: int) -> list[Question]:
    size = round(2.6 * length)
    while True:
        items = [i for n in range(rounds) for i in free_items(f"recall of {length} tokens, {n}", size)]
        prompts = tokenizer.encode_batch([item.prompt for item in items])
        answers = tokenizer.encode_batch([f" {item.answer}" for item in items])
        found = [
            Question(np.array(prompt + answer), len(prompt), int(item.facts["distance"]))
            for item, prompt, answer in zip(items, prompts, answers, strict=True)
        ]
        longest = max(len(q.ids) for q in found)
        if longest <= length:
            return found
        size = int(0.99 * size * length / longest)  # one or two rounds: a round encodes megabytes


@torch.no_grad()
def answered(
    model: Transformer, asked: Sequence[Question], tokenizer: BpeTokenizer, length: int, texts: int
) -> list[int]:
    """1 for each question whose answer a greedy decoder would give: every token of it is the likeliest, and so is
    whitespace after it. One forward of prompt and answer shows the same as a decoder does."""
    device, found = model.embedding.weight.device, []
    space = [tokenizer.bytes_of(i)[:1].isspace() for i in range(tokenizer.vocab_size)]
    with evaluating(model):
        for at in range(0, len(asked), texts):
            group = asked[at : at + texts]
            sizes = [len(q.ids) for q in group]
            offsets = np.cumsum([0, *sizes])
            hidden = model(
                torch.from_numpy(np.concatenate([q.ids for q in group])).to(device),
                torch.cat([torch.arange(n) for n in sizes]).to(device),
                torch.from_numpy(offsets.astype(np.int32)).to(device), length,
            ).hidden  # fmt: skip
            rows = [
                torch.arange(begin + q.answer - 1, begin + len(q.ids)) for begin, q in zip(offsets, group, strict=False)
            ]
            best = model.logits(hidden[torch.cat(rows).to(device)]).argmax(-1).tolist()
            for q in group:
                own, best = best[: len(q.ids) - q.answer + 1], best[len(q.ids) - q.answer + 1 :]
                found.append(int(own[:-1] == q.ids[q.answer :].tolist() and space[own[-1]]))
    return found


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    seed: int
    scale: Scale
    texts: Texts
    work: Path
    out: Path
    device: torch.device
    deadline: float
    lr: float
    save: bool

    def write(self, kind: str, **facts: Any) -> None:
        row = {"kind": kind, "arm": self.name, "seed": self.seed, "at": round(time.time(), 1), **facts}
        with self.out.open("a") as file:  # one write of one line: processes append to the same file
            file.write(json.dumps(row) + "\n")

    @property
    def checkpoints(self) -> Path:
        return self.work / f"{self.name}-{self.seed}"

    def run(self) -> None:
        began, scale = time.time(), self.scale
        self.write("start", steps=scale.steps)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        attention = "dense" if self.name == "dense" else "sparse"
        model = init_weights(Transformer(scale.model(attention), device=self.device, dtype=dtype), self.seed)
        steps, keeps = scale.steps, self.name != "sparse" and self.seed == 0
        if self.name == "switch":
            shutil.copytree(self.work / f"dense-{self.seed}-at-switch", self.checkpoints)
        elif keeps:
            self._fit(model, pause_after=round(SWITCH_AT * steps), resume=False, keeps=True)
            shutil.copytree(self.checkpoints, self.work / "copied")
            (self.work / "copied").rename(self.work / f"dense-{self.seed}-at-switch")
        done, last = self._fit(model, pause_after=None, resume=keeps, keeps=keeps)
        self.write(
            "trained", steps=done, of_steps=steps, tokens=done * scale.length * scale.rows * scale.micro_batches,
            parameters=sum(p.numel() for p in model.parameters()), seconds=round(time.time() - began, 1),
            train_loss_nats=last.get("loss_nats"),
        )  # fmt: skip
        if self.save:
            save_model(model, self.texts.tokenizer, self.work / f"{self.name}-{self.seed}-model")
        self.measure(model)

    def _fit(self, model: Transformer, *, pause_after: int | None, resume: bool, keeps: bool) -> tuple[int, Any]:
        scale = self.scale
        config = TrainConfig(
            steps=scale.steps, seed=self.seed, optimizer=OptimizerConfig(kind="muon", lr=self.lr),
            schedule=ScheduleConfig(kind="wsd", warmup_steps=scale.steps // 30, decay_share=1 - SWITCH_AT),
            eval_every=max(1, scale.steps // scale.looks), keep_last=1,
            stability=StabilityConfig(spike_threshold=None),  # the loss jumps where texts become longer
        )  # fmt: skip
        asked = questions(self.texts, scale.length, 1)[:: max(1, 200 // CURVE)]

        def look(now: Transformer) -> Mapping[str, float | None]:
            right = answered(now, asked, self.texts.tokenizer, scale.length, scale.rows)
            return {"recall": sum(right) / len(right)}

        loader = Planted(
            texts=self.texts, length=scale.length, rows=scale.rows, micro_batches=scale.micro_batches, seed=self.seed,
            short=[(round(share * scale.steps), length) for share, length in scale.short],
        )  # fmt: skip
        result = fit(
            config, model, loader, folder=self.checkpoints if keeps else None, resume=resume, pause_after=pause_after,
            observers=[Curve(self)], evaluate=look, loss=Timed(self.deadline),
        )  # fmt: skip
        return result.step, result.metrics

    def measure(self, model: Transformer) -> None:
        """Loss and recall as the model was trained, and read in the other way."""
        scale, tokenizer, trained = self.scale, self.texts.tokenizer, model.config
        held = self.texts.held_out_batches(scale.length, scale.rows, scale.held_out)
        sparse = trained.attention == "blocks"
        questions_of = {length: questions(self.texts, length, rounds) for length, rounds in scale.measured}
        reads = {read: scale.model(read) for read in (("sparse", "dense") if sparse else ("dense", "sparse"))}
        if not sparse:
            reads |= {f"{c.top} of {c.size}": replace(scale.model("sparse"), blocks=c) for c in scale.others}
        for read, config in reads.items():
            other = model.with_attention(config)
            with evaluating(other):
                loss = held_out_loss(lambda: held)(other)
            self.write("loss", read=read, **loss, held_out_tokens=sum(b.num_targets for b in held))
            for length, asked in questions_of.items():
                right = answered(other, asked, tokenizer, length, scale.rows)
                self.write(
                    "recall", read=read, length=length, mean_tokens=round(np.mean([len(q.ids) for q in asked]).item()),
                    distance_characters=[q.characters for q in asked], right=right,
                )  # fmt: skip
        self.write("done")


class Curve:
    """The observer that writes every n-th step."""

    def __init__(self, arm: Arm) -> None:
        self.arm, self.every = arm, max(1, arm.scale.steps // 60)

    def on_step(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        if "recall" in metrics or (step + 1) % self.every == 0:
            names = ("loss_nats", "recall", "grad_norm", "tokens_per_s")
            self.arm.write("step", step=step + 1, **{n: metrics[n] for n in names if n in metrics})

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        if kind not in ("save", "start"):
            self.arm.write("event", event=kind, step=step, **{k: str(v) for k, v in facts.items()})

    def on_sample(self, step: int, texts: Sequence[str]) -> None:
        """There are no samples."""

    def rewind(self, step: int) -> None:
        """Rows of a resumed run follow those before it."""

    def close(self) -> None:
        """Rows are written at once."""


# --- all arms ---------------------------------------------------------------------------------------------------------


def run_all(given: argparse.Namespace) -> None:
    """Start each arm as a process, in order, --parallel at a time; a switch starts when its dense arm has ended."""
    began = time.time()
    scale = SCALES[given.scale]
    texts = Texts.make(given.work / "texts", scale.vocab_size, every=scale.every)
    for length, rounds in {(scale.length, 1), *scale.measured}:
        questions(texts, length, rounds)
    texts.held_out  # noqa: B018 - the file of its tokens is written before several processes read it
    given.out.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "kind": "about", "scale": asdict(scale), "steps": scale.steps, "lr": given.lr or scale.lr, "arms": given.arms,
        "parallel": given.parallel, "torch": torch.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else platform.processor(),
        "vocab_size": texts.tokenizer.vocab_size, "library_tokens": len(texts.tokens), "names": len(texts.names),
        "prepared_s": round(time.time() - began, 1),
    }  # fmt: skip
    with given.out.open("a") as file:
        file.write(json.dumps(about) + "\n")
    deadline = began + given.seconds
    waiting, ended = list(given.arms), set()
    running: dict[str, subprocess.Popen[bytes]] = {}
    while waiting or running:
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                ended.add(name)
                print(f"{time.time() - began:6.0f} s: {name} ended with {process.returncode}", flush=True)
        ready = [n for n in waiting if not n.startswith("switch") or n.replace("switch", "dense") in ended]
        if ready and len(running) < given.parallel:
            waiting.remove(ready[0])
            if time.time() > deadline - 20:
                print(f"{ready[0]} was not started: the time is over", flush=True)
                continue
            running[ready[0]] = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.tools.long_context", "arm", ready[0], "--deadline", str(deadline),
                 "--out", str(given.out), "--work", str(given.work), "--scale", given.scale, "--device", given.device,
                 *(["--lr", str(given.lr)] if given.lr else []), *(["--save"] if given.save else [])]
            )  # fmt: skip
            print(f"{time.time() - began:6.0f} s: {ready[0]} started", flush=True)
        elif not running and waiting and not ready:
            raise SystemExit(f"{waiting} needs the dense arm of its seed: name it before, in --arms")
        time.sleep(0.2)


def run_arm(given: argparse.Namespace) -> None:
    name, seed = given.arm.split(":")
    scale = SCALES[given.scale]
    texts = Texts.make(given.work / "texts", scale.vocab_size)
    torch.set_float32_matmul_precision("high")
    Arm(
        name=name, seed=int(seed), scale=scale, texts=texts, work=given.work, out=given.out,
        device=torch.device(given.device), deadline=given.deadline, lr=given.lr or scale.lr, save=given.save,
    ).run()  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run, arm, shown = verbs.add_parser("run"), verbs.add_parser("arm"), verbs.add_parser("show")
    shown.add_argument("file", type=Path)
    for each in (run, arm):
        each.add_argument("--out", type=Path, required=True, help="the file of JSON lines to append to")
        each.add_argument("--work", type=Path, default=Path("runs/long_context"), help="checkpoints and tokens")
        each.add_argument("--scale", choices=SCALES, default="full")
        each.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        each.add_argument("--lr", type=float)
        each.add_argument("--save", action="store_true", help="write each model, for bagu eval")
    run.add_argument("--quick", action="store_true", help="a tiny model and few steps: does every part run?")
    run.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM")
    run.add_argument("--parallel", type=int, default=1)
    run.add_argument("--seconds", type=float, default=3600.0, help="when arms stop training")
    arm.add_argument("arm")
    arm.add_argument("--deadline", type=float, required=True, help="time of day, in seconds")
    given = parser.parse_args()
    if given.verb == "show":
        show(given.file)
    elif given.verb == "arm":
        run_arm(given)
    else:
        if given.quick:
            given.scale = "quick"
        run_all(given)


if __name__ == "__main__":
    main()
