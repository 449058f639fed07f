"""torch.nn's layers with bagu's kernels: the constructor, state dict and numbers of the class they inherit from.

Each layer replaces `forward` alone. Where an op does not cover a setting or an input (integers, nested or sparse
tensors, mixed dtypes), torch's own forward runs, so a layer accepts whatever its parent accepts.

Inside torch.autocast, products run in autocast's dtype, as torch's do; norms run torch's own forward, which returns
fp32 there on some devices.

The ops of Linear and Conv2d are torch's own functions on a GPU, and in fp32 on a CPU, so these layers run torch's
forward directly there.
"""

from typing import Any, cast

import torch
from torch import nn

from bagu import ops
from bagu.ops.activations import activate
from bagu.ops.call.dispatch import calls_torch
from bagu.ops.call.eager import autocasting

Embedding = nn.Embedding  # a gather at the bandwidth of a copy already: no kernel of bagu's would be faster


def autocast(x: torch.Tensor, *weights: torch.Tensor | None) -> tuple[Any, ...]:
    """The operands of a product in autocast's dtype where autocast is enabled; unchanged elsewhere, and in fp64."""
    if not autocasting(x) or x.dtype == torch.float64:
        return x, *weights
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(None if t is None else t.to(dtype) for t in (x, *weights))


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def supported(x: torch.Tensor, *weights: torch.Tensor | None) -> bool:
    """Whether the ops take these tensors: dense, floating point, and of one dtype."""
    dtype = x.dtype
    if dtype not in DTYPES:
        return False
    for t in (x, *weights):  # a loop: a generator takes twice as long
        if t is not None and (t.dtype != dtype or t.layout != torch.strided or t.is_nested):
            return False
    return True


class Linear(nn.Linear):
    def forward(self, input: torch.Tensor, activation: str | None = None) -> torch.Tensor:
        """`activation`, one of `ops.matmul`'s, is applied to the result: in inference on a GPU in the same kernel."""
        # a kernel that applies the activation is for inference on a GPU: autograd needs the sums before it
        fuses = activation is not None and input.is_cuda and not torch.is_grad_enabled()
        if not fuses and calls_torch(input, on_gpu=True):
            y = nn.functional.linear(input, self.weight, self.bias)
            return y if activation is None else activate(y, activation)
        x, w, b = autocast(input, self.weight, self.bias)
        if not supported(x, w, b):
            return activate(super().forward(input), activation)
        return ops.matmul(x, w, b, activation=activation)


class Int8Linear(nn.Linear):
    """A Linear that multiplies in int8 (W8A8): both operands are rounded in each call, with a scale per row.

    The weight stays in its own dtype, so the state dict is Linear's and the layer can be fine-tuned: rounding passes
    the gradient unchanged. To serve a frozen model, `bagu serve --quantization int8` rounds weights once.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, w, b = autocast(input, self.weight, self.bias)
        if not supported(x, w, b):
            return super().forward(input)
        return ops.int8_linear(x, w, b)


class Conv2d(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if calls_torch(input, on_gpu=True):
            return self._conv_forward(input, self.weight, self.bias)
        x, w, b = autocast(input, self.weight, self.bias)
        numbers = not isinstance(self.padding, str)  # "same" may pad one side more, which the op does not
        if self.padding_mode != "zeros" or not numbers or x.ndim != 4 or not supported(x, w, b):
            return super().forward(input)
        stride, padding, dilation = (cast(tuple[int, int], n) for n in (self.stride, self.padding, self.dilation))
        return ops.conv2d(x, w, b, stride, padding, dilation, self.groups)


# Up to this many values, a LayerNorm, and a BatchNorm that trains, run torch's forward: calls in a row are limited by
# the host there. At any size, forward and backward take an H200's host 0.21 to 0.41 ms through a LayerNorm's node in
# Python and 0.13 to 0.26 ms through torch's, 0.26 to 0.42 and 0.26 to 0.41 ms through a BatchNorm's with a ReLU, and a
# LayerNorm in inference 35 and 22 us. torch's kernels take that long at 9M values in inference, at 25M in training.
SMALL = 2**23


class LayerNorm(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        w, b = self.weight, self.bias
        if calls_torch(input, on_gpu=input.numel() <= SMALL):
            return torch.layer_norm(input, self.normalized_shape, w, b, self.eps)
        dims = len(self.normalized_shape)
        fits = w is not None and input.shape[-dims:] == self.normalized_shape
        if not fits or autocasting(input) or not supported(input, w, b):
            return super().forward(input)
        if dims == 1:
            return ops.layer_norm(input, w, b, self.eps)
        y = ops.layer_norm(input.flatten(-dims), w.flatten(), None if b is None else b.flatten(), self.eps)
        return y.view(input.shape)


class RMSNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fits = self.weight is not None and x.shape[-1:] == self.normalized_shape
        if not fits or self.eps is None or autocasting(x) or not supported(x, self.weight):
            return super().forward(x)
        return ops.rms_norm(x, self.weight, self.eps)


class GroupNorm(nn.GroupNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.ndim < 2 or autocasting(input) or not supported(input, self.weight, self.bias):
            return super().forward(input)
        return ops.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class BatchNorm2d(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor, activation: str | None = None) -> torch.Tensor:
        """`activation`, None or "relu", is applied to the result: on a GPU in the kernels of the norm."""
        small = self.training and input.numel() <= SMALL and torch.is_grad_enabled()
        if calls_torch(input, on_gpu=small):
            return activate(super().forward(input), activation)
        mean, var = self.running_mean, self.running_var
        if not self._fits(input, mean, var):
            return activate(super().forward(input), activation)
        momentum = self.momentum
        if self.training and (count := self.num_batches_tracked) is not None:
            count.add_(1)
            momentum = 1.0 / float(count) if momentum is None else momentum  # None is a cumulative average
        y, new_mean, new_var = ops.batch_norm(
            input,
            self.weight,
            self.bias,
            mean,
            var,
            training=self.training or mean is None,
            momentum=momentum or 0.0,
            eps=self.eps,
            relu=activation == "relu",
        )
        if self.training and mean is not None and var is not None:
            torch._foreach_copy_([mean, var], [new_mean, new_var])
        return y if activation in (None, "relu") else activate(y, activation)

    def _fits(self, x: torch.Tensor, mean: torch.Tensor | None, var: torch.Tensor | None) -> bool:
        """Whether the op computes what torch's forward does on x."""
        both = (mean is None) == (var is None)
        return both and x.ndim == 4 and not autocasting(x) and supported(x) and x.dtype != torch.float64
