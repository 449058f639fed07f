"""Configuration: trees of frozen dataclasses, read from and written to JSON, overridden by dotted key.

Each dataclass is defined next to the code that uses it; this package only reads the types of their fields.
`from_dict(C, to_dict(c)) == c` for every tree made of: dataclasses, `tuple`, `list`, `dict[str, X]`, `X | None`,
`Literal`, `bool`, `int`, `float`, `str` and `Path`. The field `kind: Literal["…"]` selects the member of a union of
dataclasses. An abstract dataclass is the union of its subclasses, so a new subclass needs no registration.

Types are strict: a float field accepts an int, and there is no other conversion. Numbers that are not finite are
refused, because JSON cannot represent them.
"""

from bagu.config.errors import ConfigError
from bagu.config.fields import from_dict
from bagu.config.files import load, save, write_atomic
from bagu.config.settings import override
from bagu.config.tree import diff, fingerprint, to_dict

__all__ = ["ConfigError", "diff", "fingerprint", "from_dict", "load", "override", "save", "to_dict", "write_atomic"]
