"""How many ranks the next start of a run has: fewer after starts in vain, and all of them again later."""

from bagu.parallel.mesh import MeshConfig

IN_VAIN = 2  # starts in a row without a new checkpoint, after which the next has fewer ranks


class Sizes:
    """The mesh of each start. `reached` counts the checkpoints that the run has made."""

    def __init__(self, full: MeshConfig, micro_batches: int) -> None:
        self.full = self.mesh = full
        self.micro_batches = micro_batches
        self._vain = 0
        self._patience = 1  # checkpoints of a smaller start before all ranks are tried again: 2, 4, 8, …
        self._reached: int | None = None  # at the last start

    def next(self, reached: int) -> MeshConfig:
        """The mesh of a start that begins after `reached` checkpoints."""
        if self._reached is not None and reached > self._reached:
            self._vain, self.mesh = 0, self.full  # what was missing may be back
        elif self._reached is not None:
            self._vain += 1
        self._reached = reached
        if self._vain == IN_VAIN and (less := self.mesh.smaller(self.micro_batches)) is not None:
            self._patience *= 2 if self.mesh == self.full else 1
            self._vain, self.mesh = 0, less
        return self.mesh

    def may_grow(self, reached: int) -> bool:
        """Whether a smaller start has gone on long enough to try all ranks again."""
        return self.mesh != self.full and reached - (self._reached or 0) >= self._patience
