"""Public names are sorted, real, documented and typed; every op's folder is exported under its own name."""

from __future__ import annotations

import inspect

import bagu.ops
from bagu.ops.catalogue import SPECS


def test_names_are_sorted_and_exist() -> None:
    assert list(bagu.ops.__all__) == sorted(bagu.ops.__all__)
    assert all(hasattr(bagu.ops, name) for name in bagu.ops.__all__)


def test_every_op_is_a_typed_documented_function_with_the_arguments_of_its_spec() -> None:
    for name, spec in SPECS.items():
        assert name in bagu.ops.__all__, f"add `from bagu.ops.{name} import {name}` to bagu/ops/__init__.py"
        fn = getattr(bagu.ops, name)
        assert inspect.isfunction(fn), f"bagu.ops.{name} is the folder, not the function"
        assert fn.__doc__, f"bagu.ops.{name} has no docstring"
        parameters = inspect.signature(fn).parameters
        assert parameters["backend"].default is None
        untyped = [p.name for p in parameters.values() if p.annotation is inspect.Parameter.empty]
        assert not untyped, f"bagu.ops.{name}: {untyped} have no type"
        for arg in spec.sig.tensors:
            if arg.name in parameters:
                assert (parameters[arg.name].default is None) == arg.optional, (name, arg)


def test_every_case_says_why() -> None:
    for spec in SPECS.values():
        assert len({c.name for c in spec.cases}) == len(spec.cases), f"{spec.name} has two cases of one name"
        assert all(len(c.why) > 20 for c in spec.cases), spec.name
        assert any(c.bench for c in spec.cases), f"{spec.name} has no bench case"
