"""The levels beside torch and Triton: gradients, and CUDA C."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bagu.errors import ArgumentError, BaguError
from bagu.lab.drill import words
from bagu.lab.drill.answers import Answers
from bagu.lab.drill.catalogue import drill, of_file, written
from bagu.lab.drill.commands import passed_before
from bagu.lab.drill.core import Planted
from bagu.lab.drill.cuda import fault
from bagu.lab.drill.cuda_source import launch
from bagu.lab.drill.grade import grade
from bagu.lab.drill.progress import Attempt, Progress, digest_of

CUDA = [name for name, d in written().items() if "cuda" in d.levels]
PLANTED = [(name, p) for name in CUDA for p in drill(name).planted if p.level == "cuda"]
CHECKED = (  # a backward of rope's drill, and what is said of it
    ("return dy", "the result shares memory with an input", "type"),
    ("return dy.clone()", "dx[", "formula"),
    ("return dy.double()", "backward returned dx as torch.float64", "type"),
    ("return dy, dy", "expected a plain torch.Tensor", "type"),
    ("return dy * 2.0", "torch computes mul", "forbidden"),
    ("raise ValueError('no')", "line {}: ValueError: no (in backward)", "raises"),
)


@pytest.mark.parametrize(("body", "said", "cause"), CHECKED)
def test_what_is_wrong_with_a_gradient_is_said(answers: Answers, body: str, said: str, cause: str) -> None:
    found = drill("rope")
    head = found.solutions["triton_grad"].partition("def backward")[0]
    source = f"{head}def backward(dy, x, cos, sin, positions, layout):\n    {body}\n"
    graded = grade(found, source, "triton_grad", seed=5, answers=answers, stop=True)
    assert said.format(len(source.splitlines())) in graded.failures[0].message
    assert graded.failures[0].cause == cause


@pytest.mark.parametrize("level", ["triton_grad", "cuda"])
def test_the_stub_of_a_level_is_found_again(tmp_path: Path, level: str) -> None:
    for name in ("softmax", "layer_norm"):
        file = words.start(drill(name), level, tmp_path, "zh")
        assert of_file(file, file.read_text(encoding="utf-8")) == (drill(name), level)
    text = (tmp_path / "layer_norm.cu").read_text(encoding="utf-8") if level == "cuda" else ""
    assert not text or "const float* b,\n    float eps,\n    float* y,\n    long long M, long long N)" in text


def test_a_drill_without_level_cuda_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="rope has no level cuda"):
        of_file(tmp_path / "rope.cu", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_cuda_the_level_is_refused() -> None:
    found = drill("softmax")
    with pytest.raises(BaguError, match=r"level cuda needs a (CUDA build of torch|GPU), and"):
        grade(found, found.solutions["cuda"], "cuda")


def test_a_launch_is_arithmetic() -> None:
    assert launch("// launch: (M + 3) / 4, min(N, 32 * 4)\n", 9, 1000) == (3, 128)
    for source, said in (
        ("", "0 lines begin with"),
        ("// launch: M\n", "not enough values"),
        ("// launch: M, 2048\n", "is 9, 2048 for M = 9"),
        ("// launch: open('x'), 1\n", "is no arithmetic of M and N"),
        ("// launch: M / 0, 1\n", "zero"),
    ):
        with pytest.raises(ArgumentError, match=said.replace("(", ".")):
            launch(source, 9, 100)


def test_a_fault_on_the_gpu_is_one_sentence() -> None:
    log = 'NVRTC refuses a kernel for sm_90a: lab.cu(7): error: identifier "v" is undefined\n  v = 1;\n\n1 error\n'
    assert fault(log) == {"raised": 'NVRTC: identifier "v" is undefined', "line": 7, "cause": "raises"}
    assert fault("CUDA error: an illegal memory access was encountered\nmore")["cause"] == "dies"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA)
def test_own_cuda_kernel_is_right(name: str) -> None:
    graded = grade(drill(name), drill(name).solutions["cuda"], "cuda", seed=5)
    assert graded.letter == "A", [str(f) for f in graded.failures]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "planted"), PLANTED)
def test_a_planted_cuda_kernel_is_wrong(name: str, planted: Planted) -> None:
    assert not grade(drill(name), drill(name).wrong(planted), "cuda", seed=5, stop=True).right


def test_a_file_that_passed_its_check_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "softmax_triton.py"
    file.write_text(source := drill("softmax").solutions["triton"])
    attempt = Attempt(drill="softmax", level="triton", letter="B", when=0.0, digest=digest_of(source))
    Progress(attempts=(attempt,)).write()
    assert "has passed its check" in next(passed_before(file, None))
    assert not Progress.read().passed("softmax", source + "\n")
    assert not Progress.read().passed("rms_norm", source)


@pytest.mark.slow
def test_a_file_that_passed_no_check_runs_in_the_sandbox_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bagu.lab.drill.commands import time_lines

    monkeypatch.chdir(tmp_path)
    (tmp_path / "softmax_triton.py").write_text(f"import triton\nopen({str(tmp_path / 'mark')!r}, 'w')\n")
    with pytest.raises(ArgumentError, match=r"is not right yet: .* line 2"):
        list(time_lines(tmp_path / "softmax_triton.py", None))
    assert not (tmp_path / "mark").exists()
