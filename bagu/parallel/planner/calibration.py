"""The constants of the cost model that no data sheet gives.

Each was set once, to minimize the error over the calibration rows alone (`python -m benchmarks.tools.plan_calibrate`;
rows.py names the sources). They are the same for every model, cluster and source.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Calibration:
    matmul_ampere: float = 0.913  # rate of large matmuls in a training step, relative to the best rate measured alone
    matmul_hopper: float = 0.882
    ramp_k: float = 117.5  # cost of filling and draining a tile, in steps of K
    hbm: float = 0.849  # share of the memory bandwidth that elementwise kernels reach
    network: float = 0.652  # share of the network's rate that collectives reach
    interference: float = 0.256  # share of a hidden collective's time that it still costs: it takes SMs and bandwidth
    tp_hidden: float = 0.9  # share of tensor-parallel communication that overlapped kernels hide
    launch_us: float = 6.0  # host time per eager kernel launch
    # per step on more than one rank: ranks wait for the slowest and for the norm of the gradients
    step_ms: float = 64.6


CALIBRATION = Calibration()
