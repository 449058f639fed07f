"""The software versions and the machine of a measurement; every record stores them."""

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from bagu import __version__
from bagu.machine import device


def environment() -> dict[str, Any]:
    """Software versions and machine facts, JSON-safe; a fact that does not apply is None."""
    return {
        "bagu": __version__,
        "commit": _commit(Path(__file__).resolve().parent.parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "numpy": package_version("numpy"),
        "cuda": device.cuda_build(),
        "driver": device.driver_version(),
        "os": platform.platform(),
        "machine": device.this_machine().name,
        "threads": torch.get_num_threads(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def package_version(name: str) -> str | None:
    """The version of an installed distribution; None if it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def triton_version() -> str | None:
    """Triton's version; Triton is published under several names."""
    names = ("triton", "pytorch-triton", "triton-windows")
    return next((version for name in names if (version := package_version(name))), None)


def _commit(package: Path) -> str | None:
    """The git commit of the package's files, with "-dirty" if they were changed; None outside a checkout.

    Only files of the package count: appending to a record file must not mark the next run as dirty. `__init__.py` must
    be tracked: an installed package may lie in an environment inside another checkout.
    """
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*args: str) -> str | None:
        done = subprocess.run([git, "-C", str(package), *args], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    head = ask("rev-parse", "--verify", "HEAD")
    if head is None or ask("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return f"{head}-dirty" if ask("status", "--porcelain", "--", ".") else head
