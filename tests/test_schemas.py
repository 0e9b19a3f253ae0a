"""The schemas in docs/schemas are the generated ones, accept what the code writes, and refuse what it does not."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import given, settings

from etude import events, records, schemas

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "schemas"
RECORDS = schemas.record_classes()
SCHEMAS = schemas.all_schemas()
REGENERATE = "run `.venv/bin/python -m etude.schemas docs/schemas` and commit the result"


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((FOLDER / f"{name}.json").read_text()))


def test_the_committed_files_are_the_generated_ones():
    assert {p.name for p in FOLDER.iterdir()} == set(SCHEMAS), REGENERATE
    for name, schema in SCHEMAS.items():
        assert (FOLDER / name).read_text() == schemas.render(schema), f"{name} is out of date; {REGENERATE}"


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_file_is_a_valid_schema_and_stands_alone(name):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    text = json.dumps(SCHEMAS[name])
    defined = set(SCHEMAS[name].get("$defs", {}))
    used = {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}
    assert used == defined


@pytest.mark.parametrize("cls", RECORDS, ids=lambda c: c.__name__)
@given(data=st.data())
@settings(max_examples=15)
def test_every_record_that_can_be_stored_is_valid(cls, data, record_strategy):
    stored = json.loads(records.to_json(data.draw(record_strategy(cls))))
    validator(cls.__name__).validate(stored)


@pytest.mark.parametrize("cls", RECORDS, ids=lambda c: c.__name__)
def test_broken_records_are_not_valid(cls, smallest_record):
    good = json.loads(records.to_json(smallest_record(cls)))
    check = validator(cls.__name__)
    check.validate(good)
    broken = [{**good, "schema": good["schema"] + 1}, {**good, "record": "Nothing"}, {**good, "surplus": 1}]
    broken += [{k: v for k, v in good.items() if k != name} for name in SCHEMAS[f"{cls.__name__}.json"]["required"]]
    broken += [{**good, name: ["of", {"another": "type"}]} for name in good if name not in ("record", "schema")]
    assert [b for b in broken if check.is_valid(b)] == []


def test_field_docs_reach_the_schema():
    assert schemas.field_docs(records.Segment)["ids_T"] == "int32 token ids, prompt and sampled alike."
    assert "description" in SCHEMAS["Segment.json"]["properties"]["ids_T"]
    assert "lineage" not in schemas.field_docs(records.Version)


@pytest.mark.parametrize("kind", events.KINDS)
def test_events_are_valid_and_broken_ones_are_not(kind, tmp_path, event_fields):
    with events.EventLog(tmp_path / "events.jsonl") as log:
        log.write(kind, **event_fields(kind), more="fields are allowed")
    event = json.loads((tmp_path / "events.jsonl").read_text())
    check = validator("event")
    check.validate(event)
    assert not check.is_valid({**event, "kind": "nothing"})
    for name in ("n", "t", "kind", *events.KINDS[kind]):
        assert not check.is_valid({k: v for k, v in event.items() if k != name})
    assert not check.is_valid({**event, "n": -1})


REPORT = {
    "recipe": "recipes/nano/run.toml",
    "seed": 0,
    "wall_s": 240.5,
    "eval": [{"step": 0, "suite": "heldout", "n": 200, "pass_at_1": 0.4, "low": 0.33, "high": 0.47}],
    "rollouts": 1024,
    "failures": {"sandbox": 1},
    "time": {"train": 100.0, "wait_groups": 140.5},
    "versions": {"etude": "0.1.0"},
}


def test_a_report_is_valid_and_broken_ones_are_not():
    check = validator("report")
    check.validate(REPORT)
    for name in REPORT:
        assert not check.is_valid({k: v for k, v in REPORT.items() if k != name})
    assert not check.is_valid({**REPORT, "eval": [{"step": 0}]})
    assert not check.is_valid({**REPORT, "time": {"train": -1.0}})
    assert not check.is_valid({**REPORT, "eval": [{**REPORT["eval"][0], "pass_at_1": 1.2}]})


def result_problem(path: Path) -> str:
    """What is wrong with a committed result, or nothing: a benchmark's object or the report of a run."""
    data = json.loads(path.read_text())
    kind = "bench" if "bench" in data else "report"
    errors = [error.message for error in validator(kind).iter_errors(data)]
    if kind == "bench" and not errors and path.name != f"{data['bench']}.{data['device']}.json":
        errors = [f"holds {data['bench']} on {data['device']}"]
    return f"{path.name}: {errors[0]}" if errors else ""


def test_committed_results_are_valid():
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert [text for path in files if (text := result_problem(path))] == []


def test_a_broken_result_is_found(tmp_path):
    row = {"name": "a", "unit": "ms", "ours": 1.0, "peer": None, "peer_name": None, "ratio": None}
    result = {"bench": "x", "device": "cpu", "rows": [row], "machine": {}, "versions": {}}
    path = tmp_path / "x.cpu.json"
    for data, says in ((result, ""), ({**result, "rows": []}, "x.cpu.json: "), ({**result, "bench": "y"}, "holds y on cpu")):
        path.write_text(json.dumps(data))
        assert says in result_problem(path)
        assert bool(result_problem(path)) == bool(says)
    path.write_text(json.dumps({"recipe": "x"}))
    assert "required property" in result_problem(path)


def test_writing_removes_what_nothing_stands_behind(tmp_path):
    (tmp_path / "Gone.json").write_text("{}")
    written = schemas.write(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(SCHEMAS) == [p.name for p in written]
