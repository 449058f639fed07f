"""The tensors of a checkpoint's safetensors files, whole or as parts that ranks have written.

A run on one rank writes `model.safetensors`, with each tensor in its shape. A divided run writes a file per rank,
`model-00001-of-00004.safetensors`, with the elements [start, start + n) of each flattened tensor; the file's metadata
has start and shape. Where tp or ep divides the tensor, they are elements of a part of it, and the metadata has the
divisions that cut it out. Any range of a tensor can be read from either: a checkpoint does not depend on the mesh that
wrote it.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import safetensors
import safetensors.torch
import torch

from bagu.parallel.sharding import Division, divided_shape, put
from bagu.train.memory.sharded import Cut

CUTS = "cuts"  # the key of the metadata: {name: [start, shape, divisions]} as JSON; no divisions in format 2


def file_name(kind: str, part: int, parts: int) -> str:
    """`kind` is model or optimizer."""
    return f"{kind}.safetensors" if parts == 1 else f"{kind}-{part:05d}-of-{parts:05d}.safetensors"


def write_parts(file: Path, tensors: Mapping[str, torch.Tensor | Cut]) -> None:
    """Write whole tensors, and cuts with their place."""
    cuts = {name: [t.start, t.shape, t.divisions] for name, t in tensors.items() if isinstance(t, Cut)}
    values = {name: t.values.contiguous() if isinstance(t, Cut) else t for name, t in tensors.items()}
    safetensors.torch.save_file(values, file, metadata={CUTS: json.dumps(cuts)} if cuts else None)


class _Part(NamedTuple):
    """The elements [start, stop) of a tensor, or of the part that `divisions` cut out of it, in an open file. `cut`:
    stored flat, else in its shape."""

    file: Any
    start: int
    stop: int
    cut: bool
    divisions: tuple[Division, ...]


class SavedTensors:
    """All tensors of one kind in a checkpoint folder. Use it as a context manager: it holds files open."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[_Part]] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        files = sorted(self.folder.glob(f"{self.kind}.safetensors")) or sorted(
            self.folder.glob(f"{self.kind}-*-of-*.safetensors")
        )
        for path in files:
            file = self._open.enter_context(safetensors.safe_open(path, framework="pt"))
            cuts = json.loads((file.metadata() or {}).get(CUTS, "{}"))
            for name in file.keys():  # noqa: SIM118
                stored = tuple(file.get_slice(name).get_shape())
                start, shape, *rest = cuts.get(name, (0, stored))
                divisions = tuple(Division(*each) for each in (rest[0] if rest else ()))
                self.shapes[name] = tuple(shape)
                part = _Part(file, start, start + math.prod(stored), name in cuts, divisions)
                self._parts.setdefault(name, []).append(part)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The elements [start, stop) of a tensor, flattened. A missing part raises ValueError."""
        if any(part.divisions for part in self._parts[name]):
            return self.whole(name).view(-1)[start:stop]
        return self._read(name, self._parts[name], start, stop)

    def _read(self, name: str, parts: Sequence[_Part], start: int, stop: int) -> torch.Tensor:
        found = []
        at = start
        for part in sorted(parts, key=lambda p: p.start):
            low, high = max(at, part.start), min(stop, part.stop)
            if low == at and low < high:
                if part.cut:
                    found.append(part.file.get_slice(name)[low - part.start : high - part.start])
                else:
                    found.append(part.file.get_tensor(name).view(-1)[low:high])
                at = high
        if at != stop:
            raise ValueError(f"{self.folder}: {name} has no elements {at} to {stop}")
        return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)

    def whole(self, name: str) -> torch.Tensor:
        """A tensor in its shape. A missing part raises ValueError."""
        shape, parts = self.shapes[name], self._parts[name]
        if not parts[0].cut:
            stored: torch.Tensor = parts[0].file.get_tensor(name)
            return stored
        if not any(part.divisions for part in parts):
            return self._read(name, parts, 0, math.prod(shape)).view(shape)
        whole, missing = torch.empty(0), math.prod(shape)
        for divisions in dict.fromkeys(part.divisions for part in parts):
            local = divided_shape(shape, divisions)
            mine = [part for part in parts if part.divisions == divisions]
            values = self._read(name, mine, 0, local.numel()).view(local)
            whole = whole if len(whole) else values.new_empty(shape)
            put(whole, values, divisions)
            missing -= local.numel()
        if missing:
            raise ValueError(f"{self.folder}: {name} lacks {missing} of {math.prod(shape)} elements")
        return whole
