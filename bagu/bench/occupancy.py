"""How many programs of a kernel a multiprocessor runs at once, and what limits them.

Limits are those of NVIDIA's CUDA programming guide, "Technical specifications per compute capability". Registers are
allocated to a warp in units of 256, and a block has 1 KB of shared memory that belongs to the system.
"""

from dataclasses import dataclass

from bagu.errors import UnknownName

REGISTER_UNIT = 256  # per warp
SYSTEM_SHARED = 1024  # bytes per block


@dataclass(frozen=True, kw_only=True)
class Multiprocessor:
    shared: int  # bytes
    warps: int
    blocks: int
    registers: int = 65_536


ARCHITECTURES = {
    "sm_80": Multiprocessor(shared=164 << 10, warps=64, blocks=32),
    "sm_86": Multiprocessor(shared=100 << 10, warps=48, blocks=16),
    "sm_89": Multiprocessor(shared=100 << 10, warps=48, blocks=24),
    "sm_90": Multiprocessor(shared=228 << 10, warps=64, blocks=32),
    "sm_100": Multiprocessor(shared=228 << 10, warps=64, blocks=32),
    "sm_120": Multiprocessor(shared=100 << 10, warps=48, blocks=32),
}


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    programs: int  # per multiprocessor
    share: float  # of its warps
    limit: str  # registers, shared memory, warps or blocks


def occupancy(arch: str, *, registers: int, shared: int, warps: int) -> Occupancy:
    """The occupancy of a kernel with `registers` per thread, `shared` bytes and `warps` warps per program."""
    UnknownName.check("architecture", arch, ARCHITECTURES)
    sm = ARCHITECTURES[arch]
    per_warp = -(-max(registers, 1) * 32 // REGISTER_UNIT) * REGISTER_UNIT
    fits = {
        "registers": sm.registers // per_warp // warps,
        "shared memory": sm.shared // (shared + SYSTEM_SHARED),
        "warps": sm.warps // warps,
        "blocks": sm.blocks,
    }
    limit = min(fits, key=lambda name: fits[name])
    return Occupancy(programs=fits[limit], share=fits[limit] * warps / sm.warps, limit=limit)
