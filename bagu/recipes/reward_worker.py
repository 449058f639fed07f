"""The process that runs a user's reward function: `user_reward.py` starts it, and kills it after a timeout.

It imports nothing of bagu, so that it starts fast; the user's file imports what it needs. The user's code has the
rights of the user: this process protects the training run from a hang or a crash, not the machine from the code.

Messages are pickled tuples. To the parent: ("ready", takes_lists) or ("refused", why) once, then for each call a list
of (value, fault) per sample. From the parent: a list of (prompt, completion, facts) for one call.
"""

import importlib.util
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Asked = tuple[str, str, dict[str, Any]]
Answer = tuple[float | None, str | None]  # a value, or a fault
LISTS = ("prompts", "completions")


class Refused(Exception):
    """The file or the function cannot be used."""


def main(file: str, name: str, inbox: int, outbox: int, life: int) -> None:
    """`inbox`, `outbox` and `life` are file descriptors of pipes; the parent holds the other ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the run after its step, which still needs rewards
    threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
    calls, answers = Connection(inbox, writable=False), Connection(outbox, readable=False)
    try:
        function = load(Path(file), name)
        takes_lists = _takes_lists(function, name)
    except Refused as error:
        answers.send(("refused", str(error)))
        return
    answers.send(("ready", takes_lists))
    while True:
        try:
            asked: list[Asked] = calls.recv()
        except EOFError:
            return
        answers.send(_of_lists(function, asked) if takes_lists else [_of_one(function, sample) for sample in asked])


def load(file: Path, name: str) -> Callable[..., Any]:
    """Import the file by its path, with its folder on the module path as for a script."""
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, "the parent checks that it is a .py file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # SystemExit too: the file is not a script
        raise Refused(f"importing {file} failed: {_words(error)}") from error
    function = getattr(module, name, None)
    if function is None:
        known = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == file.stem]
        raise Refused(f"{file} has no function {name!r}; it has: {', '.join(known) or 'none'}")
    if not callable(function):
        raise Refused(f"{name!r} of {file} is a {type(function).__name__}, not a function")
    return function


def _takes_lists(function: Callable[..., Any], name: str) -> bool:
    """Whether it is called with lists: its first parameter is `prompts`, or its second `completions`."""
    wanted = f"it takes {name}(prompt, completion, facts), or lists: {name}(prompts, completions, facts)"
    try:
        signature = inspect.signature(function)
        signature.bind("", "", {})
    except ValueError:  # a builtin without a signature
        return False
    except TypeError as error:
        raise Refused(f"{name}{inspect.signature(function)} cannot be called with three arguments; {wanted}") from error
    return any(parameter in LISTS for parameter in list(signature.parameters)[:2])


def _of_one(function: Callable[..., Any], sample: Asked) -> Answer:
    try:
        return _number(function(*sample))
    except BaseException as error:  # also SystemExit: a reward must not end the process
        return None, _raised(error)


def _of_lists(function: Callable[..., Any], asked: Sequence[Asked]) -> list[Answer]:
    """One call for all samples; if it fails, all of them have the fault."""
    try:
        values = list(function(*map(list, zip(*asked, strict=True))))
    except BaseException as error:
        return [(None, _raised(error))] * len(asked)
    if len(values) != len(asked):
        return [(None, f"returned {len(values)} values for {len(asked)} samples")] * len(asked)
    return [_number(value) for value in values]


def _number(value: Any) -> Answer:
    """A finite float. A string is not a number, and a tensor of several elements is not one."""
    if not hasattr(value, "__float__"):
        return None, f"returned {'None' if value is None else f'a {type(value).__name__}'}"
    try:
        number = float(value)
    except Exception:
        return None, f"returned a {type(value).__name__} that is not one number"
    return (number, None) if abs(number) < float("inf") else (None, f"returned {number}")


def _raised(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"raised {_words(error)}{place}"


def _words(error: BaseException) -> str:
    """The type and the first line of the message, shortened."""
    message = next(iter(str(error).splitlines()), "")[:120]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _end_with_parent(life: int) -> None:
    """Wait until the parent's end of a pipe is closed, which also happens if it is killed; then end at once, even if
    the user's function hangs."""
    os.read(life, 1)
    os._exit(1)
