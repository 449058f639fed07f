"""The store of tunings, and the lookup of a call's options."""

from __future__ import annotations

import ast
import json
import logging
import multiprocessing
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bagu import ops
from bagu.bench.tune_steps import Target, kind_of
from bagu.errors import ArgumentError
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import Case
from bagu.ops.tuning import lookup, source
from bagu.ops.tuning.missing import Missing, missing, missing_file
from bagu.ops.tuning.source import code_text, source_hash
from bagu.ops.tuning.store import Kind, Measurement, Store, Winner, merge, user_store, winners
from tests.ops.points import DEVICE

KIND = Kind(
    op="transpose", step="forward", dtype="float32", shapes=(("x", (64, 96)),),
    device=lookup.device_name(torch.device(DEVICE)), source=source_hash("bagu.ops.transpose.triton_backend"),
)  # fmt: skip


def winner(kind: Kind = KIND, **options: int) -> Winner:
    return Winner(kind=kind, options=options, verdict="faster", speedup=1.1, searched=3, space=8, seconds=1.0)


def measurement(i: int) -> Measurement:
    return Measurement(
        kind=KIND, options={"rows": i}, status="ok", median_s=1e-5, low_s=9e-6, high_s=1.1e-5, samples=9, seconds=0.1
    )


def at(*shape: int, **changes: Any) -> Kind:
    return replace(KIND, shapes=(("x", shape),), **changes)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("BAGU_TUNING", str(tmp_path / "tuning.jsonl"))
    monkeypatch.setattr(lookup, "shipped_store", lambda: Store(tmp_path / "shipped.jsonl"))
    lookup.reload()
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
    assert sorted(found) == list(range(100)) and store.read().problem is None


def test_a_line_that_was_cut_off_loses_only_itself(store: Store) -> None:
    store.append(measurement(1))
    store.append(measurement(2))
    store.path.write_bytes(store.path.read_bytes()[:-40])  # killed while writing
    store.append(measurement(3))
    assert [r.options["rows"] for r in store.records()] == [1, 3]
    assert store.read().problem == (
        f"the tuning store {store.path}: 1 line is cut off or of another version; the other 2 are used"
    )


@pytest.mark.parametrize(
    "line", [b"{}", b"[]", b"null", b"\xff\xfe", b'{"version": 99, "record": "winner"}', b'{"version": 1, "kind": 3}']
)
def test_lines_of_another_form_or_version_are_skipped(store: Store, line: bytes) -> None:
    store.append(measurement(1))
    with store.path.open("ab") as file:
        file.write(line + b"\n")
    store.append(winner(rows=64))
    assert len(store.records()) == 2 and "the other 2 are used" in str(store.read().problem)
    assert store.read("winner").records == [winner(rows=64)] and "the other 2" in str(store.read("winner").problem)


def test_a_call_names_a_damaged_store_in_one_warning_and_uses_its_good_records(store: Store) -> None:
    store.append(winner(rows=32))
    with store.path.open("ab") as file:
        file.write(b'{"version":2,"record":"winner","ki')
    run = lookup.tuned(SPECS["transpose"], "forward", lambda x, **options: options)
    with pytest.warns(RuntimeWarning, match="1 line is cut off or of another version; the other 1 are used"):
        assert run(x=torch.zeros(64, 96, device=DEVICE)) == {"rows": 32}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(x=torch.zeros(64, 96, device=DEVICE))


def test_a_store_that_cannot_be_read_is_named_and_the_defaults_are_used(store: Store) -> None:
    store.path.mkdir()
    run = lookup.tuned(SPECS["transpose"], "forward", lambda x, **options: options)
    with pytest.warns(RuntimeWarning, match="cannot be read and is not used: Is a directory"):
        assert run(x=torch.zeros(64, 96, device=DEVICE)) == {}


