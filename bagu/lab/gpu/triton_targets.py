"""Triton's targets: the same kernels compiled for several GPUs of two makers, on a machine that needs none of them."""

import time
from collections.abc import Iterator, Sequence

from bagu.lab.core import Claim, Row, Setting, Verdict, names_in, number, where
from bagu.lab.plot import Bars, Panel

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "NVIDIA A100": ("cuda", 80, 32),
    "NVIDIA H100": ("cuda", 90, 32),
    "NVIDIA B200": ("cuda", 100, 32),
    "AMD MI300X": ("hip", "gfx942", 64),
    "AMD MI350": ("hip", "gfx950", 64),
    "AMD RX 7900": ("hip", "gfx1100", 32),
}


def compiled(kernel: str, target: tuple[str, int | str, int]) -> str:
    """The kind of machine code that a kernel gives for a target."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as build

    from bagu.lab.parts import tile_matmul

    function = getattr(tile_matmul, kernel)
    constants = (
        {"SIZE": 1024}
        if kernel == "sums"
        else {"GROUP": 8, "TMA": False, "SPECIALIZE": False, "BM": 64, "BN": 64, "BK": 32}
    )
    names = list(function.arg_names)
    types = dict.fromkeys(names, "i32") | dict.fromkeys(("x", "y"), "*fp32") | dict.fromkeys("abc", "*fp16")
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(
        fn=function, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()}
    )
    return next(kind for kind in build(source, target=GPUTarget(*target)).asm if kind in ("cubin", "hsaco"))


def run(setting: Setting) -> Iterator[Row]:
    targets = list(TARGETS.items())
    for name, target in setting.track(targets[1:4:2] if setting.quick else targets):
        for kernel in ("sums",) if setting.quick else ("sums", "tiles"):
            start = time.perf_counter()
            try:
                code, reason = compiled(kernel, target), ""
            except Exception as error:  # the compilers' own classes differ by version
                code, reason = "", f"{type(error).__name__}: {error}"[:200]
            yield {
                "target": name,
                "kernel": kernel,
                "code": code,
                "time_s": time.perf_counter() - start,
                "reason": reason,
            }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if nothing compiles for a GPU that is not NVIDIA's."""
    others = [r for r in rows if r["code"] == "hsaco"]
    right = sum(bool(r["code"]) for r in rows)
    return Verdict.say(
        "did not hold" if others else "held",
        "{right} of {all} compilations gave machine code, {others} of them for AMD: {each}.",
        "{all} 次编译中 {right} 次得到机器码，其中 {others} 次为 AMD：{each}。",
        right=right,
        all=len(rows),
        others=len(others),
        each=", ".join(
            f"{t} {'/'.join(str(r['code'] or 'no') for r in where(rows, target=t))}" for t in names_in(rows, "target")
        ),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    names = names_in(rows, "target")
    bars = [
        Bars([number(r, "time_s") for r in where(rows, kernel=k)], k, text="{:.1f}") for k in names_in(rows, "kernel")
    ]
    return [Panel(bars, "Time to compile (0.0: from the cache)", y="s", xnames=names)]


LAB = Claim(
    title_en="Triton's targets",
    title_zh="Triton 的目标设备",
    claim_en="Triton supports NVIDIA only.",
    claim_zh="Triton 只支持 NVIDIA。",
    regime="The Triton of this machine compiles a sum and a matmul to machine code; nothing is run.",
    varies="The GPU: three generations of NVIDIA, three of AMD (quick: one of each).",
    measures="Whether a compilation gives machine code (cubin, hsaco), and its time.",
)
