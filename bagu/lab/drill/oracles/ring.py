"""The truth of a ring all-reduce: the sum in fp64, and the bytes that each rank sent, counted by the grader."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bagu.lab.drill.answers import Reply
from bagu.lab.drill.core import Drill, Text
from bagu.lab.drill.trial import Trial, Wrong

SLACK = 1024  # bytes beyond 2 (N - 1) / N of the tensor


def trials(drill: Drill, level: str, seed: int) -> Iterator[Trial]:
    plain = Text("every rank has the sum of all", "每个 rank 得到全部之和")
    uneven = Text("S is no multiple of N, so chunks differ in size", "S 不能被 N 整除，各块大小不同")
    tiny = Text("there are fewer values than ranks, so chunks are empty", "元素比 rank 少，有空块")
    alone = Text("one rank sends nothing", "只有一个 rank 时不发送")
    for name, why, ranks, size, edge in (
        ("two", plain, 2, 1024, False),
        ("four", plain, 4, 4096, False),
        ("three", uneven, 3, 1000, True),
        ("seven", uneven, 7, 3001, True),
        ("tiny", tiny, 4, 3, True),
        ("none", tiny, 2, 0, True),
        ("alone", alone, 1, 10, True),
    ):
        yield _trial(name, why, ranks, size, edge, seed)


def _trial(name: str, why: Text, ranks: int, size: int, edge: bool, seed: int) -> Trial:
    drawn = torch.randn(ranks, size, generator=torch.Generator().manual_seed(seed + ranks))
    want = drawn.double().sum(0)

    def judge(reply: Reply) -> None:
        for rank, got in enumerate(reply.value):
            if not isinstance(got, torch.Tensor) or got.shape != want.shape or got.dtype != torch.float32:
                kind = getattr(got, "type_name", type(got).__name__)
                shape = f" {list(got.shape)} {got.dtype}" if isinstance(got, torch.Tensor) else ""
                raise Wrong(f"rank {rank} of {ranks} returned {kind}{shape}, expected fp32 [{size}]", cause="type")
            off = (got.double() - want).abs()
            if size and not bool((off <= 1e-5 * (1 + want.abs())).all()):
                at = int(off.nan_to_num(torch.inf).argmax())
                raise Wrong(
                    f"case {name}: y[{at}] on rank {rank} of {ranks} is {got[at]:.7g}, and the sum is {want[at]:.7g}",
                    cause=_cause(got.double(), want, drawn.double(), rank, edge),
                )
        bound = 2 * (ranks - 1) * size * 4 / ranks + SLACK
        if max(reply.sent) > bound:
            most = max(reply.sent)
            raise Wrong(
                f"case {name}: rank {reply.sent.index(most)} sent {most:,} bytes; a ring sends"
                f" 2 (N - 1) / N S = {2 * (ranks - 1) * size * 4 // ranks:,}",
                cause="volume",
            )

    args = [[drawn[r].clone(), r, ranks] for r in range(ranks)]
    return Trial(name=name, why=why, edge=edge, ranks=ranks, each=("all_reduce", args), judge=judge)


def _cause(got: torch.Tensor, want: torch.Tensor, drawn: torch.Tensor, rank: int, edge: bool) -> str:
    if torch.allclose(got, want, rtol=1e-2, atol=1e-2):
        return "precision"
    if torch.allclose(got * len(drawn), want, rtol=1e-3, atol=1e-3):
        return "factor"
    if torch.allclose(got.sort()[0], want.sort()[0], rtol=1e-4, atol=1e-4):
        return "order"
    good = torch.isclose(got, want, rtol=1e-4, atol=1e-4)
    partial = torch.isclose(got, drawn[rank], rtol=1e-5, atol=1e-5) & ~good
    if bool(partial.any()) and bool(good.any()):
        return "off_by_one"
    return "edge" if edge else "formula"
