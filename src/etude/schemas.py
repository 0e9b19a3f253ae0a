"""JSON schemas of everything etude writes for others to read: records, events, and the `--json` outputs.

Record schemas are generated from the type hints and doc strings of `records`, so they cannot say something else than
the code. Events come from `events.KINDS` with the types below. Outputs of commands are described here by hand.
The files in docs/schemas are this module's output; a test compares them:

    python -m etude.schemas docs/schemas

Each file stands alone (nested records are in its `$defs`), so any JSON Schema validator can use it.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np

from etude import events, records
from etude.records import Record

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]

ARRAY: Schema = {
    "description": "A numpy array: little-endian bytes in C order, base64.",
    "type": "object",
    "properties": {
        "dtype": {"type": "string", "description": "numpy type string, such as <i4"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "base64": {"type": "string", "contentEncoding": "base64"},
    },
    "required": ["dtype", "shape", "base64"],
    "additionalProperties": False,
}


def all_schemas() -> dict[str, Schema]:
    """File name -> schema, for every file of docs/schemas."""
    out = {f"{cls.__name__}.json": record_schema(cls) for cls in record_classes()}
    out["event.json"] = event_schema()
    for name, schema in OUTPUTS.items():
        out[f"{name}.json"] = {"$schema": DIALECT, "title": name, **schema}
    return out


def render(schema: Schema) -> str:
    return json.dumps(schema, indent=2) + "\n"


def write(folder: Path) -> list[Path]:
    """Write every schema file, and remove those that nothing stands behind any more."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {folder / name: render(schema) for name, schema in all_schemas().items()}
    for stale in set(folder.glob("*.json")) - set(wanted):
        stale.unlink()
    for path, text in wanted.items():
        path.write_text(text)
    return sorted(wanted)


# ---------------------------------------------------------------------------------------------------
# Records


def record_classes() -> list[type[Record]]:
    """The records of the package itself, in the order they are written in."""
    return [cls for cls in records.RECORDS.values() if cls.__module__ == records.__name__]


def record_schema(cls: type[Record]) -> Schema:
    """A schema that stands alone: the record itself at the top, the records it holds in `$defs`."""
    held: dict[str, Schema] = {}
    body = _object(cls, held)
    return {"$schema": DIALECT, "title": cls.__name__, **body, **({"$defs": dict(sorted(held.items()))} if held else {})}


def _object(cls: type[Record], held: dict[str, Schema]) -> Schema:
    """The body of one record; records met on the way are added to `held`."""
    hints = typing.get_type_hints(cls)
    docs = field_docs(cls)
    properties: Schema = {"record": {"const": cls.__name__}, "schema": {"const": cls.SCHEMA}}
    required = ["record", "schema"]
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        properties[f.name] = {**({"description": docs[f.name]} if f.name in docs else {}), **_of(hints[f.name], held)}
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            required.append(f.name)
    return {
        "description": inspect.cleandoc(cls.__doc__ or ""),
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _of(hint: Any, held: dict[str, Schema]) -> Schema:
    """The schema of one type hint as `records.to_json` writes it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_of(a, held) for a in args]}
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return {"type": "array", "items": _of(args[0], held)}
        return {"type": "array", "prefixItems": [_of(a, held) for a in args], "minItems": len(args), "maxItems": len(args)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(args[1], held)}
    if hint is np.ndarray:
        held["array"] = ARRAY
        return {"$ref": "#/$defs/array"}
    if isinstance(hint, type) and issubclass(hint, Record):
        if hint.__name__ not in held:
            held[hint.__name__] = {}  # holds the place while its own fields are visited
            held[hint.__name__] = _object(hint, held)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if hint is Any:
        return {}
    return {"type": {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}[hint]}


def field_docs(cls: type) -> dict[str, str]:
    """Doc strings that stand under the fields of a class."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            docs[field.target.id] = " ".join(below.value.value.split())  # type: ignore[attr-defined]
    return docs


# ---------------------------------------------------------------------------------------------------
# Events

INTEGER, NUMBER, STRING, BOOLEAN, OBJECT = ({"type": t} for t in ("integer", "number", "string", "boolean", "object"))
COUNT: Schema = {"type": "integer", "minimum": 0}
OPTIONAL_NUMBER: Schema = {"type": ["number", "null"]}
OPTIONAL_INTEGER: Schema = {"type": ["integer", "null"]}
ANYTHING: Schema = {}

EVENT_FIELDS: dict[str, Schema] = {
    "name": STRING,
    "recipe": STRING,
    "seed": COUNT,
    "schedule": {"enum": ["free", "lockstep"]},
    "lineage": COUNT,
    "versions": OBJECT,
    "from_step": COUNT,
    "outcome": STRING,
    "revision": COUNT,
    "admission": COUNT,
    "task": STRING,
    "member": COUNT,
    "trajectory": STRING,
    "stop": {"enum": [member.value for member in records.StopReason]},
    "reward": OPTIONAL_NUMBER,
    "solved": {"type": ["boolean", "null"]},
    "oldest": OPTIONAL_INTEGER,
    "tokens": COUNT,
    "turns": COUNT,
    "where": STRING,
    "error": STRING,
    "step": COUNT,
    "staleness": OPTIONAL_INTEGER,
    "reason": STRING,
    "metrics": {
        "type": "object",
        "properties": {name: {**NUMBER, "description": text} for name, text in events.METRICS.items()},
        "additionalProperties": NUMBER,
    },
    "metric": STRING,
    "value": NUMBER,
    "threshold": NUMBER,
    "advice": STRING,
    "hash": STRING,
    "bytes": COUNT,
    "pause_s": NUMBER,
    "path": STRING,
    "suite": STRING,
    "n": COUNT,
    "tasks": COUNT,
    "pass_at_1": NUMBER,
    "low": NUMBER,
    "high": NUMBER,
    "rule": STRING,
    "action": STRING,
    "evidence": STRING,
    "part": STRING,
    "what": STRING,
    "seconds": {"anyOf": [{"type": "number", "minimum": 0}, {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}}]},
    "text": STRING,
    # counts in one kind and lists in another, or free detail
    "version": ANYTHING,
    "changed": ANYTHING,
    "members": ANYTHING,
    "dropped": ANYTHING,
    "unfinished": ANYTHING,
    "detail": ANYTHING,
}
"""Type of each field that `events.KINDS` names. `n`, the line's own count, is added to every kind."""


