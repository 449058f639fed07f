"""The optimizer: a rule and its state for each segment of the flat parameters.

State is one flat tensor per quantity and segment, allocated only here. Adam and AdamW run as torch's fused kernel on
the flat tensors if torch has one for the device (CPU, CUDA): one pass over memory instead of six.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from bagu.machine.device import named_dtype
from bagu.train.memory.flat import FlatParameters, Role, Segment
from bagu.train.memory.sharded import Cut, Piece, ShardedParameters
from bagu.train.optim import rules
from bagu.train.optim.config import OptimizerConfig
from bagu.train.optim.muon import MatrixParts, mix_momentum, muon, muon_over_tp, muon_part, muon_part_over_tp
from bagu.train.optim.rules import Now

RULES: Mapping[str, tuple[Callable[..., None], tuple[str, ...]]] = {  # the update function and the names of its state
    "sgd": (rules.sgd, ()),
    "momentum": (rules.momentum, ("velocity",)),
    "nesterov": (rules.nesterov, ("velocity",)),
    "adagrad": (rules.adagrad, ("square_sum",)),
    "adadelta": (rules.adadelta, ("square_avg", "delta_avg")),
    "rmsprop": (rules.rmsprop, ("square_avg",)),
    "adam": (rules.adam, ("exp_avg", "exp_avg_sq")),
    "adamw": (rules.adamw, ("exp_avg", "exp_avg_sq")),
    "lion": (rules.lion, ("exp_avg",)),
    "muon": (muon, ("velocity",)),
}
FUSED = {"adam": "_fused_adam_", "adamw": "_fused_adamw_"}


def options_of(config: OptimizerConfig, kind: str, role: Role) -> dict[str, Any]:
    """The options of the rule `kind` for parameters of a role; not those that depend on the machine."""
    options = config.options()
    if role is Role.VECTOR:
        options["weight_decay"] = 0.0  # decaying a norm's weight or a bias does not regularise
    wanted = {"muon": ("momentum", "weight_decay"), "adamw": ("betas", "eps", "weight_decay")}.get(kind, tuple(options))
    return {name: options[name] for name in wanted}


def update_elements(
    kind: str, options: Mapping[str, Any], p: torch.Tensor, g: torch.Tensor, state: Sequence[torch.Tensor], now: Now, *,
    scale: float = 1.0, fused: bool = True, step: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Run an elementwise rule on flat tensors, with the gradient times `scale`; leaves the gradient undefined. `step`
    is the number of the update on the device, where the fused kernel reads it."""
    if not (fused and kind in FUSED) or g.dtype == torch.float64:  # the fused kernel rounds the scale to fp32
        if scale != 1.0:
            g.mul_(scale)
        scale = 1.0
    if not (fused and kind in FUSED):
        RULES[kind][0](p, g, *state, now, **options)
        return
    beta1, beta2 = options["betas"]
    step = torch.tensor(float(now.step), dtype=torch.float32, device=p.device) if step is None else step
    getattr(torch, FUSED[kind])(
        [p], [g], [state[0]], [state[1]], [], [step],
        lr=now.lr, beta1=beta1, beta2=beta2, weight_decay=options["weight_decay"], eps=options["eps"],
        amsgrad=False, maximize=False,
        # the kernel divides by it in the same pass
        grad_scale=None if scale == 1.0 else torch.full((), 1 / scale, dtype=torch.float32, device=g.device),
    )  # fmt: skip


def can_fuse(device: torch.device) -> bool:
    """Whether torch has fused kernels for the device."""
    return device.type in ("cpu", "cuda") and all(hasattr(torch, name) for name in FUSED.values())


