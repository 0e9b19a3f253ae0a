"""The routes of an environment service, on the standard library's asyncio.

    GET    /healthz                        no token; "ok" or "draining"
    GET    /metrics                        Prometheus
    GET    /v1/info  /v1/stats  /v1/envs   JSON
    POST   /v1/images                      {"files"} -> {"image"}
    POST   /v1/envs                        {"image", "limits", "network", "ttl_s", "create_id", "holder", "wait_s"} -> {"id", "epoch"}
    POST   /v1/envs/ID/ops/NUMBER          {"op", "args", "wait_s", "epoch", "seen"} -> {"result"} or {"running": true}
    DELETE /v1/envs/ID/ops/NUMBER          cancels
    POST   /v1/envs/ID/lease               {"kind", "holder", "ttl_s"}
    POST   /v1/beat                        {"holder", "envs"} -> {"gone": {id: why}}
    DELETE /v1/envs/ID
    POST   /v1/drain                       {"wait_s"}

Bodies are frames of wire.py. A token says who asks ("NAME:TOKEN" lines in a file); what belongs to somebody else is not
there. An operation that takes longer than `wait_s` is asked for again with the same number: no answer is
ever waited for longer than a proxy between would allow, and a lost connection costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from etude import __version__
from etude.sandbox import http1
from etude.sandbox.http1 import BadMessage, Head
from etude.sandbox.service import wire
from etude.sandbox.service.core import BY_AGENT, Env, NoSuchEnvironment, Service
from etude.sandbox.service.wire import ErrorClass

LONGEST_WAIT_S, IDLE_S, BODY_S = 20.0, 120.0, 300.0


class NotFound(Exception):
    pass


class Server:
    """HTTP in front of a Service."""

    def __init__(self, service: Service, tokens: Mapping[str, str], *, on_drain: Callable[[float], None] = lambda wait_s: None) -> None:
        """`tokens`: token -> owner."""
        self.service, self._tokens, self._on_drain = service, dict(tokens), on_drain
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int, context: ssl.SSLContext | None = None) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._connected, host, port, ssl=context, limit=http1.MAX_HEAD, backlog=1024)
        return self._server.sockets[0].getsockname()[:2]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, TimeoutError, ssl.SSLError, asyncio.CancelledError):
            pass  # the caller went away, or the server does; what it asked for goes on
        except BadMessage as error:
            with contextlib.suppress(ConnectionError):
                writer.write(http1.response(400, "Bad Request", f"{error}\n".encode(), connection="close"))
        finally:
            self._connections.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        async with asyncio.timeout(IDLE_S):
            raw = await http1.read_head(reader)
        if not raw:
            return False
        head = http1.parse_request(raw)
        path = head.target.partition("?")[0]
        length = http1.body_length(head)
        owner = self._owner(head)
        if path != "/healthz" and owner is None:  # before the body: nobody without a token makes this process keep bytes
            writer.write(http1.response(401, "Unauthorized", b"a token is needed: Authorization: Bearer TOKEN\n", connection="close"))
            await writer.drain()
            return False
        async with asyncio.timeout(BODY_S):
            body = await http1.read_body(reader, length, wire.MAX_BODY)
        writer.write(await self._answer(head, path, body, owner or ""))
        async with asyncio.timeout(BODY_S):
            await writer.drain()
        return head.keeps_alive

    def _owner(self, head: Head) -> str | None:
        scheme, _, given = head.one("authorization").partition(" ")
        found = None
        for token, owner in self._tokens.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(token.encode(), given.encode("latin-1", "replace")) and scheme.lower() == "bearer":
                found = owner
        return found

    async def _answer(self, head: Head, path: str, body: bytes, owner: str) -> bytes:
        op: list[str] = []
        try:
            if head.method == "GET":
                return await self._get(path, owner)
            request = wire.unpack(body) if body else {}
            if not isinstance(request, dict):
                raise wire.WireError("a request is an object")
            return _frame(200, "OK", await self._do(head.method, path.strip("/").split("/"), request, owner, op))
        except NotFound:
            return http1.response(404, "Not Found", f"nothing at {head.method} {path}\n".encode())
        except Exception as error:  # whatever went wrong has a class, and the connection goes on
            by_agent = bool(op) and op[0] in BY_AGENT
            if isinstance(error, (KeyError, TypeError)) and not by_agent:
                error = wire.WireError(f"a request without the right fields: {error!r}")
            fields = wire.error_fields(error, by_agent=by_agent)
            status = 404 if isinstance(error, NoSuchEnvironment) else wire.STATUS[ErrorClass(fields["class"])]
            return _frame(status, fields["class"], {"error": fields})

    async def _get(self, path: str, owner: str) -> bytes:
        service = self.service
        if path == "/healthz":
            return http1.response(200, "OK", b"draining\n" if service.draining else b"ok\n")
        if path == "/metrics":
            return http1.response(200, "OK", service.metrics.text(service.gauges()).encode(), "text/plain; version=0.0.4")
        if path == "/v1/info":
            return _json({"version": __version__, "epoch": service.epoch, **service.gauges()})
        if path == "/v1/stats":
            return _json(await service.stats(owner))
        if path == "/v1/envs":
            return _json({"envs": [_described(env) for env in service.owned(owner)]})
        raise NotFound

    async def _do(self, method: str, path: list[str], request: dict[str, Any], owner: str, op: list[str]) -> dict[str, Any]:
        service = self.service
        match (method, *path):
            case ("POST", "v1", "images"):
                return {"image": await service.add_image(request["files"])}
            case ("POST", "v1", "envs"):
                env = await service.create(owner, request)
                return {"id": env.entry.id, "epoch": service.epoch}
            case ("POST", "v1", "envs", name, "ops", number):
                op.append(str(request.get("op")))
                return await self._operate(service.get(owner, name), number, request)
            case ("DELETE", "v1", "envs", name, "ops", number):
                task = service.get(owner, name).ops.get(number)
                if task is not None:
                    task.cancel()
                return {}
            case ("POST", "v1", "envs", name, "lease"):
                service.lease(service.get(owner, name), str(request["kind"]), str(request["holder"]), float(request["ttl_s"]))
                return {"epoch": service.epoch}
            case ("POST", "v1", "beat"):
                return {"gone": service.beat(owner, str(request["holder"]), list(request["envs"]))}
            case ("DELETE", "v1", "envs", name):
                with contextlib.suppress(NoSuchEnvironment):
                    await service.destroy(service.get(owner, name))
                return {}
            case ("POST", "v1", "drain"):
                service.draining = True
                self._on_drain(float(request.get("wait_s", 0.0)))
                return {}
        raise NotFound

    async def _operate(self, env: Env, number: str, request: dict[str, Any]) -> dict[str, Any]:
        """Wait for an operation, but not for ever; the caller asks again."""
        for seen in request.get("seen") or ():
            env.ops.pop(str(seen), None)
        task = self.service.operation(env, number, request, str(request.get("epoch", "")))
        done, _ = await asyncio.wait({task}, timeout=min(float(request.get("wait_s", 0.0)), LONGEST_WAIT_S))
        if not done:
            return {"running": True, "epoch": self.service.epoch}
        if task.cancelled():
            raise wire.WireError(f"operation {number} was cancelled")
        return {"result": task.result(), "epoch": self.service.epoch}


def _frame(status: int, reason: str, value: Any) -> bytes:
    return http1.response(status, reason, wire.pack(value), wire.KIND)


def _json(value: Any) -> bytes:
    return http1.response(200, "OK", json.dumps(value).encode() + b"\n", "application/json")


def _described(env: Env) -> dict[str, Any]:
    entry = env.entry
    running = sum(not task.done() for task in env.ops.values())
    state = "starting" if env.sandbox is None else "ending" if env.why else "live"
    return {
        "id": entry.id, "state": state, "image": entry.image, "create_id": entry.create_id, "leases": sorted(entry.leases),
        "running": running, "memory_bytes": env.need_bytes, "network": bool(entry.network),
    }  # fmt: skip
