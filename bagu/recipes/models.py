"""Load and save MODEL of the command line, which find.py finds.

A run writes its result to `model/`: a Hugging Face folder if a model family can represent the model, and otherwise
`bagu.json` with the weights under bagu's names. The tokenizer is in the same folder. A LoRA run also writes `adapter/`,
in PEFT's format.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from bagu import config as configs
from bagu.config.files import write_atomic
from bagu.data.gguf_tokenizer import gguf_metadata, gguf_tokenizer
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError
from bagu.machine.cache import cache_folder
from bagu.machine.hub import WeightsError, is_adapter, read_json
from bagu.nn import peft, weights
from bagu.nn.config import ModelConfig
from bagu.nn.families import family_for, family_of
from bagu.nn.gguf_file import is_gguf, read_gguf
from bagu.nn.gguf_write import save_gguf
from bagu.nn.hollow import Values, hollow
from bagu.nn.lora import merge
from bagu.nn.model import Transformer
from bagu.recipes.find import find_model
from bagu.recipes.generation import GENERATION_CONFIG, written_settings
from bagu.runs.folder import RunFolder
from bagu.train import checkpoint
from bagu.train.checkpoint.saved_tensors import SavedTensors

NATIVE = "bagu.json"


def tokenizer_folder(folder: Path) -> Path | None:
    """The tokenizer's folder for the model in `folder`: the same one, a checkpoint's run, or an adapter's base.

    None if there is no tokenizer. That of a GGUF file is written to the cache.
    """
    if is_gguf(folder):
        made = gguf_tokenizer(read_gguf(folder).metadata)
        facts = json.dumps([made.spec, made.variables, made.chat_template])
        cached = cache_folder() / "tokenizers" / f"gguf-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
        made.save(cached)
        return cached
    places = [folder]
    if _is_checkpoint(folder):
        places.append(_run_of(folder) / "tokenizer")
    found = next((p for p in places if (p / "tokenizer.json").is_file()), None)
    if found is None and is_adapter(folder):
        return tokenizer_folder(_base_of(folder))
    return found


def model_config(folder: Path) -> ModelConfig:
    """The configuration of the model in a folder returned by `find_model`. Reads no weights."""
    if is_adapter(folder):
        return model_config(_base_of(folder))
    if _is_checkpoint(folder):
        return _native_config(_run_of(folder) / NATIVE)
    if (folder / NATIVE).is_file():
        return _native_config(folder / NATIVE)
    hf = read_gguf(folder).hf if is_gguf(folder) else read_json(folder / "config.json")
    return family_of(hf).config(hf)


def check_predicts_tokens(folder: Path, name: str | Path) -> None:
    """Raise for a model with a score head, which cannot generate. `name` is what the user called it."""
    if model_config(folder).score_head:
        raise BaguError(
            f"{name} is a reward model: it scores texts and predicts no tokens",
            hint="name a language model; `bagu serve` scores texts with a reward model (/v1/score)",
        )


def load_model(
    name: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Transformer:
    """Load MODEL in eval mode; `dtype` None keeps the saved dtype. An adapter is merged into its base."""
    folder = find_model(name)
    if is_adapter(folder):
        model = load_model(_base_of(folder), dtype=dtype, device=device)
        peft.load_adapter(model, folder)
        merge(model)
        return model
    if _is_checkpoint(folder):
        checkpoint.verify(folder)
        state = checkpoint.load_model_tensors(folder)
        config = _native_config(_run_of(folder) / NATIVE)
        return _native(config, folder / checkpoint.MODEL, state, dtype, device)
    if (folder / NATIVE).is_file():
        config, file = _native_config(folder / NATIVE), folder / weights.SINGLE_FILE
        return _native(config, file, safetensors.torch.load_file(file, device=str(device)), dtype, device)
    return weights.from_pretrained(folder, dtype=dtype, device=device)


@contextmanager
def opened_model(
    name: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Iterator[tuple[Transformer, Values]]:
    """MODEL, which is no adapter, as a hollow model and its weights: they are read one at a time, when asked for."""
    folder = find_model(name)
    with hollow():
        model = Transformer(model_config(folder), device=device, dtype=dtype)
    if _is_checkpoint(folder):
        checkpoint.verify(folder)
        with SavedTensors(folder, "model") as saved:
            yield model, _native_values(model, folder / checkpoint.MODEL, saved.shapes, saved.whole)
    elif (folder / NATIVE).is_file():
        with safetensors.safe_open(folder / weights.SINGLE_FILE, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            yield model, _native_values(model, folder / weights.SINGLE_FILE, shapes, file.get_tensor)
    else:
        with weights.stored_values(folder, model) as values:
            yield model, values


def save_model(model: Transformer, tokenizer: BpeTokenizer | None, folder: Path, *, start: Path | None = None) -> None:
    """Write the model as a Hugging Face folder if it belongs to a supported family, else under bagu's names. Its
    generation settings are those of the model in `start`, from which it was trained or loaded, and of its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    extra: dict[str, Any] | None = None if tokenizer is None else {"eos_token_id": tokenizer.eos_id}
    if tokenizer is not None and model.score is not None:
        tokenizer = _with_padding(tokenizer)
        extra = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.token_id(tokenizer.named["pad_token"])}
    elif tokenizer is not None and model.config.causal:
        extra, generation = written_settings(tokenizer, None if start is None else _settings_folder(start))
        write_atomic(folder / GENERATION_CONFIG, json.dumps(generation, indent=2) + "\n")
    try:
        family_for(model.config)
    except WeightsError:
        state = {k: v.contiguous() for k, v in model.state_dict().items()}
        safetensors.torch.save_file(_once(state), folder / weights.SINGLE_FILE)
        configs.save(model.config, folder / NATIVE)
    else:
        weights.save_pretrained(model, folder, extra=extra)
        (folder / NATIVE).unlink(missing_ok=True)  # left by an earlier model: it would be read first
    if tokenizer is not None:
        tokenizer.save(folder)


