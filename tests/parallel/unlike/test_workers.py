"""`--workers`: the text, what it refuses, and the cores that each worker gets."""

import os
import subprocess
import sys

import pytest

from bagu.errors import ArgumentError, UnknownName
from bagu.parallel.unlike.workers import Worker, divide_cores, parse_workers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2x cpu:2,1x cpu:1", [Worker(cores=2), Worker(cores=2), Worker(cores=1)]),
        ("3", [Worker()] * 3),
        ("cpu:2, cpu:1", [Worker(cores=2), Worker(cores=1)]),
        (" 2xcpu ,cuda", [Worker(), Worker(), Worker(kind="cuda")]),
    ],
)
def test_a_text_is_its_workers(text: str, expected: list[Worker]) -> None:
    found = parse_workers(text)
    assert list(found) == expected


@pytest.mark.parametrize(
    "text", ["", "2x", "x cpu", "0", "0x cpu", "cpu:0", "cpu:", "2 cpu", "cpu:1,", "-1", "cuda:1", "2000"]
)
def test_a_text_that_is_no_list_of_workers_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_workers(text)
    assert repr(text) in str(caught.value) and caught.value.hint


def test_a_kind_that_the_caller_does_not_know_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="kind of worker 'h20'") as caught:
        parse_workers("2x h20", kinds=("cpu", "h200"))
    assert "h200" in caught.value.hint


def test_workers_that_name_their_cores_get_sets_of_their_own() -> None:
    found = divide_cores(parse_workers("cpu:2,cpu:1,2x cpu,cuda"), [4, 5, 6, 7, 8, 9, 10])
    assert [c.pinned for c in found.of] == [(4, 5), (6,), None, None, None]
    assert [c.threads for c in found.of] == [2, 1, 2, 2, 1]
    assert not found.shared


def test_more_cores_than_there_are_begin_again_and_one_worker_cannot_have_them() -> None:
    found = divide_cores(parse_workers("2x cpu:2,1x cpu:1"), [0, 1])
    assert [c.pinned for c in found.of] == [(0, 1), (0, 1), (0,)]
    assert found.shared
    with pytest.raises(ArgumentError, match="3 cores, and this process may use 2"):
        divide_cores(parse_workers("cpu:3"), [0, 1])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_a_process_is_kept_on_its_cores() -> None:
    core = min(os.sched_getaffinity(0))
    (cores,) = divide_cores(parse_workers("cpu:1"), [core]).of
    code = "import os, sys; sys.stdin.read(); print(os.sched_getaffinity(0))"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True)
    cores.pin(process.pid)
    assert process.communicate("")[0].strip() == str({core})
