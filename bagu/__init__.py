"""bagu (八股): the canon of LLM infrastructure as one package.

>>> import bagu
>>> run = bagu.fit(["the first text", "the second", ...], minutes=2)  # or a folder, a file, chats
>>> model = bagu.load(run)  # or a run's folder, a checkpoint, a Hugging Face folder or id, a GGUF file
>>> model.generate("the ")
>>> bagu.evaluate(model, "continue4")
>>> bagu.ops.rms_norm(x, w)

These names are imported at their first use: `import bagu` alone does not import torch. docs/python.md has scripts.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"
__all__ = ["Model", "evaluate", "fit", "load", "ops"]

if TYPE_CHECKING:
    from bagu import ops
    from bagu.recipes.fit import fit
    from bagu.recipes.language_model import Model, evaluate, load
else:  # a type checker would take __getattr__ to mean that every name exists
    _PLACES = {
        "Model": "bagu.recipes.language_model",
        "evaluate": "bagu.recipes.language_model",
        "fit": "bagu.recipes.fit",
        "load": "bagu.recipes.language_model",
        "ops": "bagu.ops",
    }

    def __getattr__(name):
        if name not in _PLACES:
            raise AttributeError(f"module 'bagu' has no attribute {name!r}")
        from importlib import import_module

        module = import_module(_PLACES[name])
        return module if name == "ops" else getattr(module, name)

    def __dir__():
        return sorted({*globals(), *__all__})
