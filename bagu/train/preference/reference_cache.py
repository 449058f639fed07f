"""Reference log-probabilities of preferences, computed once and kept on disk.

DPO needs the reference only for the sum over each answer, which does not change during a run: with the cache no second
model is in memory. They are computed in the batches in which the first epoch uses them, so that on a CPU the first loss
is exactly that of a reference computed with the step. The key covers the initial weights, the data and the batches: a
resumed run finds its file, and another run does not.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from bagu.data.loader import DataConfig
from bagu.data.preference_batch import batches_of
from bagu.data.preference_set import PreferenceSet
from bagu.errors import BaguError
from bagu.machine.terminal import Terminal
from bagu.nn.digest import digest_of
from bagu.nn.lora import has_lora, lora_state
from bagu.nn.model import Transformer
from bagu.runs.plain_progress import plain_progress
from bagu.train.rl.logprobs import segment_sums
from bagu.train.rl.reference import Reference


def model_digest(model: Transformer) -> str:
    """A hash of the weights without LoRA, the dtype, and the kind of device, whose kernels round in their own way."""
    pairs = lora_state(model)
    weights = {n: t for n, t in model.state_dict().items() if n not in pairs}
    return f"{digest_of(weights)} {next(model.parameters()).device.type}"


def with_reference(
    found: PreferenceSet, rows: Sequence[np.ndarray], model: Transformer, digest: str, config: DataConfig, folder: Path
) -> PreferenceSet:
    """The set with the log-probability of each answer in `rows` under `model`, which has its initial weights.

    A row has the units of one batch. `digest` is `model_digest(model)`. Read from `folder` if computed before.
    """
    documents = [found.units[units].ravel().tolist() for units in rows]
    facts = {
        "format": 1,
        "model": digest,
        "context": config.context,
        "rows": config.rows,
        "batches": hashlib.sha256(json.dumps(documents).encode()).hexdigest(),
        "tokens": _tokens_digest(found),
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    path = folder / f"{key}.safetensors"
    values = _read(path, found.store.num_documents)
    if values is None:
        values = _computed(found, rows, model, config)
        _write(path, values)
    return replace(found, reference=values)


def _tokens_digest(found: PreferenceSet) -> str:
    mask = found.store.loss_mask
    assert mask is not None
    digest = hashlib.sha256(np.ascontiguousarray(found.store.flat).data)
    digest.update(np.ascontiguousarray(mask).data)
    digest.update(np.ascontiguousarray(found.store.offsets).data)
    return digest.hexdigest()


def _computed(found: PreferenceSet, rows: Sequence[np.ndarray], model: Transformer, config: DataConfig) -> np.ndarray:
    """One forward for each row; documents that are in no row have NaN."""
    reference = Reference(model, shared=has_lora(model))
    device = next(model.parameters()).device
    values = np.full(found.store.num_documents, np.nan, np.float32)
    console = Terminal(stderr=True)
    for units in plain_progress(rows, "batches", console, prefix=f"reference of {found.name!r}: "):
        (batch,) = batches_of([(found, units)], config)
        sums = segment_sums(
            reference.logprobs(batch.batch.to(device)), batch.batch.cu_seqlens.to(device), batch.num_sequences
        )
        values[found.units[units].ravel()] = sums.float().cpu().numpy()
    return values


def _read(path: Path, documents: int) -> np.ndarray | None:
    """The stored values; None if there are none, or if the file is damaged."""
    try:
        values = safetensors.numpy.load_file(path)["logprobs"]
    except (FileNotFoundError, safetensors.SafetensorError, KeyError):
        return None
    return values if values.shape == (documents,) else None


def _write(path: Path, values: np.ndarray) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as scratch:
            draft = Path(scratch, path.name)
            with draft.open("wb") as file:
                file.write(safetensors.numpy.save({"logprobs": values}))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
    except OSError as error:
        raise BaguError(
            f"cannot write the reference log-probabilities to {path.parent}: {error}",
            hint="free some disk space, set BAGU_CACHE, or use --set objective.reference=live",
        ) from error
