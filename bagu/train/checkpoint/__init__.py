"""One checkpoint on disk: a folder that is complete or absent, with a checksum for each file and no pickle.

    model.safetensors       fp32 masters by parameter name, and the model's buffers
    optimizer.safetensors   the optimizer's state, named "exp_avg/<parameter>"
    state.json              step, data_step, updates, the cursor of the loader, the states of guard and loss, settings
    manifest.json           size and SHA-256 of the other files; written last

A run whose states are divided over ranks (ZeRO, tp, pp, ep) has a model and an optimizer file per rank
(saved_tensors.py, divided_tensors.py). Each rank writes its own to a folder beside the others'; rank 0 waits for all of
them and puts the checkpoint together.

Everything is written and synced in a temporary folder, which is then renamed: a kill or a full disk leaves that folder
behind and does not change earlier checkpoints. Tensors are stored by name and in fp32, so a checkpoint does not depend
on the layout or the compute dtype of the run that wrote it.
"""

from bagu.train.checkpoint.folder import (
    MANIFEST,
    MODEL,
    BadCheckpoint,
    CheckpointError,
    best,
    checkpoints,
    clear_partial,
    newest_good,
    path_of,
    set_aside,
    state_of,
    unneeded,
    verify,
)
from bagu.train.checkpoint.restoring import load_model_tensors, restore
from bagu.train.checkpoint.writing import Snapshot, snapshot, write

__all__ = [
    "MANIFEST",
    "MODEL",
    "BadCheckpoint",
    "CheckpointError",
    "Snapshot",
    "best",
    "checkpoints",
    "clear_partial",
    "load_model_tensors",
    "newest_good",
    "path_of",
    "restore",
    "set_aside",
    "snapshot",
    "state_of",
    "unneeded",
    "verify",
    "write",
]
