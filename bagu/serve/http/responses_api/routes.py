"""The routes of the Responses API."""

from functools import partial

from fastapi import Request
from starlette.responses import Response

from bagu.serve.http.bodies.parse import parse
from bagu.serve.http.calls import json_response
from bagu.serve.http.errors import ApiError
from bagu.serve.http.files_api.routes import FilesRoutes
from bagu.serve.http.files_api.turn import Source, as_sent
from bagu.serve.http.instances import Models
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.http.responses_api.body import ResponsesBody
from bagu.serve.http.responses_api.items import input_messages
from bagu.serve.http.responses_api.response import ModelResponse
from bagu.serve.http.responses_api.store import ResponseStore
from bagu.serve.http.routes import LARGE_BODY, ApiConfig, key_of, user_of


class ResponsesRoutes(FilesRoutes):
    def __init__(self, models: Models, metrics: Metrics, config: ApiConfig) -> None:
        super().__init__(models, metrics, config)
        self.stored = ResponseStore()

    async def create_response(self, request: Request) -> Response:
        self.catalog.check_ready()
        raw = await self.read(request)
        body = parse(ResponsesBody, raw)
        owner, messages = _owner(request), input_messages(body.input)
        earlier: list[Source] = []
        if body.previous_response_id is not None:
            previous = self.stored.get(owner, body.previous_response_id, "previous_response_id")
            messages, earlier = [*previous.messages, *messages], [*previous.sources]
        earlier += as_sent(messages, len(earlier))
        turn = None
        if (asked := body.file_search) is not None and messages[-1]["role"] == "user":
            if not isinstance(messages[-1]["content"], str):
                hint = "ask about the image without file_search"
                raise ApiError(400, "file_search for a question with an image", param="tools", hint=hint)
            turn = await self.find_turn(request, asked, str(messages[-1]["content"]), earlier, "tools.")
        chat = body.to_chat(messages, turn)
        respond = partial(
            ModelResponse,
            asked=body,
            messages=chat.messages,
            store=self.stored,
            owner=owner,
            turn=turn,
            earlier=earlier,
        )
        large = await self.find_images(request, chat.body.messages) or len(raw) > LARGE_BODY
        return await self.run_generation(request, chat, respond, large=large, user=user_of(body))

    async def get_response(self, request: Request) -> Response:
        return json_response(self.stored.get(_owner(request), request.path_params["id"]).body)

    async def delete_response(self, request: Request) -> Response:
        id = request.path_params["id"]
        self.stored.delete(_owner(request), id)
        return json_response({"id": id, "object": "response", "deleted": True})


def _owner(request: Request) -> bytes | None:
    key = key_of(request)
    return None if key is None else key.key.digest
