"""Find MODEL of the command line: a run folder, a checkpoint of a run, a Hugging Face folder (a model, or a PEFT
adapter whose base can be found), a GGUF file, or a hub id.

This imports no torch: the HTTP server's process checks names with it.
"""

from pathlib import Path

from bagu.machine.hub import WeightsError, find
from bagu.runs.files import RunFiles

MODEL = "model"  # where a run writes its result


def find_model(name: str | Path) -> Path:
    """The folder with the files of MODEL, or a GGUF file; for a run, the folder of its result."""
    folder = find(name)
    run = RunFiles(folder)
    if not run.environment_path.is_file():  # Hugging Face folders also contain a config.json
        inside = _runs_in(folder)
        if inside and not run.config_path.is_file():  # such as the folder of a demo
            raise WeightsError(f"{folder} is not a model", hint=f"give a run inside it: {', '.join(inside[:8])}")
        return folder
    if not (folder / MODEL).is_dir():
        from bagu.train.checkpoint import checkpoints  # imports torch

        saved = checkpoints(run.checkpoints)
        hint = f"give its checkpoint {saved[-1]}, or let it finish" if saved else "let it finish"
        raise WeightsError(f"the run {folder} has no model yet", hint=hint)
    return folder / MODEL


def _runs_in(folder: Path) -> list[str]:
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [str(path) for path in inside if RunFiles(path).environment_path.is_file()]