def state_bytes(kind: str, *, matrices: int, others: int) -> int:
    """The bytes of the fp32 state for so many parameters. Muon has AdamW's state for those that are no matrices."""
    sizes = {name: 4 * len(names) for name, (_, names) in RULES.items()}
    return matrices * sizes[kind] + others * sizes["adamw" if kind == "muon" else kind]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One segment with the rule that updates it."""

    segment: Segment
    kind: str
    options: dict[str, Any]
    state: dict[str, torch.Tensor]


class Optimizer:
    """Updates the masters of `flat` from its gradients. `fused=False` uses the readable rule for all kinds. `parts` is
    given if tensor parallelism divides matrices, which Muon needs whole."""

    def __init__(
        self,
        config: OptimizerConfig,
        flat: FlatParameters | ShardedParameters,
        *,
        fused: bool = True,
        parts: MatrixParts | None = None,
    ) -> None:
        self.config, self.flat, self._matrix_parts = config.resolved(flat.device), flat, parts
        self.parts = tuple(self._part(piece) for piece in flat.pieces)
        self._fused = fused and can_fuse(flat.state_device)
        # the fused kernel reads it on the device
        self._step = torch.zeros((), dtype=torch.float32, device=flat.state_device)

    def _kind(self, role: Role) -> str:
        return "adamw" if self.config.kind == "muon" and role is not Role.MATRIX else self.config.kind

    def _newton_schulz(self) -> dict[str, Any]:
        options = self.config.options()
        name = options["newton_schulz_dtype"]
        return {
            "newton_schulz_steps": options["newton_schulz_steps"],
            "newton_schulz_dtype": torch.float64 if name == "fp64" else named_dtype(name),
        }

    def _part(self, segment: Segment) -> _Part:
        kind = self._kind(segment.role)
        options = options_of(self.config, kind, segment.role)
        if kind == "muon":
            options |= self._newton_schulz()
        size = segment.stop - segment.start
        # in the masters' dtype: exact in sums with them
        state = {
            name: torch.zeros(size, dtype=self.flat.dtype, device=self.flat.state_device) for name in RULES[kind][1]
        }
        return _Part(segment=segment, kind=kind, options=options, state=state)

    @torch.no_grad()
    def update(self, *, lr: float, step: int, scale: float = 1.0) -> None:
        """Run update number `step` (from 1) with the gradients times `scale` (clipping); leaves them undefined."""
        now = Now(lr=lr, step=step)
        self._step.fill_(step)
        for part in self.parts:
            segment: Any = part.segment  # one of flat.pieces, so of the class that flat has
            p, g = self.flat.master_of(segment), self.flat.grad_of(segment)
            if part.kind != "muon":
                state = tuple(part.state.values())
                update_elements(
                    part.kind, part.options, p, g, state, now, scale=scale, fused=self._fused, step=self._step
                )
                continue
            if scale != 1.0:
                g.mul_(scale)
            velocity = part.state["velocity"]
            if self.flat.divided:
                options = {name: part.options[name] for name in ("momentum", "weight_decay")}
                mix_momentum(p, g, velocity, now, **options)
            elif self._matrix_parts is not None:
                muon_over_tp(part.segment, p, g, velocity, now, self._matrix_parts, **part.options)
            else:
                muon(part.segment, p, g, velocity, now, **part.options)
        if self.config.kind == "muon" and isinstance(self.flat, ShardedParameters):
            self._orthogonalise_parts(self.flat, now)

    def _orthogonalise_parts(self, flat: ShardedParameters, now: Now) -> None:
        """The second half of a divided Muon: gather each unit's mixed gradient, and update the own part. Every rank
        gathers every unit with matrices, also one in which it has none of them."""
        for unit in flat.units:
            matrices = [flat.slots[i] for i in unit.members if flat.role_of[flat.slots[i].name] is Role.MATRIX]
            if not matrices:
                continue
            whole = flat.whole_gradient(unit)
            parts = [p for p in self.parts if p.kind == "muon" and cast(Piece, p.segment).unit is unit]
            pieces = [(cast(Piece, p.segment), flat.master_of(cast(Piece, p.segment))) for p in parts]
            options = self._newton_schulz()
            if self._matrix_parts is not None:
                muon_part_over_tp(pieces, matrices, whole, unit.start, now, self._matrix_parts, **options)
                continue
            for piece, master in pieces:
                muon_part(piece, master, whole, now, **options)

    def tensors(self, copy: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> dict[str, torch.Tensor]:
        """The state, named "exp_avg/blocks.0.…": by parameter, so that it does not depend on this layout.

        Returns views of the state, or of the copy that `copy` returns of each flat tensor.
        """
        return {
            f"{name}/{slot.name}": slot.of(flat, part.segment.start)
            for part in self.parts
            for name, state in part.state.items()
            for flat in (copy(state),)
            for slot in part.segment.slots
        }

    def state_names(self, role: Role) -> tuple[str, ...]:
        """The quantities that the rule keeps for a parameter of this role."""
        return RULES[self._kind(role)][1]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the state, by the names of `tensors`; those of other ranks of shard too."""
        return {
            f"{name}/{slot.name}": tuple(slot.parameter.shape)
            for slot in self.flat.slots
            for name in self.state_names(self.flat.role_of[slot.name])
        }

    def cuts(self, copy: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> dict[str, Cut]:
        """This rank's parts of the state of divided parameters, under the same names."""
        assert isinstance(self.flat, ShardedParameters)
        return {
            f"{name}/{parameter}": cut
            for part in self.parts
            for name, state in part.state.items()
            for parameter, cut in self.flat.cuts(part.segment, copy(state)).items()  # type: ignore[arg-type]
        }
