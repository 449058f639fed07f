"""Mutants that conformance here cannot tell from the original, each with the reason."""

SIZES = "sets the size of chunks, not what is computed"
TILES = "sets the size of tiles, not what is computed"
BOUND = "a larger bound computes the same, and a smaller one is refused: test_values.py, test_paged_attention.py"
GPU = "runs on a GPU alone"
RANGES = "sets the length of a range of keys, not what is computed"

EQUIVALENT = {
    # What is changed has no effect.
    "matmul.triton_backend: packed: by_tma: x.stride(0)": "chooses how rows are read, not what is computed",
    "int8_matmul.triton_backend: packed: by_tma: x.stride(0)": "chooses how rows are read, not what is computed",
    **dict.fromkeys(
        (*(f"linear_cross_entropy.tile_kernels: stride: _tile_slopes: {x}_stride in [{x}_stride, 1]" for x in "xw"),
         *(f"linear_cross_entropy.tile_kernels: {kind}: _slope_host: {x}.stride(0)"
           for kind in ("packed", "swapped") for x in ("hidden", "weight"))),
        "chunked.operands widens the operands on a CPU, which packs their rows",
    ),
    **dict.fromkeys(
        (f"linear_cross_entropy.tile_kernels: {kind}: fits: {x}.stride(0)"
         for kind in ("packed", "swapped") for x in ("rows", "words")),
        "chooses the kernels, not what is computed",
    ),
    **dict.fromkeys(
        (f"linear_cross_entropy_loss.triton_backend: default: forward: grad_{x} in"
         " grad_hidden or grad_weight or (not tile_kernels.fits(hidden, weight))" for x in ("hidden", "weight")),
        "chooses the kernels, not what is computed",
    ),
    "matmul.triton_backend: packed: product: y.stride(0)":
        "rows of y have gaps only in linear_cross_entropy's invariant form: test_invariant_triton.py",
    # It writes outside of y, which ends the process instead of failing a comparison.
    "matmul.triton_backend: swapped: product: y.stride(0)": "stores far outside of y",
    "matmul.product_kernel: stride: product_kernel: y_stride in row[:, None] * y_stride":
        "stores far outside of y",
    "attention.work_list: zero: _list: tl.store(past + tl.arange(0, LEFT_OVER), tl.zeros([LEFT_OVER], tl.int32))": (
        "what is stored there is zeros"
    ),
    "add_rms_norm.torch_backend: default: backward: eps in rms_norm.backward(dy, s.to(r.dtype), w, r, eps)":
        "RMSNorm's backward has r and reads no eps",
    "add_rms_norm.triton_backend: default: backward: eps in"
    " run_backward('rms', dy, s, w, r, eps, programs_per_sm, num_warps, ds=ds)":
        "RMSNorm's backward has r and reads no eps",
    "rms_norm.triton_backend: default: backward: eps in"
    " run_backward('rms', dy, x, w, r, eps, programs_per_sm, num_warps)":
        "RMSNorm's backward has r and reads no eps",
    "encoder_layer.triton_backend: default: _norm_backward: eps in"
    " run_backward('layer', dy, x, w, rstd, eps, None, None, mean=mean, b=b, ds=plus)":
        "LayerNorm's backward has rstd and reads no eps",
    **{
        f"encoder_layer.parts: default: Parts: eps in (norm{i}, norm{i}_bias, mean{i}, r{i}, eps)":
            "LayerNorm's backward has rstd and reads no eps"
        for i in (1, 2)
    },
    "encoder_layer.torch_backend: default: _norm_backward: eps in layer_norm.backward(dy, x, w, b, mean, rstd, eps)":
        "LayerNorm's backward has rstd and reads no eps",
    "mlp.torch_backend: default: forward: activation in activation == 'silu'":
        "the formula of the other gates computes the same",
    "layer_norm.triton_backend: default: backward: eps in"
    " run_backward('layer', dy, x, w, rstd, eps, programs_per_sm, num_warps, mean=mean, b=b)":
        "LayerNorm's backward has r and reads no eps",
    "kernels.scalars: short: rsqrt: x < float('inf')": "infinity less 1 is infinity",
    **{
        f"rope.triton_backend: packed: _most_heads: x.stride({d})":
            "the strides decide which tokens and heads share a program, not what it computes"
        for d in (1, 2)
    },
    "linear_cross_entropy.triton_backend: packed: _overwrite: dlogits.stride(0)": "a view of rows without gaps",
    # What is changed sets how the same result is computed.
    "linear_cross_entropy.torch_backend: default: _Head: memory in (ignore_index, memory, kernels)": SIZES,
    "linear_cross_entropy_loss.one_pass: default: forward: memory in"
    " operands(hidden, weight, targets, memory, kernels, itemsize)": SIZES,
    "dequantize_int8.triton_backend: default: forward: granularity in granularity != 'channel'": TILES,
    "dequantize_int8.triton_backend: default: forward: granularity in granularity == 'channel'": TILES,
    "paged_attention.triton_backend: default: forward: max_len in max_len * heads": TILES,
    "paged_attention.triton_backend: default: attend: max_context in"
    " _ranges(tiles * G, max_context, tile.per_sm, num_sms(q.device))": TILES,
    "paged_attention.triton_backend: default: attend: max_context in triton.cdiv(max_context, ranges)": TILES,
    "mla_attention.triton_backend: default: forward: max_len in max_len * H": TILES,
    "mla_attention.triton_backend: default: forward: max_context in"
    " _split(programs, max_context, num_sms(q.device))": RANGES,
    "mla_attention.triton_backend: default: _split: max_context in triton.cdiv(max_context, n)": RANGES,
    "mla_attention.triton_backend: default: _split: max_context in n < max_context": RANGES,
    "paged_attention.cpu: default: forward: max_len in max_len == 1":
        "a plan of decodes alone skips the search for decodes in the offsets, which finds the same",
    # A bound of lengths that are read from the tensors.
    "attention.cpu: default: _ragged: max_len in runs(cu_seqlens, q.shape[0], max_len)": BOUND,
    "attention.torch_backend: default: _added: max_len in shape.additive(max_len, like)":
        "a mask of another size than the segment is a shape error",
    "group_norm.torch_backend: default: backward: groups in _by_group(x.to(acc), groups)":
        "mean has the right number of groups, so another one is a shape error",
    "group_norm.torch_backend: default: backward: groups in"
    " _by_group(dyf if w is None else dyf * w.to(acc).view(along), groups)":
        "mean has the right number of groups, so another one is a shape error",
    "paged_attention.torch_backend: default: forward: max_len in"
    " attend(shape, scale, q, pages, cu_seqlens, max_len)": BOUND,
    "paged_attention.dense: default: forward: max_len in torch.arange(max_len, device=device)":
        "a larger bound only pads more, and a smaller one is an index error",
    "mla_attention.spec: default: as_paged: max_len in max_len=max_len": BOUND,
    "int8_attention.triton_backend: default: quantized_keys: max_len in max_len // 128": SIZES,
    "int8_attention.key_kernels: short: quantize_kernel: s < segments":
        "no segment begins at or after the end of the last one",
    "mla_attention.triton_backend: default: forward: max_len in max_len == 1":
        "programs of sequences that do not exist read past the tables, which ends the process",
    # Not seen by conformance here, and tested elsewhere.
    "conv2d.triton_backend: default: convolve: groups in _fits_hopper(x, y, steps, groups)": GPU,
    "conv2d.triton_backend: default: convolve: activation in _by_boxes(x, w, bias, scales, y, steps, activation)": GPU,
    "conv2d.triton_backend: default: _fits_hopper: groups in groups == 1": GPU,
    "conv2d.triton_backend: default: _by_boxes: activation in ACTIVATION=activation": GPU,
    "conv2d.triton_backend: default: _by_boxes: activation in activation != 'gelu'": GPU,
    "conv2d.triton_backend: default: _by_pointers: groups in O // groups":
        "more programs than there are tiles: what is past the group is masked",
    "mla_attention.triton_backend: default: _fits_hopper: rank in (rank, q.shape[2] - rank)": GPU,
    "mla_attention.triton_backend: default: _fits_hopper: rank in q.shape[2] - rank": GPU,
    "mla_attention.triton_backend: default: _fits_hopper: window in window is None": GPU,
    "attention.torch_backend: default: forward: max_len in cuda.packed(shape, scale, q, k, v, cu_seqlens, max_len)":
        GPU,
    "linear_cross_entropy_loss.torch_backend: default: _Loss: grad_weight in (grad_hidden, grad_weight)":
        "raises: test_linear_cross_entropy.py",
    "linear_cross_entropy_loss.torch_backend: default: _scaled: grad_weight in grad_weight=grad_weight":
        "raises: test_linear_cross_entropy.py",
    "linear_cross_entropy_loss.triton_backend: default: backward: grad_weight in grad_weight=grad_weight":
        "raises: test_linear_cross_entropy.py",
    "sample.triton_backend: no select: _choose: tl.where((tops == top) & (lane >= values_at), lane, LANES)":
        "only of equal logits, one of them replaced, the first may be another: test_sample.py",
    "sample.triton_backend: no select: _choose: tl.where(token < V, token, 0)": "a row of NaN: test_sample.py",
    "kernels.quantize: no select: quantized: tl.where(inverse > 0.0, q, 0)":
        "the low byte of a NaN is 0 on a CPU and 255 on a GPU, where conformance runs too",
}  # fmt: skip
