"""What each operation means, costs, and how it runs. `ls` is the catalogue: a folder is an op.

>>> y = bagu.ops.rms_norm(x, w)  # Triton on a GPU, torch elsewhere
>>> y = bagu.ops.rms_norm(x, w, backend="torch")  # or ask
>>> with bagu.ops.use("torch"):  # or ask for everything inside
...     y = bagu.ops.rms_norm(x, w)
"""

from bagu.ops.dispatch import use
from bagu.ops.rms_norm import rms_norm

__all__ = ["rms_norm", "use"]
