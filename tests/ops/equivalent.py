"""Mutants that conformance here cannot tell from the original, each with the reason."""

EQUIVALENT = {
    "attention.work_list: zero: _list: tl.store(past + tl.arange(0, LEFT_OVER), tl.zeros([LEFT_OVER], tl.int32))": (
        "what is stored there is zeros"
    ),
    "add_rms_norm.torch_backend: default: backward: eps": "RMSNorm's backward has r and reads no eps",
    "add_rms_norm.triton_backend: default: backward: eps": "RMSNorm's backward has r and reads no eps",
    "rms_norm.triton_backend: default: backward: eps": "RMSNorm's backward has r and reads no eps",
    "layer_norm.triton_backend: default: backward: eps": "LayerNorm's backward has r and reads no eps",
    "kernels.scalars: short: rsqrt: x < float('inf')": "infinity less 1 is infinity",
    "linear_cross_entropy.triton_backend: packed: _overwrite: dlogits.stride(0)": "a view of rows without gaps",
    "linear_cross_entropy.torch_backend: default: backward: memory": "sets the size of chunks, not what is computed",
    "linear_cross_entropy.triton_backend: default: backward: memory": "sets the size of chunks, not what is computed",
    # Not seen by conformance here, and tested elsewhere:
    "linear_cross_entropy_loss.torch_backend: no select: forward: torch.where(targets != ignore_index, losses, 0.0)":
        "runs under torch.func alone: test_transforms.py",
    "linear_cross_entropy_loss.one_pass: default: check_made: grad_weight": "raises: test_linear_cross_entropy.py",
    "linear_cross_entropy_loss.torch_backend: default: _scaled: grad_weight": "raises: test_linear_cross_entropy.py",
    "linear_cross_entropy_loss.triton_backend: default: backward: grad_weight": "raises: test_linear_cross_entropy.py",
    "quantize_int8.triton_backend: no select: _rounded: tl.where(inverse > 0.0, q, 0)":
        "the low byte of a NaN is 0 on a CPU and 255 on a GPU, where conformance runs too",
}  # fmt: skip
