"""Meshes: text, sizes, coordinates, and the process groups they make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from bagu.errors import ArgumentError, UnknownName
from bagu.parallel.mesh import DIMS, MeshConfig, open_mesh


def test_a_mesh_is_read_from_text_and_written_back() -> None:
    mesh = MeshConfig.parse("dp=2, tp=2,pp=2")
    assert mesh == MeshConfig(dp=2, tp=2, pp=2)
    assert mesh.ranks == 8 and mesh.size("data") == 2
    assert MeshConfig.parse(str(mesh)) == mesh
    assert MeshConfig.parse(str(MeshConfig())) == MeshConfig()


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("shards=2", UnknownName, "did you mean 'shard'"),
        ("dp", ArgumentError, "dp=2"),
        ("dp=two", ArgumentError, "'dp=two'"),
        ("dp=0", ArgumentError, "dp=0"),
        ("dp=2,dp=2", ArgumentError, "dp twice"),
        ("", ArgumentError, "names no dimension"),
    ],
)
def test_a_wrong_mesh_is_refused(text: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        MeshConfig.parse(text)
    assert words in str(error.value) + "".join(error.value.__notes__)


def test_a_mesh_that_does_not_multiply_to_the_ranks_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"the mesh dp=2,tp=2 has 4 ranks \(dp 2 x tp 2\), and 3 are running"):
        MeshConfig(dp=2, tp=2).check_ranks(3)


def places(sizes: dict[str, int]) -> dict[str, Any]:
    """This rank's members of every group, found by gathering ranks, and its coordinates."""
    mesh = open_mesh(MeshConfig(**sizes), torch.device("cpu"))
    members = {}
    for name in (*DIMS, "data", "loss"):
        group = mesh.group(name)
        if group is not None:
            found = [torch.zeros((), dtype=torch.int64) for _ in range(mesh.size(name))]
            dist.all_gather(found, torch.tensor(mesh.rank), group=group)
            members[name] = [int(f) for f in found]
            assert members[name][mesh.coordinate(name)] == mesh.rank
    return members


def test_groups_hold_the_ranks_that_differ_in_their_dimensions(four: Ranks) -> None:
    found = four.run(places, {"dp": 2, "shard": 2})
    assert [f["dp"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [f["shard"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(f["data"] == f["loss"] == [0, 1, 2, 3] for f in found)
    found = four.run(places, {"dp": 2, "tp": 2})
    assert [f["data"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all("cp" not in f for f in found)
    found = four.run(places, {"pp": 2, "cp": 2})
    assert [f["loss"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_job_that_loses_ranks_goes_on_with_a_mesh_that_divides_the_micro_batches() -> None:
    assert MeshConfig(dp=4).smaller(12) == MeshConfig(dp=3)
    assert MeshConfig(dp=4).smaller(4) == MeshConfig(dp=2)
    assert MeshConfig(dp=2, shard=2).smaller(4) == MeshConfig(shard=2)
    assert MeshConfig(shard=2).smaller(4) == MeshConfig()
    assert MeshConfig().smaller(4) is None


def test_ranks_are_row_major() -> None:
    """Rank 5 of pp 2 x dp 2 x tp 2 is stage 1, replica 0, tensor-parallel rank 1."""
    mesh = MeshConfig(pp=2, dp=2, tp=2)
    assert [mesh.coordinate(name, 5) for name in ("pp", "dp", "tp", "data")] == [1, 0, 1, 0]
