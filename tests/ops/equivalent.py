"""Mutants that no test can tell from the original, each with the reason."""

EQUIVALENT = {
    "attention.work_list: zero: _list: tl.store(past + tl.arange(0, LEFT_OVER), tl.zeros([LEFT_OVER], tl.int32))": (
        "what is stored there is zeros"
    ),
    "add_rms_norm.torch_backend: default: backward: eps": "RMSNorm's backward has r and reads no eps",
    "add_rms_norm.triton_backend: default: backward: eps": "RMSNorm's backward has r and reads no eps",
    "kernels.scalars: short: rsqrt: x < float('inf')": "infinity less 1 is infinity",
}
