"""A lab's function in a Python of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

from bagu.errors import BaguError
from bagu.lab.core import Row


def in_new_process(function: Callable[..., list[Row]], *args: object, **environment: str) -> list[Row]:
    """The rows of a module's function, from a new process. Triton compiles there even where this process has its
    interpreter on, which is decided when Triton is imported."""
    name = function.__name__
    code = f"import json; from {function.__module__} import {name}; print(json.dumps({name}(*{args!r})))"
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BaguError(f"{name} ended with {done.returncode} in its process: {done.stderr.strip()[-300:]}")
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows
