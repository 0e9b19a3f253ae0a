"""The routes: which path does what, who may ask, and what every error looks like.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/NAME      OpenAI's
    POST /engine/v1/{generate,score,load,cancel}   GET /engine/v1/{version,stats}                docs/engine-contract.md, if switched on
    GET /health                                                                                  200, or 503 while it drains

Errors have OpenAI's JSON shape: 400 a wrong field, 401 a missing or wrong key, 404 another model or path, 413 a body or prompt too large
for this server, 429 its queue is full, 499 the client left, 503 the engine failed or the server drains, 500 a defect (logged here).
An error after a stream began is its last event.

Who works for whom: a handler's task lives as long as its client listens (http.py); cancelling it leaves the engine's stream or drops its
task, and by the engine contract that ends the request there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from etude.errors import EtudeError, first_cause
from etude.inference import wire
from etude.protocols import Engine, Generation
from etude.records import Manifest, from_dict, to_dict
from etude.serve.http import HttpError, HttpServer, Request, Response, json_response
from etude.serve.openai import Choice, Job, Texts, UnknownModel, chat_job, completion_job
from etude.serve.tools import BadParameter

_LOG = logging.getLogger(__name__)
_DONE = b"data: [DONE]\n\n"


class App:
    """One engine, served. `texts` None serves the engine contract alone (an engine that has no tokenizer)."""

    def __init__(
        self, engine: Engine, texts: Texts | None, *, api_key: str = "", contract: bool = False, max_body: int = 16 * 2**20
    ) -> None:
        self._engine, self._texts, self._key = engine, texts, api_key.encode()
        self.server = HttpServer(self.handle, refuse=refused, seen=self._seen, max_body=max_body)
        self.statuses: dict[int, int] = {}
        """How often each status was answered."""
        routes: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {("GET", "/health"): self._health}
        if texts is not None:
            routes[("POST", "/v1/chat/completions")] = self._chat
            routes[("POST", "/v1/completions")] = self._completions
            routes[("GET", "/v1/models")] = self._models
            routes[("GET", f"/v1/models/{texts.model}")] = self._models
        if contract:
            for method, name in (("POST", "generate"), ("POST", "score"), ("POST", "load"), ("POST", "cancel")):
                routes[(method, f"{wire.PREFIX}/{name}")] = getattr(self, f"_engine_{name}")
            for name in ("version", "stats"):
                routes[("GET", f"{wire.PREFIX}/{name}")] = getattr(self, f"_engine_{name}")
        self._routes = routes

    async def handle(self, request: Request) -> Response:
        """Every error becomes an answer here."""
        try:
            if not self._allowed(request):
                return failure(401, "this server needs a key: send `Authorization: Bearer KEY`", "invalid_request_error", "invalid_api_key")
            route = self._routes.get((request.method, request.path))
            if route is None:
                return self._no_route(request)
            if self.server.draining:
                return failure(503, "this server is shutting down; ask another", "server_error", "draining", {"Retry-After": "5"})
            return await route(request)
        except UnknownModel as error:
            return failure(404, str(error), "invalid_request_error", "model_not_found", param="model")
        except EtudeError as error:
            return failed(error)
        except Exception as error:  # a defect of ours must not take the connection, or the server, with it
            _LOG.exception("%s %s failed", request.method, request.path)
            return failure(500, f"a defect of the server: {type(error).__name__}; its log says more", "server_error", "internal_error")

    def _allowed(self, request: Request) -> bool:
        if not self._key or request.path == "/health":
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)

    def _no_route(self, request: Request) -> Response:
        methods = sorted(m for m, path in self._routes if path == request.path)
        if methods:
            message = f"{request.path} takes {' and '.join(methods)}, not {request.method}"
            return failure(405, message, "invalid_request_error", "method_not_allowed", {"Allow": ", ".join(methods)})
        if request.path.startswith("/v1/models/") and self._texts is not None:
            raise UnknownModel(request.path.removeprefix("/v1/models/"), self._texts.model)
        known = ", ".join(sorted({path for _, path in self._routes}))
        return failure(404, f"nothing at {request.path}; there is {known}", "invalid_request_error", "not_found")

    def _seen(self, request: Request, status: int, seconds: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        _LOG.info("%s %s %d %.3f s", request.method, request.path, status, seconds)

    # -- OpenAI's ------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok", "version": str(await self._engine.version())})

    async def _models(self, request: Request) -> Response:
        assert self._texts is not None, "routed with texts only"
        model = {"id": self._texts.model, "object": "model", "created": 0, "owned_by": "etude", "max_model_len": self._texts.window}
        return json_response(model if request.path != "/v1/models" else {"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        assert self._texts is not None, "routed with texts only"
        return await self._run(chat_job(_body(request), self._texts))

    async def _completions(self, request: Request) -> Response:
        assert self._texts is not None, "routed with texts only"
        return await self._run(completion_job(_body(request), self._texts))

    async def _run(self, job: Job) -> Response:
        if not job.stream:
            try:
                async with asyncio.TaskGroup() as group:
                    for choice in job.choices:
                        group.create_task(self._whole(choice))
            except ExceptionGroup as errors:
                raise first_cause(errors) from errors
            return json_response(job.answer())
        events = self._events(job)
        try:
            first = await anext(events)  # what is wrong with a request shows here, before the answer has begun
        except BaseException:
            await events.aclose()
            raise
        return Response(stream=_stream(first, events), content_type="text/event-stream")

    async def _whole(self, choice: Choice) -> None:
        """Sample one choice to its end. Stop strings are only seen in text, so with them it is watched while it is sampled."""
        if not choice.turn.watches:
            choice.take(await self._engine.generate(choice.request))
            return
        async with contextlib.aclosing(_generator(self._engine.generate_stream(choice.request))) as pieces:
            async for piece in pieces:
                choice.take(piece)
                if choice.finish is not None:
                    return

    async def _events(self, job: Job) -> AsyncGenerator[bytes]:
        """Server-sent events of all choices as they come. Closing it ends the choices that are left."""
        queue: asyncio.Queue[tuple[Choice, Generation | BaseException | None]] = asyncio.Queue()

        async def feed(choice: Choice) -> None:
            try:
                async with contextlib.aclosing(_generator(self._engine.generate_stream(choice.request))) as pieces:
                    async for piece in pieces:
                        queue.put_nowait((choice, piece))
                        if choice.finish is not None:
                            break
                queue.put_nowait((choice, None))
            except Exception as error:  # told to the reader of the queue, which raises it
                queue.put_nowait((choice, error))

        tasks = [asyncio.create_task(feed(choice)) for choice in job.choices]
        begun: set[int] = set()
        left = len(tasks)
        try:
            while left:
                choice, piece = await queue.get()
                if isinstance(piece, BaseException):
                    raise piece
                if piece is None:
                    left -= 1
                elif choice.finish is None:
                    delta = choice.take(piece)
                    for event in job.chunks(choice, delta, first=choice.index not in begun):
                        begun.add(choice.index)
                        yield _event(event)
                    if choice.turn.stopped is not None:
                        await self._engine.cancel(choice.request.id)
            for event in job.closing():
                yield _event(event)
            yield _DONE
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- the engine contract -----------------------------------------------------------------------------

    async def _engine_generate(self, request: Request) -> Response:
        asked, stream = wire.request_from_wire(_body(request))
        if not stream:
            return json_response(wire.generation_to_wire(await self._engine.generate(asked)))
        pieces = _generator(self._engine.generate_stream(asked))

        async def lines() -> AsyncGenerator[bytes]:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield _line(wire.generation_to_wire(piece))

        body = lines()
        try:
            first = await anext(body)
        except BaseException:
            await body.aclose()
            raise
        return Response(stream=_stream(first, body, sse=False), content_type="application/x-ndjson")

    async def _engine_score(self, request: Request) -> Response:
        data = _fields(request, "ids", "temperature")
        if not isinstance(data.get("ids"), list):
            raise BadParameter("ids", "should be a list of token ids")
        temperature = data.get("temperature", 1.0)
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
            raise BadParameter("temperature", f"{temperature!r} should be a number")
        return json_response(wire.scored_to_wire(await self._engine.score(data["ids"], temperature=temperature)))

    async def _engine_load(self, request: Request) -> Response:
        data = _fields(request, "manifest", "source")
        if not isinstance(data.get("source"), str):
            raise BadParameter("source", "should be the store's folder or URL")
        version = await self._engine.load(from_dict(data.get("manifest"), Manifest), data["source"])
        return json_response({"version": to_dict(version)})

    async def _engine_cancel(self, request: Request) -> Response:
        data = _fields(request, "id")
        if not isinstance(data.get("id"), str):
            raise BadParameter("id", "should be the id of a request")
        await self._engine.cancel(data["id"])
        return json_response({})

    async def _engine_version(self, request: Request) -> Response:
        return json_response({"version": to_dict(await self._engine.version())})

    async def _engine_stats(self, request: Request) -> Response:
        return json_response(await self._engine.stats())


async def _generator(pieces: AsyncIterator[Generation]) -> AsyncGenerator[Generation]:
    """The same pieces, from something that can be closed, whatever kind of iterator the engine gave."""
    try:
        async for piece in pieces:
            yield piece
    finally:
        close = getattr(pieces, "aclose", None)
        if close is not None:
            await close()


async def _stream(first: bytes, rest: AsyncGenerator[bytes], *, sse: bool = True) -> AsyncGenerator[bytes]:
    """The first piece and the rest. An error on the way is the last thing that is sent."""
    try:
        yield first
        async for piece in rest:
            yield piece
    except Exception as error:
        known = isinstance(error, EtudeError)
        if not known:
            _LOG.exception("a stream failed")
        answer = (
            failed(error) if isinstance(error, EtudeError) else failure(500, "a defect of the server", "server_error", "internal_error")
        )
        body = json.loads(answer.body)
        yield _event(body) if sse else _line(body)
    finally:
        await rest.aclose()


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _body(request: Request) -> Any:
    try:
        return json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise BadParameter("body", f"is not JSON: {error}") from error


def _fields(request: Request, *known: str) -> dict[str, Any]:
    data = _body(request)
    if not isinstance(data, dict):
        raise BadParameter("body", f"should be a JSON object, got {type(data).__name__}")
    for name in data:
        if name not in known:
            raise BadParameter(name, f"is not a field of this request; known: {', '.join(known)}")
    return data


def failed(error: EtudeError) -> Response:
    status, body = wire.error_to_wire(error, getattr(error, "param", None))
    return json_response(body, status, {"Retry-After": "1"} if status in (429, 503) else None)


def failure(status: int, message: str, kind: str, code: str, headers: dict[str, str] | None = None, param: str | None = None) -> Response:
    return json_response({"error": {"message": message, "type": kind, "param": param, "code": code}}, status, headers)


def refused(error: HttpError) -> Response:
    """An answer to what is no request of HTTP, or too large a one."""
    code = "body_too_large" if error.status == 413 else "bad_request"
    return failure(error.status, f"{error}", "invalid_request_error", code)
