"""The frozen records that flow through the loop, and how they are stored.

A step returns a new record and never fills a field of an old one. Data goes round the learning loop in
these records; imports do not (see ARCHITECTURE.md). Arrays are numpy, made read-only on construction,
and records compare by identity; use `to_dict` to compare by value.

Notation in field names: T tokens, L layers, K experts per token.

`to_dict(record)` gives plain JSON types plus arrays; `to_json` is the same with arrays as
`{"dtype", "shape", "base64"}`. Every stored record carries `"record"` and `"schema"`; a record of
another schema version is refused by `from_dict` with the version it met.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import hashlib
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, dataclass_transform

import numpy as np

from etude.errors import RecordError, nearest

R = TypeVar("R", bound="Record")
RECORDS: dict[str, type[Record]] = {}
ABSENT_ROUTE = 255
"""Fill value of `Segment.routes_TLK` rows that were not recorded (uint8; `ABSENT_ROUTE_16` for uint16)."""
ABSENT_ROUTE_16 = 65535


class Record:
    """Base of all stored records. Subclasses are frozen keyword-only dataclasses."""

    SCHEMA: ClassVar[int] = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        RECORDS[cls.__name__] = cls

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, np.ndarray) and value.flags.writeable:
                view = value.view()
                view.flags.writeable = False
                object.__setattr__(self, f.name, view)

    def replace(self: R, **changes: Any) -> R:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False, field_specifiers=(field,))
def record(cls: type[R]) -> type[R]:
    """Class decorator: a frozen, keyword-only dataclass compared by identity."""
    return dataclass(frozen=True, kw_only=True, eq=False)(cls)


# ---------------------------------------------------------------------------------------------------
# Outcomes are enums, never booleans or magic numbers


class StopReason(enum.StrEnum):
    """How a rollout ended. Every way of ending is one of these."""

    DONE = "done"
    """The model answered without a tool call: it says it is finished."""
    OUT_OF_TOKENS = "out_of_tokens"
    """The rollout's budget of sampled tokens ran out (over-long; kept and trained, M7)."""
    OUT_OF_CONTEXT = "out_of_context"
    """The context window is full and compaction is off or did not help."""
    OUT_OF_TURNS = "out_of_turns"
    OUT_OF_TIME = "out_of_time"
    CANCELLED = "cancelled"
    INFRA = "infra"
    """A machine broke; `Trajectory.failure` says which. Masked, never a reward."""


class Finish(enum.StrEnum):
    """How one generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


class ToolError(enum.StrEnum):
    """Why a tool call was answered with an error. All of these are the model's own doing, and trained on."""

    UNKNOWN_TOOL = "unknown_tool"
    BAD_CALL = "bad_call"
    """The call could not be parsed."""
    BAD_ARGUMENTS = "bad_arguments"
    FAILED = "failed"
    """The tool ran and could not do it (no such file, text not found ...)."""
    TIMEOUT = "timeout"
    FORBIDDEN = "forbidden"
    """The task's tool policy removed the tool or the argument."""


