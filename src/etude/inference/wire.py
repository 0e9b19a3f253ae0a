"""The engine protocol as JSON: what `serve` answers and `inference.http` asks. docs/engine-contract.md says the same in words.

Arrays are `{"dtype", "shape", "base64"}` (little-endian, C order), versions and manifests are stored records, everything else plain JSON.
A field that is missing or of another type is a UserError naming it, so a third party's client learns what it sent wrongly.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from etude.errors import BusyError, ContextError, EngineError, EtudeError, InfraError, IntegrityError, UserError, nearest
from etude.protocols import GenerateRequest, Generation, Scored
from etude.records import Finish, Sampling, Version, from_dict, to_dict, to_json

PREFIX = "/engine/v1"
_COLUMNS = ("logprob_T", "logprob_t1_T", "version_T")
_REQUEST: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "ids": (list,),
    "sampling": (dict,),
    "priority": (int, float),
    "deadline_s": (int, float, type(None)),
    "routes": (bool,),
    "stream": (bool,),
}


def request_to_wire(request: GenerateRequest, *, stream: bool) -> dict[str, Any]:
    return {
        "id": request.id,
        "ids": plain_ids(request.ids),
        "sampling": {k: v for k, v in to_dict(request.sampling).items() if k not in ("record", "schema")},
        "priority": request.priority,
        "deadline_s": request.deadline_s,
        "routes": request.routes,
        "stream": stream,
    }


def request_from_wire(data: Any) -> tuple[GenerateRequest, bool]:
    """The request, and whether it wants a stream."""
    if not isinstance(data, dict):
        raise UserError(f"the body should be a JSON object, got {type(data).__name__}")
    for name, value in data.items():
        if name not in _REQUEST:
            raise UserError(f"unknown field {name!r}; {nearest(name, _REQUEST)}")
        if not isinstance(value, _REQUEST[name]) or (isinstance(value, bool) and bool not in _REQUEST[name]):
            raise UserError(f"{name} is {str(value)[:60]!r}; it should be {' or '.join(t.__name__ for t in _REQUEST[name])}")
    for name in ("id", "ids"):
        if name not in data:
            raise UserError(f"the request has no {name!r}")
    sampling = from_dict({"record": "Sampling", "schema": Sampling.SCHEMA, **data.get("sampling", {})}, Sampling)
    rest = {k: v for k, v in data.items() if k not in ("sampling", "stream")}
    return GenerateRequest(**{**rest, "sampling": sampling}), data.get("stream", False)


def plain_ids(ids: Any) -> list[Any]:
    """Token ids as JSON can hold them; what is no integer is left for the engine to refuse by name."""
    return [int(i) if isinstance(i, np.integer) else i for i in ids]


def generation_to_wire(generation: Generation) -> dict[str, Any]:
    g = generation
    return {
        "id": g.id,
        "ids": list(g.ids),
        **{name: array_to_wire(getattr(g, name)) for name in _COLUMNS},
        "kept_T": None if g.kept_T is None else array_to_wire(g.kept_T),
        "versions": [to_dict(v) for v in g.versions],
        "routes_PTLK": None if g.routes_PTLK is None else array_to_wire(g.routes_PTLK),
        "finish": None if g.finish is None else g.finish.value,
        "cached_tokens": g.cached_tokens,
        "seconds": g.seconds,
    }


def generation_from_wire(data: Mapping[str, Any]) -> Generation:
    return Generation(
        id=data["id"],
        ids=tuple(data["ids"]),
        **{name: array_from_wire(data[name]) for name in _COLUMNS},
        versions=tuple(from_dict(v, Version) for v in data["versions"]),
        kept_T=None if data["kept_T"] is None else array_from_wire(data["kept_T"]),
        routes_PTLK=None if data["routes_PTLK"] is None else array_from_wire(data["routes_PTLK"]),
        finish=None if data["finish"] is None else Finish(data["finish"]),
        cached_tokens=data["cached_tokens"],
        seconds=data["seconds"],
    )


def scored_to_wire(scored: Scored) -> dict[str, Any]:
    return {
        "logprob_T": array_to_wire(scored.logprob_T),
        "routes_TLK": None if scored.routes_TLK is None else array_to_wire(scored.routes_TLK),
        "version": to_dict(scored.version),
    }


def scored_from_wire(data: Mapping[str, Any]) -> Scored:
    return Scored(
        logprob_T=array_from_wire(data["logprob_T"]),
        routes_TLK=None if data["routes_TLK"] is None else array_from_wire(data["routes_TLK"]),
        version=from_dict(data["version"], Version),
    )


def array_to_wire(array: np.ndarray) -> dict[str, Any]:
    return json.loads(to_json(np.asarray(array)))


def array_from_wire(data: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data["base64"]), np.dtype(data["dtype"])).reshape(data["shape"])


# ---------------------------------------------------------------------------------------------------
# Errors: the OpenAI shape, {"error": {"message", "type", "param", "code"}}, with what tells the kinds apart in `code`


def error_to_wire(error: EtudeError, param: str | None = None) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error that etude raised on purpose."""
    status, kind, code = 500, "server_error", "internal_error"
    if isinstance(error, ContextError):
        status, kind, code = 413 if error.memory else 400, "invalid_request_error", "context_length_exceeded"
    elif isinstance(error, UserError):
        status, kind, code = 400, "invalid_request_error", "invalid_value"
    elif isinstance(error, IntegrityError):
        status, kind, code = 409, "invalid_request_error", "weights_refused"
    elif isinstance(error, BusyError):
        status, kind, code = 429, "rate_limit_error", "engine_busy"
    elif isinstance(error, InfraError):
        status, kind, code = 503, "server_error", "engine_unavailable"
    body: dict[str, Any] = {"message": str(error), "type": kind, "param": param, "code": code}
    if isinstance(error, ContextError):
        body["limit"] = error.limit
    return status, {"error": body}


def error_from_wire(status: int, data: Any, where: str) -> EtudeError:
    """The error that an answer with this status stands for."""
    found = data.get("error") if isinstance(data, dict) else None
    if not isinstance(found, dict):
        return EngineError(f"{where} answered {status} with {str(data)[:200]!r}")
    message, code = str(found.get("message")), found.get("code")
    if code == "context_length_exceeded":
        return ContextError(message, limit=int(found.get("limit", 0)), memory=status == 413)
    if code == "engine_busy":
        return BusyError(message)
    if code == "weights_refused":
        return IntegrityError(message)
    if status in (400, 404, 413, 422):
        return UserError(message)
    if status in (401, 403):
        return UserError(f"{where} refused the key: {message}")
    return EngineError(message)
