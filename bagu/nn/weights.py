"""Read and write Hugging Face checkpoints: a folder with config.json and safetensors, in one file or in shards. GGUF
files are read too (gguf_file.py), and quantized checkpoints are dequantized (quantized_files.py).

    from_pretrained(name)         config.json -> family -> ModelConfig -> Transformer; names and shapes are compared
                                  before anything is allocated, then tensors are copied one at a time
    stored_values(name, model)    the same for a hollow model, of which each rank keeps a part
    save_pretrained(model, dir)   the inverse; transformers can load the result

Only safetensors are read: a pickle can run arbitrary code.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bagu.config import write_atomic
from bagu.errors import UnknownName
from bagu.machine import hub
from bagu.machine.hub import WeightsError, read_json
from bagu.nn.families import Family, can_describe, family_for, family_named, family_of
from bagu.nn.families.core import Part
from bagu.nn.gguf_file import is_gguf, read_gguf
from bagu.nn.hollow import Values
from bagu.nn.model import Transformer
from bagu.nn.quantized_files import dequantized
from bagu.nn.stored import Stored, StoredTensor

INDEX, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}  # names in safetensors
SHOWN = 4  # number of names in an error; the rest are counted


def from_pretrained(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Transformer:
    """Load the model from folder `name` (or a GGUF file, or a Hugging Face id), in eval mode. `dtype` None is the dtype
    in config.json, or that of the stored weights if config.json has none."""
    with opened(hub.find(name)) as (hf, files):
        family = family_of(hf)
        config = family.config(hf)
        named = hf.get("dtype") or hf.get("torch_dtype")
        dtype = dtype or (_dtype(str(named)) if named else _stored_dtype(files))
        tensors = Tensors(files, family, config.num_layers)
        tensors.check(parts_of(Transformer(config, device="meta", dtype=dtype), family))
        model = Transformer(config, device=device, dtype=dtype)
        model.family = family.name
        with torch.no_grad():
            for theirs, part in parts_of(model, family).items():
                part.load(tensors.read(theirs))
    return model.eval()


@contextmanager
def stored_values(name: str | Path, model: Transformer) -> Iterator[Values]:
    """The weights of folder `name` for a hollow `model` of its configuration: a parameter is read when it is asked for.
    Buffers of the model get theirs here."""
    with opened(hub.find(name)) as (hf, files):
        family, config = family_of(hf), model.config
        tensors = Tensors(files, family, config.num_layers)
        tensors.check(parts_of(Transformer(config, device="meta"), family))
        model.family = family.name
        wanted = {name: torch.empty_like(t, device="meta") for name, t in model.state_dict().items()}

        def value(full: str) -> torch.Tensor:
            t = torch.empty_like(wanted[full], device="cpu")
            for theirs, part in family.parts({full: t}, config).items():
                part.load(tensors.read(theirs))
            return t

        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for full, buffer in model.state_dict().items():
            if full not in parameters:
                buffer.copy_(value(full))
        yield value


def save_pretrained(
    model: Transformer,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5 * 10**9,
    family: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and the weights, in shards if they exceed `max_shard_bytes`. A tied head is written once.

    `family` None is the family it was loaded from, or the first that can describe it. `extra` is added to config.json:
    eos_token_id and other facts that a model does not know; a key that `from_pretrained` would refuse is refused here.
    All weights are written before the first file is moved to its place; existing weights are replaced, other files are
    kept. At most one shard is held in memory besides the model.
    """
    chosen = _family(model, family)
    parts = parts_of(model, chosen)
    for spare, used in chosen.spares.items():
        if used in parts:  # safetensors does not allow two names for the same memory
            parts[spare] = parts[used]._replace(views=tuple(view.clone() for view in parts[used].views))
    if not model.config.lm_head:
        parts = {name.removeprefix(chosen.prefix): part for name, part in parts.items()}
    hf = chosen.file(model.config)
    dtype = next(model.parameters()).dtype
    unknown = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # the model does not know them
    hf = {**unknown, **hf, "torch_dtype": str(dtype).removeprefix("torch."), **(extra or {})}
    chosen.config(hf)  # the result, with `extra`, must be loadable
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
            _write_shards(parts, Path(partial), max_shard_bytes)
            written = [file.replace(folder / file.name).name for file in Path(partial).iterdir()]
        for old in [*folder.glob("model*.safetensors"), folder / INDEX]:
            if old.name not in written:  # transformers would load an old model.safetensors before an index
                old.unlink(missing_ok=True)
        write_atomic(folder / "config.json", json.dumps(hf, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot write {folder}: {error}", hint="free some space, or save elsewhere") from error


def parts_of(model: Transformer, family: Family) -> dict[str, Part]:
    """The checkpoint name of every tensor of the model -> its location. A shared parameter has one name."""
    seen: dict[int, str] = {}
    tensors = {n: t for n, t in model.state_dict(keep_vars=True).items() if seen.setdefault(id(t), n) == n}
    return family.parts({n: t.detach() for n, t in tensors.items()}, model.config)


class Tensors:
    """The tensors of a checkpoint under the current names of its family."""

    def __init__(self, files: Stored, family: Family, num_layers: int) -> None:
        self.files, self.family = files, family
        headless = family.prefix and not any(name.startswith(family.prefix) for name in files)
        self.stored: dict[str, str] = {}  # current name -> name in the file
        for name in files:
            today = name
            for pattern, new in family.renamed:
                today = re.sub(pattern, new, today)
            if headless and not today.startswith("lm_head."):
                today = family.prefix + today
            if not any(re.fullmatch(u.replace("{num_layers}", str(num_layers)), today) for u in family.unused):
                self.stored[today] = name

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files[self.stored[name]].shape

    def read(self, name: str) -> torch.Tensor:
        return self.files[self.stored[name]].read()

    def check(self, parts: Mapping[str, Part]) -> None:
        """Raise if a tensor is missing, unknown, or has a wrong shape."""
        for spare, used in self.family.spares.items():
            if used in parts and spare in self.stored:
                self.stored.setdefault(used, self.stored.pop(spare))
        for copy, original in self.family.copies.items():
            if copy in self.stored and copy not in parts:
                if original in self.stored and not torch.equal(self.read(copy), self.read(original)):
                    raise WeightsError(
                        f"{copy} differs from {original}, but config.json ties them",
                        hint="set tie_word_embeddings to false in config.json",
                    )
                del self.stored[copy]
        wrong = [n for n in parts if n in self.stored and self.shape(n) != parts[n].shape]
        faults = [
            _listed("is missing", "are missing", sorted(parts.keys() - self.stored.keys())),
            _listed("is not in this model", "are not in this model", sorted(self.stored.keys() - parts.keys())),
            _listed(
                "has a different shape",
                "have different shapes",
                [f"{n} {list(self.shape(n))} for {list(parts[n].shape)}" for n in wrong],
            ),
        ]
        if any(faults):
            raise WeightsError(
                f"the weights do not match config.json ({self.family.name}): {'; '.join(f for f in faults if f)}",
                hint="check that config.json belongs to this checkpoint and that the download is complete",
            )


@contextmanager
def opened(place: Path) -> Iterator[tuple[Mapping[str, Any], Stored]]:
    """The config.json and the tensors of a folder or a GGUF file. Quantized weights are dequantized when read, and
    have no `quantization_config` any more."""
    if is_gguf(place):
        file = read_gguf(place)
        yield file.hf, file.tensors
        return
    hf = read_json(place / "config.json")
    with _safetensors(place) as files:
        if hf.get("quantization_config"):
            files = dequantized(files, hf["quantization_config"])
        yield {k: v for k, v in hf.items() if k != "quantization_config"}, files


@contextmanager
def _safetensors(folder: Path) -> Iterator[Stored]:
    """The tensors of the safetensors files of a folder."""
    files: dict[str, StoredTensor] = {}
    with ExitStack() as stack:
        for path in _paths(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"cannot read {path}: {error}", hint="download or write it again") from error
            for name in file.keys():  # noqa: SIM118  the file is not a mapping
                inside = file.get_slice(name)
                code, read = inside.get_dtype(), partial(file.get_tensor, name)
                files[name] = StoredTensor(tuple(inside.get_shape()), STORED.get(code, code), read)
        yield files


def _paths(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if (folder / INDEX).is_file():
        shards = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        if outside := [s for s in shards if Path(s).name != s]:
            raise WeightsError(f"{folder / INDEX} names a file outside its folder: {outside[0]}", hint="do not load it")
        if absent := [s for s in shards if not (folder / s).is_file()]:
            raise WeightsError(
                f"{folder} lacks {len(absent)} of {len(shards)} shards, first {absent[0]}",
                hint="download it again",
            )
        return [folder / s for s in shards]
    if pickles := [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]:
        raise WeightsError(
            f"{folder} has no safetensors, only {pickles[0].name}; a pickle can run arbitrary code",
            hint="if you trust it, load it with transformers and write safetensors with its save_pretrained",
        )
    raise WeightsError(f"{folder} has no {SINGLE_FILE} and no {INDEX}", hint="check that it is a model folder")


def _write_shards(parts: Mapping[str, Part], folder: Path, max_shard_bytes: int) -> None:
    shards: list[list[str]] = []
    room = 0
    for name, part in parts.items():
        size = part.num_bytes
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file({n: parts[n].save() for n in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(p.num_bytes for p in parts.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _family(model: Transformer, name: str | None) -> Family:
    if name is None:
        return family_for(model.config, model.family)
    family = family_named(name)
    if not can_describe(family, model.config):
        raise WeightsError(f"{name} cannot describe this model", hint="leave the family out to find one")
    return family


def _stored_dtype(files: Stored) -> torch.dtype:
    """The dtype of the first floating-point tensor, as in transformers."""
    stored = (tensor.dtype for tensor in files.values())
    return _dtype(next((name for name in stored if "float" in name or name.startswith("F")), "float32"))


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UnknownName.among("dtype of weights", name, DTYPES)
    return DTYPES[name]


def _listed(one: str, many: str, names: Sequence[str]) -> str:
    """ "a, b and 7 more are missing", or "" for no names."""
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more} {one if len(names) == 1 else many}"
