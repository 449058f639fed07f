"""The compile gate for an answer's Triton kernels: registers, spills, shared memory, wide loads; without a GPU.

The answer's `forward` runs on tensors without values, in a process where Triton compiles instead of interpreting. It is
the learner's own code and has passed its trials in the sandbox; the compiler needs files and processes, so this process
is not isolated. A reward never comes here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bagu.errors import NotOffered
from bagu.lab.drill.core import Drill

SECONDS = 120.0
PACKAGE = Path(__file__).parents[3]
START = "import sys; sys.path.append(sys.argv[1]); from bagu.lab.drill.static import main; main(*sys.argv[2:])"


def compile_answer(drill: Drill, level: str, source: str, file: str) -> tuple[list[str], list[str]]:
    """The faults that the compiler finds, and a line for each kernel."""
    if importlib.util.find_spec("triton") is None:
        return [], ["Triton is not installed here: the kernel was not compiled"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.py"
        path.write_text(source, encoding="utf-8")
        settings = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = [sys.executable, "-c", START, str(PACKAGE), drill.name, level, str(path)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return [f"{file}: the kernel did not compile in {SECONDS:g} s"], []
    if run.returncode or not run.stdout.strip():
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        return [f"{file}: it does not compile for sm_90: {last[:300]}"], []
    said: dict[str, list[str]] = json.loads(run.stdout.strip().splitlines()[-1])
    return said["faults"], said["kernels"]


def main(name: str, level: str, path: str) -> None:
    """In that process: print the faults and the kernels as JSON."""
    import torch

    from bagu.lab.drill import catalogue
    from bagu.lab.drill.oracles.ops import reduced
    from bagu.ops.inspect import gate, offline

    drill = catalogue.drill(name)
    spec = reduced(drill)
    loader = importlib.util.spec_from_file_location("answer", path)
    assert loader is not None and loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    sys.modules["answer"] = module
    loader.loader.exec_module(module)
    case = next((c for c in spec.cases if c.bench), None)
    if case is None:
        raise NotOffered(f"{name} has no benchmark case")
    args: dict[str, Any] = spec.cast(case, spec.inputs(case, offline.MetaStreams()), torch.bfloat16)
    args = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in args.items() if k not in drill.fixed}
    found: list[offline.Launch] = []
    with offline.recorded(found, "forward"):
        out = module.forward(**args)
        if level == "triton_grad":
            outs = out if isinstance(out, tuple) else (out,)
            flows = {f"d{o.name}": torch.empty_like(y) for o, y in zip(spec.sig.outputs, outs, strict=True)}
            module.backward(**flows, **args)
    compiled = [offline.compile_launch(launch) for launch in found]
    codes = offline.instructions([c.asm["cubin"] for c in compiled])
    kernels = [
        gate.kernel_of(spec, case, launch, one, code) for launch, one, code in zip(found, compiled, codes, strict=True)
    ]
    faults = [fault for kernel in kernels for fault in gate.faults(kernel)]
    lines = [" ".join(str(kernel).split()) for kernel in kernels]
    floor = f"compulsory traffic at {case.name}: {spec.cost(_sizes(spec, args, drill), 2).bytes / 1e6:.1f} MB"
    print(json.dumps({"faults": faults, "kernels": [*lines, floor] if kernels else ["no kernel was launched"]}))


def _sizes(spec: Any, args: dict[str, Any], drill: Drill) -> dict[str, int]:
    from bagu.ops.contract.signature import sizes

    return sizes(spec.bind(args | dict(drill.fixed)))
