"""The error tree. Every message says what went wrong, with which value, and what to do about it.

    EtudeError
    |-- UserError (also ValueError)   the caller can fix it: a config, a path, a flag, a task folder
    |   |-- ConfigError               a field is unknown, missing or out of range
    |   |-- RecordError               a stored record is malformed or of another schema version
    |   |-- CheckpointError           a checkpoint or model folder cannot be used
    |   |-- TaskError                 a task or a source of tasks is unusable
    |   |-- PatchError                a patch is malformed, or does not fit the files
    |   |-- ContextError              a prompt is longer than the model's window, or than the engine's memory
    |   `-- MissingExtra              an optional dependency is not installed
    |-- IntegrityError                bytes differ from what their hash promises; never retried silently
    `-- InfraError                    a machine broke; the rollout is masked, never scored as a wrong answer
        |-- SandboxError              a sandbox could not be made, or died
        |-- EngineError               the inference engine refused or lost a request
        |   `-- BusyError             it has as many requests as it may have; the same request is fine later
        `-- DeadlineError             a wait ran out; names what was waited for

A broken tool call by the model is none of these: it is a tool result (`records.ToolError`).

    try:
        trajectory = await rollout(task)
    except InfraError as error:       # a record with a cause, never a reward of zero
        trajectory = failed(task, error)
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable


class EtudeError(Exception):
    """Root of everything etude raises on purpose."""


class UserError(EtudeError, ValueError):
    """Something the person running the command can fix."""


class ConfigError(UserError):
    """A config field is unknown, missing, or out of range."""


class RecordError(UserError):
    """A stored record is malformed, or was written by another schema version."""


class CheckpointError(UserError):
    """A checkpoint or a model folder is missing, half-written, or of another shape."""


class TaskError(UserError):
    """A task folder or a source of tasks cannot be used."""


class PatchError(UserError):
    """A patch cannot be read, or does not fit the files it names. Nothing was changed."""


class ContextError(UserError):
    """A prompt is longer than what can be served. `limit` is in tokens; `memory` tells the engine's cache from the model's window."""

    def __init__(self, message: str, *, limit: int = 0, memory: bool = False) -> None:
        super().__init__(message)
        self.limit, self.memory = limit, memory

    def __reduce__(self):
        return functools.partial(type(self), limit=self.limit, memory=self.memory), self.args


class MissingExtra(UserError):
    """An optional dependency is needed for what was asked. `instead` tells of another way to get it."""

    def __init__(self, package: str, extra: str, purpose: str, instead: str = "") -> None:
        other = f" ({instead})" if instead else ""
        super().__init__(f"{purpose} needs the package {package!r}, which is not installed: pip install 'etude[{extra}]'{other}")
        self._made_from = (package, extra, purpose, instead)

    def __reduce__(self):
        return type(self), self._made_from


class IntegrityError(EtudeError):
    """Content does not match the hash recorded for it."""


class InfraError(EtudeError):
    """A machine, process or disk failed. Masked out of learning and counted, never a reward."""


class SandboxError(InfraError):
    """A sandbox could not be created, or died under its rollout."""


class EngineError(InfraError):
    """The inference engine refused, lost or could not finish a request."""


class BusyError(EngineError):
    """The engine has as many requests as it may have. Nothing was computed; the same request is fine later."""


class DeadlineError(InfraError):
    """A wait ran out of time."""

    def __init__(self, waited_for: str, timeout_s: float) -> None:
        super().__init__(f"waited {timeout_s:g} s for {waited_for}, and gave up; raise the limit or look at what it waits for")
        self.waited_for = waited_for
        self.timeout_s = timeout_s

    def __reduce__(self):
        return type(self), (self.waited_for, self.timeout_s)


def first_cause(error: BaseException) -> BaseException:
    """The first error inside the groups that task groups made of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def nearest(word: str, known: Iterable[str]) -> str:
    """A clause for an error message: the closest known word, or the list of them.

    Example:
        nearest("temprature", ["temperature", "top_p"])   # "did you mean 'temperature'?"
    """
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
