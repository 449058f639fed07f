"""Every op's spec, by name: the folders of this package that have a spec.py."""

import importlib
from pathlib import Path

from bagu.errors import UnknownName
from bagu.ops.contract.core import OpSpec

SPECS: dict[str, OpSpec] = {
    path.parent.name: importlib.import_module(f"bagu.ops.{path.parent.name}.spec").SPEC
    for path in sorted(Path(__file__).parent.glob("*/spec.py"))
}


def spec(name: str) -> OpSpec:
    """Return the spec of an op. For an unknown name, raise an error that suggests the closest one."""
    if name not in SPECS:
        raise UnknownName.among("op", name, SPECS)
    return SPECS[name]
