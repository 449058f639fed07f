"""A body of the type multipart/form-data (RFC 7578): the fields, and one file."""

import re
from dataclasses import dataclass

from bagu.serve.http.errors import ApiError

MAX_PARTS = 64
FIELD = re.compile(rb'form-data;(?:.*;)?\s*name="((?:[^"\\]|\\.)*)"', re.I | re.S)
FILENAME = re.compile(rb'filename="((?:[^"\\]|\\.)*)"', re.I)
EXTENDED = re.compile(rb"filename\*=utf-8''([^;\s]+)", re.I)


@dataclass(frozen=True)
class Form:
    fields: dict[str, str]
    filename: str | None  # None: there is no file
    data: bytes = b""


def parse_form(content_type: str, raw: bytes) -> Form:
    """Raises 415 for another type and 400 for a body that is not such a form."""
    found = re.fullmatch(r'multipart/form-data;.*?boundary="?([^"\s;]{1,70})"?.*', content_type.strip(), re.I | re.S)
    if not found:
        kind = content_type.partition(";")[0][:80] or "missing"
        raise ApiError(415, f"the body's content type is {kind}", hint="send a form: multipart/form-data; boundary=...")
    parts = (b"\r\n" + raw).split(b"\r\n--" + found[1].encode("latin-1"), MAX_PARTS + 2)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise ApiError(400, "the form does not end with its boundary", hint=f"at most {MAX_PARTS} fields")
    fields: dict[str, str] = {}
    filename, data = None, b""
    for part in parts[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        name = FIELD.search(head)
        if name is None:
            raise ApiError(400, "a part of the form has no name")
        if name[1] != b"file":
            fields[_text(name[1])] = _text(value)
            continue
        if (extended := EXTENDED.search(head)) is not None:
            from urllib.parse import unquote_to_bytes

            filename = _text(unquote_to_bytes(extended[1]))
        elif (given := FILENAME.search(head)) is not None:
            quoted = re.sub(rb"\\(.)", rb"\1", given[1])
            filename = _text(quoted.replace(b"%22", b'"').replace(b"%0D", b"\r").replace(b"%0A", b"\n"))  # as browsers
        data = value
    return Form(fields, filename, data)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"a field of the form is not UTF-8: {error.reason}") from error
