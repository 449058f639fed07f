"""Cheats that were seen elsewhere, and files that no grader likes: each is refused with the right sentence, and the
grader goes on. docs/drills.md lists the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagu.errors import ArgumentError
from bagu.lab.drill.answers import Answers
from bagu.lab.drill.catalogue import drill
from bagu.lab.drill.grade import Grade, grade, read_answer

SOFTMAX = drill("softmax")
TORCH, TRITON = SOFTMAX.solutions["torch"], SOFTMAX.solutions["triton"]
HEAD = "import torch\n\n\ndef forward(x, scale, mask, lengths):\n"


def body(text: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in text.splitlines())


def around(text: str, *, before: str = "") -> str:
    """The right answer as `right`, and a forward that uses it."""
    return (
        f"{before}\n{TORCH.replace('def forward', 'def right')}\n\ndef forward(x, scale, mask, lengths):\n"
        + "".join(f"    {line}\n" for line in text.splitlines())
    )


def graded(answers: Answers, source: str, name: str = "softmax", level: str = "torch") -> Grade:
    return grade(drill(name), source, level, file="drills/answer.py", seed=3, answers=answers, stop=True)


CHEATS = {
    "calls the library": (body("return torch.softmax(x.float() * scale, -1).to(x.dtype)"), "_softmax"),
    "calls it by another name": (body("import torch.nn.functional as F\nreturn getattr(F, 'soft' + 'max')(x, -1)"), "softmax"),
    "log-softmax, then exp": (body("return torch.log_softmax(x.float(), -1).exp().to(x.dtype)"), "log_softmax"),
    "imports bagu": (body("from bagu.ops import softmax\nreturn softmax(x, scale, mask, lengths)"), "imports bagu|No module"),
    "ctypes": (body("import ctypes\nctypes.CDLL(None)\nreturn x"), "imports ctypes|started"),
    "a result kept by object": (around("key = id(x)\nif key not in kept:\n    kept[key] = right(x, scale, mask, lengths)\nreturn kept[key].clone()", before="kept = {}"), "earlier call|came back as|ulps off"),
    "a result kept by pointer": (around("key = x.data_ptr()\nif key not in kept:\n    kept[key] = right(x, scale, mask, lengths)\nreturn kept[key].clone()", before="kept = {}"), "earlier call|came back as|ulps off|other bits the second time"),
    "NaN as a wildcard": (body("return torch.full_like(x, torch.nan)"), "ulps off"),
    "zeros pass where outputs are small": (body("return torch.zeros_like(x)"), "ulps off"),
    "the input is overwritten": (around("y = right(x, scale, mask, lengths)\nx.zero_()\nreturn y"), "changed its input"),
    "a lazy subclass": (around("class Lazy(torch.Tensor):\n    pass\nreturn right(x, scale, mask, lengths).as_subclass(Lazy)"), "Lazy"),
    "patched comparison": (around("torch.allclose = lambda *a, **k: True\ntorch.equal = lambda *a, **k: True\nreturn torch.zeros_like(x)"), "ulps off"),
    "looks for the expected tensor": (body("import gc\nfound = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.dtype == torch.float64 and o.shape == x.shape]\nreturn found[0].to(x.dtype) if found else torch.zeros_like(x)"), "ulps off"),
    "memory that nobody wrote": (body("return torch.empty_like(x)"), "ulps off"),
    "lower precision inside": (around("return right((x.float() * scale).bfloat16().to(x.dtype), 1.0, mask, lengths)"), "ulps off"),
    "another bit each time": (around("y = right(x, scale, mask, lengths)\nn.append(0)\nif y.numel() and y.dtype == torch.float32:\n    y.view(-1)[y.argmax()] *= 1 + 2e-7 * (len(n) % 2)\nreturn y", before="n = []"), "other bits"),
    "a thread goes on": (around("import threading, time\nthreading.Thread(target=time.sleep, args=(5,), daemon=True).start()\nreturn right(x, scale, mask, lengths)"), "number of threads|can't start"),
    "only one shape": (around("return right(x, scale, mask, lengths) if x.shape == (8, 64) else torch.zeros_like(x)"), "ulps off"),
    "a view of the input": (body("return x.view(x.shape)"), "shares memory|ulps off"),
    "exit reads as a pass": (body("import os\nos._exit(0)"), "exited with 0"),
    "the grader's pipe": (body("import os\nos.write(3, b'x' * 100)\nreturn x"), "no message|no result|exited|ended"),
}  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_refused(answers: Answers, cheat: str) -> None:
    source, sentence = CHEATS[cheat]
    found = graded(answers, source)
    assert not found.right
    assert any(part in found.failures[0].message for part in sentence.split("|")), found.failures[0].message


def test_the_bait_itself_is_right(answers: Answers) -> None:
    """The wrapper that the cheats use is no reason to refuse them."""
    assert graded(answers, around("return right(x, scale, mask, lengths)")).right


def test_torch_may_not_compute_for_a_kernel(answers: Answers) -> None:
    source = TRITON.replace("    x = x.contiguous()\n", "    x = (x * 1.0).contiguous()\n")
    found = graded(answers, source, level="triton")
    assert "torch computes mul" in found.failures[0].message


@pytest.mark.slow
def test_plain_attention_is_not_flash_attention(answers: Answers) -> None:
    source = drill("flash_attention").solutions["torch"].replace("BLOCK = 64", "BLOCK = 4096")
    found = graded(answers, source, "flash_attention")
    assert "flash attention needs no more than" in found.failures[0].message


BAD = {
    "syntax": ("def forward(x:\n", "line 1: SyntaxError"),
    "raises at import": ("import torch\n1 / 0\n", "line 2: ZeroDivisionError"),
    "another name": ("def softmax(x):\n    return x\n", "does not define forward"),
    "another signature": ("def forward(x):\n    return x\n", "TypeError"),
    "None": (body("return None"), "NoneType"),
    "a list": (body("return [x]"), "list"),
    "numpy": (body("return x.numpy()"), "numpy.ndarray"),
    "another dtype": (body("return x.double()"), "came back as torch.float64"),
    "another device": (body("return x.to('meta')"), "expected a plain torch.Tensor on the CPU"),
    "another shape": (body("return x.flatten().clone()"), "came back as"),
    "prints 10 MB": (body("print('x' * 10_000_000)\nraise ValueError('after')"), "line 6: ValueError: after"),
    "forks": (body("import os\nos.fork()\nreturn x"), "fork|process|ulps"),
    "a socket": (body("import socket\nsocket.create_connection(('127.0.0.1', 80))"), "line 6"),
    "deletes files": (body("import shutil\nshutil.rmtree('/usr')"), "line 6: PermissionError|OSError"),
    "100 GB": (body("return torch.zeros(25_000_000_000)"), "line 5: RuntimeError"),
    "segfault": (body("import gc\nx.set_(torch.UntypedStorage(0), 10**12, (4,), (1,))\nreturn x + 1"), "line|ended"),
    "sys.exit": (body("import sys\nsys.exit(0)"), "it called sys.exit"),
    "default dtype": (around("torch.set_default_dtype(torch.float64)\nreturn right(x, scale, mask, lengths)"), "default dtype"),
    "random generator": (around("torch.rand(1)\nreturn right(x, scale, mask, lengths)"), "random generator"),
    "threads": (around("torch.set_num_threads(3)\nreturn right(x, scale, mask, lengths)"), "number of threads"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_sentence(answers: Answers, kind: str) -> None:
    source, sentence = BAD[kind]
    found = graded(answers, source)
    assert not found.right
    message = found.failures[0].message
    assert message.startswith("drills/answer.py"), message
    assert any(part in message for part in sentence.split("|")), message
    assert "Traceback" not in message


def test_an_answer_that_does_not_end_is_stopped_with_its_line(answers: Answers) -> None:
    with answers.open(body("while True:\n    pass"), "drills/answer.py") as answer:
        from bagu.lab.drill.answers import AnswerFault

        with pytest.raises(AnswerFault, match=r"line [56]: TimeoutError: no result after 1 s"):
            answer.call("forward", [None] * 4, seconds=1.0)


def test_a_deadlock_is_named(answers: Answers) -> None:
    source = "def all_reduce(x, rank, world, send, recv):\n    return recv((rank - 1) % world)\n"
    found = graded(answers, source, "ring_all_reduce")
    assert "deadlock: rank 0 waits for rank 1" in found.failures[0].message


def test_the_grader_works_after_all_that(answers: Answers) -> None:
    assert graded(answers, TORCH).right


def test_what_is_no_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"# caf\xe9\n")
    (tmp_path / "null").write_bytes(b"x = 1\0")
    for name, sentence in (
        ("none", "there is no file"),
        (".", "is a folder"),
        ("latin", "not UTF-8: byte 5"),
        ("null", "null byte"),
    ):
        with pytest.raises(ArgumentError, match=sentence):
            read_answer(tmp_path / name)