def save_as_gguf(model: Transformer, tokenizer: BpeTokenizer | None, path: Path, quantization: str) -> None:
    """Write the model and its tokenizer as one GGUF file."""
    facts = {} if tokenizer is None else gguf_metadata(tokenizer, model.config.vocab_size)
    save_gguf(model, path, quantization=quantization, metadata=facts)


def _settings_folder(folder: Path) -> Path:
    """Where the generation settings of a model are: an adapter has those of its base, a checkpoint those of the model
    that its run started from."""
    if is_adapter(folder):
        return _settings_folder(_base_of(folder))
    if _is_checkpoint(folder):
        start = read_json(RunFolder(_run_of(folder)).config_path).get("init_from")
        return folder if start is None else _settings_folder(find_model(start))
    return folder


def _with_padding(tokenizer: BpeTokenizer) -> BpeTokenizer:
    """The tokenizer with a pad token for a sequence classifier. transformers scores the last token that is not the pad
    token, so it must be one that ends no text: not eos, if there is another.
    """
    named = tokenizer.named
    found = next(
        (t for n in ("pad_token", "mask_token") if (t := named.get(n)) not in (None, tokenizer.eos_token)), None
    )
    return replace(tokenizer, named={**named, "pad_token": found or tokenizer.eos_token})


def _base_of(adapter: Path) -> Path:
    """The folder of an adapter's base model."""
    base = find_model(peft.base_of(adapter))
    if is_adapter(base):
        raise WeightsError(
            f"the base of the adapter {adapter} is {base}, an adapter too", hint="export that one first: it is merged"
        )
    return base


def _is_checkpoint(folder: Path) -> bool:
    return (folder / checkpoint.MANIFEST).is_file()


def _run_of(folder: Path) -> Path:
    """The run of a checkpoint: RUN of RUN/checkpoints/step-…"""
    return folder.resolve().parent.parent


def _native_config(path: Path) -> ModelConfig:
    if not path.is_file():
        raise WeightsError(f"there is no {path}", hint="a checkpoint is read beside the run that made it")
    return configs.load(ModelConfig, path)


def _native(
    config: ModelConfig,
    file: Path,
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> Transformer:
    floats = [t.dtype for t in state.values() if t.is_floating_point()]
    model = Transformer(config, device=device, dtype=dtype or floats[0])
    wanted = _once(model.state_dict())
    _check_native(file, {name: t.shape for name, t in state.items()}, {name: t.shape for name, t in wanted.items()})
    for name, tensor in wanted.items():
        tensor.copy_(state[name])
    return model.eval()


def _native_values(
    model: Transformer, file: Path, shapes: Mapping[str, Sequence[int]], read: Callable[[str], torch.Tensor]
) -> Values:
    """The weights of a hollow model from a file with bagu's names; its buffers get theirs here."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: t for name, t in model.state_dict().items() if name not in names}
    parameters = dict(model.named_parameters())
    _check_native(file, shapes, {name: t.shape for name, t in (parameters | buffers).items()})
    for name, buffer in buffers.items():
        buffer.copy_(read(name))
    return read


def _check_native(file: Path, found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> None:
    """Raise unless a file has exactly these tensors in these shapes."""
    stored = {name for name in found if not name.startswith("critic.")}  # in checkpoints of PPO
    for what, names in (("misses", wanted.keys() - stored), ("has surplus", stored - wanted.keys())):
        if names:
            hint = "an adapter's checkpoint holds no base: give the run's folder" if what == "misses" else ""
            raise WeightsError(f"{file} {what} {len(names)} tensors, {sorted(names)[0]} first", hint=hint)
    for name, shape in wanted.items():
        if tuple(shape) != tuple(found[name]):
            raise WeightsError(f"{file}: {name} is {list(found[name])}, and {list(shape)} is wanted")


def _once(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Remove duplicates: a tensor with two names keeps the first one."""
    seen: set[int] = set()
    return {k: v for k, v in state.items() if not (v.data_ptr() in seen or seen.add(v.data_ptr()))}  # type: ignore[func-returns-value]
