"""Options of the command line, stated where their values are kept: name, type, default and help are a field.

    @dataclass(frozen=True, kw_only=True)
    class Export:
        model: Annotated[str, Argument("A run or a folder.", metavar="MODEL")]
        dtype: Annotated[str | None, Option("bf16 or fp32. Default: as saved.")] = None
        settings: Annotated[tuple[str, ...], Option("Override a setting; repeatable.", flags=("--set",))] = ()

`bagu.cli.options.takes(Export)` gives a verb these options and calls it with an `Export`: a new option is a new field.
The flag is the field's name unless `flags` says otherwise; a bool has --name and --no-name unless `flags` has one of
them. `to_arguments` is the way back: the command line that gives the same values. A field without Option or Argument is
not an option. Nothing here imports more than the standard library, so that a dataclass of any part can use it, and
`--help` reads only modules that are fast to import.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Argument:
    """A positional argument."""

    help: str
    metavar: str | None = None


@dataclass(frozen=True)
class Option:
    """An option, by `flags` or --field-name; `envvar` is the environment variable that sets it too. `parse` reads the
    value, or each value of a repeatable option, from its text. A `hidden` option is an old way
    that still works."""

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    envvar: str | None = None
    parse: Callable[[str], Any] | None = None
    hidden: bool = False


def parameters(cls: type[Any]) -> Iterator[tuple[Field[Any], Any, Argument | Option]]:
    """The fields of a dataclass that the command line sets, with their types."""
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        if get_origin(hint := hints[field.name]) is Annotated:
            kind, *notes = get_args(hint)
            for note in notes:
                if isinstance(note, Argument | Option):
                    yield field, kind, note


def to_arguments(values: Any, *, without: tuple[str, ...] = ()) -> list[str]:
    """The command line that gives the values of an options' dataclass, those that are the defaults left out."""
    words: list[str] = []
    for field, _, note in parameters(type(values)):
        value = getattr(values, field.name)
        if field.name in without or value == field.default or value is None:
            continue
        many = value if isinstance(value, tuple) else (value,)
        if isinstance(note, Argument):
            words += map(str, many)
            continue
        flag = note.flags[0] if note.flags else "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [word for one in many for word in (flag, str(one))]
    return words


def default_of(field: Field[Any]) -> Any:
    """The default of a field; MISSING if it must be given."""
    return field.default if field.default_factory is MISSING else field.default_factory()


# options that several verbs have
MODEL = Argument("A run, a checkpoint, a Hugging Face folder or a model id.", metavar="MODEL")
TOKENIZER = Option("A folder with tokenizer.json. Default: the model's tokenizer.")
DEVICE = Option("cpu, cuda or cuda:1. Default: the first GPU if there is one.")
MODEL_DTYPE = Option("bf16, fp32 or auto. auto picks the faster one on this machine.")
API_KEY = Option("The API key that the server requires.", envvar="BAGU_API_KEY")
QUANTIZATION = Option("int8, int4 or fp8 weights in linear layers.")
INVARIANT = Option("Bitwise equal results at any batch size; slower.", flags=("--invariant",))
KV_DTYPE = Option("Dtype of the KV cache: auto (the model's), int8 or fp8.")
TENSOR_PARALLEL = Option(
    "Divide the model over this many processes, one per GPU.", flags=("--tp", "--tensor-parallel-size")
)
PREFIX_CACHING = Option(
    "Reuse the KV cache of common prompt prefixes.", flags=("--enable-prefix-caching/--no-enable-prefix-caching",)
)
AS_JSON = Option("Print JSON, and nothing else, on stdout.", flags=("--json",))