def test_a_store_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    unwritable = Store(tmp_path / "file" / "tuning.jsonl")
    for write in (unwritable.check_writable, lambda: unwritable.append(measurement(1))):
        with pytest.raises(ArgumentError, match="cannot be written") as error:
            write()
        assert "BAGU_TUNING" in str(error.value.hint)


def test_stores_merge_without_repeating_records(store: Store, tmp_path: Path) -> None:
    other = Store(tmp_path / "other.jsonl")
    for i in (1, 2):
        store.append(measurement(i))
    for i in (2, 3):
        other.append(measurement(i))
    assert merge([other], store) == 1 and merge([other], store) == 0
    assert [r.options["rows"] for r in store.records()] == [1, 2, 3]


def test_stores_of_two_machines_merge_by_concatenation(store: Store, tmp_path: Path) -> None:
    other, there = Store(tmp_path / "other.jsonl"), replace(KIND, device="NVIDIA H100")
    store.append(winner(rows=64))
    other.append(winner(there, rows=128))
    store.path.write_bytes(store.path.read_bytes() + other.path.read_bytes())
    assert {k.device: w.options["rows"] for k, w in winners(store.records()).items()} == {
        KIND.device: 64,
        "NVIDIA H100": 128,
    }


def test_the_last_result_for_a_kind_counts(store: Store) -> None:
    for rows in (64, 128):
        store.append(winner(rows=rows))
    assert winners(store.records())[KIND].options == {"rows": 128}


def test_the_nearest_shapes_of_the_same_class_are_used() -> None:
    known = [winner(at(n, 4096), rows=n) for n in (64, 128)]
    assert lookup.nearest(at(70, 4096), known).options == {"rows": 64}  # type: ignore[union-attr]
    assert lookup.nearest(at(120, 4000), known).options == {"rows": 128}  # type: ignore[union-attr]
    for other in (
        at(64, 512),
        at(64, 4096, 2),
        at(64, 4095),  # rows that are not aligned run another kernel
        at(64, 4096, source="other"),
        at(64, 4096, device="H100"),
        at(64, 4096, dtype="bfloat16"),
        at(64, 4096, modes=(("by", "row"),)),
    ):
        assert lookup.nearest(other, known) is None, other


def test_a_call_uses_the_stored_options_and_a_miss_is_listed_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    with caplog.at_level(logging.INFO, "bagu.ops.tuning"):
        for _ in range(2):
            run(x=torch.randn(4, 3, device=DEVICE), dim0=0, dim1=1)
    assert seen[1:] == [{}, {}] and [k.shapes for k in missing()] == [(("x", (4, 3)),)]
    assert [r.getMessage() for r in caplog.records] == [
        "no tuning for transpose forward of float32 x[4, 3]: the default options are used"
    ]
    monkeypatch.setenv("BAGU_TUNING", "off")
    run(x=x, dim0=0, dim1=1)
    assert seen[-1] == {}


def test_the_list_of_misses_has_a_kind_once_and_survives_a_damaged_line(store: Store) -> None:
    Missing().add(KIND)
    with missing_file().open("a") as file:
        file.write('{"op": "transpose"}\n{"op": "tra')
    for _ in range(2):  # two processes
        Missing().add(KIND)
    assert missing() == [KIND] and missing_file().read_text().count("\n") == 2


def test_the_list_of_misses_does_not_grow_without_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagu.ops.tuning.missing.LIMIT", 3)
    for process in (Missing(), Missing()):
        for n in range(5):
            process.add(at(n, n))
    assert missing() == [at(n, n) for n in range(3)]


def test_options_of_similar_shapes_that_cannot_run_are_replaced_by_the_defaults(store: Store) -> None:
    from triton.runtime.errors import OutOfResources

    store.append(winner(at(64, 96), rows=128))

    def forward(x: torch.Tensor, rows: int = 0) -> int:
        if rows:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return rows

    run = lookup.tuned(SPECS["transpose"], "forward", forward)
    with pytest.warns(RuntimeWarning, match="cannot run here and the defaults are used .*shared memory"):
        assert run(x=torch.zeros(80, 96, device=DEVICE)) == 0
    assert run(x=torch.zeros(80, 96, device=DEVICE)) == 0  # remembered: no second warning
    with pytest.raises(OutOfResources):  # at the shapes that were measured it is an error
        run(x=torch.zeros(64, 96, device=DEVICE))


