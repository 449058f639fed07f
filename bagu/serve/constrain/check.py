"""Compiles the grammars of clients in another process first, with a limit of CPU time.

A grammar of 50 kB can overflow the stack of llguidance or compile for a minute. In the engine process that would end or
delay everybody's requests; here it ends or delays a process that has nothing else to do. A grammar that passes is
compiled again by the engine process, in a thread with a larger stack.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

from bagu.serve.constrain.compiler import GrammarCompiler, compile_grammar, grammar_source, ll_tokenizer
from bagu.serve.grammar import Grammar
from bagu.serve.request import Unservable

LIMIT_S = 5.0  # CPU time for one grammar
PROCESSES = 2  # so that one slow grammar does not delay the next; started when needed
CHECK_STACK = 2**23  # bytes: a grammar that fits in it fits in the larger one of the engine process
COMPILE_STACK = 2**25
ENDED = (EOFError, OSError, pickle.UnpicklingError)  # what a pipe to a process that has ended raises
_STACK_SIZE = threading.Lock()  # threading.stack_size is a setting of the process


class CheckedCompiler:
    """Fills a `GrammarCompiler` in the background with grammars that have passed the check."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler, self.limit_s = compiler, LIMIT_S
        self._workers = ThreadPoolExecutor(PROCESSES, thread_name_prefix="grammar")
        self._idle: SimpleQueue[_CheckProcess] = SimpleQueue()
        self._running: dict[Grammar, Future[None]] = {}  # used by the caller's thread only

    def prepare(self, grammar: Grammar, then: Callable[[], None]) -> None:
        """Call `then` from another thread when `compiler` has a result for the grammar: a matcher or an error."""
        for done in [g for g, future in self._running.items() if future.done()]:
            del self._running[done]
        if grammar not in self._running:
            self._running[grammar] = self._workers.submit(self._prepare, grammar)
        self._running[grammar].add_done_callback(lambda _: then())

    def close(self) -> None:
        self._workers.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(Empty):
            while True:
                self._idle.get_nowait().kill()

    def _prepare(self, grammar: Grammar) -> None:
        if self.compiler.has_result(grammar):
            return
        try:
            source = self._check(grammar)
        except OSError as error:
            message = f"the grammar compiler did not start: {error}"
            source = Unservable(message, hint="try again later", param="grammar", temporary=True)
        if isinstance(source, Unservable):
            self.compiler.keep(grammar, source)
        else:
            _with_stack(COMPILE_STACK, partial(self._compile, grammar, source))
            if not self.compiler.has_result(grammar):  # a bug, whose traceback is printed; requests need a result
                hint = "the server's log has the reason"
                self.compiler.keep(grammar, Unservable("the grammar compiler failed", hint=hint, param="grammar"))

    def _compile(self, grammar: Grammar, source: str) -> None:
        with contextlib.suppress(Unservable):  # the engine's own call raises it again
            self.compiler.matcher(grammar, source)

    def _check(self, grammar: Grammar) -> str | Unservable:
        """The source of the grammar if it compiles in the other process, else the reason why not."""
        process = self._idle_process()
        if process is None:
            process = _CheckProcess()
            failure = process.start(self.compiler)
            if failure is not None:
                process.kill()
                return failure
        answer = process.ask(grammar, self.limit_s)
        if process.alive:
            self._idle.put(process)
        return answer

    def _idle_process(self) -> _CheckProcess | None:
        """None if there is none. The system may have killed one, which says nothing about the next grammar."""
        with contextlib.suppress(Empty):
            while True:
                process = self._idle.get_nowait()
                if process.alive:
                    return process
                process.kill()
        return None


class _CheckProcess:
    """`python -m bagu.serve.constrain.check`, which answers a grammar with its source or the reason to refuse it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "bagu.serve.constrain.check"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def start(self, compiler: GrammarCompiler) -> Unservable | None:
        """Send the vocabulary; returns why the process cannot compile. Raises OSError if it has ended."""
        try:
            answer = self._answer(compiler.vocabulary)
        except ENDED as error:
            self.kill()
            raise OSError(f"its process ended with exit status {self._process.returncode}") from error
        return answer if isinstance(answer, Unservable) else None

    def ask(self, grammar: Grammar, limit_s: float) -> str | Unservable:
        try:
            return self._answer((grammar, limit_s))
        except ENDED:
            self.kill()
        if self._process.returncode == -signal.SIGPROF:
            message = f"the grammar takes more than {limit_s:g} s to compile"
            return Unservable(message, hint="make it smaller, with fewer optional properties", param="grammar")
        reason = f"the grammar compiler ended with exit status {self._process.returncode}: "
        return Unservable(
            f"{reason}the grammar is nested too deeply, or too large", hint="make it smaller", param="grammar"
        )

    def _answer(self, message: Any) -> str | Unservable:
        """Raises one of `ENDED` if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()
        answer: str | Unservable = pickle.load(self._process.stdout)
        return answer


def _with_stack(size: int, call: Callable[[], object]) -> None:
    """Run `call` in a thread with a stack of `size` bytes."""
    thread = threading.Thread(target=call, daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(size)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()


def _serve(source: BinaryIO, target: BinaryIO) -> None:
    try:
        tokens = ll_tokenizer(pickle.load(source))
    except Unservable as error:  # llguidance is missing
        _reply(target, error)
        return
    _reply(target, "")
    while True:
        try:
            grammar, limit_s = pickle.load(source)
        except EOFError:  # the engine process has ended
            return
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # the signal ends this process, also inside llguidance
        answer: str | Unservable
        try:
            answer = source_text = grammar_source(grammar)
            compile_grammar(grammar, source_text, tokens)
        except Unservable as error:
            answer = error
        except Exception as error:  # a bug, here or in llguidance: it refuses this grammar, and not the next one
            answer = Unservable(f"the grammar compiler failed: {error!s:.200}", hint="change it", param="grammar")
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _reply(target, answer)


def _reply(target: BinaryIO, answer: str | Unservable) -> None:
    pickle.dump(answer, target)
    target.flush()


if __name__ == "__main__":
    _with_stack(CHECK_STACK, lambda: _serve(sys.stdin.buffer, sys.stdout.buffer))
