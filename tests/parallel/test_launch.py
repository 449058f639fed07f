"""Which rank a process is, and the first meeting of all ranks: threads stand for ranks, with a real TCP store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from bagu.errors import BaguError
from bagu.parallel import launch
from bagu.parallel.launch import PeerFailed, Place, find_place


def test_a_process_that_was_started_alone_has_no_place() -> None:
    assert find_place({}) is None
    assert find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script, outside srun


def test_torchrun_and_nproc_set_the_same_variables() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    assert find_place(environ) == Place(rank=5, ranks=8, local_rank=1, host="a", port=29500)
    agent = find_place({**environ, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert agent is not None and agent.agent_store and agent.generation == "2"
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


def test_each_rank_sees_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(rank=5, ranks=8, local_rank=1, host="", port=0)
    for visible, mine in ((None, "1"), ("4,6", "6"), ("7", "7"), ("", "")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        launch.use_own_gpu(place)
        assert launch.os.environ["CUDA_VISIBLE_DEVICES"] == mine


def meet(facts: list[dict[str, Any]], ranks: int, timeout: float = 30.0) -> list[BaseException | None]:
    """The error of each rank that comes to the meeting."""
    patience = timedelta(seconds=120)
    server = dist.TCPStore("127.0.0.1", 0, ranks, True, patience, wait_for_workers=False)

    def go(rank: int) -> BaseException | None:
        place = Place(rank=rank, ranks=ranks, local_rank=rank, host="127.0.0.1", port=server.port)
        store = server.clone() if rank else server
        if rank == 0:  # its clock starts when the others are there, however slow the machine is
            store.wait([f"facts/{other}" for other in range(1, len(facts))], patience)
        try:
            launch._meet(store, place, facts[rank], timeout)
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(go, range(len(facts))))


def test_equal_ranks_start() -> None:
    assert meet([{"config": {"lr": 1}}] * 3, 3) == [None] * 3


def test_a_rank_with_another_configuration_is_named_on_rank_0() -> None:
    first, *others = meet([{"config": {"lr": 1}}, {"config": {"lr": 1}}, {"config": {"lr": 2}}], 3)
    assert isinstance(first, BaguError) and not isinstance(first, PeerFailed)
    assert str(first) == "rank 2 differs from rank 0: config.lr: 1 → 2"
    assert all(isinstance(other, PeerFailed) for other in others)


def test_a_missing_rank_is_named_on_rank_0() -> None:
    first, second = meet([{}, {}], 4, timeout=0.5)
    assert str(first) == "2 of 4 ranks did not start within 0 s: rank 2, 3"
    assert isinstance(second, PeerFailed)