def test_the_users_store_wins_over_the_shipped_one(store: Store, tmp_path: Path) -> None:
    shipped = Store(tmp_path / "shipped.jsonl")
    for kind, rows in ((at(8, 8), 1), (at(32, 32), 2)):
        shipped.append(winner(kind, rows=rows))
    store.append(winner(at(8, 8), rows=3))
    run = lookup.tuned(SPECS["transpose"], "forward", lambda x, **options: options["rows"])
    assert [run(x=torch.zeros(n, n, device=DEVICE)) for n in (8, 32)] == [3, 2]


def test_a_public_call_passes_through_the_lookup(store: Store) -> None:
    """An option that the kernel does not have can come from the store alone."""
    store.append(winner(at(8, 24), no_such_option=48))
    with pytest.raises(TypeError, match="no_such_option"):
        ops.transpose(torch.randn(8, 24, device=DEVICE), 0, 1, backend="triton")


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_a_public_call_is_of_the_kind_that_the_tuner_stores(store: Store, approximate: str) -> None:
    """Forward and backward, with a scalar that selects other code."""
    store.append(winner(rows=1))  # without any result nothing is looked up
    case = Case("small", "", M=3, N=16, separate=True, approximate=approximate)
    x, up = (torch.randn(3, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    ops.geglu(x, up, approximate=approximate, backend="triton").sum().backward()
    for step in ("forward", "backward"):
        kind = kind_of(Target(spec=SPECS["geglu"], case=case, step=step), torch.float32, KIND.device)
        assert dict(kind.modes) == {"approximate": approximate}
        assert kind in lookup.table().found, f"{kind} is not in {list(lookup.table().found)}"


def test_the_source_hash_ignores_comments_and_sees_shared_kernels() -> None:
    assert "bagu.ops.kernels.norms" in source._reached("bagu.ops.rms_norm.triton_backend")
    hashes = {name: source_hash(f"bagu.ops.{name}.triton_backend") for name in ("rms_norm", "layer_norm", "softmax")}
    assert len(set(hashes.values())) == 3 and all(len(h) == 16 for h in hashes.values())
    plain, written = (
        code_text(ast.parse(text))
        for text in ("def f(a, b=1):\n    return a", 'def f(a,\n b=1):\n "Doc."\n return a # c')
    )
    assert plain == written != code_text(ast.parse("def f(a, b=2):\n    return a"))
    assert plain == code_text(ast.parse('from bagu import x\n__all__ = ["f"]\ndef f(a, b=1):\n    return a'))


def test_the_source_hash_does_not_depend_on_the_version_of_python() -> None:
    """`ast.dump` has other empty fields in 3.12 and 3.13; a store is used with any version."""
    assert code_text(ast.parse("def f(a, *, b=None): return lambda: [a.b, f'{a}!']")) == (
        "Module(body=[FunctionDef(name='f',args=arguments(args=[arg(arg='a')],kwonlyargs=[arg(arg='b')],"
        "kw_defaults=[Constant()]),body=[Return(value=Lambda(args=arguments(),body=List(elts=[Attribute("
        "value=Name(id='a',ctx=Load()),attr='b',ctx=Load()),JoinedStr(values=[FormattedValue(value=Name(id='a',"
        "ctx=Load()),conversion=-1),Constant(value='!')])],ctx=Load())))])])"
    )


def test_a_record_is_one_line_of_json(store: Store) -> None:
    store.append(winner(rows=64))
    (line,) = store.path.read_text().splitlines()
    assert json.loads(line)["kind"]["op"] == "transpose" and json.loads(line)["kind"]["shapes"] == {"x": [64, 96]}
