"""The choices of `use` and `invariant`. They apply to the code inside the `with`, in its own thread or asyncio task.

Eager code reads a ContextVar. torch.compile cannot trace a ContextVar (torch 2.13), and reads a threading.local without
a guard. So compiled code reads plain globals, which it guards on: they hold the newest open choice of any thread. A
thread with a different choice gets an error when it compiles (docs/decisions/002).

A block under torch.utils.checkpoint runs its forward again during the backward, when the `with` around it is closed.
`keep_for_recompute` stores the choice at the start of the block with the block and restores it for the second run.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from bagu.errors import BackendError
from bagu.ops.call.eager import constant, saved_tensor_hooks


class Choice(NamedTuple):
    backend: str | None = None  # None: by device
    invariant: bool = False


class _Entry(NamedTuple):
    choice: Choice
    block: Any  # the torch.utils.checkpoint block inside which the `with` was entered


NOTHING = Choice()
_stack: ContextVar[tuple[_Entry, ...]] = ContextVar("bagu.ops.call.scope", default=())
opened = _stack.get  # the choices around the current eager call, the innermost last

# The globals that compiled code reads and guards on, and the open choices they come from, the newest last.
_backend: str | None = None
_invariant: bool = False
_open: list[Choice] = []
_lock = threading.Lock()
_kept: weakref.WeakSet[Any] = weakref.WeakSet()  # blocks whose initial choice is stored


def current() -> Choice:
    """The choice that applies to the current call."""
    if torch.compiler.is_compiling():
        _refuse_another_thread()
        return Choice(_backend, _invariant)
    stack = _stack.get()
    return stack[-1].choice if stack else NOTHING


def enter(*, backend: str | None = None, invariant: bool = False) -> Choice:
    """Select a backend or invariant mode until `leave` is called with the returned choice."""
    global _backend, _invariant
    before = current()
    choice = Choice(backend or before.backend, invariant or before.invariant)
    if torch.compiler.is_compiling():
        _backend, _invariant = choice.backend, choice.invariant
        return before
    _stack.set((*_stack.get(), _Entry(choice, _block())))
    _publish(choice)
    return choice


def leave(entered: Choice) -> None:
    """Undo the innermost `enter`."""
    global _backend, _invariant
    if torch.compiler.is_compiling():
        _backend, _invariant = entered.backend, entered.invariant
        return
    _stack.set(_stack.get()[:-1])
    _withdraw(entered)


def _publish(choice: Choice) -> None:
    global _backend, _invariant
    with _lock:
        _open.append(choice)
        _backend, _invariant = choice.backend, choice.invariant


def _withdraw(choice: Choice) -> None:
    global _backend, _invariant
    with _lock:
        _open.pop(next(i for i, c in reversed(list(enumerate(_open))) if c is choice))
        newest = _open[-1] if _open else Choice()
        _backend, _invariant = newest.backend, newest.invariant


@constant  # runs, and so raises, while the compiler traces the call
def _refuse_another_thread() -> None:
    stack = _stack.get()
    own = stack[-1].choice if stack else Choice()
    if (own.backend, own.invariant) != (_backend, _invariant):
        raise BackendError(
            "torch.compile traces a bagu op in a thread while another thread is inside bagu.ops.use or invariant",
            hint="compiled code sees one choice per process: pass backend= to the op, or compile outside that `with`",
        )


def _block() -> Any:
    """The torch.utils.checkpoint block whose first forward is running, or None. It is read from the closure of the
    innermost pack hook, since PyTorch has no public name for it; tests/ops/test_scope.py checks that this works."""
    hooks = saved_tensor_hooks(True)
    pack: Any = hooks[0] if hooks else None
    if getattr(pack, "__qualname__", "") != "_checkpoint_hook.__init__.<locals>.pack_hook":
        return None
    return pack.__closure__[pack.__code__.co_freevars.index("frame")].cell_contents


def keep_for_recompute() -> None:
    """In an eager call inside a checkpointed block: make the block's second run start with the choice of its first run.

    The block's own code repeats the choices made inside it.
    """
    block = _block()
    if block is None or block in _kept:
        return
    _kept.add(block)
    outside = tuple(e for e in _stack.get() if e.block is not block)
    block.recompute_fn = _within(outside, block.recompute_fn)


def _within(stack: tuple[_Entry, ...], run: Callable[..., Any]) -> Callable[..., Any]:
    def recompute(*args: Any) -> Any:
        with _restored(stack):
            return run(*args)

    return recompute


@contextmanager
def _restored(stack: tuple[_Entry, ...]) -> Iterator[None]:
    choice = Choice(*stack[-1].choice) if stack else Choice()  # a new object: `_withdraw` finds it by identity
    token = _stack.set(stack)
    _publish(choice)
    try:
        yield
    finally:
        _withdraw(choice)
        _stack.reset(token)
