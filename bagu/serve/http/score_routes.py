"""`/v1/score` and `/v1/rerank`."""

import asyncio
import time
import uuid
from typing import Any

from fastapi import Request
from starlette.responses import Response

from bagu.serve.http.bodies.parse import parse
from bagu.serve.http.bodies.scores import RerankBody, ScoreBody, check_scores, embedded_texts, scored_texts
from bagu.serve.http.calls import cancel_on_disconnect, json_response
from bagu.serve.http.instances import Instance
from bagu.serve.http.routes import LARGE_BODY, Routes

Scores = tuple[list[float], dict[str, int]]  # of each pair, and the usage


class ScoreRoutes(Routes):
    async def score(self, request: Request) -> Response:
        self.catalog.check_ready()
        raw = await self.read(request)
        body = parse(ScoreBody, raw)
        instance = await self.find(request, body.model)
        scores, usage = await self._scores(request, instance, body, large=len(raw) > LARGE_BODY)
        data = [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]
        about = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return json_response({**about, "model": instance.name, "data": data, "usage": usage})

    async def rerank(self, request: Request) -> Response:
        self.catalog.check_ready()
        raw = await self.read(request)
        body = parse(RerankBody, raw)
        instance = await self.find(request, body.model)
        scores, usage = await self._scores(request, instance, body, large=len(raw) > LARGE_BODY)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or len(scores)]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if body.return_documents is not False:
            for result in results:
                result["document"] = {"text": body.texts[result["index"]]}
        id = f"rerank-{uuid.uuid4().hex}"
        return json_response({"id": id, "model": instance.name, "results": results, "usage": usage})

    async def _scores(
        self, request: Request, instance: Instance, body: ScoreBody | RerankBody, *, large: bool
    ) -> Scores:
        ready = instance.engine.require_ready()
        check_scores(ready)
        pairs = body.pairs()

        def tokenize() -> tuple[list[str], list[list[int]]]:
            if ready.scores:
                return [], scored_texts(pairs, ready, body.param)
            found = embedded_texts(pairs, ready, body.param)
            return list(found), list(found.values())

        with instance.engine.pending.embedding_call():
            names, texts = await asyncio.to_thread(tokenize) if large else tokenize()
            vectors = await cancel_on_disconnect(instance.engine.embed(texts), request.receive)
        count = sum(map(len, texts))
        self.charge(request, count)
        usage = {"prompt_tokens": count, "total_tokens": count}
        if ready.scores:
            return [vector[0] for vector in vectors], usage
        of = dict(zip(names, vectors, strict=True))
        return [sum(a * b for a, b in zip(of[one], of[other], strict=True)) for one, other in pairs], usage