class Outcome(enum.StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class Drop(enum.StrEnum):
    """Why a member of a group is not trained on."""

    INFRA = "infra"
    MONITOR = "monitor"
    CANCELLED = "cancelled"


class HintReason(enum.StrEnum):
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    FAILED_TEST = "failed_test"
    LINT = "lint"
    STYLE = "style"
    READER = "reader"


class Level(enum.StrEnum):
    """What a snapshot or a fork of a sandbox carries. Asking for more than a backend has is an error."""

    FILES = "L0"
    SESSION = "L1"
    PROCESSES = "L2"
    MACHINE = "L3"


# ---------------------------------------------------------------------------------------------------
# Versions and tasks


@record
class Version(Record):
    """One set of weights. `lineage` rises at every resume, so an ordinal trained twice is never confused."""

    lineage: int
    ordinal: int
    hash: str
    """Content hash of the weights, hex."""

    def __str__(self) -> str:
        return f"v{self.lineage}.{self.ordinal}-{self.hash[:8]}"

    @property
    def key(self) -> tuple[int, int, str]:
        return (self.lineage, self.ordinal, self.hash)


@record
class Grader(Record):
    """What decides a task: exact test ids, run in a pristine fork."""

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    command: tuple[str, ...] = ("pytest",)
    time_limit_s: float = 60.0
    hidden: tuple[tuple[str, str], ...] = ()
    """(path, text) of test files the agent never sees, restored before grading."""
    protected: tuple[str, ...] = ("tests/*", "conftest.py", "*/conftest.py", "pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini")
    """Patterns of paths whose changes by the agent are discarded before grading."""


@record
class ToolPolicy(Record):
    """What a task changes about the tools. The same code applies it in training and in the product."""

    removed: tuple[str, ...] = ()
    strict_arguments: bool = False
    """Refuse unknown arguments and wrong types instead of coercing."""
    max_result_chars: int = 16_000


@record
class Provenance(Record):
    generator: str
    source: str
    version: str = ""
    licence: str = ""
    base_commit: str = ""
    seed: int = 0
    family: str = ""
    """Unit of the train / held-out split: a function family for katas, a package for real code."""


@record
class Difficulty(Record):
    """Live statistics the curriculum keeps for a task."""

    attempts: int = 0
    passes: int = 0
    mean_turns: float = 0.0
    mean_tokens: float = 0.0


@record
class Task(Record):
    id: str
    hash: str
    """Content hash over everything that can change an outcome; see `content_hash`."""
    prompt: str
    workspace: str
    """Content hash of the workspace snapshot the agent starts from."""
    files: tuple[tuple[str, str], ...] = ()
    """(path, text) of a workspace small enough to travel in the record (katas); else the store has it."""
    start: str = ""
    """Shell script replayed at the start of each episode, for services."""
    grader: Grader
    tools: ToolPolicy = field(default_factory=ToolPolicy)
    network: tuple[str, ...] = ()
    """Hosts the sandbox may reach; empty means no network."""
    split: str = "train"
    """train | heldout | unseen | pretrain"""
    provenance: Provenance
    difficulty: Difficulty = field(default_factory=Difficulty)
    solution: tuple[tuple[str, str], ...] = ()
    """(path, text) of files as they were before the deletion. Never enters a sandbox; used by validation and expert traces."""


# ---------------------------------------------------------------------------------------------------
# Conversation


@record
class ToolCall(Record):
    id: str
    name: str
    arguments: dict[str, str]
    raw: str = ""
    """The sampled text of the call, kept when it did not parse."""
    error: ToolError | None = None
    """Set by the parser when the call is broken; the harness answers it with this error."""


@record
class ToolResult(Record):
    call_id: str
    name: str
    text: str
    error: ToolError | None = None
    truncated_chars: int = 0
    seconds: float = 0.0


@record
class Span(Record):
    """Token positions [start, end) of one segment."""

    segment: int
    start: int
    end: int


@record
class Message(Record):
    role: str
    """system | user | assistant | tool"""
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    """A tool message answers all calls of the assistant message before it, in call order."""
    span: Span | None = None


@record
class Sampling(Record):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 512
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


@record
class Segment(Record):
    """One contiguous token list that a policy continued; a compaction starts a new one with `parent` set."""

    ids_T: np.ndarray
    """int32 token ids, prompt and sampled alike."""
    sampled_T: np.ndarray
    """bool; True where the policy sampled the token."""
    logprob_T: np.ndarray
    """float32 log-prob under the sampling distribution; 0 where not sampled."""
    logprob_t1_T: np.ndarray
    """float32 log-prob at temperature 1 over the full vocabulary; 0 where not sampled."""
    version_T: np.ndarray
    """int16 index into `versions`; -1 where not sampled."""
    message_T: np.ndarray
    """int32 index into `Trajectory.messages`."""
    thinking_T: np.ndarray
    """bool; True for sampled tokens of a reasoning part."""
    versions: tuple[Version, ...]
    """Distinct versions in order of first use."""
    routes_TLK: np.ndarray | None = None
    """uint8 / uint16 expert ids of every position, prompt too; a row of ABSENT_ROUTE was not recorded."""
    sampling: Sampling
    engine: str = ""
    """Engine build, e.g. "native-0.1.0"."""
    numerics: str = "fast"
    cache_policy: str = "keep"
    """What happened to cached keys and values at a weight swap: keep | recompute."""
    parent: int | None = None
    """Index of the segment this one continues after a compaction."""


@record
class Effort(Record):
    """The six effort counts of M13."""

    thinking_tokens: int = 0
    call_tokens: int = 0
    output_tokens: int = 0
    """Tokens of tool results."""
    final_tokens: int = 0
    calls: int = 0
    turns: int = 0


@record
class Boundary(Record):
    """What really separates a sandbox from the host. Recorded, never assumed."""

    backend: str
    shared_kernel: bool = True
    hypervisor: str = ""
    """Name of the virtual machine monitor; empty without one."""
    hardware: str = "native"
    """native | virtualised | emulated: what the processor is to the code that runs."""
    network: str = "none"
    capabilities: tuple[str, ...] = ()
    """Privileges that processes of the sandbox hold."""
    filter_hash: str = ""
    """Of the system-call filter; empty without one."""
    separates: dict[str, str] = field(default_factory=dict)
    """aspect of the host -> what keeps the sandbox from it, or "nothing". The aspects are those of docs/sandboxes.md, and the corpus of
    escape attempts proves each claim."""
    limits: dict[str, str] = field(default_factory=dict)
    """limit name -> what enforces it, or "nothing"."""
    evidence: tuple[str, ...] = ()
    """Kinds of evidence the host collects."""
    coverage: dict[str, str] = field(default_factory=dict)
    """kind of evidence -> what it sees and what it misses."""
    levels: tuple[Level, ...] = (Level.FILES,)
    """What a snapshot or a fork may be asked for."""
    level: Level = Level.FILES
    """What was carried over when this sandbox was made: L0 from an image, else the level of the snapshot or fork."""


@record
class Failure(Record):
    """An infrastructure failure: why a rollout is masked."""

    where: str
    error: str
    message: str


@record
class Trajectory(Record):
    id: str
    task_id: str
    task_hash: str
    group: int
    """Admission number of its group."""
    member: int
    seed: int
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    stop: StopReason
    effort: Effort = field(default_factory=Effort)
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by part: generate, tools, sandbox, grade."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Content hashes of tools, system, renderer, tokenizer."""
    config_revision: int = 0
    boundary: Boundary | None = None
    image: str = ""
    snapshot: str = ""
    diff: str = ""
    """Unified diff of the workspace at the end, for people; the grader reads the layer itself."""
    evidence: str = ""
    failure: Failure | None = None

    @property
    def oldest_ordinal(self) -> int | None:
        """Ordinal of the oldest version that sampled a token of it; None when nothing was sampled."""
        ordinals = [v.ordinal for s in self.segments for v in s.versions]
        return min(ordinals) if ordinals else None

    @property
    def sampled_tokens(self) -> int:
        return int(sum(int(s.sampled_T.sum()) for s in self.segments))


# ---------------------------------------------------------------------------------------------------
# Judgement


@record
class TestReport(Record):
    """Outcome of every expected test id, read from a channel the grader owns."""

    __test__ = False  # not a test class for pytest
    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    seconds: float = 0.0
    detail: str = ""
    """First failure's message, trimmed."""
    solved: bool = False


@record
class Finding(Record):
    """What a monitor saw."""

    rule: str
    evidence: str
    message: int | None = None
    action: str = "note"
    """note | drop | negative | review"""


@record
class Graded(Record):
    trajectory: Trajectory
    parts: dict[str, float]
    """Reward parts by name; the reward is their sum, already weighted."""
    report: TestReport | None = None
    findings: tuple[Finding, ...] = ()
    grader: str = "0.1.0"

    @property
    def reward(self) -> float:
        return float(sum(self.parts.values()))


@record
class Hint(Record):
    trajectory: str
    message: int
    text: str
    reason: HintReason
    source: str = "rule"
    efficacy: float | None = None


@record
class Dropped(Record):
    member: int
    reason: Drop
    detail: str = ""


@record
class Group(Record):
    """G graded trajectories of one task, and the ones that were dropped with the reason."""

    admission: int
    task_id: str
    admitted_at: Version
    members: tuple[Graded, ...]
    dropped: tuple[Dropped, ...] = ()

    @property
    def oldest_ordinal(self) -> int | None:
        ordinals = [o for g in self.members if (o := g.trajectory.oldest_ordinal) is not None]
        return min(ordinals) if ordinals else None


# ---------------------------------------------------------------------------------------------------
# Training


@record
class Batch(Record):
    """Packed rows. One row holds several samples; `bounds` says where each begins and ends.

    Weights of the three streams are per token and already divided by their stream's global normaliser, so
    the trainer only sums. N = tokens in the row.
    """

    ids_N: np.ndarray
    positions_N: np.ndarray
    bounds: tuple[tuple[int, int], ...]
    rl_weight_N: np.ndarray
    hint_weight_N: np.ndarray
    ce_weight_N: np.ndarray
    advantage_N: np.ndarray
    old_logprob_N: np.ndarray
    """Engine's log-prob at temperature 1 of each sampled token (mu)."""
    version_N: np.ndarray
    """int32 ordinal that sampled the token; -1 where not sampled."""
    routes_NLK: np.ndarray | None = None
    teacher: dict[str, Any] = field(default_factory=dict)
    """Hint rows: teacher context ids and the map from student to teacher positions."""


@record
class Alarm(Record):
    """A number of a step that left its healthy range. It stops nothing; it asks someone to look."""

    metric: str
    value: float
    threshold: float
    """The bound that was crossed."""
    advice: str
    """What to do about it."""


@record
class StepReport(Record):
    """What one trainer step measured."""

    step: int
    version: Version
    metrics: dict[str, float]
    """loss, grad_norm, lr, tokens, kl, ess, weight_mean, weight_std, clip_share, dlogp_mean, dlogp_p99, dlogp_max ..."""
    seconds: dict[str, float] = field(default_factory=dict)
    alarms: tuple[Alarm, ...] = ()
    """Metrics out of their healthy range."""


@record
class TensorEntry(Record):
    name: str
    shape: tuple[int, ...]
    dtype: str
    hash: str
    """blake2b-128 of the resulting tensor's bytes."""
    payload: str
    """Name of the payload object that holds the change; empty when the tensor did not change."""
    encoding: str = "full"
    """full | values"""
    changed: int = 0
    """Elements whose bits changed."""


@record
class Manifest(Record):
    """One link of the weight chain; also a line of the deployment ledger."""

    lineage: int
    base: Version | None
    """None for an anchor, which carries every tensor whole."""
    version: Version
    tensors: tuple[TensorEntry, ...]
    chain: str = ""
    """Hash of the previous manifest's chain hash and this one's content."""
    config_hash: str = ""
    tokenizer_hash: str = ""
    canary_ids: tuple[int, ...] = ()
    canary_logprobs: tuple[float, ...] = ()
    signature: str = ""
    bytes: int = 0


# ---------------------------------------------------------------------------------------------------
# Evaluation and use


@record
class Score(Record):
    name: str
    n: int
    mean: float
    low: float
    high: float


@record
class Verdict(Record):
    version: Version
    suite_hash: str
    scores: tuple[Score, ...]
    monitor_counts: dict[str, int] = field(default_factory=dict)
    outcome: Outcome = Outcome.INCONCLUSIVE


@record
class Deployment(Record):
    version: Version
    role: str
    """live | canary | shadow"""
    share: float
    since: str
    verdict: str = ""


@record
class Feedback(Record):
    id: str
    request_id: str
    subject: str
    """Pseudonym."""
    version: Version
    kind: str
    """kept | reverted | follow_up | abandoned | latency"""
    horizon_s: float
    value: float
    time: str
    consent: bool
    redacted: bool
    signature: str = ""


# ---------------------------------------------------------------------------------------------------
# Serialisation


def to_dict(value: Any) -> Any:
    """Plain JSON types, except that numpy arrays stay arrays."""
    if isinstance(value, Record):
        out: dict[str, Any] = {"record": type(value).__name__, "schema": value.SCHEMA}
        for f in dataclasses.fields(value):  # type: ignore[arg-type]
            out[f.name] = to_dict(getattr(value, f.name))
        return out
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {k: to_dict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_dict(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def from_dict(data: Any, expect: type[R] | None = None) -> R:
    """The record a `to_dict` came from. Refuses other schema versions, unknown fields and missing ones."""
    if not isinstance(data, dict) or "record" not in data:
        raise RecordError(f"expected a stored record (an object with 'record' and 'schema'), got {str(data)[:80]!r}")
    name = data["record"]
    cls = RECORDS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise RecordError(f"unknown record {name!r}; {nearest(str(name), RECORDS)}")
    if expect is not None and not issubclass(cls, expect):
        raise RecordError(f"expected a {expect.__name__}, found a {name}")
    if type(data.get("schema")) is not int or data["schema"] != cls.SCHEMA:
        raise RecordError(
            f"{name} was stored with schema {data.get('schema')!r}, this etude reads schema {cls.SCHEMA}; "
            "read it with the etude version that wrote it, or make it again"
        )
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields) - {"record", "schema"})
    if unknown:
        raise RecordError(f"{name} has no field {unknown[0]!r}; {nearest(unknown[0], fields)}")
    values = {k: _decode(v, hints[k], f"{name}.{k}") for k, v in data.items() if k in fields}
    try:
        return cls(**values)  # type: ignore[return-value]
    except TypeError as error:
        raise RecordError(f"{name} cannot be read: {error}") from error


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _decode(value: Any, hint: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _decode(value, next(a for a in args if a is not type(None)), where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise RecordError(f"{where} should be a list, got {type(value).__name__}")
        inner = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else args
        if len(inner) != len(value):
            raise RecordError(f"{where} should have {len(inner)} items, got {len(value)}")
        return tuple(_decode(v, h, where) for v, h in zip(value, inner, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise RecordError(f"{where} should be an object, got {type(value).__name__}")
        return {k: _decode(v, args[1], f"{where}.{k}") for k, v in value.items()}
    if hint is np.ndarray:
        return _array(value, where)
    if isinstance(hint, type) and issubclass(hint, Record):
        return from_dict(value, hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            raise RecordError(f"{where} is {value!r}; {nearest(str(value), [e.value for e in hint])}") from None
    if hint in (int, float, str, bool):
        return _scalar(value, hint, where)
    return value


def _scalar(value: Any, hint: type, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise RecordError(f"{where} should be {hint.__name__}, got {type(value).__name__} {str(value)[:40]!r}")
    return value


def _array(value: Any, where: str) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, dict) and {"dtype", "shape", "base64"} <= set(value):
        try:
            raw = np.frombuffer(base64.b64decode(value["base64"], validate=True), dtype=np.dtype(value["dtype"]))
            return raw.reshape(value["shape"])
        except (ValueError, TypeError) as error:  # bad base64 is a ValueError
            raise RecordError(f"{where} is not a stored array: {error}") from error
    raise RecordError(f"{where} should be an array, got {type(value).__name__}")


def to_json(value: Any) -> str:
    """Canonical JSON text (sorted keys, no spaces): the same record always gives the same bytes."""
    return json.dumps(to_dict(value), default=_json_array, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _json_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"dtype": value.dtype.str, "shape": list(value.shape), "base64": data}
    raise TypeError(f"cannot store a {type(value).__name__}")


def from_json(text: str, expect: type[R] | None = None) -> R:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"not JSON at character {error.pos}: {text[:60]!r}") from error
    return from_dict(data, expect)


def content_hash(*parts: Any) -> str:
    """blake2b-128 of the canonical JSON of the parts, hex. The one content hash of the project."""
    return hashlib.blake2b(to_json(list(parts)).encode(), digest_size=16).hexdigest()


def seed_for(*parts: Any) -> int:
    """A 63-bit seed that depends on nothing but the parts: randomness = hash(run, task, rollout, position)."""
    return int.from_bytes(hashlib.blake2b(to_json(list(parts)).encode(), digest_size=8).digest(), "big") >> 1
