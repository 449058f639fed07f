"""The truth of an op drill: the op's own spec, in fp64, at each of its cases, with its tolerances and layouts.

`ops/contract/core.py:check` compares; what it calls is the answer, in another process.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from bagu.errors import ConformanceError
from bagu.lab.drill.answers import Answer, AnswerFault, Reply
from bagu.lab.drill.core import Drill, Text, in_triton
from bagu.lab.drill.diagnose import guess
from bagu.lab.drill.signature import gradients_of
from bagu.lab.drill.trial import Trial, Wrong
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import Case, OpSpec, Streams, check

LAYOUTS = ("packed", "packed", "odd_gaps", "transposed", "packed", "sliced", "stepped")
LARGE = {
    "torch": 1 << 21,
    "triton": 1 << 18,
    "triton_grad": 1 << 16,
    "cuda": 1 << 22,
}  # elements of the inputs of a case; larger ones take the interpreter long
BASIC = ("even", "masked", "ragged", "square", "basic", "plain", "small")


def reduced(drill: Drill, *, gradients: bool = False) -> OpSpec:
    """The op's spec with the drill's fixed arguments, without gradients if they are not asked for."""
    spec = SPECS[drill.op]
    inputs, grads = spec.inputs, tuple(gradients_of(drill.op, drill.fixed)) if gradients else ()
    return dataclasses.replace(
        spec, grads=grads, twins={}, saves=(), inputs=lambda c, s: inputs(c, s) | dict(drill.fixed)
    )


def trials(drill: Drill, level: str, seed: int) -> Iterator[Trial]:
    spec = reduced(drill, gradients=level == "triton_grad")
    cases = [c for c in spec.cases if not c.bench and _fits(spec, c, level)]
    ordered = sorted(cases, key=lambda c: _size(spec, c) > 5000)  # stable: the spec's order, long ones last
    for i, case in enumerate(ordered):
        dtype = torch.float16 if i % 2 and level != "cuda" else torch.float32
        layout = "packed" if level == "cuda" else LAYOUTS[i % len(LAYOUTS)]
        yield _trial(drill, spec, case, dtype, layout, level, seed)
        if i == 0:
            yield _again(drill, spec, case, level, seed)
    if drill.op == "attention":
        yield _long(drill, spec, level, seed)


def _size(spec: OpSpec, case: Case) -> int:
    drawn = spec.inputs(case, Streams(spec.name, case.name))
    return max((v.numel() for v in drawn.values() if isinstance(v, torch.Tensor)), default=0)


def _fits(spec: OpSpec, case: Case, level: str) -> bool:
    if _size(spec, case) > LARGE[level]:
        return False
    if in_triton(level) and spec.unsupported is not None:
        return spec.unsupported(spec.inputs(case, Streams(spec.name, case.name))) is None
    return True


class _Seen:
    """The last calls of an answer inside `check`: the record of both together, and what the diagnosis compares."""

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.args: dict[str, Any] = {}
        self.flows: Sequence[torch.Tensor] = ()  # the incoming gradients
        self.gradients: Mapping[str, Any] = {}

    def add(self, reply: Reply) -> Reply:
        """The reply, whose record is added to that of the call before; the value stays that of the forward."""
        before, self.reply = self.reply, reply
        if before is not None:
            self.reply = before.with_record_of(reply)
        return reply


def _remote(drill: Drill, spec: OpSpec, answer: Answer, seen: _Seen, **options: Any) -> Callable[..., Any]:
    """The answer as a function of the op's arguments, which autograd differentiates if the spec has gradients."""

    def forward(**args: Any) -> Any:
        kept = {k: v for k, v in args.items() if k not in drill.fixed}
        seen.args = dict(args)
        return results(spec, seen.add(answer.call("forward", kwargs=kept, **options)).value)

    def backward(args: Mapping[str, Any], flows: Sequence[torch.Tensor]) -> list[Any]:
        named = {f"d{name}": flow for name, flow in zip(spec.differentiable, flows, strict=True)}
        kept = {k: v for k, v in args.items() if k not in drill.fixed}
        seen.flows = flows
        found = seen.add(answer.call("backward", kwargs={**named, **kept}, **options)).value
        seen.gradients = gradients(spec, args, found)
        return list(seen.gradients.values())

    return _differentiable(spec, forward, backward) if spec.grads else forward


def _differentiable(spec: OpSpec, forward: Any, backward: Any) -> Callable[..., Any]:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, args: dict[str, Any], *given: Any) -> Any:
            ctx.args = args
            return forward(**args)

        @staticmethod
        def backward(ctx: Any, *flows: torch.Tensor) -> Any:
            return None, *backward(ctx.args, flows)

    def call(**args: Any) -> Any:
        plain = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        return Both.apply(plain, *(args[g] for g in spec.grads))

    return call


