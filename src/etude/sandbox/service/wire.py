"""Values and errors of the sandbox protocol as bytes, for both ends of the service.

A body is `>II` (length of a JSON text, length of a blob), the text, the blob; bytes anywhere in a value stand in the blob,
and {"$bytes": [offset, length]} in their place. Lengths are checked before anything is taken.

Every error has a class, and the class says what a trainer does with it:

    infra    a machine broke, or was full         the rollout is masked and counted, never scored
    task     the caller's mistake                 image, limits or arguments must change; a retry is pointless
    agent    what the agent asked cannot be done  a result like any other: the policy learns from it
    policy   the service's rules forbid it        the operator decides
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from etude.errors import DeadlineError, EtudeError, InfraError, PatchError, SandboxError, UserError
from etude.protocols import Change, ExecResult, FileStat, GradeBundle, GradedRun, Limits, SandboxInfo
from etude.records import Boundary, from_dict, to_dict

MAX_BODY = 512 * 2**20
KIND = "application/x-etude-frame"
_HEADER = struct.Struct(">II")
_BYTES, _ESCAPED = "$bytes", "$dict"


class ErrorClass(enum.StrEnum):
    INFRA = "infra"
    TASK = "task"
    AGENT = "agent"
    POLICY = "policy"


STATUS = {ErrorClass.INFRA: 503, ErrorClass.TASK: 400, ErrorClass.AGENT: 422, ErrorClass.POLICY: 403}
"""HTTP status of an answer that is an error; the body says more."""


class PolicyError(UserError):
    """The rules of an environment service do not allow what was asked."""


class WireError(ValueError):
    """Bytes that are no value of the protocol."""


# ---------------------------------------------------------------------------------------------------
# Values


def pack(value: Any) -> bytes:
    parts: list[bytes] = []
    size = 0

    def plain(item: Any) -> Any:
        nonlocal size
        if isinstance(item, (bytes, bytearray, memoryview)):
            parts.append(bytes(item))
            size += len(item)
            return {_BYTES: [size - len(item), len(item)]}
        if isinstance(item, Mapping):
            body = {str(key): plain(value) for key, value in item.items()}
            return {_ESCAPED: body} if body.keys() & {_BYTES, _ESCAPED} else body
        if isinstance(item, (list, tuple)):
            return [plain(each) for each in item]
        return item

    head = json.dumps(plain(value)).encode()
    return b"".join([_HEADER.pack(len(head), size), head, *parts])


def unpack(data: bytes) -> Any:
    if len(data) < _HEADER.size:
        raise WireError(f"a body of {len(data)} bytes")
    head_size, blob_size = _HEADER.unpack_from(data)
    if len(data) != _HEADER.size + head_size + blob_size:
        raise WireError(f"a body of {len(data)} bytes that says it has {_HEADER.size + head_size + blob_size}")
    blob = memoryview(data)[_HEADER.size + head_size :]

    def rich(item: Any) -> Any:
        if isinstance(item, dict):
            if item.keys() == {_BYTES}:
                offset, length = item[_BYTES]
                if not 0 <= offset <= offset + length <= blob_size:
                    raise WireError("bytes outside of the body")
                return bytes(blob[offset : offset + length])
            if item.keys() == {_ESCAPED}:
                item = item[_ESCAPED]
            return {key: rich(value) for key, value in item.items()}
        return [rich(each) for each in item] if isinstance(item, list) else item

    try:
        return rich(json.loads(data[_HEADER.size : _HEADER.size + head_size]))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"not a value: {error}") from None


def plain(value: Any) -> Any:
    """A result of the protocol as a value that `pack` takes."""
    if isinstance(value, SandboxInfo):
        return {**{f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, "boundary": to_dict(value.boundary)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def info(data: Mapping[str, Any]) -> SandboxInfo:
    return SandboxInfo(**{**data, "boundary": from_dict(data["boundary"], Boundary)})


def limits(data: Mapping[str, Any]) -> Limits:
    return Limits(**{key: type(getattr(Limits(), key))(value) for key, value in data.items()})


def changes(data: Sequence[Mapping[str, Any]]) -> list[Change]:
    return [Change(**item) for item in data]


def exec_result(data: Mapping[str, Any]) -> ExecResult:
    return ExecResult(**data)


def file_stat(data: Mapping[str, Any]) -> FileStat:
    return FileStat(**data)


def bundle(data: Mapping[str, Any]) -> GradeBundle:
    fields = {**data, "changes": tuple(changes(data["changes"])), "args": tuple(data["args"])}
    return GradeBundle(**{**fields, "limits": limits(data["limits"]) if data["limits"] is not None else None})


def graded_run(data: Mapping[str, Any]) -> GradedRun:
    return GradedRun(**data)


# ---------------------------------------------------------------------------------------------------
# Errors

_REBUILT: dict[str, type[Exception]] = {
    cls.__name__: cls for cls in (UserError, PolicyError, PatchError, SandboxError, FileNotFoundError, PermissionError, OSError)
}


def classify(error: BaseException, *, by_agent: bool = False) -> ErrorClass:
    """`by_agent`: the operation was one in which an OSError is the workspace's answer, not the machine's."""
    if isinstance(error, InfraError):
        return ErrorClass.INFRA
    if isinstance(error, PolicyError):
        return ErrorClass.POLICY
    if isinstance(error, PatchError):
        return ErrorClass.AGENT
    if isinstance(error, (UserError, WireError)):
        return ErrorClass.TASK
    return ErrorClass.AGENT if by_agent and isinstance(error, OSError) else ErrorClass.INFRA


def error_fields(error: BaseException, *, by_agent: bool = False) -> dict[str, Any]:
    kind = classify(error, by_agent=by_agent)
    fields: dict[str, Any] = {"class": kind.value, "type": type(error).__name__, "text": str(error)}
    if isinstance(error, DeadlineError):
        fields |= {"waited_for": error.waited_for, "timeout_s": error.timeout_s}
    if not isinstance(error, (EtudeError, WireError)) and kind is ErrorClass.INFRA:
        fields["text"] = f"{type(error).__name__}: {error}"
    return fields


def rebuilt(fields: Mapping[str, Any]) -> Exception:
    """The error that the other end raised, as the type that callers of the protocol expect."""
    kind, name, text = str(fields["class"]), str(fields["type"]), str(fields["text"])
    if name == "DeadlineError":
        return DeadlineError(str(fields["waited_for"]), float(fields["timeout_s"]))
    if kind == ErrorClass.INFRA:
        return SandboxError(text)
    known = _REBUILT.get(name)
    if known is None:
        builtin = getattr(builtins, name, None)
        known = builtin if isinstance(builtin, type) and issubclass(builtin, OSError) else None
    if known is None:
        known = OSError if kind == ErrorClass.AGENT else UserError
    return known(text)
