"""The bytecode of a fresh clone, of which each worker of pytest-xdist makes a share.

Where nothing is cached, every worker would rewrite the assertions of all test files and compile the package, all at the
same time: 8 s of CPU time each. Here a worker does that for every second file (of two workers) before it collects, and
finds the others' files in the cache.
"""

from __future__ import annotations

import compileall
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parents[1]


def share(config: pytest.Config) -> None:
    """Write what is missing of this worker's files, if the whole suite is about to be collected."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    number, workers = int(worker["workerid"].removeprefix("gw")), int(worker["workercount"])
    for file in sorted(ROOT.glob("tests/**/*.py"))[number::workers]:
        if file.match("test_*.py") and "peers" not in file.parts:
            _rewritten(file, config)
    for file in sorted(ROOT.glob("bagu/**/*.py"))[number::workers]:
        compileall.compile_file(file, quiet=2)


def _rewritten(file: Path, config: pytest.Config) -> None:
    """As pytest does where it finds no rewritten bytecode. It checks the hash of the source when it reads it."""
    cached = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
    if not cached.exists() and rewrite.try_makedirs(cached.parent):
        digest, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, cached)
