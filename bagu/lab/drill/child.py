"""The answer's process. A helper imports torch once and forks a process per answer, which gives up its rights before it
reads the answer's code; it then receives calls and returns results with a record of what was executed. It never sees
the expected results, the clock or the verdict.

The record: ATen operations (TorchDispatchMode), torch's Python functions (TorchFunctionMode), imports, sockets and
processes (audit hook: code cannot remove one), the largest tensor, changed inputs, global state, threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import io
import linecache
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from bagu.lab.drill import wire
from bagu.machine.sandbox import landlock, namespaces, quota
from bagu.machine.sandbox.protocol import Limits
from bagu.machine.sandbox.zygote import isolated

LIMITS = Limits(memory_bytes=16 << 30, processes=64, disk_bytes=16 << 20)  # torch maps several GiB of addresses
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::mv", "aten::dot")
WATCHED = ("torch.optim", "torch.nn.modules", "torch.distributed")  # loaded with torch, so that no import is seen
FAILED_START = 86  # the exit code if the grader's own part of the process fails
GRACE_S = 2.0  # for a process that has closed its channel, to end
PRINTED = 64 << 10  # characters of print that are kept
EVENTS = (
    "ctypes.dlopen",
    "os.fork",
    "os.posix_spawn",
    "os.system",
    "socket.connect",
    "socket.bind",
    "subprocess.Popen",
)


def main(fd: int, allowed: str) -> None:
    """Fork an answer's process for each file descriptor that arrives; reap it when asked."""
    control = socket.socket(fileno=fd)
    torch.set_num_threads(1)
    torch.ones(64, 64).half().float().exp().sum()  # reads /sys/devices for the CPU's features, once
    torch.ones(8, 8) @ torch.ones(8, 8)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty returns NaN; imports torch._inductor: 1.6 s
    if os.environ.get("TRITON_INTERPRET") and not os.environ.get("DRILL_NO_TRITON"):
        with contextlib.suppress(ImportError):
            import triton.language
            import triton.runtime.interpreter  # noqa: F401
    also = [Path(p) for p in sys.path if Path(p).is_dir() and "-packages" in p]
    kind, problems = isolated(allowed.split(","), also) if allowed else (None, ["not asked for"])
    wire.send(control, {"isolation": kind, "problems": problems})
    running: dict[int, int] = {}
    for number in range(sys.maxsize):
        try:
            message, fds, _, _ = socket.recv_fds(control, 64, 2)
        except OSError:
            return
        if not message:
            return
        asked, _, argument = message.decode().partition(" ")
        if asked == "open":
            running[number] = _forked(fds, kind, also, 64 * (os.getpid() % 4096) + number % 64, float(argument))
            wire.send(control, number)
        else:
            wire.send(control, _ended(running.pop(int(argument)), grace_s=0.0 if asked == "kill" else GRACE_S))


def _ended(pid: int, *, grace_s: float) -> int:
    """The exit code of a process, which is killed if it has not ended within the grace."""
    end = time.monotonic() + grace_s
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _forked(fds: list[int], kind: str | None, also: list[Path], number: int, seconds: float) -> int:
    """The process id of a supervisor, which ends as the answer's process does."""
    supervisor = os.fork()
    if supervisor:
        for fd in fds:
            os.close(fd)
        return supervisor
    code, folder = 1, None
    try:
        folder = quota.make_folder() if kind != "namespaces" else None
        if kind == "namespaces":
            namespaces.enter_job_processes()
        child = os.fork()
        if child == 0:
            _execute(fds, kind, folder, also, number, seconds)
        for fd in fds:
            os.close(fd)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if folder is not None:
            quota.remove_folder(folder)
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
            os.kill(os.getpid(), -code)
        os._exit(code)


