"""Print the functions that a cached op call passes, on Triton's path: `python -m benchmarks.tools.op_path`.

Without a GPU the launch does nothing, and the call takes the path that it takes on one. The last line counts functions,
the package's files and how often the call enters a file that it had left, and gives the host's time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch

from bagu import ops
from bagu.ops.call import dispatch, node
from bagu.ops.replay.launcher import CudaLauncher, Direct, Launch

ROOT = Path(ops.__file__).parents[2]


class Idle(CudaLauncher):
    """A launcher for a machine without a GPU, whose launches do nothing."""

    def __init__(self) -> None:
        self._hooks = SimpleNamespace(
            launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[])
        )
        self.current_device, self.stream, self.empty = lambda: -1, lambda device: 0, _empty

    def direct(self, launch: Launch) -> Direct | None:
        return Direct(lambda *args: None, (), ())


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def cached_call() -> Callable[[], Any]:
    """rms_norm of a kind that has been called before."""
    if torch.cuda.is_available():
        x, w = torch.randn(64, 256, device="cuda"), torch.ones(256, device="cuda")
    else:
        x, w = torch.randn(64, 256), torch.ones(256)
        vars(dispatch)["available_launcher"] = Idle
        vars(node)["_on"] = lambda x: node.nullcontext()
        torch.Tensor.is_cuda = property(lambda x: True)  # type: ignore[assignment]

    def run() -> Any:
        return ops.rms_norm(x, w, backend="triton")

    for _ in range(4):
        run()
    return run


def functions(run: Callable[[], Any]) -> list[tuple[str, str]]:
    """(file, function) of each Python function that a call enters, in order."""
    seen: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            seen.append((frame.f_code.co_filename.removeprefix(f"{ROOT}/"), frame.f_code.co_qualname))

    sys.setprofile(note)
    run()
    sys.setprofile(None)
    return seen


def main() -> None:
    run = cached_call()
    seen = functions(run)
    print(*(f"{file.rpartition('site-packages/')[2]}: {name}" for file, name in seen), sep="\n")
    moves = [file for i, (file, _) in enumerate(seen) if i == 0 or seen[i - 1][0] != file]
    own = {file for file, _ in seen if file.startswith("bagu/")}
    fastest = float("inf")
    for _ in range(30):
        begin = time.thread_time()
        for _ in range(1000):
            run()
        fastest = min(fastest, time.thread_time() - begin)
    print(
        f"{len(set(seen))} functions, {len(own)} files, {len(moves) - len(set(moves))} returns, {fastest * 1e3:.1f} us"
    )


if __name__ == "__main__":
    main()
