"""The routes of files and vector stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from bagu.errors import ArgumentError
from bagu.retrieve.read import MAX_BYTES
from bagu.retrieve.split import Chunking
from bagu.serve.http.bodies.images import refused_url
from bagu.serve.http.bodies.messages import Message, image_parts
from bagu.serve.http.bodies.parse import parse
from bagu.serve.http.calls import json_response, read_body
from bagu.serve.http.errors import ApiError
from bagu.serve.http.files_api.bodies import PURPOSES, FileSearch, SearchBody, StoreBody, StoreChange, StoreFileBody
from bagu.serve.http.files_api.multipart import parse_form
from bagu.serve.http.files_api.turn import DEFAULT_RESULTS, Source, Turn
from bagu.serve.http.routes import Routes, key_of

if TYPE_CHECKING:
    from bagu.serve.http.files_api.library import Library

T = TypeVar("T")
FORM_OVERHEAD = 2**16  # bytes of a form besides its file
PAGE = 100


class FilesRoutes(Routes):
    @cached_property
    def library(self) -> Library:
        """Opened when it is needed first: it imports numpy and SQLite."""
        from bagu.serve.http.files_api.library import Library

        return Library(self.config.files, self.config.indexes)

    def close_library(self) -> None:
        if "library" in vars(self):
            self.library.close()

    async def find_turn(
        self, request: Request, asked: FileSearch, question: str, earlier: Sequence[Source], place: str
    ) -> Turn:
        """Search the stores for a question; `place` begins the names of fields in errors."""
        k, options = asked.max_num_results or DEFAULT_RESULTS, asked.arguments(place)
        found = await self._run(self.library.search, request, asked.vector_store_ids, question, k, **options)
        return Turn(question, found, earlier)

    async def find_images(self, request: Request, messages: list[Message]) -> bool:
        """Give the images of messages the bytes of their files and URLs; whether there are images."""
        parts = image_parts(messages)
        for place, part in parts:
            id, url = part.image_url.file_id, part.image_url.url
            if id is not None and url is None:
                try:
                    _, data = await self._run(self.library.content, request, id)
                except ApiError as error:
                    error.param = f"{place}.image_url.file_id"
                    raise
                part.give(data)
            elif id is None and url is not None and url.lower().startswith(("http:", "https:")):
                part.give(await self._fetch_image(url, place))
        return bool(parts)

    async def _fetch_image(self, url: str, place: str) -> bytes:
        if not self.config.image_hosts:
            raise refused_url(url, place)
        from bagu.serve.images.fetch import fetch_image

        try:
            return await asyncio.to_thread(fetch_image, url, self.config.image_hosts)
        except ArgumentError as error:
            raise ApiError(400, f"{place}: {error}", param=place, hint=error.hint) from error

    async def upload_file(self, request: Request) -> Response:
        raw = await read_body(request, self.config.request_timeout, most=MAX_BYTES + FORM_OVERHEAD)
        form = parse_form(request.headers.get("content-type", ""), raw)
        purpose = form.fields.get("purpose")
        if purpose not in PURPOSES:
            raise ApiError(400, f"purpose is {purpose!r:.40}", param="purpose", hint=f"use {' or '.join(PURPOSES)}")
        if any(name.startswith("expires_after") for name in form.fields):
            raise ApiError(400, "expires_after is not supported", param="expires_after", hint="delete the file")
        if not form.filename:
            raise ApiError(400, "the form has no file", param="file", hint="a part named file, with a filename")
        name = form.filename.replace("\\", "/").rpartition("/")[2][:255]
        if any(ord(c) < 32 for c in name) or not name:
            raise ApiError(400, f"the filename is {name!r:.80}", param="file", hint="letters and digits")
        return await self._json(self.library.add_file, request, name, purpose, form.data)

    async def list_files(self, request: Request) -> Response:
        return await self._page(request, await self._run(self.library.files, request))

    async def get_file(self, request: Request) -> Response:
        return await self._json(self.library.file, request, request.path_params["id"])

    async def delete_file(self, request: Request) -> Response:
        id = request.path_params["id"]
        await self._run(self.library.delete_file, request, id)
        return json_response({"id": id, "object": "file", "deleted": True})

    async def file_content(self, request: Request) -> Response:
        """The bytes as they were sent, as a download: a browser never shows them as a page of this server."""
        _, data = await self._run(self.library.content, request, request.path_params["id"])
        headers = {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}
        return Response(data, headers=headers, media_type="application/octet-stream")

    async def create_store(self, request: Request) -> Response:
        body = parse(StoreBody, await self.read(request))
        body.refuse_unsupported()
        chunking = Chunking() if body.chunking_strategy is None else body.chunking_strategy.chunking()
        for id in body.file_ids or ():
            await self._run(self.library.file, request, id)
        made = await self._run(self.library.create, request, body.name or "", body.metadata or {})
        for id in body.file_ids or ():
            await self._run(self.library.add, request, made["id"], id, {}, chunking)
        return await self._json(self.library.store, request, made["id"])

    async def list_stores(self, request: Request) -> Response:
        return await self._page(request, await self._run(self.library.stores, request))

    async def get_store(self, request: Request) -> Response:
        return await self._json(self.library.store, request, request.path_params["id"])

    async def change_store(self, request: Request) -> Response:
        body = parse(StoreChange, await self.read(request))
        body.refuse_unsupported()
        return await self._json(self.library.change, request, request.path_params["id"], body.name, body.metadata)

    async def delete_store(self, request: Request) -> Response:
        id = request.path_params["id"]
        await self._run(self.library.delete, request, id)
        return json_response({"id": id, "object": "vector_store.deleted", "deleted": True})

    async def search_store(self, request: Request) -> Response:
        body = parse(SearchBody, await self.read(request))
        body.refuse_unsupported()
        options, k, ids = body.arguments(), body.max_num_results or 10, [request.path_params["id"]]
        found = []
        for query in body.queries:
            found += await self._run(self.library.search, request, ids, query, k, **options)
        best = {(one.file_id, one.hit.passage.id): one for one in sorted(found, key=lambda one: one.hit.score)}
        data = [
            {
                "file_id": one.file_id,
                "filename": one.hit.passage.file,
                "score": one.hit.score,
                "attributes": one.hit.passage.attributes,
                "line": one.hit.passage.line,
                "content": [{"type": "text", "text": one.hit.passage.text}],
            }
            for one in [*reversed(best.values())][:k]
        ]
        page = {"object": "vector_store.search_results.page", "search_query": body.queries}
        return json_response({**page, "data": data, "has_more": False, "next_page": None})

    async def add_store_file(self, request: Request) -> Response:
        body = parse(StoreFileBody, await self.read(request))
        chunking = Chunking() if body.chunking_strategy is None else body.chunking_strategy.chunking()
        id = request.path_params["id"]
        return await self._json(self.library.add, request, id, body.file_id, body.attributes or {}, chunking)

    async def list_store_files(self, request: Request) -> Response:
        return await self._page(request, await self._run(self.library.members, request, request.path_params["id"]))

    async def get_store_file(self, request: Request) -> Response:
        return await self._json(self.library.member, request, *_ids(request))

    async def delete_store_file(self, request: Request) -> Response:
        _, file = _ids(request)
        await self._run(self.library.remove, request, *_ids(request))
        return json_response({"id": file, "object": "vector_store.file.deleted", "deleted": True})

    async def store_file_content(self, request: Request) -> Response:
        """The passages of a file; `line` is the first one of each."""
        about, passages = await self._run(self.library.passages, request, *_ids(request))
        data = [{"type": "text", "text": passage.text, "line": passage.line} for passage in passages]
        name = passages[0].file if passages else about["id"]
        page = {"object": "vector_store.file_content.page", "file_id": about["id"], "filename": name}
        return json_response(
            {**page, "attributes": about["attributes"], "data": data, "has_more": False, "next_page": None}
        )

    async def _run(self, work: Callable[..., T], request: Request, *given: Any, **options: Any) -> T:
        """Call a method of the library for the owner of a request, in a thread."""
        return await asyncio.to_thread(work, owner_of(request), *given, **options)

    async def _json(self, work: Callable[..., dict[str, Any]], request: Request, *given: Any) -> Response:
        return json_response(await self._run(work, request, *given))

    async def _page(self, request: Request, found: list[dict[str, Any]]) -> Response:
        """One page of a list, newest first unless `order` is asc; `after` is the last id of the page before."""
        query = request.query_params
        limit, order, after = query.get("limit", str(PAGE)), query.get("order", "desc"), query.get("after")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= 10_000):
            raise ApiError(400, f"limit is {limit!r:.40}", param="limit", hint="1 to 10000")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order is {order!r:.40}", param="order", hint="asc or desc")
        found = found if order == "asc" else found[::-1]
        if after is not None:
            at = next((i for i, one in enumerate(found) if one["id"] == after), None)
            if at is None:
                raise ApiError(400, f"after is {after!r:.80}", param="after", hint="an id of the list")
            found = found[at + 1 :]
        data = found[: int(limit)]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        more = len(found) > len(data)
        return json_response({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more})


def owner_of(request: Request) -> str:
    """The digest of the API key; empty on a server without keys."""
    key = key_of(request)
    return "" if key is None else key.key.digest.hex()


def _ids(request: Request) -> tuple[str, str]:
    return request.path_params["id"], request.path_params["file_id"]