def _execute(
    fds: list[int], kind: str | None, folder: Path | None, also: list[Path], number: int, seconds: float
) -> None:
    """In the answer's own process. Does not return."""
    code = FAILED_START
    try:
        os.setsid()
        channel, errors = fds
        os.dup2(errors, 2)
        os.dup2(os.open("/dev/null", os.O_RDWR), 1)
        os.dup2(1, 0)
        os.dup2(channel, 3)
        os.closerange(4, 256)
        os.environ.clear()
        os.environ["TRITON_INTERPRET"] = "1"  # read at every launch
        limits = Limits(**{**vars(LIMITS), "seconds": seconds})
        if kind == "namespaces":
            namespaces.enter_job(limits, number)
        elif folder is not None and kind is not None:
            landlock.enter_job(folder, limits, also)
        elif folder is not None:
            os.chdir(folder)
        faulthandler.enable(2)
        _serve(wire.FileChannel(3))
        code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(error).__name__}: {error}".encode())
    os._exit(code)


class _Bounded(io.TextIOBase):
    """What an answer prints: the beginning."""

    def __init__(self) -> None:
        self.kept = ""

    def write(self, text: str) -> int:
        self.kept += text[: PRINTED - len(self.kept)]
        return len(text)


class NotAGenerator:
    """Arrives as the name of a type: a function that should be a generator returned something else."""


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.largest = 0
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._schema.name)
        result = func(*args, **(kwargs or {}))
        if func._schema.name in PRODUCTS:
            self.flops += 2 * result.numel() * args[-1].shape[-2 if args[-1].ndim > 1 else -1]
        for made in wire.tensors(result):
            self.largest = max(self.largest, made.untyped_storage().nbytes())
        return result


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(resolve_name(func) or getattr(func, "__name__", "?"))
        return func(*args, **(kwargs or {}))


def _serve(channel: wire.Channel) -> None:
    """Load the answer, then answer calls until the grader closes the channel."""
    events: set[str] = set()
    done = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if done:
            return
        if event == "import" and args:
            events.add(f"import {args[0]}")
        elif event in EVENTS:
            events.add(event)

    start = wire.receive(channel)
    printed = _Bounded()
    sys.stdout = sys.stderr = printed
    sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115
    sys.path[:] = [p for p in sys.path if "-packages" in p or p.startswith(sys.base_prefix)]
    for name in [n for n in sys.modules if n.partition(".")[0] == "bagu"]:
        del sys.modules[name]  # an answer that imports it is seen by the hook, and cannot in the namespace
    warnings.simplefilter("ignore")
    file = Path("answer.py").absolute()
    file.write_text(start["source"], encoding="utf-8")
    module = type(sys)("answer")
    module.__file__ = str(file)
    sys.modules["answer"] = module
    sys.addaudithook(hook)
    serving = _Server(module, str(file), events, printed)
    said = serving.guarded(start["seconds"], lambda: serving.load(start["source"]))
    wire.send(channel, said)
    while True:
        try:
            asked = wire.receive(channel)
        except wire.Closed:
            return
        wire.send(channel, serving.guarded(asked["seconds"], partial(serving.run, asked, channel)))


