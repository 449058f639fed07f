"""What a training stack does with a layout: which kernels it fuses, what it overlaps, what it keeps in memory.

These are facts about each stack, stated with their source, not fitted. By default the planner plans for `BAGU`;
the others describe the stacks behind the published tables.
"""

from dataclasses import dataclass
from typing import Literal

from bagu.parallel.planner.kernels import AttentionKernel

Stages = Literal["even", "ceil", "ends", "balanced"]  # layouts.py:stage_layers says what they mean


@dataclass(frozen=True, kw_only=True)
class Software:
    name: str
    attention: AttentionKernel = "flash2"
    # bytes that elementwise kernels of one layer move in the forward, per token; the backward moves twice as much
    stream_bytes: float = 16.0  # per hidden feature: norms, residual, dropout
    inner_bytes: float = 2.5  # per feature inside attention and FFN: activation (2: read and write once), RoPE, bias
    head_bytes: float = 14.0  # per logit, forward and backward
    kernels_per_layer: int = 14  # launches in the forward; the backward has twice as many
    blocking_launches: bool = False  # CUDA_LAUNCH_BLOCKING=1: nothing overlaps, every kernel pays a round trip
    gradient_bytes: int = 4  # of a gradient when it is reduced
    # moved per element to round to fp8: read 2, write 1 and the transpose; 2 more to find the largest in a pass of its
    # own, 2 less if fused
    fp8_cast_bytes: float = 4.0
    keeps_fp8: bool = False  # weights in fp8, both ways and whole, from one step to the next; 8 bits of inputs
    bucket_mb: float = 160.0  # size of one gradient reduction; each pays the latency of its ring
    accumulate_bytes: float = 8.0  # moved per parameter and micro-batch to add a gradient
    overlap_gradients: bool = True  # reduced during the last backward
    overlap_parameters: bool = True  # ZeRO-1/2: gathered during the next forward; ZeRO-3: prefetched
    overlap_publish: bool = True  # of these, the gather of ZeRO-1/2
    overlap_with_pipeline: bool = True  # gradients are reduced during the backward of a pipeline too
    overlap_tp: bool = False
    overlap_p2p: bool = False  # pipeline sends during computation
    one_rail: bool = False  # collectives of ZeRO-3 use one network card, not all of the node
    scatter_p2p: bool = True  # each tensor-parallel rank sends its share of an activation
    stages: Stages = "even"
    # what selective recomputation runs again: the attention core, half of the products and all else, or no product
    selective: Literal["attention", "half", "elementwise"] = "half"
    # bytes per parameter: 16-bit copy, gradient, optimizer (fp32 weights and two moments)
    weight_bytes: float = 2.0
    stored_gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    activation: Literal["bagu", "megatron", "eager", "compiled"] = "bagu"
    logit_bytes: float = 4.0  # kept per logit until the backward
    context_gib: float = 1.5  # CUDA context, NCCL buffers, libraries
    fragmentation: float = 0.04  # share of the allocator's peak that it cannot use


_MEGATRON = Software(
    name="Megatron-LM 2021",  # fused bias-GELU and bias-dropout-add, fused softmax; all-reduce after the last backward
    attention="unfused", stream_bytes=22, inner_bytes=3, head_bytes=26, kernels_per_layer=28, gradient_bytes=4,
    overlap_gradients=False, overlap_parameters=False, activation="megatron", accumulate_bytes=8,
    selective="attention",
)  # fmt: skip
STACKS: dict[str, Software] = {
    "bagu": Software(  # fused norms, SwiGLU, RoPE and head; fp32 master, gradient and moments; balanced stages
        name="bagu", attention="flash3", head_bytes=8, logit_bytes=0, selective="elementwise", stages="balanced",
        kernels_per_layer=12, bucket_mb=25, overlap_publish=False, overlap_with_pipeline=False,
        fp8_cast_bytes=6, keeps_fp8=True,  # nn/fp8.py
    ),
    "megatron-2021": _MEGATRON,
    "zero3-2021": Software(  # DeepSpeed ZeRO-3 with Megatron's kernels, SC21 section 5.2: a gather per parameter
        name="DeepSpeed ZeRO-3 2021", attention="unfused", stream_bytes=22, inner_bytes=3, head_bytes=26,
        kernels_per_layer=28, gradient_bytes=2, one_rail=True, activation="megatron", accumulate_bytes=12,
    ),
    "megatron-core": Software(  # Transformer Engine (cuDNN attention), all overlaps on (README of the table)
        name="Megatron-Core", attention="flash3", stream_bytes=18, inner_bytes=2.5, head_bytes=20, overlap_tp=True,
        overlap_p2p=True, kernels_per_layer=18, activation="megatron",
    ),
    "nanotron": Software(  # eager PyTorch, FlashAttention-2, fp32 gradient accumulation
        name="nanotron", attention="flash2", stream_bytes=24, inner_bytes=5, head_bytes=26, kernels_per_layer=34,
        accumulate_bytes=12, overlap_gradients=True, overlap_parameters=False, activation="eager", scatter_p2p=False,
        bucket_mb=25, stages="balanced",  # DDP's default; blocks are assigned by computed cost
    ),
    "bloom": Software(  # Megatron-DeepSpeed: fp16 reduced, fp32 kept (chronicles),
        # CUDA_LAUNCH_BLOCKING=1 against hangs (chronicles-prequel)
        name="Megatron-DeepSpeed (BLOOM)", attention="unfused", stream_bytes=22, inner_bytes=3, head_bytes=26,
        kernels_per_layer=28, blocking_launches=True, gradient_bytes=2, accumulate_bytes=6, overlap_gradients=False,
        overlap_parameters=False, activation="megatron", stages="ceil", bucket_mb=1000,
    ),
    # PyTorch FSDP, eager; attn_impl was triton until 2024-03, the loss is fused, low_precision_layernorm keeps bf16
    "llm-foundry": Software(
        name="llm-foundry", attention="flash1", stream_bytes=22, inner_bytes=3, head_bytes=10, kernels_per_layer=22,
        gradient_bytes=4, accumulate_bytes=8, activation="compiled", logit_bytes=2,
    ),
    "torchtitan-eager": Software(
        name="torchtitan, eager", attention="flash2", stream_bytes=34, inner_bytes=6, head_bytes=26,
        kernels_per_layer=34, gradient_bytes=4, activation="eager", logit_bytes=12,
    ),
    "torchtitan": Software(  # per-block torch.compile, SDPA's FlashAttention-2
        name="torchtitan, compiled", attention="flash2", stream_bytes=18, inner_bytes=2.5, head_bytes=16,
        kernels_per_layer=14, gradient_bytes=4, activation="compiled", logit_bytes=10,
    ),
    "nemo": Software(  # DGXC: Megatron-Core with Transformer Engine
        name="NeMo", attention="flash3", stream_bytes=18, inner_bytes=2.5, head_bytes=20, overlap_tp=True,
        overlap_p2p=True, kernels_per_layer=18, activation="megatron", fp8_cast_bytes=2,
    ),
}  # fmt: skip
