"""The store of tunings, and the lookup of a call's options."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bagu import ops
from bagu.errors import ArgumentError
from bagu.ops.catalogue import SPECS
from bagu.ops.tuning import lookup
from bagu.ops.tuning.source import source_hash
from bagu.ops.tuning.store import Kind, Measurement, Store, Winner, merge, missing, user_store, winners
from tests.ops.points import DEVICE

KIND = Kind(
    op="transpose", step="forward", dtype="float32", shapes=((64, 96),),
    device=lookup.device_name(torch.device(DEVICE)), source=source_hash("bagu.ops.transpose.triton_backend"),
)  # fmt: skip


def winner(kind: Kind = KIND, **options: int) -> Winner:
    return Winner(kind=kind, options=options, speedup=1.1, searched=3, space=8, seconds=1.0)


def measurement(i: int) -> Measurement:
    return Measurement(
        kind=KIND, options={"rows": i}, status="ok", median_s=1e-5, low_s=9e-6, high_s=1.1e-5, samples=9, seconds=0.1
    )


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("BAGU_TUNING", str(tmp_path / "tuning.jsonl"))
    lookup.reload()
    lookup._missing.clear()
    yield user_store()
    lookup.reload()


def write_many(path: Path, start: int) -> None:
    for i in range(start, start + 50):
        Store(path).append(measurement(i))


def test_two_processes_write_at_once_and_no_record_is_lost(store: Store) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_many, args=(store.path, start)) for start in (0, 50)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = [r.options["rows"] for r in store.records() if isinstance(r, Measurement)]
    assert sorted(found) == list(range(100)) and store.unreadable() == 0


def test_a_line_that_was_cut_off_loses_only_itself(store: Store) -> None:
    store.append(measurement(1))
    store.append(measurement(2))
    store.path.write_bytes(store.path.read_bytes()[:-40])  # killed while writing
    store.append(measurement(3))
    assert [r.options["rows"] for r in store.records()] == [1, 3] and store.unreadable() == 1


@pytest.mark.parametrize(
    "line", [b"{}", b"[]", b"null", b"\xff\xfe", b'{"version": 99, "record": "winner"}', b'{"version": 1, "kind": 3}']
)
def test_lines_of_another_form_or_version_are_skipped(store: Store, line: bytes) -> None:
    store.append(measurement(1))
    with store.path.open("ab") as file:
        file.write(line + b"\n")
    store.append(winner(rows=64))
    assert len(list(store.records())) == 2 and store.unreadable() == 1


def test_a_store_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot be written") as error:
        Store(tmp_path / "file" / "tuning.jsonl").append(measurement(1))
    assert "BAGU_TUNING" in str(error.value.hint)


def test_stores_merge_without_repeating_records(store: Store, tmp_path: Path) -> None:
    other = Store(tmp_path / "other.jsonl")
    for i in (1, 2):
        store.append(measurement(i))
    for i in (2, 3):
        other.append(measurement(i))
    assert merge([other], store) == 1 and merge([other], store) == 0
    assert [r.options["rows"] for r in store.records()] == [1, 2, 3]


def test_the_last_result_for_a_kind_counts(store: Store) -> None:
    for rows in (64, 128):
        store.append(winner(rows=rows))
    assert winners([store])[KIND].options == {"rows": 128}


def test_the_nearest_shapes_of_the_same_class_are_used() -> None:
    known = {k: winner(k, rows=n) for n in (64, 128) for k in [replace(KIND, shapes=((n, 4096),))]}
    assert lookup.nearest(replace(KIND, shapes=((70, 4096),)), known).options == {"rows": 64}  # type: ignore[union-attr]
    assert lookup.nearest(replace(KIND, shapes=((120, 4000),)), known).options == {"rows": 128}  # type: ignore[union-attr]
    assert lookup.nearest(replace(KIND, shapes=((64, 512),)), known) is None
    assert lookup.nearest(replace(KIND, shapes=((64, 4096, 2),)), known) is None
    assert lookup.nearest(replace(KIND, shapes=((64, 4096),), source="other"), known) is None
    assert lookup.nearest(replace(KIND, shapes=((64, 4096),), device="H100"), known) is None


def test_a_call_uses_the_stored_options_and_a_miss_is_listed_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append(winner(rows=32, num_warps=8))
    spec, seen = SPECS["transpose"], []
    module = spec.module("triton")
    original = module.forward

    def spy(**args: Any) -> Any:
        seen.append({k: v for k, v in args.items() if k in ("rows", "columns", "num_warps")})
        return original(**args)

    run = lookup.tuned(spec, "forward", spy)
    x = torch.randn(64, 96, device=DEVICE)
    (y,) = run(x=x, dim0=0, dim1=1)
    assert seen == [{"rows": 32, "num_warps": 8}] and torch.equal(y, x.T)
    for _ in range(2):
        run(x=torch.randn(4, 3, device=DEVICE), dim0=0, dim1=1)
    assert seen[1:] == [{}, {}] and [k.shapes for k in missing()] == [((4, 3),)]
    monkeypatch.setenv("BAGU_TUNING", "off")
    run(x=x, dim0=0, dim1=1)
    assert seen[-1] == {}


def test_a_public_call_passes_through_the_lookup(store: Store) -> None:
    """An option that the kernel does not have can come from the store alone."""
    store.append(winner(replace(KIND, shapes=((8, 24),)), no_such_option=48))
    with pytest.raises(TypeError, match="no_such_option"):
        ops.transpose(torch.randn(8, 24, device=DEVICE), 0, 1, backend="triton")


def test_the_source_hash_ignores_comments_and_sees_shared_kernels(tmp_path: Path) -> None:
    from bagu.ops.tuning import source

    assert "bagu.ops.kernels.norms" in source._reached("bagu.ops.rms_norm.triton_backend")
    hashes = {name: source_hash(f"bagu.ops.{name}.triton_backend") for name in ("rms_norm", "layer_norm", "softmax")}
    assert len(set(hashes.values())) == 3 and all(len(h) == 16 for h in hashes.values())


def test_a_record_is_one_line_of_json(store: Store) -> None:
    store.append(winner(rows=64))
    (line,) = store.path.read_text().splitlines()
    assert json.loads(line)["kind"]["op"] == "transpose"
