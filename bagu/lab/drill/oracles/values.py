"""Trials that compare a returned value with a known one: tensors in fp64 to 1e-9, everything else exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from bagu.lab.drill.answers import Reply
from bagu.lab.drill.core import Text
from bagu.lab.drill.diagnose import Suspects, guess
from bagu.lab.drill.trial import Trial, Wrong

Make = Callable[..., Any]


def value_trial(
    name: str, why: Text, function: str, args: Sequence[Any], want: Any, *, cause: str = "", edge: bool = False,
    suspects: Suspects | None = None, kind: str = "call", steps: Sequence[Sequence[Any]] = (), seconds: float = 20.0,
    tolerance: float = 1e-9, usual: str = "formula", extra: Callable[[Reply], None] | None = None,
) -> Trial:  # fmt: skip
    """A trial whose result must be `want`. `suspects` maps a cause to what that mistake would give."""

    def judge(reply: Reply) -> None:
        try:
            compare(reply.value, want, tolerance)
        except Wrong as wrong:
            found = wrong.cause or guessed(reply.value, want, suspects or {}, cause or usual)
            raise Wrong(f"case {name}: {function}: {wrong.message}", got=reply.value, want=want, cause=found) from None
        if extra is not None:
            extra(reply)

    return Trial(
        name=name,
        why=why,
        edge=edge,
        judge=judge,
        cause=cause if edge else "",
        ask=lambda answer: answer.call(function, list(args), kind=kind, steps=steps, seconds=seconds),
    )


def guessed(got: Any, want: Any, suspects: Mapping[str, Callable[[], Any]], usual: str) -> str:
    """The cause whose mistake gives this result; results of several tensors are compared together."""
    for cause, make in suspects.items():
        mistaken = make()
        if agrees(got, mistaken) and not agrees(want, mistaken):
            return cause.partition(":")[0]
    return guess(got, want, {}, usual=usual)


def agrees(got: Any, want: Any) -> bool:
    try:
        compare(got, want, 1e-6)
    except Wrong:
        return False
    return True


def compare(got: Any, want: Any, tolerance: float = 1e-9, at: str = "") -> None:
    """Raise Wrong at the first place where two values differ."""
    where = f"result{at}"
    if isinstance(got, dict) and got.keys() == {"raised"} and not isinstance(want, dict):
        raise Wrong(f"{where} is not there: the call raised {got['raised']}", cause="raises")
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            kind = getattr(got, "type_name", type(got).__name__)
            raise Wrong(f"{where} is {kind}, expected a plain torch.Tensor on the CPU", cause="type")
        if got.shape != want.shape or got.dtype != want.dtype:
            have, need = f"{got.dtype} {list(got.shape)}", f"{want.dtype} {list(want.shape)}"
            raise Wrong(f"{where} is {have}, expected {need}", cause="type")
        if not want.numel():
            return
        a, b = got.double(), want.double()
        off = (a - b).abs() / (1e-12 + b.abs() + b[b.isfinite()].abs().mean().nan_to_num(0.0))
        off = torch.where(a == b, 0.0, torch.where(a.isnan() & b.isnan(), 0.0, off.nan_to_num(torch.inf)))
        if float(off.max()) > tolerance:
            i = int(off.argmax())
            place = [int(k) for k in torch.unravel_index(torch.tensor(i), off.shape)]
            close = float(off.max()) < 1e-4
            text = f"{where}{place} is {a.flatten()[i]:.9g}, and should be {b.flatten()[i]:.9g}"
            raise Wrong(text, cause="precision" if close else "")
        return
    if isinstance(want, list | tuple) and isinstance(got, list | tuple):
        with suppress(RuntimeError):  # tensors inside have no one truth value
            if type(got) is type(want) and got == want:
                return
        if at and isinstance(want, tuple) and isinstance(got, list):
            raise Wrong(f"{where} is a list, and should be a tuple", cause="type")
        for i, (one, other) in enumerate(zip(got, want, strict=False)):
            compare(one, other, tolerance, f"{at}[{i}]")
        if len(got) != len(want):
            raise Wrong(f"{where} has {len(got)} entries, and should have {len(want)}")
        return
    if isinstance(want, float) and isinstance(got, int | float) and not isinstance(got, bool):
        close = got == want or abs(got - want) <= tolerance * max(1.0, abs(want)) or (got != got and want != want)
        if not close:
            raise Wrong(f"{where} is {got!r}, and should be {want!r}")
        return
    kinds = {type(got), type(want)}
    if (len(kinds) > 1 and not kinds <= {int, float}) or got != want:
        kind = getattr(got, "type_name", None) or _short(got)
        cause = "type" if len(kinds) > 1 and not (got is None or want is None) else ""
        raise Wrong(f"{where} is {kind}, and should be {_short(want)}", cause=cause)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else f"{text[:100]} … ({type(value).__name__})"
