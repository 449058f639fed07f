"""The HTTP routes of a repository: list, load, unload, promote, set weights. Changes need an API key with `admin`, if
the server has keys."""

import asyncio
from typing import Annotated, Any

from fastapi import Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from bagu.errors import BaguError
from bagu.serve.http.api import Api
from bagu.serve.http.bodies.openai import Body
from bagu.serve.http.bodies.parse import parse
from bagu.serve.http.calls import json_response
from bagu.serve.http.errors import ApiError
from bagu.serve.http.openapi.document import OPERATIONS
from bagu.serve.http.openapi.operation import NO_MODEL, READING, Operation
from bagu.serve.http.openapi.schemas import Schema
from bagu.serve.http.routes import key_of
from bagu.serve.repository.layout import FILE, is_version, read_model
from bagu.serve.repository.model import RepositoryModel
from bagu.serve.repository.repository import Repository

Number = Annotated[int, Field(ge=1, le=999_999_999)]
Weight = Annotated[float, Field(ge=0)]


class OperationBody(Body):
    """The body of a repository operation. It has no fields of other servers, so an unknown one is a mistake."""

    model_config = ConfigDict(strict=True, extra="forbid")


class VersionBody(OperationBody):
    """The version that a repository operation is about."""

    version: Number


class WeightsBody(OperationBody):
    """Shares of the traffic by version, in any unit: {"1": 90, "2": 10}."""

    weights: dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")], Weight]


class VersionState(Schema):
    version: int
    state: str  # unloaded, loading, warming, ready, restarting, draining or failed
    weight: float  # its share of the model's traffic, 0 to 1
    in_trial: bool  # the traffic returns to the version before if it exceeds a limit
    reason: str | None  # why it failed
    requests: int
    errors: int  # requests that the server failed to finish


class RepositoryModelState(Schema):
    name: str
    versions: list[VersionState]
    swaps: int
    returns: int  # automatic returns to the version before
    last_return: str | None


class RepositoryState(Schema):
    object: str
    data: list[RepositoryModelState]


MODEL = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
CHANGES = {
    **READING,
    **NO_MODEL,
    409: "The version did not start, or its memory is not free; nothing has changed.",
    503: "The server is shutting down.",
}


def _changes(verb: str, body: type[Body], summary: str) -> Operation:
    return Operation(
        path=f"/v1/repository/models/{{name}}/{verb}",
        name=f"{verb}_version",
        method="POST",
        summary=summary,
        body=body,
        answer=RepositoryModelState,
        parameters=(MODEL,),
        failures=CHANGES,
        access="admin",
    )


REPOSITORY_OPERATIONS = (
    Operation(
        path="/v1/repository",
        name="repository",
        summary="List the models, their versions and their traffic",
        answer=RepositoryState,
        failures={},
        access="key",
    ),
    _changes("load", VersionBody, "Load a version without traffic"),
    _changes("unload", VersionBody, "Let a version finish its requests and stop it"),
    _changes("promote", VersionBody, "Load a version, give it all new requests, and unload the others"),
    _changes("weights", WeightsBody, "Set the shares of the traffic by version"),
)


class RepositoryApi(Api):
    operations = (*(o for o in OPERATIONS if o.needs != "adapters"), *REPOSITORY_OPERATIONS)
    catalog: Repository

    async def repository(self, request: Request) -> Response:
        """All models; for a key with a list of models and without `admin`, the versions that it may use."""
        key = key_of(request)
        data = []
        for model in self.catalog.models.values():
            found = model.describe()
            if key is not None and not key.key.admin:
                versions = [v for v in found["versions"] if key.may_use(f"{model.name}@{v['version']}", model.name)]
                found["versions"] = versions
            if key is None or found["versions"] or key.may_use(model.name):
                data.append(found)
        return json_response({"object": "list", "data": data})

    async def load_version(self, request: Request) -> Response:
        return await self._change(request, VersionBody, lambda model, body: model.load(body.version))

    async def unload_version(self, request: Request) -> Response:
        return await self._change(request, VersionBody, lambda model, body: model.unload(body.version))

    async def promote_version(self, request: Request) -> Response:
        return await self._change(request, VersionBody, lambda model, body: model.promote(body.version))

    async def weights_version(self, request: Request) -> Response:
        def change(model: RepositoryModel, body: WeightsBody) -> Any:
            return model.set_weights({int(version): weight for version, weight in body.weights.items()})

        return await self._change(request, WeightsBody, change)

    async def _change(self, request: Request, kind: Any, change: Any) -> Response:
        body = parse(kind, await self.read(request))
        model = await self._model_named(request.path_params["name"])
        try:
            await model.run(change(model, body))
        except ApiError:
            raise
        except BaguError as error:  # e.g. the version's folder has no model
            raise ApiError(409, str(error), code="load_failed", hint=error.hint) from error
        except OSError as error:
            raise ApiError(409, f"the model could not be read: {error}", code="load_failed") from error
        return json_response(model.describe())

    async def _model_named(self, name: str) -> RepositoryModel:
        """The model; its folder may have been made after the server started."""
        if name not in self.catalog.models and not is_version(name) and "/" not in name and name[:1] != ".":
            folder = self.catalog.folder / name
            if (folder / FILE).is_file():
                try:
                    layout = await asyncio.to_thread(read_model, folder)
                except BaguError as error:
                    raise ApiError(400, str(error), hint=error.hint) from error
                self.catalog.add(layout)
        return self.catalog.model_of(name)[0]
