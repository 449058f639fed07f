"""The places in the stack that an answer can take: those of ops by `bagu.ops.swap`, others as an attribute of this
process, for as long as a `with` lasts."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from bagu.errors import ArgumentError
from bagu.lab.drill.core import Drill

# the owner of attributes, and what takes the place of each
Place = tuple[Any, Mapping[str, Callable[..., Any]]]


@contextmanager
def replaced(drill: Drill, answer: str) -> Iterator[Any]:
    """The answer (a file; "": none) in place of bagu's part; yields its name and the number of calls."""
    if not answer:
        yield SimpleNamespace(name="bagu", calls=0)
    elif drill.op:
        from bagu.ops import swap

        module, fixed = load(answer), drill.fixed
        kept = SimpleNamespace(
            forward=lambda **a: module.forward(**{k: v for k, v in a.items() if k not in fixed}),
            supports=lambda a: all(a[k] is v or a[k] == v for k, v in fixed.items()),
        )
        with swap(drill.op, kept) as op:
            yield op
    else:
        owner, by = PLACES[drill.name](load(answer))
        placed = SimpleNamespace(name=f"{owner.__name__}.{', '.join(by)}", calls=0)

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                placed.calls += 1
                return function(*args, **options)

            return call

        with ExitStack() as stack:
            for name, function in by.items():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, counted(function))
            yield placed


def load(file: str) -> ModuleType:
    loader = importlib.util.spec_from_file_location("answer", file)
    assert loader is not None and loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    sys.modules["answer"] = module
    loader.loader.exec_module(module)
    return module


def function_of(answer: ModuleType, function: str, parameters: int) -> Callable[..., Any]:
    """A function of the answer that takes this many arguments."""
    found = getattr(answer, function, None)
    if found is None or len(inspect.signature(found).parameters) != parameters:
        raise ArgumentError(f"the answer has no function {function} with {parameters} arguments", hint="see its stub")
    return found


def _sampler(answer: ModuleType) -> Place:
    """bagu.ops.sample by the answer's distribution, with the engine's own random numbers."""
    import torch

    from bagu import ops

    distribution = function_of(answer, "distribution", 4)

    def sample(logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, u: Any, **_: Any) -> Any:
        out = []
        for row in range(len(logits)):
            p = distribution(logits[row].double(), float(temperature[row]), int(top_k[row]), float(top_p[row]))
            edges = p.cumsum(0)
            out.append(int(torch.searchsorted(edges, u[row].double() * edges[-1], right=True).clamp(max=len(p) - 1)))
        return torch.tensor(out)

    return ops, {"sample": sample}


def _tokenizer(answer: ModuleType) -> Place:
    """The texts of training and the prompts of requests by the answer's encode, word by word, with the tokenizer's
    merges. The tokenizer that a run trains adds no tokens to a prompt."""
    from tokenizers import Tokenizer, pre_tokenizers

    from bagu.data.tokenizer import BpeTokenizer

    encode = function_of(answer, "encode", 2)
    alphabet = _byte_alphabet()
    back = {v: k for k, v in alphabet.items()}
    known: dict[tuple[str, str], list[int]] = {}

    def by_answer(self: BpeTokenizer, text: str) -> list[int]:
        pre = Tokenizer.from_str(self.spec).pre_tokenizer or pre_tokenizers.ByteLevel()
        words = [word for word, _ in pre.pre_tokenize_str(text)]
        new = {word for word in words if (self.spec, word) not in known}
        if new:
            model = json.loads(self.spec)["model"]
            pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
            merges = [(_bytes(a, alphabet), _bytes(b, alphabet)) for a, b in pairs]
            for word in new:
                pieces = encode(_bytes(word, alphabet), merges)
                known[self.spec, word] = [model["vocab"]["".join(back[b] for b in p)] for p in pieces]
        return [token for word in words for token in known[self.spec, word]]

    def batch(self: BpeTokenizer, texts: Sequence[str]) -> list[list[int]]:
        return [by_answer(self, text) for text in texts]

    return BpeTokenizer, {"encode_batch": batch, "encode_prompt": by_answer}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for 256 and on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def _bytes(word: str, alphabet: dict[str, int]) -> bytes:
    return bytes(alphabet[c] for c in word)


def _ring(answer: ModuleType) -> Place:
    """The sum of gradients over the ranks by the answer's all_reduce, its messages over torch.distributed."""
    import torch
    import torch.distributed as dist

    from bagu.train.memory import gradients

    ring = function_of(answer, "all_reduce", 5)

    def all_reduce(mesh: Any, tensor: torch.Tensor, group: Any, *, async_op: bool = False) -> None:
        if (ranks := mesh.group(group)) is None:
            return
        pending: list[Any] = []  # with the tensors, which must outlive the messages

        def send(to: int, part: torch.Tensor) -> None:
            held, to = part.detach().clone(), dist.get_global_rank(ranks, to)
            for message in (torch.tensor([held.numel()]), *([held] if len(held) else [])):
                pending.append((dist.isend(message, to, ranks), message))

        def recv(source: int) -> torch.Tensor:
            size, source = torch.empty(1, dtype=torch.int64), dist.get_global_rank(ranks, source)
            dist.recv(size, source, ranks)
            got = torch.empty(int(size), dtype=tensor.dtype)
            if len(got):
                dist.recv(got, source, ranks)
            return got

        tensor.copy_(ring(tensor.clone(), mesh.coordinate(group), mesh.size(group), send, recv))
        for work, _ in pending:
            work.wait()

    return gradients, {"all_reduce": all_reduce}


PLACES: dict[str, Callable[[ModuleType], Place]] = {
    "sampling": _sampler,
    "bpe": _tokenizer,
    "ring_all_reduce": _ring,
}
