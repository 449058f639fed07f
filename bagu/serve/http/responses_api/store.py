"""Finished responses, kept in memory for `previous_response_id` and `GET /v1/responses/{id}`, within a bound.

A response belongs to the API key that created it. Owner and id together are the key of one dict, so the response of
another owner is not found in the same time and with the same words as one that does not exist.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from bagu.serve.http.errors import ApiError
from bagu.serve.http.files_api.turn import Source
from bagu.serve.http.responses import to_json

MAX_RESPONSES = 10_000
MAX_BYTES = 32 * 2**20  # of JSON, which takes up to twice as much memory


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResponse:
    """The body of a response, and the messages of the conversation up to and including it."""

    owner: bytes | None  # `Key.digest`; None on a server without keys
    body: dict[str, Any]
    messages: list[dict[str, Any]]
    sources: tuple[Source, ...] = ()  # of all turns, from number 1

    @property
    def size(self) -> int:
        """Bytes of its JSON. The messages are counted in full, also those that an earlier response shares."""
        sources = sum(len(source.text) for source in self.sources)
        return len(to_json(self.body).encode()) + len(to_json(self.messages).encode()) + sources


class ResponseStore:
    """The most recently used responses, up to `max_responses` and `max_bytes`."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses, self.max_bytes = max_responses, max_bytes
        self.bytes = 0
        self._found: OrderedDict[tuple[bytes | None, str], tuple[StoredResponse, int]]
        self._found = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._found)

    def put(self, response: StoredResponse) -> None:
        """Add a response and drop the least recently used ones beyond the bounds."""
        size = response.size
        self._found[response.owner, response.body["id"]] = response, size
        self.bytes += size
        while len(self._found) > self.max_responses or self.bytes > self.max_bytes:
            _, (_, dropped) = self._found.popitem(last=False)
            self.bytes -= dropped

    def get(self, owner: bytes | None, id: str, param: str | None = None) -> StoredResponse:
        """The owner's response; raises 404 if there is none."""
        if (owner, id) not in self._found:
            hint = "it was not stored, was deleted, or was dropped for newer ones; send the conversation as input"
            raise ApiError(404, f"there is no response {id!r:.80}", param=param, code="response_not_found", hint=hint)
        self._found.move_to_end((owner, id))
        return self._found[owner, id][0]

    def delete(self, owner: bytes | None, id: str) -> None:
        """Remove the owner's response; raises 404 if there is none."""
        self.get(owner, id)
        self.bytes -= self._found.pop((owner, id))[1]