def event_schema() -> Schema:
    """One line of events.jsonl: exactly one of the kinds. More fields than a kind requires are allowed."""
    kinds = []
    for kind, names in events.KINDS.items():
        fields = {name: EVENT_FIELDS[name] for name in names}
        properties = {"n": COUNT, "t": {"type": "number", "minimum": 0}, "kind": {"const": kind}, **fields}
        kinds.append({"title": kind, "type": "object", "properties": properties, "required": ["n", "t", "kind", *names]})
    return {"$schema": DIALECT, "title": "event", "description": "One line of a run's events.jsonl.", "oneOf": kinds}


# ---------------------------------------------------------------------------------------------------
# Outputs of commands, and the report of a run


def _plain(description: str, *, extra: bool = False, **properties: Schema) -> Schema:
    """An object in which every property is required."""
    return {
        "description": description,
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": extra,
    }


def _list(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
SPREAD = _plain("Over the sampled tokens.", mean=NUMBER, p99=NUMBER, max=NUMBER)
SCORE_FIELDS: dict[str, Schema] = {"suite": STRING, "n": COUNT, "pass_at_1": SHARE, "low": SHARE, "high": SHARE}

OUTPUTS: dict[str, Schema] = {
    "doctor": _plain(
        "`etude doctor --json`",
        probes=_list(
            _plain(
                "One thing that was tried on this machine.",
                name=STRING,
                status={"enum": ["ok", "partial", "no"]},
                found=STRING,
                enables=STRING,
                how=STRING,
                required=BOOLEAN,
            ),
            least=1,
        ),
        counts=_plain("Probes by status.", ok=COUNT, partial=COUNT, no=COUNT),
        machine=_plain("Where it ran.", system=STRING, release=STRING, machine=STRING, cores={"type": "integer", "minimum": 1}),
    ),
    "bench": _plain(
        "Last line of `etude bench NAME`, and benchmarks/results/NAME.DEVICE.json",
        bench=STRING,
        device={"enum": ["cpu", "cuda"]},
        rows=_list(
            _plain(
                "One number. A ratio above 1 means ours is better, whatever the unit.",
                name=STRING,
                unit=STRING,
                ours=NUMBER,
                peer=OPTIONAL_NUMBER,
                peer_name={"type": ["string", "null"]},
                ratio=OPTIONAL_NUMBER,
            ),
            least=1,
        ),
        machine=OBJECT,
        versions=_map(STRING),
    ),
    "report": _plain(
        "runs/<name>/report.json",
        extra=True,
        recipe=STRING,
        seed=COUNT,
        wall_s={"type": "number", "minimum": 0},
        eval=_list(_plain("One evaluation during the run.", extra=True, step=COUNT, **SCORE_FIELDS)),
        rollouts=COUNT,
        failures=_map(COUNT),
        time=_map({"type": "number", "minimum": 0}),
        versions=OBJECT,
    ),
    "eval": _plain("Last line of `etude eval --json`", extra=True, model=STRING, suite_hash=STRING, **SCORE_FIELDS),
    "mismatch": _plain(
        "Last line of `etude debug mismatch --json`: a step's trajectories computed again, each token with the weights that sampled it",
        run=STRING,
        step=COUNT,
        versions={"description": "versions that sampled them", **_list(STRING, least=1)},
        tokens={"description": "sampled tokens compared", **COUNT},
        left_out={"description": "tokens sampled after a swap in flight from a kept cache, which no one version gives", **COUNT},
        dlogp=_plain(
            "Size of delta log-prob. engine, trainer: computed now against recorded then; between: the two computed now.",
            trainer=SPREAD,
            engine=SPREAD,
            between=SPREAD,
        ),
        layers=_list(
            _plain(
                "Stream after a layer, engine's against trainer's; share of recorded positions whose experts the trainer's router changes.",
                layer=COUNT,
                max_delta_hidden=NUMBER,
                max_hidden=NUMBER,
                routes_differ=SHARE,
            )
        ),
        first_layer={"description": "first layer whose difference is beyond rounding", **OPTIONAL_INTEGER},
        positions={"description": "positions with recorded routes", **COUNT},
        routes_differ={"description": "share of them whose experts differ in some layer", **SHARE},
        first={
            "description": "first difference of experts, in the order of trajectories, positions, layers",
            "anyOf": [
                {"type": "null"},
                _plain(
                    "Sets of experts.",
                    trajectory=STRING,
                    segment=COUNT,
                    position=COUNT,
                    layer=COUNT,
                    recorded=_list(COUNT),
                    recomputed=_list(COUNT),
                ),
            ],
        },
        weights=_list(
            _plain(
                "A tensor, or an expert of one, that checkpoint and weight chain hold differently (the first 20).",
                version=STRING,
                tensor=STRING,
                expert=OPTIONAL_INTEGER,
                max_delta=NUMBER,
            )
        ),
        weights_differ=COUNT,
        reported={"description": "what the step itself reported, staleness included", **_map(NUMBER)},
    ),
    "tasks": _plain(
        "Last line of `etude tasks check --json`",
        extra=True,
        counts={"description": "tasks by outcome: written, or accepted and rejected ...", **_map(COUNT)},
        reasons={"description": "rejections by reason", **_map(COUNT)},
    ),
    "tasks_made": _plain(
        "Last line of `etude tasks make --json`",
        extra=True,
        counts={"description": "tasks written, candidates rejected, packages_skipped", **_map(COUNT)},
        reasons={"description": "rejections by reason; of whole packages as `package: REASON`", **_map(COUNT)},
        packages=_list(
            _plain(
                "One package: what its suite is like, and what came of its candidates.",
                source=STRING,
                name=STRING,
                version=STRING,
                licence=STRING,
                skip={"description": "why it gave nothing, or empty", **STRING},
                detail=STRING,
                tests={"description": "tests that pass in every run", **COUNT},
                flaky=COUNT,
                red=COUNT,
                candidates=COUNT,
                judged=COUNT,
                accepted=COUNT,
                deleted_lines=_list(COUNT),
                wall_s=NUMBER,
            )
        ),
        core_s={"description": "processor seconds spent on packages, sandboxes included", **NUMBER},
        tasks_per_core_hour=NUMBER,
    ),
    "models": _plain(
        "Last line of `etude model add --json`, `etude model ls --json` and `etude model rm --json`",
        folder=STRING,
        changed={"description": "names that were written or removed", **_list(STRING)},
        models=_list(
            _plain(
                "One model that has a name: the one added, or all of `ls`.",
                name=STRING,
                path=STRING,
                source=STRING,
                licence=STRING,
                dtype=STRING,
                bytes=COUNT,
                hash=STRING,
            )
        ),
    ),
    "envs": _plain(
        "Last line of `etude env ls --json`, `etude env fork --json` and `etude env rm --json`",
        changed={"description": "ids of environments that were made or ended", **_list(STRING)},
        envs=_list(
            _plain(
                "One environment of the token's owner.",
                id=STRING,
                state={"enum": ["starting", "live", "ending"]},
                image=STRING,
                create_id=STRING,
                leases=_list({"enum": ["rollout", "grade"]}),
                running=COUNT,
                memory_bytes=COUNT,
                network=BOOLEAN,
            )
        ),
    ),
}
"""Name of a schema file -> what it says. Every command with `--json` names one of these in its `Command.schema`."""


if __name__ == "__main__":
    for path in write(Path(sys.argv[1])):
        print(path)
