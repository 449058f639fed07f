"""Mutants that no test can tell from the original, each with the reason."""

EQUIVALENT = {
    "add_rms_norm.torch_backend: default: backward: eps": "RMSNorm's backward has r and reads no eps",
    "add_rms_norm.triton_backend: default: backward: eps": "RMSNorm's backward has r and reads no eps",
    "kernels.scalars: short: rsqrt: x < float('inf')": "infinity less 1 is infinity",
}
