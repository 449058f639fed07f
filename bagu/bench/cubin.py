"""Registers and stack of a compiled kernel, read from its cubin.

A cubin is an ELF file. Its section `.nv.info` is a list of attributes: a byte for the form, a byte for the name, and
two bytes that are the value or, in form 4, the number of bytes that follow. Those used here are pairs (symbol, number)
of 32 bits. cuobjdump prints the same numbers (`-res-usage`: REG and STACK), and takes half a second for a kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Resources", "resources"]

SIZED = 4
FRAME_SIZE, REGISTERS = 0x11, 0x2F


class Resources(NamedTuple):
    """Of the entry function: registers of a thread, and bytes of its stack. A Triton kernel uses stack for spilled
    registers only."""

    registers: int
    stack: int


def resources(cubin: bytes) -> Resources:
    found = {name: max((v for n, v in _attributes(cubin) if n == name), default=0) for name in (REGISTERS, FRAME_SIZE)}
    return Resources(found[REGISTERS], found[FRAME_SIZE])


def _attributes(cubin: bytes) -> Iterator[tuple[int, int]]:
    """(name, number) of the sized attributes of all functions."""
    for start, size in _sections(cubin, b".nv.info"):
        at = start
        while at < start + size:
            form, name, value = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == SIZED:
                if name in (FRAME_SIZE, REGISTERS):
                    yield name, struct.unpack_from("<II", cubin, at)[1]
                at += value


def _sections(elf: bytes, wanted: bytes) -> Iterator[tuple[int, int]]:
    """(offset, size) of the sections with this name, in a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    width, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * width) for i in range(count)]
    text = headers[names][4]
    for name, _, _, _, offset, size in headers:
        begin = text + name
        if elf[begin : elf.index(b"\0", begin)] == wanted:
            yield offset, size
