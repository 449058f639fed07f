"""Objectives, one file each. Every module here, in `rl` and in `preference` is imported: that registers its `kind`."""

import importlib
import pkgutil

from bagu.train import preference, rl

for _package, _path in ((__name__, __path__), (preference.__name__, preference.__path__), (rl.__name__, rl.__path__)):
    for _module in pkgutil.iter_modules(_path):
        importlib.import_module(f"{_package}.{_module.name}")
