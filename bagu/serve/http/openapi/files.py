"""The routes of files and vector stores as data, and their response bodies."""

from typing import Any, Literal

from pydantic import BaseModel

from bagu.serve.http.bodies.openai import Body
from bagu.serve.http.files_api.bodies import SearchBody, StoreBody, StoreChange, StoreFileBody
from bagu.serve.http.openapi.operation import READING, Operation
from bagu.serve.http.openapi.schemas import Schema

READ_ONLY = {403: "An index of the server cannot be changed by requests."}
MISSING = {404: "This API key has no file or vector store of this id."}
PAGING = (
    {"name": "limit", "in": "query", "required": False, "schema": {"type": "integer", "minimum": 1, "maximum": 10_000}},
    {"name": "order", "in": "query", "required": False, "schema": {"enum": ["asc", "desc"]}},
    {
        "name": "after",
        "in": "query",
        "required": False,
        "schema": {"type": "string"},
        "description": "The last id of the page before.",
    },
)
BAD_PAGE = {400: "A parameter of the page is wrong."}


class FileObject(Schema):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FileCounts(Schema):
    in_progress: int
    completed: int
    failed: int
    cancelled: int
    total: int


class VectorStore(Schema):
    id: str
    object: Literal["vector_store"]
    created_at: int
    name: str
    usage_bytes: int
    file_counts: FileCounts
    status: Literal["completed", "in_progress"]
    last_active_at: int
    metadata: dict[str, str]


class FileFault(Schema):
    code: str
    message: str


class StoreFile(Schema):
    id: str
    object: Literal["vector_store.file"]
    created_at: int
    status: Literal["in_progress", "completed", "failed"]
    vector_store_id: str
    last_error: FileFault | None
    usage_bytes: int
    attributes: dict[str, str | float | bool]
    chunking_strategy: dict[str, Any]


class Page(Schema):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page):
    data: list[FileObject]


class StoreList(Page):
    data: list[VectorStore]


class StoreFileList(Page):
    data: list[StoreFile]


class Text(Schema):
    type: Literal["text"]
    text: str
    line: int | None = None  # its first line in the file


class StoreHit(Schema):
    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | float | bool]
    content: list[Text]
    line: int


class StoreHits(Schema):
    object: Literal["vector_store.search_results.page"]
    search_query: list[str]
    data: list[StoreHit]
    has_more: bool
    next_page: None


class StoreFileContent(Schema):
    object: Literal["vector_store.file_content.page"]
    file_id: str
    filename: str
    attributes: dict[str, str | float | bool]
    data: list[Text]
    has_more: bool
    next_page: None


class Deleted(Schema):
    id: str
    object: Literal["file", "vector_store.deleted", "vector_store.file.deleted"]
    deleted: Literal[True]


def _route(
    path: str,
    name: str,
    summary: str,
    answer: type[BaseModel] | Literal["application/octet-stream"],
    method: Literal["GET", "POST", "DELETE"] = "GET",
    body: type[Body] | None = None,
    *,
    pages: bool = False,
    form: bool = False,
) -> Operation:
    ids = [word.strip("{}") for word in path.split("/") if word.startswith("{")]
    parameters = [{"name": id, "in": "path", "required": True, "schema": {"type": "string"}} for id in ids]
    failures = {
        **(READING if method == "POST" else {}),
        **(BAD_PAGE if pages else {}),
        **(MISSING if ids or body else {}),
        **(READ_ONLY if ids and method != "GET" else {}),
    }
    return Operation(
        path=path, name=name, summary=summary, answer=answer, method=method, body=body, form=form, failures=failures,
        parameters=(*parameters, *(PAGING if pages else ())), access="key",
    )  # fmt: skip


FILES, STORES = "/v1/files", "/v1/vector_stores"
FILE_OPERATIONS = (
    _route(FILES, "upload_file", "Upload a file", FileObject, "POST", form=True),
    _route(FILES, "list_files", "List the files of the API key", FileList, pages=True),
    _route(f"{FILES}/{{id}}", "get_file", "Get one file", FileObject),
    _route(f"{FILES}/{{id}}", "delete_file", "Delete a file, also from its vector stores", Deleted, "DELETE"),
    _route(f"{FILES}/{{id}}/content", "file_content", "Get the bytes of a file", "application/octet-stream"),
    _route(STORES, "create_store", "Create a vector store", VectorStore, "POST", StoreBody),
    _route(STORES, "list_stores", "List the vector stores", StoreList, pages=True),
    _route(f"{STORES}/{{id}}", "get_store", "Get one vector store", VectorStore),
    _route(f"{STORES}/{{id}}", "change_store", "Rename a vector store", VectorStore, "POST", StoreChange),
    _route(f"{STORES}/{{id}}", "delete_store", "Delete a vector store; its files stay", Deleted, "DELETE"),
    _route(f"{STORES}/{{id}}/search", "search_store", "Search a vector store", StoreHits, "POST", SearchBody),
    _route(f"{STORES}/{{id}}/files", "add_store_file", "Index a file", StoreFile, "POST", StoreFileBody),
    _route(f"{STORES}/{{id}}/files", "list_store_files", "List the files of a store", StoreFileList, pages=True),
    _route(f"{STORES}/{{id}}/files/{{file_id}}", "get_store_file", "Get the state of a file", StoreFile),
    _route(f"{STORES}/{{id}}/files/{{file_id}}", "delete_store_file", "Take a file out", Deleted, "DELETE"),
    _route(f"{STORES}/{{id}}/files/{{file_id}}/content", "store_file_content", "Get the text", StoreFileContent),
)
