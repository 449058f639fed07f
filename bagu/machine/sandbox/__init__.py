"""Runs code that a model wrote: no network, no user files, limited time, memory, processes and output.

>>> with Sandbox() as sandbox:
...     sandbox.run("print(1 + 1)")
Result(status='ok', exit_code=0, stdout='2\\n', stderr='', seconds=0.004)

    client.py       the caller's side: starts helper processes, hands them code, returns results
    zygote.py       a helper process: forks a child per program, supervises it, kills it after a timeout
    namespaces.py   isolation by Linux namespaces: own processes, mounts and network, another user id
    landlock.py     isolation where namespaces are not permitted (many containers): Landlock and seccomp
    calls.py        the system calls that code may make, by either kind
    quota.py        the disk in all, where no file system of limited size can be mounted
    syscalls.py     the system calls that Python has no function for

They exist only on Linux. On other systems, and if the kernel permits neither kind of isolation, `Sandbox()` raises
`SandboxUnavailable`: code never runs unprotected.
"""

from bagu.machine.sandbox.client import Sandbox, SandboxUnavailable
from bagu.machine.sandbox.protocol import Limits, Result

__all__ = ["Limits", "Result", "Sandbox", "SandboxUnavailable"]
