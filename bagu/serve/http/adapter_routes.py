"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM."""

from typing import ClassVar

from fastapi import Request
from starlette.responses import PlainTextResponse, Response

from bagu.serve.http.bodies import fields
from bagu.serve.http.bodies.openai import Body, Word
from bagu.serve.http.bodies.parse import parse
from bagu.serve.http.errors import ApiError
from bagu.serve.http.instances import Instance
from bagu.serve.http.routes import Routes


class LoadAdapterBody(Body):
    unsupported: ClassVar[fields.Fields] = fields.LOAD_ADAPTER
    lora_name: Word
    lora_path: Word  # a folder below the server's --adapter-root


class UnloadAdapterBody(Body):
    lora_name: Word
    lora_int_id: int | None = None  # vLLM accepts it too, and does not use it


class AdapterRoutes(Routes):
    async def load_adapter(self, request: Request) -> Response:
        instance = self._served()
        body = parse(LoadAdapterBody, await self.read(request))
        body.refuse_unsupported()
        if body.lora_name in self.catalog.names and body.lora_name not in instance.engine.adapters:
            hint = "use another name"
            raise ApiError(400, f"{body.lora_name!r} is the base model's name", param="lora_name", hint=hint)
        await instance.engine.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        instance = self._served()
        body = parse(UnloadAdapterBody, await self.read(request))
        await instance.engine.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _served(self) -> Instance:
        """The engine that loads adapters. Raises 403 if it may not."""
        instance = self.catalog.sole
        if instance is None or not instance.engine.require_ready().loads_adapters:
            hint = "start the server with --adapter-root DIR"
            raise ApiError(403, "this server does not load adapters by request", hint=hint)
        return instance