class _Server:
    def __init__(self, module: Any, file: str, events: set[str], printed: _Bounded) -> None:
        self.module, self.file, self.events, self.printed = module, file, events, printed
        self.before: list[Any] = []  # the arguments of the last call, whose memory a later one may reuse

    def guarded(self, seconds: float, work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The result of `work`, or the exception with the line of the answer's file at which it was raised."""

        def stop(*_: Any) -> None:
            raise TimeoutError(f"no result after {seconds:g} s")

        self.printed.kept = ""
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return {**work(), "printed": self.printed.kept[:400]}
        except BaseException as error:
            return {"raised": type(error).__name__, "message": str(error)[:400], **self.place(error)}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def place(self, error: BaseException) -> dict[str, Any]:
        line, at = None, error.__traceback__
        while at is not None:
            line = at.tb_lineno if at.tb_frame.f_code.co_filename == self.file else line
            at = at.tb_next
        if line is None and isinstance(error, SyntaxError) and error.filename == self.file:
            line = error.lineno
        if error.__cause__ is not None and line is None:
            return self.place(error.__cause__)
        return {"line": line, "text": linecache.getline(self.file, line).strip() if line else ""}

    def watch(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note the answer's calls of functions in modules that torch has loaded already. Torch itself calls
        some of them too."""
        name, caller = frame.f_globals.get("__name__", ""), frame.f_back
        if event == "call" and name.startswith(WATCHED) and caller and caller.f_code.co_filename == self.file:
            self.events.add(f"import {name}")

    def load(self, source: str) -> dict[str, Any]:
        exec(compile(source, self.file, "exec"), self.module.__dict__)
        names = [n for n, v in vars(self.module).items() if callable(v) and not n.startswith("_")]
        return {"names": names, "imports": sorted(self.events), "state": _state()}

    def run(self, asked: Mapping[str, Any], channel: wire.Channel) -> dict[str, Any]:
        kind, args, kwargs = asked["kind"], asked["args"], asked["kwargs"]
        if asked["reuse"]:
            args, kwargs = _refilled(self.before, args, kwargs)
        self.before = [args, kwargs]
        given = wire.tensors([args, kwargs])
        torch.manual_seed(asked["rng"])
        target = getattr(self.module, asked["function"])
        random_state = torch.random.get_rng_state() if not asked["draws"] else None
        with torch.no_grad(), _Operations() as operations, _Functions() as functions:
            sys.setprofile(None if asked["triton"] else self.watch)
            try:
                if kind == "script":
                    value: Any = _script(target, args, asked["steps"])
                elif kind == "rank":
                    value = target(*args, *_messages(channel))
                else:
                    value = target(*args, **kwargs)
                if kind == "iterate":
                    value = list(value) if isinstance(value, GeneratorType) else NotAGenerator()
            finally:
                sys.setprofile(None)
        moved = random_state is not None and not torch.equal(random_state, torch.random.get_rng_state())
        own = {t.untyped_storage().data_ptr() for t in given if t.numel()}
        out = wire.tensors(value)
        return {
            "value": value,
            "aten": sorted(operations.seen),
            "functions": sorted(functions.seen),
            "largest": operations.largest,
            "flops": operations.flops,
            "imports": sorted(self.events),
            "hashes": [digest(t) for t in given],
            "view": any(t.numel() and t.untyped_storage().data_ptr() in own for t in out),
            "state": _state() | ({"torch's random generator": "used"} if moved else {}),
        }


def _refilled(before: list[Any], args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The objects of the last call with other values in the same memory."""
    for old, new in zip(wire.tensors(before), wire.tensors([args, kwargs]), strict=True):
        old.copy_(new)
    return before[0], before[1]


def _script(target: Any, args: list[Any], steps: list[list[Any]]) -> list[Any]:
    """Method calls on one object of the answer's class. An exception is a result."""
    thing, results = target(*args), []
    for method, *rest in steps:
        try:
            results.append(getattr(thing, method)(*rest))
        except Exception as error:
            results.append({"raised": type(error).__name__})
    return results


def _messages(channel: wire.Channel) -> tuple[Callable[[int, torch.Tensor], None], Callable[[int], torch.Tensor]]:
    """send(to, tensor) and recv(source), which pass through the grader. It counts the bytes."""

    def send(to: int, tensor: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor:
            raise TypeError(f"send takes a tensor, and got {type(tensor).__name__}")
        wire.send(channel, {"message": "send", "to": int(to), "tensor": tensor.detach().clone()})

    def recv(source: int) -> torch.Tensor:
        wire.send(channel, {"message": "recv", "from": int(source)})
        return wire.receive(channel)["tensor"]

    return send, recv


def digest(tensor: torch.Tensor) -> str:
    """A digest of a tensor's whole memory, gaps included."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    flat = tensor.detach().as_strided((extent,), (1,)) if extent else torch.empty(0)
    return hashlib.sha256(flat.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _state() -> dict[str, Any]:
    return {
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's number of threads": torch.get_num_threads(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "the number of threads": threading.active_count(),
        "the recursion limit": sys.getrecursionlimit(),
    }
