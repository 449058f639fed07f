"""Images over HTTP: the openai client against a real server with a small vision-language model, and hostile images."""

from __future__ import annotations

import base64
import http.server
import io
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from small_vlm import SIDE, TOKENS, data_url, file_of, picture, small_tokenizer, small_vlm
from tiny_server import KEY, Running, openai_client, running_server

from bagu.data.chat import ChatEncoder
from bagu.data.pictures.read import decode
from bagu.errors import ArgumentError
from bagu.machine.image_file import MAX_SCANS, read_image
from bagu.serve.http.bodies.chat import ChatBody
from bagu.serve.http.errors import ApiError
from bagu.serve.images.fetch import fetch_image, is_public
from bagu.serve.images.prompt import ImageSpec
from bagu.serve.wire.messages import Ready

CHAT = "/v1/chat/completions"
ASK = "what is left of the umbrella?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("vlm") / "stderr", "--kind", "vlm") as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai_client(server.url) as found:
        yield found


def part(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, kind)}}


def body(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": ASK}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, **fields}


def expected(*files: bytes) -> str:
    """The text that the model alone answers."""
    model, tokenizer = small_vlm(), small_tokenizer()
    parts = [*[{"type": "image"}] * len(files), {"type": "text", "text": ASK}]
    prompt = ChatEncoder(tokenizer).prompt([{"role": "user", "content": parts}])
    image = model.config.image_token
    prompt = [t for token in prompt for t in [token] * (TOKENS if token == image else 1)]
    ids = model.answer([prompt], [decode(f, SIDE) for f in files], 8, tokenizer.token_id("<|end|>"))[0]
    return tokenizer.decode([i for i in ids if i not in tokenizer.special_ids.values()])


def test_the_server_answers_as_the_model_does(client: openai.OpenAI, server: Running) -> None:
    one, two = file_of(picture(1, (40, 30))), file_of(picture(2), "WEBP")
    for files in ((one,), (two, one), (one, one)):
        sent: Any = body(*[part(f) for f in files], model="tiny")
        answer = client.chat.completions.create(**sent)
        assert answer.choices[0].message.content == expected(*files)
        streamed = "".join(
            c.choices[0].delta.content or "" for c in client.chat.completions.create(**sent, stream=True)
        )
        assert streamed == answer.choices[0].message.content
        assert answer.usage is not None
        ids = server.http.post("/tokenize", json={"messages": sent["messages"]}).json()["tokens"]
        assert len(ids) == answer.usage.prompt_tokens
    counts = dict(line.split(" ") for line in server.http.get("/metrics").text.splitlines() if "images_" in line[:15])
    assert [float(v) for k, v in counts.items() if k.startswith("bagu:images_encoded")] == [2.0]


def test_files_responses_and_schemas(client: openai.OpenAI) -> None:
    data = file_of(picture(3))
    id = client.files.create(file=("a.png", data), purpose="vision").id
    sent: Any = body({"type": "image_url", "image_url": {"file_id": id}}, model="tiny")
    assert client.chat.completions.create(**sent).choices[0].message.content == expected(data)
    for source in ({"image_url": data_url(data)}, {"file_id": id, "detail": "low"}):
        content: Any = [{"type": "input_image", **source}, {"type": "input_text", "text": ASK}]
        first = client.responses.create(
            model="tiny", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=8
        )
        assert first.output_text == expected(data)
    later = client.responses.create(
        model="tiny", input="and now?", previous_response_id=first.id, max_output_tokens=8, temperature=0
    )
    assert later.usage is not None and first.usage is not None
    assert later.usage.input_tokens > first.usage.input_tokens + TOKENS, "the image is in the conversation"
    choice: Any = {"structured_outputs": {"choice": ["a knight"]}}
    assert client.chat.completions.create(**sent, extra_body=choice).choices[0].message.content == "a knight"


def test_a_placeholder_that_a_user_types_is_text(server: Running) -> None:
    typed = {"messages": [{"role": "user", "content": "<|image|>" * 3}], "max_tokens": 2}
    assert server.http.post(CHAT, json=typed).status_code == 200


def _png(width: int, height: int, *, depth: int = 8, colour: int = 2, data: bytes | None = None) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 100) if data is None else data
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def _many_scans() -> bytes:
    whole = file_of(picture(0, (64, 64)), "JPEG", progressive=True)
    at = whole.rindex(b"\xff\xda")
    return whole[:at] + whole[at:-2] * (MAX_SCANS + 1) + whole[-2:]


