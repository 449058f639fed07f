"""The ops: their definitions, costs and backends. Each folder of this package is one op.

>>> y = bagu.ops.rms_norm(x, w)  # Triton on a GPU, torch elsewhere
>>> y = bagu.ops.rms_norm(x, w, backend="torch")  # or choose the backend
>>> with bagu.ops.use("torch"):  # or choose it for every op inside
...     y = bagu.ops.rms_norm(x, w)
>>> with bagu.ops.invariant():  # a row's bits do not depend on its batch
...     y = bagu.ops.rms_norm(x, w)
"""

from bagu.ops.add_rms_norm import add_rms_norm
from bagu.ops.attention import attention
from bagu.ops.batch_norm import batch_norm
from bagu.ops.block_attention import block_attention
from bagu.ops.call.dispatch import use
from bagu.ops.call.swap import swap
from bagu.ops.choose_blocks import choose_blocks
from bagu.ops.conv2d import conv1d, conv2d
from bagu.ops.cross_entropy import cross_entropy
from bagu.ops.dequantize_int8 import dequantize_int8
from bagu.ops.encoder_layer import encoder_layer
from bagu.ops.fp8_matmul import fp8_matmul
from bagu.ops.geglu import geglu
from bagu.ops.gelu import gelu
from bagu.ops.group_assign import group_assign
from bagu.ops.group_norm import group_norm
from bagu.ops.grouped_matmul import grouped_matmul
from bagu.ops.gumbel_softmax import gumbel_softmax
from bagu.ops.int4_matmul import Int4, dequantize_int4, int4_matmul, quantize_int4
from bagu.ops.int8_attention import int8_attention
from bagu.ops.int8_conv2d import int8_conv2d
from bagu.ops.int8_matmul import int8_linear, int8_matmul
from bagu.ops.invariant.mode import invariant
from bagu.ops.kv_write import kv_write
from bagu.ops.layer_norm import layer_norm
from bagu.ops.linear_attention import linear_attention, positive_features
from bagu.ops.linear_cross_entropy import Losses, linear_cross_entropy, token_losses
from bagu.ops.linear_cross_entropy_loss import linear_cross_entropy_loss
from bagu.ops.lora_add import lora_add
from bagu.ops.lora_linear import lora_linear
from bagu.ops.matmul import matmul
from bagu.ops.mla_attention import mla_attention
from bagu.ops.mlp import mlp
from bagu.ops.paged_attention import paged_attention
from bagu.ops.quantize_fp8 import quantize_fp8
from bagu.ops.quantize_fp8_matrix import quantize_fp8_matrix
from bagu.ops.quantize_int8 import quantize_int8
from bagu.ops.relu_squared import relu_squared
from bagu.ops.rms_norm import rms_norm
from bagu.ops.rope import rope, rope_tables
from bagu.ops.rope_kv_write import rope_kv_write
from bagu.ops.sample import sample
from bagu.ops.scale_norm import scale_norm
from bagu.ops.self_attention import self_attention
from bagu.ops.softmax import softmax
from bagu.ops.swiglu import swiglu
from bagu.ops.transpose import transpose
from bagu.ops.w8a16_matmul import w8a16_matmul

__all__ = [
    "Int4",
    "Losses",
    "add_rms_norm",
    "attention",
    "batch_norm",
    "block_attention",
    "choose_blocks",
    "conv1d",
    "conv2d",
    "cross_entropy",
    "dequantize_int4",
    "dequantize_int8",
    "encoder_layer",
    "fp8_matmul",
    "geglu",
    "gelu",
    "group_assign",
    "group_norm",
    "grouped_matmul",
    "gumbel_softmax",
    "int4_matmul",
    "int8_attention",
    "int8_conv2d",
    "int8_linear",
    "int8_matmul",
    "invariant",
    "kv_write",
    "layer_norm",
    "linear_attention",
    "linear_cross_entropy",
    "linear_cross_entropy_loss",
    "lora_add",
    "lora_linear",
    "matmul",
    "mla_attention",
    "mlp",
    "paged_attention",
    "positive_features",
    "quantize_fp8",
    "quantize_fp8_matrix",
    "quantize_int4",
    "quantize_int8",
    "relu_squared",
    "rms_norm",
    "rope",
    "rope_kv_write",
    "rope_tables",
    "sample",
    "scale_norm",
    "self_attention",
    "softmax",
    "swap",
    "swiglu",
    "token_losses",
    "transpose",
    "use",
    "w8a16_matmul",
]