def results(spec: OpSpec, value: Any) -> Any:
    """The outputs of a forward, or Wrong if they are not the tensors that the signature names."""
    names = [o.name for o in spec.sig.outputs]
    values = tensors("forward", names, value)
    return values[0] if len(values) == 1 else tuple(values)


def tensors(function: str, names: Sequence[str], value: Any) -> list[torch.Tensor]:
    """A function's results as a list, or Wrong if they are not one tensor for each name."""
    values = list(value) if isinstance(value, tuple) and len(names) > 1 else [value]
    if len(values) != len(names):
        raise Wrong(
            f"{function} returned {len(values)} values, expected {len(names)}: {', '.join(names)}", cause="type"
        )
    for name, one in zip(names, values, strict=True):
        if not isinstance(one, torch.Tensor):
            kind = getattr(one, "type_name", type(one).__name__)
            raise Wrong(
                f"{function} returned {kind} for {name}, expected a plain torch.Tensor on the CPU", cause="type"
            )
    return values


def gradients(spec: OpSpec, args: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """What a backward returned, by the name of the argument: None for an argument that is None."""
    values = list(value) if isinstance(value, tuple) and len(spec.grads) > 1 else [value]
    if len(values) != len(spec.grads):
        said = f"backward returned {len(values)} values, expected {len(spec.grads)}"
        raise Wrong(f"{said}: {', '.join(f'd{g}' for g in spec.grads)}", cause="type")
    found = dict(zip(spec.grads, values, strict=True))
    for name, one in found.items():
        if args[name] is None:
            found[name] = None
            continue
        tensors("backward", [f"d{name}"], one)
        if (one.shape, one.dtype) != (args[name].shape, args[name].dtype):
            said = f"backward returned d{name} as {one.dtype} {list(one.shape)}"
            raise Wrong(f"{said}, expected {args[name].dtype} {list(args[name].shape)}", cause="type")
    return found


def _trial(drill: Drill, spec: OpSpec, case: Case, dtype: torch.dtype, layout: str, level: str, seed: int) -> Trial:
    seeded = Case(
        f"{case.name}, seed {seed}", case.why, mixed=case.mixed, frozen=case.frozen, sms=case.sms, **case.params
    )
    held: list[tuple[_Seen, BaseException | None]] = []
    strided: list[bool] = []  # the same values without gaps are right

    def ask(answer: Answer) -> Reply:
        seen = _Seen()
        error: BaseException | None = None
        try:
            check(spec, seeded, dtype, _remote(drill, spec, answer, seen), backend=level, layout=layout)
        except (ConformanceError, Wrong) as wrong:
            error = wrong
        held[:] = [(seen, error)]
        strided.clear()
        if isinstance(error, ConformanceError) and layout != "packed":
            with suppress(ConformanceError, Wrong, AnswerFault):
                check(spec, seeded, dtype, _remote(drill, spec, answer, _Seen()), backend=level)
                strided.append(True)
        assert seen.reply is not None
        return seen.reply

    def judge(reply: Reply) -> None:
        seen, error = held[0]
        if isinstance(error, Wrong):
            raise error
        if reply.view:
            raise Wrong("the result shares memory with an input, and must have its own", cause="type")
        if error is not None:
            text = str(error.args[0]).rpartition("]: ")[2]
            where = f"case {case.name} ({_kind(dtype)}, {layout}, {_shapes(seen.args)}): {text}"
            gradient = re.match(r"d(\w+)", text)
            if gradient and (name := gradient[1]) in seen.gradients:
                got, want = seen.gradients[name], _gradient(spec, seen, name)
                cause = "stride" if strided else guess(got, want, {}, usual="formula")
            else:
                got, want = _pair(spec, seen)
                cause = "stride" if strided else _cause(drill, case, dtype, seen, got, want)
            raise Wrong(where, got=got, want=want, cause=cause)

    return Trial(
        name=case.name,
        why=Text(case.why, case.why),
        ask=ask,
        judge=judge,
        edge=case.name not in BASIC,
        suspects={},
    )


def _kind(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16"}[dtype]


def _shapes(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {list(v.shape)}" for k, v in args.items() if isinstance(v, torch.Tensor))


def _truth(spec: OpSpec, args: Mapping[str, Any]) -> torch.Tensor:
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in args.items()}
    out = spec.apply(spec.reference, wide)
    return out[0] if isinstance(out, tuple) else out


def _gradient(spec: OpSpec, seen: _Seen, name: str) -> torch.Tensor:
    """The true gradient of an argument, for the diagnosis."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in seen.args.items()}
    wide[name] = wide[name].detach().requires_grad_()
    with torch.enable_grad():
        out = spec.apply(spec.reference, wide)
    flows = [flow.double() for flow in seen.flows]
    return torch.autograd.grad(out if isinstance(out, tuple) else (out,), wide[name], flows)[0]


def _pair(spec: OpSpec, seen: _Seen) -> tuple[Any, torch.Tensor]:
    assert seen.reply is not None
    value = seen.reply.value
    return (value[0] if isinstance(value, tuple) else value), _truth(spec, seen.args)


def _cause(drill: Drill, case: Case, dtype: torch.dtype, seen: _Seen, got: Any, want: torch.Tensor) -> str:
    """By what typical mistakes would have given; else by the case, if it is there for one reason."""
    from bagu.lab.drill.oracles import op_mistakes

    if isinstance(got, torch.Tensor) and (got.shape != want.shape or got.dtype != _expected(drill, dtype, want)):
        return "type"
    spec, args = SPECS[drill.op], seen.args
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in args.items()}
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    suspects: dict[str, Callable[[], Any]] = {
        cause: partial(lambda make: first(make(wide)), make)
        for cause, make in op_mistakes.MISTAKES.get(drill.op, {}).items()
    }
    for name, value in args.items():
        optional = next(a.optional for a in spec.sig.inputs if a.name == name)
        if value is not None and optional and name not in drill.fixed:
            key = "mask" if name in ("mask", "lengths", "window") else "ignored"
            suspects[f"{key}:{name}"] = partial(lambda n: first(spec.apply(spec.reference, {**wide, n: None})), name)
        elif isinstance(value, float) and name not in drill.fixed:
            neutral = 0.0 if name == "eps" else 1.0
            key = "eps" if name == "eps" else "ignored"
            suspects[f"{key}:{name}"] = partial(
                lambda n, v: first(spec.apply(spec.reference, {**wide, n: v})), name, neutral
            )
    found = guess(got, want, suspects, usual="").partition(":")[0]
    if found == "unwritten":  # NaN: an overflow where the case is there for one
        found = op_mistakes.BY_CASE.get(case.name, found)
    return found or op_mistakes.BY_CASE.get(case.name) or "formula"


def _expected(drill: Drill, dtype: torch.dtype, want: torch.Tensor) -> torch.dtype:
    out = SPECS[drill.op].sig.outputs[0]
    return out.result_dtype(dtype if want.is_floating_point() else want.dtype, None)


def _again(drill: Drill, spec: OpSpec, case: Case, level: str, seed: int) -> Trial:
    """Other values in the memory of an earlier call, and the same call twice."""

    def ask(answer: Answer) -> Reply:
        drawn = [
            spec.cast(case, spec.inputs(case, Streams(spec.name, case.name, seed, i)), torch.float32) for i in (0, 1)
        ]
        kept = [{k: v for k, v in d.items() if k not in drill.fixed} for d in drawn]
        kept = [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in d.items()} for d in kept]
        scalars = {k: v for k, v in kept[0].items() if not isinstance(v, torch.Tensor)}
        first = results(spec, answer.call("forward", kwargs=kept[0]).value)
        again = results(spec, answer.call("forward", kwargs=kept[0]).value)
        reply = answer.call("forward", kwargs={**kept[1], **scalars}, reuse=True)
        state.append((first, again, {**drawn[1], **scalars}))
        return reply

    def judge(reply: Reply) -> None:
        first, again, args = state.pop()
        one, two = (x[0] if isinstance(x, tuple) else x for x in (first, again))
        if one.shape == two.shape and not torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0)):
            raise Wrong("the same call gave other bits the second time", cause="random")
        got, want = results(spec, reply.value), _truth(spec, args)
        got = got[0] if isinstance(got, tuple) else got
        if not torch.allclose(got.double(), want, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise Wrong(
                "other values in the memory of an earlier call gave a wrong result: is one kept?", cause="stale"
            )

    state: list[Any] = []
    why = Text(
        "a result that is kept by address or object would be returned again", "按地址或对象缓存的结果会被再次返回"
    )
    return Trial(name="again", why=why, ask=ask, judge=judge, cause="", edge=False)


def _long(drill: Drill, spec: OpSpec, level: str, seed: int) -> Trial:
    """Memory is part of the truth of flash attention."""
    T, H, D = (1024, 2, 16) if level == "torch" else (512, 1, 16)
    bound = 4 * T * H * (D + D)

    def ask(answer: Answer) -> Reply:
        streams = Streams("long", seed)
        q, k, v = (streams.normal(n, T, H, D).float() for n in "qkv")
        cu = torch.tensor([0, T], dtype=torch.int32)
        args = {"q": q, "k": k, "v": v, "cu_seqlens": cu, "max_len": T, "causal": True, "window": None, "scale": None}
        return answer.call("forward", kwargs=args)

    def judge(reply: Reply) -> None:
        if reply.largest > bound:
            raise Wrong(
                f"a tensor of {reply.largest:,} bytes is allocated for T = {T}, H = {H}, D = {D}; flash attention needs"
                f" no more than 4 T H (D + E) = {bound:,}",
                cause="memory",
            )

    why = Text("peak memory is what flash attention is for", "峰值显存正是 flash attention 的意义")
    return Trial(name="memory", why=why, ask=ask, judge=judge, cause="", edge=False)
