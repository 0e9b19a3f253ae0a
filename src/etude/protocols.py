"""The seams of the system: typing only, no behaviour.

Every seam has a small implementation that ships (`fakes.py`, the native engine, the namespace sandbox, a
directory) and one for scale (vLLM, micro-VMs, an object store). The same contract tests run over both.
Anything that does work is async; nothing here blocks the loop's thread for 10 ms.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from etude.records import (
    Boundary,
    Finish,
    Graded,
    Group,
    Level,
    Manifest,
    Message,
    Sampling,
    StepReport,
    Task,
    Trajectory,
    Version,
)

# ---------------------------------------------------------------------------------------------------
# Inference: token ids in, token ids out


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    id: str
    ids: Sequence[int]
    """The whole context. The engine finds the cached prefix itself."""
    sampling: Sampling
    priority: int = 0
    """Lower runs first when memory is short."""
    deadline_s: float | None = None
    """Seconds from now; then it ends with what it has and finish DEADLINE."""
    routes: bool = True
    """Return expert ids of every position (mixture-of-experts models)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What one request sampled. T counts sampled tokens, P prompt tokens."""

    id: str
    ids: tuple[int, ...]
    logprob_T: np.ndarray
    """float32, under the distribution that was sampled from (temperature, top-p, top-k applied)."""
    logprob_t1_T: np.ndarray
    """float32, at temperature 1 over the whole vocabulary."""
    version_T: np.ndarray
    """int16 index into `versions`, per sampled token."""
    versions: tuple[Version, ...]
    routes_PTLK: np.ndarray | None
    """Expert ids of prompt and sampled positions, (P + T, L, K); None for a dense model. The last sampled
    token has not been fed through the model, so its row is absent (see records.ABSENT_ROUTE)."""
    finish: Finish | None
    """How it ended; None in a piece of a stream that others follow."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    kept_T: np.ndarray | None = None
    """bool: the token was sampled over keys and values that older weights had computed and a swap kept. None where the engine does not
    say. It cannot be told from version_T: a preemption in between computes them anew."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Teacher forcing of given ids: log-prob of ids[t] given ids[:t]; position 0 is 0."""

    logprob_T: np.ndarray
    routes_TLK: np.ndarray | None
    version: Version


@runtime_checkable
class Engine(Protocol):
    async def generate(self, request: GenerateRequest) -> Generation: ...

    def generate_stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """Yields pieces in order; only the last has a finish. Concatenated they equal `generate`."""
        ...

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0) -> Scored: ...

    async def load(self, manifest: Manifest, source: str) -> Version:
        """Swap weights between two engine steps; requests in progress go on. `source` is the store's folder or URL."""
        ...

    async def cancel(self, request_id: str) -> None: ...

    async def stats(self) -> dict[str, float]: ...

    async def version(self) -> Version: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One assistant turn, as the harness sees it."""

    message: Message
    finish: Finish
    generation: Generation | None = None
    """None when the turn came from a foreign endpoint that gives no tokens."""


class ChatClient(Protocol):
    """What the agent loop talks to: our engine through `agent.chat.EngineChat`, or any OpenAI-compatible endpoint."""

    async def reply(self, messages: Sequence[Message], *, max_tokens: int) -> Reply:
        """Continue the conversation. `messages` only ever extends what the same client saw before."""
        ...


# ---------------------------------------------------------------------------------------------------
# Sandboxes


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Per-sandbox limits; hitting one is a clear error naming it."""

    wall_s: float = 600.0
    memory_bytes: int = 512 * 2**20
    pids: int = 64
    disk_bytes: int = 64 * 2**20
    output_bytes: int = 1 * 2**20
    """Output of one exec kept; the rest is counted and dropped."""
    cpu_s: float = 300.0
    """CPU seconds of one process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    code: int
    """Exit status; negative for a signal."""
    output: bytes
    """stdout and stderr interleaved as written."""
    dropped_bytes: int = 0
    timed_out: bool = False
    limit: str = ""
    """Name of the limit that ended it: memory | pids | disk | output | cpu | wall, or empty."""
    seconds: float = 0.0
    kept: bool = True
    """False for a command of a session whose changes to the session were lost, because it was killed or replaced its shell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStat:
    path: str
    size: int
    mode: int
    kind: str
    """file | dir | link | other"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxInfo:
    id: str
    image: str
    """Content hash of what it started from."""
    snapshot: str
    boundary: Boundary
    workdir: str
    """Absolute path of the workspace as seen inside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One changed path of a workspace layer, read by the host. `data` is None for a deletion."""

    path: str
    data: bytes | None
    mode: int = 0o644


@dataclass(frozen=True, kw_only=True, slots=True)
class GradeBundle:
    """What is graded: changes and hidden files over a tree that the agent never touched, and the tests to run there."""

    changes: tuple[Change, ...] = ()
    """Already sorted: only what may count."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Put over the changes: hidden tests, restored test surface."""
    args: tuple[str, ...] = ("-q",)
    """Of pytest."""
    timeout_s: float = 60.0
    image: str = ""
    """What to grade on; empty for the image that the sandbox's history began with, whatever was forked since."""
    limits: Limits | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedRun:
    """One test run in a pristine sandbox that was made for it and is gone."""

    answer: Mapping[str, Any]
    """Of the `pytest` operation with a report; empty when the changes could not be applied."""
    graded: str
    """Hash over the image, the changes and the files: names exactly what was graded."""
    image: str
    refused: str = ""
    """Why the changes could not be applied (the agent's doing), or empty."""


