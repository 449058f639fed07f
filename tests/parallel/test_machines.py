"""Two machines as network namespaces: a link between them, folders and caches of their own, one shared folder.

They run the torchrun line of docs/parallel/launch.md with a smaller model. Each has a host name and /etc/hosts of its
own, because torchrun and Gloo ask where the name of the host leads. Needs root and `ip`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import ranks
from test_requeue import checkpoint_after, command, weights
from test_train_ranks import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("ip") is None or os.geteuid() != 0, reason="needs root and ip"),
]


LIMIT_S = 1200  # of each run: five processes that import torch, three times, on machines that may be busy
INSIDE = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


@dataclass(frozen=True)
class Machine:
    name: str  # of its network namespace
    host: str
    address: str
    link: str
    folder: Path

    def start(self, words: Sequence[str], log: Path) -> subprocess.Popen[str]:
        """A process of this machine, in its folder and with its own caches."""
        home = {"HOME": str(self.folder), "XDG_CACHE_HOME": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount", "sh", "-c", INSIDE]
        inside += [str(self.folder.parent / "hosts"), self.host, sys.executable, *words]
        return subprocess.Popen(inside, cwd=self.folder, env=os.environ | home, text=True, stderr=log.open("w"))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    made = [
        Machine(f"bagu-{os.getpid()}-{i}", f"host{i}", f"10.77.0.{i + 1}", f"b{os.getpid()}-{i}", tmp_path / "ab"[i])
        for i in range(2)
    ]
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{m.address} {m.host}\n" for m in made))

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        if subprocess.run(["ip", "netns", "add", made[0].name], check=False, capture_output=True).returncode:
            pytest.skip("ip netns add is not permitted: it needs CAP_SYS_ADMIN")
        ip("netns", "add", made[1].name)
        ip("link", "add", made[0].link, "type", "veth", "peer", "name", made[1].link)
        for machine in made:
            ip("link", "set", machine.link, "netns", machine.name)
            ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.link)
            ip("-n", machine.name, "link", "set", "lo", "up")
            ip("-n", machine.name, "link", "set", machine.link, "up")
            machine.folder.mkdir()
            (machine.folder / "data").mkdir()
            text = "\n\n".join(f"{i} and {i * i} are {i + i * i}. " * 5 for i in range(300))
            (machine.folder / "data" / "a.txt").write_text(text)
        yield made
    finally:
        for machine in made:  # the link ends with its namespace
            subprocess.run(["ip", "netns", "delete", machine.name], check=False, capture_output=True)


def torchrun(
    machines: Sequence[Machine], train: Sequence[str], logs: Path, restarts: int
) -> list[subprocess.Popen[str]]:
    launcher = [
        "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"{machines[0].host}:29400", "--max-restarts", str(restarts),
    ]  # fmt: skip
    return [m.start([*launcher, "-m", "bagu", *train], logs / f"log-{i}") for i, m in enumerate(machines)]


def ended(jobs: Sequence[subprocess.Popen[str]], logs: Path) -> tuple[list[int], list[str]]:
    """The exit codes and the logs."""
    codes = [job.wait(timeout=LIMIT_S) for job in jobs]
    return codes, [(logs / f"log-{i}").read_text() for i in range(len(jobs))]


def rank_of(machine: Machine) -> int | None:
    """The rank that runs on a machine."""
    found = subprocess.run(["ip", "netns", "pids", machine.name], check=True, capture_output=True, text=True)
    for pid in found.stdout.split():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"bagu" in words and b"torch.distributed.run" not in words:
            return int(pid)
    return None


def test_torchrun_on_two_machines_survives_the_loss_of_a_rank(machines: list[Machine], tmp_path: Path) -> None:
    """With the bits of two ranks of one machine, unbroken."""
    once, shared = tmp_path / "once", tmp_path / "shared"
    assert ranks.run_bagu(2, command(machines[0].folder / "data", once), tmp_path / "log", LIMIT_S) == [0, 0]
    jobs = torchrun(machines, command(Path("data"), shared), tmp_path, 3)
    try:
        wait_for(lambda: checkpoint_after(shared, 0), jobs[0], LIMIT_S)
        rank = rank_of(machines[1])
        assert rank is not None
        os.kill(rank, signal.SIGKILL)
        codes, said = ended(jobs, tmp_path)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert codes == [0, 0], said
    assert '"kind": "resume"' in (shared / "events.jsonl").read_text()
    assert weights(once) == weights(shared)


def test_two_machines_without_a_shared_folder_or_with_other_data_are_refused(
    machines: list[Machine], tmp_path: Path
) -> None:
    codes, said = ended(torchrun(machines, command(Path("data"), Path("out")), tmp_path, 0), tmp_path)  # each its own
    where = (machines[0].folder / "out").resolve()
    assert all(codes), said
    assert all(f"rank 1 does not see what rank 0 writes to {where}: the folder is not shared" in x for x in said), said
    (machines[1].folder / "data" / "a.txt").write_text("other " * 999)
    codes, said = ended(torchrun(machines, command(Path("data"), tmp_path / "shared"), tmp_path, 0), tmp_path)
    assert all(codes), said
    assert all("rank 1 differs from rank 0: data.data.sha256: " in line for line in said), said
