"""`make api`: the reference of the public names, built from their docstrings by pdoc.

python -m benchmarks.tools.api [FOLDER]
"""

import sys
from pathlib import Path

import bagu

# What a user calls or gets. The other modules are read in the source.
MODULES = (
    "bagu", "bagu.types", "bagu.errors", "bagu.config", "bagu.data", "bagu.nn", "bagu.train", "bagu.eval.score",
    "bagu.serve.config", "bagu.serve.request", "bagu.parallel.plan",
)  # fmt: skip


def main(out: Path, modules: tuple[str, ...] = MODULES) -> None:
    import pdoc

    for name in bagu.__all__:  # pdoc looks into the module's dict, where a lazy name is not
        setattr(bagu, name, getattr(bagu, name))
    pdoc.render.configure(docformat="markdown")
    pdoc.pdoc(*modules, output_directory=out)
    print(out / "index.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/api"))
