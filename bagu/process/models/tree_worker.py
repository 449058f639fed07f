"""A child process: `tree_worker.py JOB.npz FOLDER` trains LightGBM on each set of rows and writes FOLDER/i.txt."""

import sys
from pathlib import Path

import numpy as np


def main(job_path: str, folder: str) -> None:
    import lightgbm

    job = np.load(job_path)
    x, y, signs = job["x"], job["y"], [int(s) for s in job["signs"]]
    settings = {
        "objective": "regression", "learning_rate": 0.06, "num_leaves": 15, "min_data_in_leaf": 8, "verbose": -1,
        "deterministic": True, "force_row_wise": True, "num_threads": 1, "seed": 0, "lambda_l2": 1.0,
        "bagging_fraction": 0.8, "bagging_freq": 1, "monotone_constraints": signs,
        "monotone_constraints_method": "basic",
    }  # fmt: skip
    for i in range(sum(name.startswith("rows_") for name in job.files)):
        rows = job[f"rows_{i}"]
        model = lightgbm.train(settings, lightgbm.Dataset(x[rows], y[rows]), 200)
        Path(folder, f"{i}.txt").write_text(model.model_to_string(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
