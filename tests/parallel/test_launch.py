"""Which rank a process is, and the first meeting of all ranks: threads stand for ranks, with a real TCP store."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from bagu.errors import BaguError
from bagu.parallel import launch, meeting
from bagu.parallel.launch import Place, find_place
from bagu.parallel.meeting import PeerFailed


def test_a_process_that_was_started_alone_has_no_place() -> None:
    assert find_place({}) is None
    assert find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script, outside srun


def test_torchrun_and_nproc_set_the_same_variables() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    assert find_place(environ) == Place(rank=5, ranks=8, local_rank=1, host="a", port=29500)
    agent = find_place({**environ, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent is not None and agent.agent_store
    pod = find_place({name: value for name, value in environ.items() if name != "LOCAL_RANK"})
    assert pod is not None and pod.local_rank is None
    with pytest.raises(BaguError, match="MASTER_ADDR"):
        find_place({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu[03-05,9],login1", "gpu03"), ("a,b", "a"), ("node7", "node7"), ("n-[1,2]", "n-1")]
)
def test_srun_ranks_meet_at_the_first_machine(nodes: str, first: str) -> None:
    environ = {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "20007",
        "SLURM_STEP_NODELIST": nodes,
    }  # fmt: skip
    assert find_place(environ) == Place(rank=3, ranks=8, local_rank=1, host=first, port=20007)


@pytest.mark.parametrize(
    ("local", "visible", "gpus", "mine"),
    [
        (1, None, 8, "1"), (1, "4,6", 8, "6"), (1, "7", 8, None), (1, "", 8, None),
        (None, None, 1, "0"),  # a pod with one GPU, whose launcher sets no LOCAL_RANK
        (None, None, 4, "1"), (None, "2,3", 4, "3"), (None, None, 0, "0"),
    ],
)  # fmt: skip
def test_each_rank_sees_its_own_gpu(local: int | None, visible: str | None, gpus: int, mine: str | None) -> None:
    place = Place(rank=5, ranks=8, local_rank=local, host="", port=0)
    assert launch.own_gpu(place, visible, lambda: gpus) == mine


def meet_all(facts: list[dict[str, Any]], ranks: int, timeout: float = 30.0) -> list[BaseException | None]:
    """The error of each rank that comes to the meeting. The store has the keys of an earlier start of all ranks."""
    patience = timedelta(seconds=120)
    server = dist.TCPStore("127.0.0.1", 0, ranks, True, patience, wait_for_workers=False)
    stale = [f"old-{rank}" for rank in range(ranks)]
    for rank, name in enumerate(stale):
        server.set(f"name/{rank}", name)
    server.set("names", json.dumps(stale))
    stale_start = dist.PrefixStore(meeting._key([*stale]), server)
    stale_start.set("verdict", "go")

    def go(rank: int) -> BaseException | None:
        try:
            meeting.meet(server.clone() if rank else server, rank, ranks, facts[rank], timeout)
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(go, range(len(facts))))


def test_equal_ranks_start_in_a_store_that_an_earlier_start_has_used() -> None:
    assert meet_all([{"config": {"lr": 1}}] * 3, 3) == [None] * 3


def test_a_rank_with_another_configuration_is_named_on_every_rank() -> None:
    errors = meet_all([{"config": {"lr": 1}}, {"config": {"lr": 1}}, {"config": {"lr": 2}}], 3)
    assert [str(error) for error in errors] == ["rank 2 differs from rank 0: config.lr: 1 → 2"] * 3
    assert all(isinstance(error, BaguError) and error.hint.startswith("start every rank") for error in errors)
    assert [isinstance(error, PeerFailed) for error in errors] == [False, True, True]


def test_missing_ranks_are_named_on_every_rank() -> None:
    errors = meet_all([{}, {}], 4, timeout=1)
    assert [str(error) for error in errors] == ["2 of 4 ranks did not start within 1 s: rank 2, 3"] * 2


def test_a_missing_rank_0_is_one_sentence() -> None:
    with socket.socket() as probe:  # bound and not listening: connections are refused
        probe.bind(("127.0.0.1", 0))
        place = Place(rank=1, ranks=2, local_rank=1, host="127.0.0.1", port=probe.getsockname()[1])
        with pytest.raises(PeerFailed, match=r"rank 1 did not reach rank 0 at 127.0.0.1:\d+ within 0 s: Connection"):
            launch._store(place, 0.3)
