"""The objectives, one file each. Every module here is imported, which registers its objective by its `kind`."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