GOOD = file_of(picture(0))
HOSTILE: dict[str, dict[str, Any]] = {
    "not base64": {"image_url": {"url": "data:image/png;base64,@@@@"}},
    "base64 of nothing": {"image_url": {"url": "data:image/png;base64,"}},
    "no base64": {"image_url": {"url": "data:image/png,abc"}},
    "not ascii": {"image_url": {"url": "data:image/png;base64,图"}},
    "wrong type": part(GOOD, "text/html"),
    "no comma": {"image_url": {"url": "data:image/png;base64"}},
    "truncated": part(GOOD[: len(GOOD) // 2]),
    "header alone": part(GOOD[:33]),
    "zero size": part(_png(0, 0)),
    "zero height": part(_png(5, 0)),
    "a line": part(file_of(Image.new("L", (100_000, 1)))),
    "bomb": part(_png(65_535, 65_535)),
    "huge": part(_png(2**31 - 1, 2**31 - 1)),
    "pixels that are missing": part(_png(1500, 1500)),
    "pixels that do not decompress": part(_png(10, 10, data=b"garbage")),
    "depth 3": part(_png(10, 10, depth=3)),
    "svg": part(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
    "heic": part(b"\0\0\0\x18ftypheic" + b"\0" * 64, "image/heic"),
    "tiff": part(file_of(Image.fromarray(np.full((4, 4), np.nan, np.float32)), "TIFF")),
    "bmp": part(file_of(picture(0), "BMP")),
    "scans": part(_many_scans(), "image/jpeg"),
    "file": {"image_url": {"url": "file:///etc/passwd"}},
    "http": {"image_url": {"url": "http://169.254.169.254/latest"}},
    "https": {"image_url": {"url": "HTTPS://example.com/a.png"}},
    "octal": {"image_url": {"url": "http://0177.0.0.1/"}},
    "ipv6": {"image_url": {"url": "http://[::1]/"}},
    "two sources": {"image_url": {"url": data_url(GOOD), "file_id": "file-1"}},
    "no source": {"image_url": {}},
    "unknown file": {"image_url": {"file_id": "file-1"}},
    "url is a number": {"image_url": {"url": 7}},
    "image_url is a text": {"image_url": "data:"},
    "no image_url": {},
    "another detail": {"image_url": {"url": data_url(GOOD), "detail": "ultra"}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_refused_in_one_sentence(server: Running, name: str) -> None:
    answer = server.http.post(CHAT, json=body({"type": "image_url", **HOSTILE[name]}))
    error = answer.json()["error"]
    assert answer.status_code == (404 if name == "unknown file" else 400), answer.text
    assert error["param"].startswith("messages.0.content.0") and "\n" not in error["message"]
    assert len(error["message"]) < 600


def _wide(mode: str) -> Image.Image:
    return Image.fromarray(np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)) if mode == "16" else (
        picture(7).convert(mode)
    )  # fmt: skip


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # by 90 degrees
    return exif


ODD = {
    "palette": file_of(_wide("P")),
    "palette gif": file_of(_wide("P"), "GIF"),
    "16 bits": file_of(_wide("16")),
    "one bit": file_of(_wide("1")),
    "grey with alpha": file_of(_wide("LA")),
    "cmyk": file_of(_wide("CMYK"), "JPEG"),
    "one pixel": file_of(picture(1, (1, 1))),
    "tall": file_of(picture(1, (1, 4000))),
    "turned": file_of(picture(1, (30, 10)), "JPEG", exif=_turned()),
    "animated": file_of(picture(1), "GIF", save_all=True, append_images=[picture(s) for s in range(30)]),
    "progressive": file_of(picture(1, (64, 64)), "JPEG", progressive=True),
}  # fmt: skip


def test_odd_images_have_their_right_pixels(client: openai.OpenAI) -> None:
    for name, data in ODD.items():
        sent: Any = body(part(data), model="tiny")
        assert client.chat.completions.create(**sent).choices[0].message.content == expected(data), name
    turned = np.asarray(read_image(ODD["turned"]))
    assert turned.shape == (30, 10, 3)


def test_where_images_may_not_be(server: Running, tiny: Running) -> None:
    image = part(GOOD)
    cases = [
        ({"messages": [{"role": "system", "content": [image]}, {"role": "user", "content": "a"}]}, "image of 'system'"),
        ({"messages": [{"role": "tool", "content": [image]}]}, "image of 'tool'"),
        (body(*[image] * 65), "more than 64 images"),
        (body(*[part(file_of(picture(0, (1900, 1900)), "PNG", compress_level=0)[:100])] * 3), "cannot be read"),
        (body(image, file_search={"vector_store_ids": ["docs"]}), "with an image"),
    ]
    for sent, reason in cases:
        answer = server.http.post(CHAT, json=sent)
        assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text
    items = [{"role": "assistant", "content": [{"type": "input_image", "image_url": data_url(GOOD)}]}]
    assert server.http.post("/v1/responses", json={"input": items}).status_code == 400
    headers = {"authorization": f"Bearer {KEY}"}
    answer = tiny.http.post(CHAT, json=body(image), headers=headers)
    assert answer.status_code == 400 and "takes text only" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages.0.content.0"


@pytest.fixture(scope="module")
def ready() -> Ready:
    tokenizer = small_tokenizer()
    return Ready(
        tokenizer=tokenizer, chat=ChatEncoder(tokenizer), generates=True, max_model_len=64, vocab_size=300,
        images=ImageSpec(tokenizer.token_id("<|image|>"), TOKENS, SIDE),
    )  # fmt: skip


def test_costs_are_refused_before_anything_is_decoded(ready: Ready) -> None:
    def refused(*files: bytes) -> str:
        with pytest.raises(ApiError) as error:
            ChatBody.model_validate(body(*map(part, files))).to_job(ready)
        return str(error.value.message)

    assert "20 images are 80 tokens" in refused(*[b"not an image"] * 20)
    plain = zlib.compress(bytes(6001) * 2000)
    assert "have 20,000,000 pixels" in refused(*[_png(2000, 2000, data=plain)] * 6)
    assert "at most" not in refused(GOOD[:40])
    large = b"\x89PNG\r\n\x1a\n" + bytes(11 * 2**20)
    assert "bytes" in refused(large)


def test_a_thousand_hostile_images_are_read_or_refused_quickly() -> None:
    """Files of every format with bytes changed, cut and repeated: pixels or an ArgumentError, nothing else."""
    stream = np.random.default_rng(0)
    frames = {"save_all": True, "append_images": [picture(9, (48, 40))]}
    wholes = [
        file_of(picture(1, (48, 40)), kind, **options)
        for kind, options in (
            ("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("GIF", frames), ("WEBP", frames),
        )
    ]  # fmt: skip
    read, slowest = 0, 0.0
    for number in range(1000):
        data = bytearray(wholes[number % len(wholes)])
        for at in stream.integers(0, len(data), stream.integers(1, 12)):
            data[at] = stream.integers(256)
        if number % 3 == 0:
            del data[stream.integers(len(data)) :]
        if number % 5 == 0:
            at = int(stream.integers(len(data) + 1))
            data[at:at] = data[:at]
        began = time.process_time()
        try:
            assert read_image(bytes(data), SIDE).size == (SIDE, SIDE)
            read += 1
        except ArgumentError:
            pass
        slowest = max(slowest, time.process_time() - began)
    assert 50 < read < 950 and slowest < 0.05


def test_addresses_that_are_not_public() -> None:
    inside = (
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "::1",
        "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "64:ff9b::a00:1", "2002:a00:1::", "224.0.0.1",
        "255.255.255.255",
    )  # fmt: skip
    assert not any(map(is_public, inside))
    assert is_public("8.8.8.8") and is_public("2606:4700::1111")


class _Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = {
            "/a.png": (200, GOOD),
            "/far": (302, b""),
            "/large": (200, bytes(11 * 2**20)),
            "/text": (200, b"hello"),
        }
        status, data = found.get(self.path, (404, b""))
        self.send_response(status)
        self.send_header("Location", "http://169.254.169.254/")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def test_images_are_fetched_from_allowed_hosts_only() -> None:
    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    base = f"http://localhost:{site.server_port}"
    try:
        assert fetch_image(f"{base}/a.png", {"localhost"}, allowed=lambda address: True) == GOOD
        for path, reason in (("/far", "answers 302"), ("/none", "answers 404"), ("/large", "more than 10,485,760")):
            with pytest.raises(ArgumentError, match=reason):
                fetch_image(base + path, {"localhost"}, allowed=lambda address: True)
        with pytest.raises(ArgumentError, match="not public"):
            fetch_image(f"{base}/a.png", {"localhost"})
        elsewhere = (
            "http://example.com/",
            "http://user@localhost/",
            "ftp://localhost/",
            "http://localhost.evil/",
            "http://[",
        )
        for url in elsewhere:
            with pytest.raises(ArgumentError, match=r"does not fetch from|not valid"):
                fetch_image(url, {"localhost"}, allowed=lambda address: True)
        with pytest.raises(ArgumentError, match="did not send"):
            fetch_image("http://localhost:1/", {"localhost"}, allowed=lambda address: True)
    finally:
        site.shutdown()
        site.server_close()


def test_the_server_lives_after_all_of_it(server: Running) -> None:
    image = base64.b64encode(io.BytesIO(GOOD).getvalue()).decode()
    sent = body({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}})
    assert server.http.post(CHAT, json=sent).status_code == 200 and server.get("/health") == {"status": "ok"}
    assert "Traceback" not in server.log.read_text()
