"""Gradients with fewer bytes on the wire, and error feedback.

    none    4 bytes a value (fp32)
    int8    1 + 4/256 bytes: groups of 256 values, each divided by its largest magnitude
    topk    1/8 + 2/10 bytes: the largest tenth as fp16 of the largest, and a bit per value for the positions

What rounding leaves out is added to the next gradient of the same worker (error feedback), so nothing is lost for ever:
the sum of what was sent follows the sum of what was computed. https://arxiv.org/abs/1901.09847
"""

from typing import Literal, get_args

import numpy as np

from bagu.errors import ArgumentError, UnknownName

Method = Literal["none", "int8", "topk"]
GROUP = 256
SHARE = 0.1  # of the values that topk sends


def encode(method: Method, values: np.ndarray) -> np.ndarray:
    """`values` [n] as bytes."""
    if method == "none":
        return values.view(np.uint8)
    if method == "int8":
        groups = np.zeros((-(-len(values) // GROUP), GROUP), np.float32)
        groups.reshape(-1)[: len(values)] = values
        scales = np.abs(groups).max(axis=1, keepdims=True) / 127
        with np.errstate(invalid="ignore", divide="ignore"):  # NaN stays in the scale
            codes = np.nan_to_num(np.rint(groups / np.where(scales > 0, scales, 1))).astype(np.int8)
        return np.concatenate([scales.reshape(-1).view(np.uint8), codes.reshape(-1)[: len(values)].view(np.uint8)])
    magnitudes = np.abs(values)
    kept = max(1, round(len(values) * SHARE)) if len(values) else 0
    mask = np.zeros(len(values), bool)
    mask[np.argpartition(magnitudes, len(values) - kept)[len(values) - kept :] if kept else []] = True
    scale = np.float32(magnitudes.max(initial=0))
    with np.errstate(invalid="ignore"):
        coded = (values[mask] / (scale or 1)).astype(np.float16)
    return np.concatenate([scale.reshape(1).view(np.uint8), np.packbits(mask), coded.view(np.uint8)])


def decode(method: Method, data: np.ndarray, size: int, dtype: np.dtype) -> np.ndarray:
    """The `size` values of bytes; raises ArgumentError if the bytes are not those of so many values."""
    if len(data) != encoded_bytes(method, size, dtype):
        raise ArgumentError(
            f"a push has {len(data)} bytes, and {size} values by {method} have {encoded_bytes(method, size, dtype)}",
            hint="the worker has another model, or the message was cut short",
        )
    if method == "none":
        return data.view(dtype)
    if method == "int8":
        groups = -(-size // GROUP)
        scales, codes = data[: 4 * groups].view(np.float32), data[4 * groups :].view(np.int8)
        return (np.repeat(scales, GROUP)[:size] * codes).astype(dtype)
    bits = -(-size // 8)
    mask = np.unpackbits(data[4 : 4 + bits], count=size).astype(bool)
    values = np.zeros(size, dtype)
    values[mask] = data[4 + bits :].copy().view(np.float16).astype(dtype) * data[:4].copy().view(np.float32)[0]
    return values


def encoded_bytes(method: Method, size: int, dtype: np.dtype) -> int:
    """The bytes of `size` values."""
    if method == "none":
        return size * dtype.itemsize
    if method == "int8":
        return size + 4 * -(-size // GROUP)
    return 4 + -(-size // 8) + 2 * (max(1, round(size * SHARE)) if size else 0)


class Compressor:
    """Encodes the gradients of one worker, with error feedback: `residual` is what earlier pushes left out."""

    def __init__(self, method: Method) -> None:
        UnknownName.check("compression", method, get_args(Method))
        self.method: Method = method
        self.residual: dict[int, np.ndarray] = {}  # by range

    def decoded(self, number: int, values: np.ndarray) -> np.ndarray:
        """What arrives of range `number`."""
        return decode(self.method, self.encode(number, values), len(values), values.dtype)

    def encode(self, number: int, values: np.ndarray) -> np.ndarray:
        """The bytes of range `number`."""
        if self.method == "none":
            return encode("none", values)
        if number in self.residual:
            values = values + self.residual[number]
        data = encode(self.method, values)
        left = values - decode(self.method, data, len(values), values.dtype)
        if np.isfinite(left).all():  # a gradient that is not finite is refused by the guard, and leaves nothing
            self.residual[number] = left
        return data
