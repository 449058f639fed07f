"""The size of the KV pool: block size, number of blocks that fit the memory, and the longest sequence."""

from typing import NamedTuple

import torch

from bagu.errors import ArgumentError
from bagu.machine.device import available_memory, this_machine
from bagu.nn.model import Transformer
from bagu.parallel.inference import local_heads
from bagu.serve.adapters.registry import adapter_bytes
from bagu.serve.config import EngineConfig
from bagu.serve.kv.groups import group_layers, layer_groups, max_positions
from bagu.serve.kv.paged import block_bytes, cache_dtype

BLOCK_SIZE = 16  # small blocks waste less memory and give more prefix cache hits
CPU_SHARE, CPU_MAX = 4, 1 << 30  # a quarter of the free memory, at most 1 GiB: 65k tokens of the 8M model in fp32
WORKSPACE_BYTES = 1 << 30  # on a GPU, reserved for activations, logits and CUDA graphs


class Pool(NamedTuple):
    num_blocks: int
    max_model_len: int
    block_size: int


def size_pool(model: Transformer, config: EngineConfig, draft: Transformer | None = None) -> Pool:
    """Size the pool, with tp > 1 that of each rank. It has at most as many blocks as `max_num_seqs` sequences of full
    length can use: a group of layers with a window keeps that, not the whole length. A draft model has a pool of as
    many blocks, in the same memory."""
    table = model.embedding.weight
    B = config.block_size or (model.config.blocks.size if model.config.attention == "blocks" else BLOCK_SIZE)
    longest = min(model.config.max_len, config.max_model_len or model.config.max_len)
    if config.max_model_len is not None and config.max_model_len > model.config.max_len:
        raise ArgumentError(
            f"engine: max_model_len = {config.max_model_len}, and the model has positions for {model.config.max_len}",
            hint=f"max_model_len is at most {model.config.max_len} for this model",
        )
    groups = layer_groups(model.config, config.attention_sinks)
    dtype = cache_dtype(config.kv_dtype, table.dtype)
    each = block_bytes(local_heads(model.config, config.tp), B, dtype, num_layers=group_layers(groups))
    if draft is not None:
        each += block_bytes(draft.config, B, draft.embedding.weight.dtype)
    useful = config.max_num_seqs * sum(group.max_blocks(longest, B) for group in groups)
    if any(group.window is not None for group in groups):  # a chunk of a prompt needs them all until it is computed
        useful += len(groups) * -(-config.step_tokens(table.device.type) // B)
    adapters = adapter_bytes(model, config.adapter_slots, config.max_adapter_rank)
    memory = _memory(table.device, config, model, adapters) if config.num_blocks is None else 0
    blocks = config.num_blocks or min(useful, memory // each)
    if blocks < 1:
        raise ArgumentError(
            f"engine: no block of {each} bytes fits into the memory for the KV pool: {each - memory} bytes are missing",
            hint="raise kv_memory, gpu_memory_utilization or memory_share, or use a smaller block_size",
        )
    return Pool(blocks, longest if config.max_model_len else max_positions(groups, blocks, B, longest), B)


def _memory(device: torch.device, config: EngineConfig, model: Transformer, adapters: int) -> int:
    """Bytes for the pool; less than 0 if the weights alone need more than the engine may use. On a GPU the most that
    LoRA adapters may take is left for them."""
    if config.kv_memory is not None:
        return config.kv_memory
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if config.memory_share is not None:  # other processes use the same GPU
            own = torch.cuda.memory_reserved(device)
            return min(int(total * config.memory_share) - own, free) - WORKSPACE_BYTES - adapters
        return int(total * config.gpu_memory_utilization) - (total - free) - WORKSPACE_BYTES - adapters
    free_bytes = available_memory()
    shared = CPU_MAX if free_bytes is None else min(CPU_MAX, free_bytes // CPU_SHARE)
    total_bytes = this_machine().memory_bytes
    if config.memory_share is not None and total_bytes is not None:
        weights = sum(p.nbytes for p in model.parameters())
        shared = min(shared, int(total_bytes * config.memory_share) - weights)
    return shared // config.tp  # the ranks share the memory of this machine
