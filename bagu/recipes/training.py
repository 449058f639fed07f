"""From a `Run` to its folder: make or find the model, prepare the data, fit, leave the result where others find it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bagu import config as configs
from bagu.config import write_whole
from bagu.data.loader import evaluation_batches
from bagu.data.masked import Masking, mask_batch
from bagu.data.tokenizer import BpeTokenizer
from bagu.device import compute_dtype, named_device, named_dtype, vendor_flops
from bagu.errors import BaguError
from bagu.nn import count
from bagu.nn.init import init_weights
from bagu.nn.lora import add_lora, merge
from bagu.nn.model import Transformer
from bagu.nn.sample import generate
from bagu.observer import Observer
from bagu.progress import TrainProgress
from bagu.recipes.corpus import Corpus, Tokens, read_tokenizer, tokens_of, train_tokenizer
from bagu.recipes.models import MODEL, NATIVE, find_model, load_model, save_model
from bagu.recipes.run import Run
from bagu.run import RunFolder, RunRecorder
from bagu.train.evaluate import held_out_loss
from bagu.train.loop import FitResult, fit
from bagu.types import Batch

__all__ = ["Trained", "held_out", "train"]

DATA = "data.json"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished (or interrupted) run."""

    folder: RunFolder
    model: Transformer
    tokenizer: BpeTokenizer
    tokens: Tokens
    corpora: Mapping[str, Corpus]
    fit: FitResult


def train(
    run: Run,
    out: Path,
    *,
    resume: bool = False,
    progress: Observer | None = None,
    prompts: Sequence[str] = (),
    tokenizer: BpeTokenizer | None = None,
    corpora: Mapping[str, Corpus] | None = None,
) -> Trained:
    """Carry a run out in folder `out`. `prompts` are continued whenever `train.sample_every` says so.

    A tokenizer and corpora that are at hand save reading them again.
    """
    device = named_device(run.device)
    dtype = named_dtype(run.dtype) if run.dtype else compute_dtype(device)
    found = find_model(run.init_from) if run.init_from else None
    corpora = corpora if corpora is not None else {n: Corpus(n, c, run) for n, c in run.sources.items()}
    tokenizer = tokenizer or _tokenizer(run, found, corpora, out)
    masking = None if run.mask_rate is None else Masking.of(tokenizer, rate=run.mask_rate, seed=run.data.seed)
    model = _model(run, found, tokenizer, device, dtype)
    tokens = tokens_of(run, corpora, tokenizer, model.config.vocab_size)
    if masking is not None:
        tokens = replace(tokens, loader=tokens.loader.masked(masking))
    folder = RunFolder.create(out, run, resume=resume)  # after all that can be wrong with the input
    recorder = RunRecorder(folder, progress=progress or TrainProgress(run.train.steps, name=run.stage))
    try:
        tokenizer.save(out / "tokenizer")
        configs.save(model.config, out / NATIVE)
        facts = {"sources": tokens.facts, "loader": tokens.loader.report(run.train.steps)}
        write_whole(out / DATA, json.dumps(facts, indent=2) + "\n")
        evaluate = held_out_loss(lambda: held_out(run, tokens)) if run.train.eval_every else None
        sample = _sampler(tokenizer, prompts) if run.train.sample_every and prompts else None
        result = fit(
            run.train if sample else replace(run.train, sample_every=None), model, tokens.loader,
            folder=folder.checkpoints, resume=resume, observers=[recorder], evaluate=evaluate, sample=sample,
            identity={"tokenizer": tokenizer.fingerprint, "model": configs.fingerprint(model.config)},
            flops_per_token=count.flops(model.config, run.data.context).training, peak_flops=_peak(device, dtype),
        )  # fmt: skip
        if run.lora is not None:
            merge(model)
        save_model(model, tokenizer, out / MODEL)
    finally:
        recorder.close()
    return Trained(folder=folder, model=model, tokenizer=tokenizer, tokens=tokens, corpora=corpora, fit=result)


def _tokenizer(run: Run, found: Path | None, corpora: Mapping[str, Corpus], out: Path) -> BpeTokenizer:
    """The named one, the starting model's, the one this run trained before it was interrupted, or a new one."""
    before = out / "tokenizer"
    if run.tokenizer.path is None and found is None and before.is_dir():
        return BpeTokenizer.load(before)
    return read_tokenizer(run, found) or train_tokenizer(corpora, run.tokenizer)


def _model(
    run: Run, found: Path | None, tokenizer: BpeTokenizer, device: torch.device, dtype: torch.dtype
) -> Transformer:
    if found is not None:
        model = load_model(found, dtype=dtype, device=device)
    else:
        assert run.model is not None, "Run refuses to have neither"
        model = init_weights(Transformer(run.model, device=device, dtype=dtype), run.train.seed)
    run.check_sight(model.config)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise BaguError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, and the model's vocabulary {model.config.vocab_size}",
            hint=f"set model.vocab_size={tokenizer.vocab_size}, or use the tokenizer the model was made with",
        )
    if run.data.context > model.config.max_len:
        raise BaguError(
            f"data.context is {run.data.context}, and the model has positions for {model.config.max_len}",
            hint=f"set data.context={model.config.max_len} or less",
        )
    if run.lora is not None:
        add_lora(model, rank=run.lora.rank, alpha=run.lora.alpha, targets=run.lora.targets, seed=run.train.seed)
    return model


def held_out(run: Run, tokens: Tokens) -> Iterator[Batch]:
    """What a run is validated on: the same each time, and hidden at the same places where tokens are."""
    masking = tokens.loader.masking
    for name, store in tokens.validation.items():
        for number, batch in enumerate(evaluation_batches(store, run.data, limit=run.eval_batches)):
            yield batch if masking is None else mask_batch(batch, masking, "validation", name, number)


def _sampler(tokenizer: BpeTokenizer, prompts: Sequence[str]) -> Callable[[Transformer], list[str]]:
    """Continuations of the prompts, each shown after its prompt."""
    ids = [tokenizer.encode(p) or [tokenizer.eos_id] for p in prompts]

    def sample(model: Transformer) -> list[str]:
        room = model.config.max_len - max(map(len, ids))
        new = generate(model, ids, min(96, room), temperature=0.8, top_p=0.95, eos_id=tokenizer.eos_id)
        return [p + tokenizer.decode(n) for p, n in zip(prompts, new, strict=True)]

    return sample


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    """What MFU is a share of: the vendor's dense bf16 FLOP/s of a GPU that is known, else what a matmul gives here."""
    stated = vendor_flops(device)
    if stated is not None:
        return stated
    n, fewest = 1024 if device.type == "cpu" else 8192, float("inf")
    x = torch.randn(n, n, device=device, dtype=dtype)
    for _ in range(8):
        start = time.perf_counter()
        y = x @ x
        float(y[0, 0])  # waits for the device
        fewest = min(fewest, time.perf_counter() - start)
    return 2 * n**3 / fewest