class Session(Protocol):
    """A shell whose folder, variables, functions, aliases and options last from one command to the next."""

    name: str

    async def run(self, command: str, *, timeout_s: float = 60.0) -> ExecResult: ...

    async def close(self) -> None: ...


@runtime_checkable
class Sandbox(Protocol):
    """A running environment. Paths are relative to the workspace unless absolute."""

    async def info(self) -> SandboxInfo: ...

    async def exec(
        self, argv: Sequence[str], *, cwd: str = "", env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float = 60.0
    ) -> ExecResult: ...

    async def call(self, op: str, arguments: Mapping[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
        """One operation of the in-sandbox tool server (see sandbox/toolserver.py): read, write, edit, list, glob,
        grep, job_start, job_poll, job_kill, pytest ... A refusal by the operation is {"error": kind, "text": ...}."""
        ...

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None: ...

    async def list(self, path: str = ".") -> builtins.list[FileStat]: ...

    async def stat(self, path: str) -> FileStat | None: ...

    async def apply_changes(self, changes: Sequence[Change]) -> None:
        """The inverse of `diff`: make the workspace hold these files, whatever stands in their way. OSError when it does not take them."""
        ...

    async def apply_patch(self, patch: str) -> tuple[str, ...]:
        """Apply a unified diff, all of it or nothing. Returns the paths it changed; PatchError (a UserError) names what does not fit."""
        ...

    async def open_session(self, name: str = "", *, cwd: str = "", env: Mapping[str, str] | None = None) -> Session:
        """Open a shell session, or take up the one of that name (after a fork at level L1: the one of the parent)."""
        ...

    async def grade(self, bundle: GradeBundle) -> GradedRun:
        """Run tests in a new sandbox on a tree the agent never touched. InfraError when a machine broke, never a bad grade."""
        ...

    async def diff(self) -> builtins.list[Change]: ...

    async def snapshot(self, level: Level = Level.FILES, *, require: bool = True) -> str: ...

    async def fork(self, n: int, level: Level = Level.FILES, *, require: bool = True) -> Sequence[Sandbox]: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def destroy(self) -> None: ...


class SandboxHost(Protocol):
    """Makes sandboxes. `image` is a content hash made by `add_image`, or a snapshot id."""

    async def add_image(self, files: Mapping[str, bytes]) -> str:
        """Store a workspace tree given as {path: bytes} and return its content hash. Same tree, same hash."""
        ...

    async def create(
        self, image: str, *, limits: Limits = Limits(), network: Sequence[str] = (), ttl_s: float = 900.0, create_id: str = ""
    ) -> Sandbox: ...

    async def stats(self) -> dict[str, float]: ...

    async def close(self) -> None: ...


# ---------------------------------------------------------------------------------------------------
# Tools and tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """Name, one-line description and parameters {name: (type, required, description)} of a tool."""

    name: str
    description: str
    parameters: Mapping[str, tuple[str, bool, str]] = field(default_factory=dict)


class TaskSource(Protocol):
    """The curriculum: gives tasks and hears how they went."""

    def next(self) -> Task: ...

    def feedback(self, group: Group) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Grade(Protocol):
    async def __call__(self, task: Task, trajectory: Trajectory, sandbox: Sandbox) -> Graded: ...


class Rollout(Protocol):
    async def __call__(self, task: Task, *, group: int, member: int, seed: int) -> Graded: ...


# ---------------------------------------------------------------------------------------------------
# Learning and weights


@runtime_checkable
class Trainer(Protocol):
    async def step(self, groups: Sequence[Group]) -> StepReport:
        """One optimizer step on the groups. Consumes each group once; returns after the weights have changed."""
        ...

    async def publish(self) -> tuple[Manifest, str]:
        """Write the delta from the last committed version to the store; returns (manifest, store location)."""
        ...

    async def commit(self, version: Version) -> None:
        """Engines serve `version`: it becomes the base of the next delta."""
        ...

    async def save(self, folder: Path) -> None:
        """Write model/ and optim/ of a checkpoint into `folder` (which the caller commits by rename)."""
        ...

    async def load(self, folder: Path, lineage: int) -> Version: ...

    async def version(self) -> Version: ...

    async def close(self) -> None: ...


class Store(Protocol):
    """Bytes by key: a directory, or an object store."""

    async def put(self, key: str, data: bytes) -> None: ...

    async def get(self, key: str) -> bytes: ...

    async def exists(self, key: str) -> bool: ...

    async def list(self, prefix: str = "") -> builtins.list[str]: ...

    async def delete(self, key: str) -> None: ...


# ---------------------------------------------------------------------------------------------------
# Text


class Tokenizer(Protocol):
    """Bytes-safe: decode(encode(text)) == text for every str."""

    hash: str
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, special: str) -> int | None: ...


class Renderer(Protocol):
    """Messages to tokens and back. Rendering one more message only ever appends tokens."""

    hash: str
    stop_ids: tuple[int, ...]
    """Tokens that end an assistant turn."""

    def render(self, message: Message) -> list[int]:
        """Tokens of one whole message, its opening and closing marks included. An assistant message made by
        `parse` is never rendered: its sampled ids are appended as they are."""
        ...

    def open_assistant(self) -> list[int]:
        """Tokens that ask the policy for its turn."""
        ...

    def close_assistant(self, ids: Sequence[int]) -> list[int]:
        """Tokens to append after sampled ids so that the turn is closed (empty when it stopped by itself)."""
        ...

    def parse(self, ids: Sequence[int]) -> tuple[Message, list[bool]]:
        """The assistant message that was sampled, and for each id whether it belongs to its reasoning part.
        Never raises: broken calls come back as ToolCalls with `error` set."""
        ...
