"""Values between the grader and an answer's process: JSON with the bytes of tensors behind it. Never pickle, since one
side runs code that nobody has read. A tensor keeps its strides, so that a layout with gaps arrives as one."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from socket import socket
from typing import Any

import torch

HEAD = struct.Struct("!II")  # bytes of JSON, bytes of tensors
LARGEST = 1 << 30


@dataclass(frozen=True)
class Other:
    """A value that is not sent: only the name of its type arrives."""

    type_name: str


class Closed(Exception):
    """The other process has ended, or has sent what is no message."""


class FileChannel:
    """A socket by `read` and `write`, which every sandbox allows; Landlock's refuses the calls of sockets."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self.fd, left) :]

    def recv_into(self, view: memoryview) -> int:
        data = os.read(self.fd, min(len(view), 1 << 20))
        view[: len(data)] = data
        return len(data)


Channel = socket | FileChannel


def send(channel: Channel, value: Any) -> None:
    blobs: list[bytes] = []
    with _nested_values():
        text = json.dumps(_encoded(value, blobs)).encode()
    channel.sendall(HEAD.pack(len(text), sum(map(len, blobs))) + text + b"".join(blobs))


def receive(channel: Channel) -> Any:
    """The next value. Raises Closed, or TimeoutError after the socket's timeout."""
    text_bytes, blob_bytes = HEAD.unpack(_read(channel, HEAD.size))
    if text_bytes + blob_bytes > LARGEST:
        raise Closed("it sent more than 1 GiB")
    text, blob = _read(channel, text_bytes), _read(channel, blob_bytes)
    try:
        with _nested_values():
            return _decoded(json.loads(text), blob)
    except (ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise Closed("it sent something that is no message") from error


@contextmanager
def _nested_values() -> Iterator[None]:
    """Lists may be nested deeper than Python's usual limit of calls."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _read(channel: Channel, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        try:
            count = channel.recv_into(view[at:])
        except (ConnectionError, BrokenPipeError) as error:
            raise Closed("it has ended") from error
        if not count:
            raise Closed("it has ended")
        at += count
    return data


def _encoded(value: Any, blobs: list[bytes]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encoded(v, blobs) for v in value]
    if kind is tuple:
        return {"tuple": [_encoded(v, blobs) for v in value]}
    if kind is dict:
        return {"dict": [[_encoded(k, blobs), _encoded(v, blobs)] for k, v in value.items()]}
    if kind in (bytes, bytearray):
        blobs.append(bytes(value))
        return {"bytes": _span(blobs)}
    if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and value.device.type == "cpu":
        value = value.detach().resolve_neg().resolve_conj()
        extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
        flat = value.as_strided((extent,), (1,))
        blobs.append(flat.contiguous().view(torch.uint8).numpy().tobytes() if extent else b"")
        strides = list(value.stride())
        return {"tensor": [str(value.dtype)[6:], list(value.shape), strides, _span(blobs)]}
    return {"other": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")}


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors inside of lists, tuples and dicts, in order. No recursion: values may be nested deep."""
    found, todo = list[torch.Tensor](), [value]
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            todo += reversed(one)
        elif isinstance(one, dict):
            todo += reversed(one.values())
    return found


def _span(blobs: list[bytes]) -> list[int]:
    end = sum(map(len, blobs))
    return [end - len(blobs[-1]), end]


def _decoded(tree: Any, blob: bytearray) -> Any:
    if isinstance(tree, list):
        return [_decoded(v, blob) for v in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, body),) = tree.items()
    if kind == "tuple":
        return tuple(_decoded(v, blob) for v in body)
    if kind == "dict":
        return {_decoded(k, blob): _decoded(v, blob) for k, v in body}
    if kind == "bytes":
        return bytes(blob[slice(*body)])
    if kind == "tensor":
        name, shape, strides, (begin, end) = body
        dtype = getattr(torch, name)
        flat = torch.frombuffer(blob[begin:end], dtype=dtype) if end > begin else torch.empty(0, dtype=dtype)
        return flat.as_strided(shape, strides)  # raises if it reaches past its memory
    return Other(str(body))
