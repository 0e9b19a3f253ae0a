"""Records: what is stored comes back the same, and what is not ours is refused with the reason."""

from __future__ import annotations

import dataclasses
import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from etude import records
from etude.errors import RecordError
from etude.records import Batch, Graded, Grader, Manifest, Record, Sampling, Segment, ToolCall, ToolError, Trajectory, Version
from etude.schemas import record_classes

ALL = record_classes()
V = Version(lineage=0, ordinal=3, hash="ab" * 16)


def same(a, b) -> bool:
    """Value equality, arrays and nested records included; True is not 1 and 1 is not 1.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Record):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def test_the_list_of_records_is_whole():
    assert {"Version", "Task", "Segment", "Trajectory", "Group", "Batch", "Manifest", "Verdict", "Feedback"} <= {c.__name__ for c in ALL}


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
@given(data=st.data())
@settings(max_examples=25)
def test_a_record_survives_storage(cls, data, record_strategy):
    value = data.draw(record_strategy(cls))
    text = records.to_json(value)
    back = records.from_json(text, cls)
    assert same(back, value)
    assert records.to_json(back) == text
    assert same(records.from_dict(records.to_dict(value)), value)


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_another_schema_version_is_refused(cls, smallest_record):
    data = records.to_dict(smallest_record(cls))
    for stored in (cls.SCHEMA + 1, cls.SCHEMA - 1, str(cls.SCHEMA), None):
        with pytest.raises(RecordError, match=rf"{cls.__name__} was stored with schema .*this etude reads schema {cls.SCHEMA}; "):
            records.from_dict({**data, "schema": stored})


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_an_unknown_field_names_the_nearest(cls, smallest_record):
    data = records.to_dict(smallest_record(cls))
    for f in dataclasses.fields(cls):
        with pytest.raises(RecordError, match=f"{cls.__name__} has no field '{f.name}q'; did you mean '"):
            records.from_dict({**data, f.name + "q": 1})


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_a_missing_field_is_named(cls, smallest_record):
    data = records.to_dict(smallest_record(cls))
    for f in dataclasses.fields(cls):
        without = {k: v for k, v in data.items() if k != f.name}
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            with pytest.raises(RecordError, match=f.name):
                records.from_dict(without)
        else:
            assert isinstance(records.from_dict(without), cls)


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
@given(data=st.data())
@settings(max_examples=25)
def test_a_mangled_record_is_refused_as_a_record_error_or_read(cls, data, smallest_record):
    """Whatever stands in a field, reading ends in a record or in a RecordError, never in another exception."""
    junk = st.sampled_from([None, True, -1, 0.5, "x", [], [1], ["a", "b", "c"], {}, {"dtype": "<i4", "shape": [1], "base64": "!"}])
    stored = records.to_dict(smallest_record(cls))
    name = data.draw(st.sampled_from(sorted(stored)))
    try:
        records.from_dict({**stored, name: data.draw(junk)})
    except RecordError:
        pass


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "not JSON at character 1"),
        ("[]", "expected a stored record"),
        ('{"a": 1}', "expected a stored record"),
        ('{"record": "Vesrion", "schema": 1}', "unknown record 'Vesrion'; did you mean 'Version'"),
        ('{"record": "Sampling", "schema": 1, "temperature": "hot"}', "Sampling.temperature should be float, got str 'hot'"),
        ('{"record": "Sampling", "schema": 1, "seed": true}', "Sampling.seed should be int, got bool"),
        ('{"record": "Sampling", "schema": 1, "stop_ids": 3}', "Sampling.stop_ids should be a list"),
        ('{"record": "ToolCall", "schema": 1, "id": "a", "name": "b", "arguments": [1]}', "ToolCall.arguments"),
        ('{"record": "ToolCall", "schema": 1, "id": "a", "name": "b", "arguments": {}, "error": "bad_cal"}', "did you mean 'bad_call'"),
        ('{"record": "Grader", "schema": 1, "fail_to_pass": [], "pass_to_pass": [], "hidden": [["a", "b", "c"]]}', "Grader.hidden"),
    ],
)
def test_what_is_wrong_is_said(text, says):
    with pytest.raises(RecordError) as error:
        records.from_json(text)
    assert says in str(error.value)


def test_a_record_of_another_kind_is_refused():
    with pytest.raises(RecordError, match="expected a Task, found a Version"):
        records.from_json(records.to_json(V), records.Task)


def test_storage_is_stable():
    """Bytes that other runs and other machines have written: they may never change within a schema version."""
    assert records.to_json(V) == '{"hash":"abababababababababababababababab","lineage":0,"ordinal":3,"record":"Version","schema":1}'
    array = records.to_json(np.array([1, 2], dtype=np.int16))
    assert array == '{"base64":"AQACAA==","dtype":"<i2","shape":[2]}'
    assert records.content_hash("a", 1, V) == records.content_hash("a", 1, V) != records.content_hash("a", 2, V)
    assert records.content_hash("task", 7) == "d1a7722bb20de3302d590fb166dcc139"
    assert records.seed_for(1, "rollout", 0, 2) == 816725400584769156
    assert 0 <= records.seed_for() < 2**63


def test_arrays_are_read_only_and_the_callers_stay_writable():
    ids = np.zeros(3, dtype=np.int32)
    segment = make_segment(ids)
    with pytest.raises(ValueError, match="read-only"):
        segment.ids_T[0] = 1
    ids[0] = 5  # the caller's own array stays as it was
    assert ids.flags.writeable
    back = records.from_json(records.to_json(segment), Segment)
    assert not back.ids_T.flags.writeable


def make_segment(ids: np.ndarray, ordinals: tuple[int, ...] = (3,)) -> Segment:
    n = len(ids)
    return Segment(
        ids_T=ids,
        sampled_T=np.array([i > 0 for i in range(n)]),
        logprob_T=np.zeros(n, dtype=np.float32),
        logprob_t1_T=np.zeros(n, dtype=np.float32),
        version_T=np.zeros(n, dtype=np.int16),
        message_T=np.zeros(n, dtype=np.int32),
        thinking_T=np.zeros(n, dtype=bool),
        versions=tuple(Version(lineage=0, ordinal=o, hash="") for o in ordinals),
        sampling=Sampling(),
    )


def make_trajectory(*segments: Segment) -> Trajectory:
    stop = records.StopReason.DONE
    return Trajectory(id="t", task_id="k", task_hash="h", group=0, member=0, seed=0, segments=segments, messages=(), stop=stop)


def test_records_are_frozen_and_compare_by_identity():
    other = V.replace()
    assert other is not V
    assert other != V
    assert other.key == V.key
    with pytest.raises(dataclasses.FrozenInstanceError):
        V.ordinal = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        Version(0, 3, "ab")  # type: ignore[misc]
    assert V.replace(ordinal=4).key == (0, 4, V.hash)
    assert str(V) == "v0.3-abababab"


def test_what_a_trajectory_and_a_group_know_of_themselves():
    ids = np.arange(4, dtype=np.int32)
    trajectory = make_trajectory(make_segment(ids, (5, 7)), make_segment(ids, (4,)))
    assert trajectory.oldest_ordinal == 4
    assert trajectory.sampled_tokens == 6
    assert make_trajectory().oldest_ordinal is None
    graded = Graded(trajectory=trajectory, parts={"tests": 1.0, "length": -0.25})
    assert graded.reward == 0.75
    group = records.Group(admission=0, task_id="k", admitted_at=V, members=(graded, Graded(trajectory=make_trajectory(), parts={})))
    assert group.oldest_ordinal == 4


def test_enums_are_stored_by_value_and_come_back_as_enums():
    call = ToolCall(id="1", name="x", arguments={"a": "b"}, error=ToolError.BAD_CALL)
    assert json.loads(records.to_json(call))["error"] == "bad_call"
    assert records.from_json(records.to_json(call), ToolCall).error is ToolError.BAD_CALL


def test_numpy_scalars_are_stored_as_plain_numbers(smallest_record):
    manifest = smallest_record(Manifest).replace(bytes=np.int64(7))
    assert json.loads(records.to_json(manifest))["bytes"] == 7


def test_something_that_cannot_be_stored_is_refused(smallest_record):
    with pytest.raises(TypeError, match="cannot store a set"):
        records.to_json(smallest_record(Batch).replace(teacher={"a": {1}}))


def test_a_field_that_was_not_stored_has_its_default():
    grader = records.from_json('{"record":"Grader","schema":1,"fail_to_pass":["a"],"pass_to_pass":[]}', Grader)
    assert grader.command == ("pytest",)
    assert "tests/*" in grader.protected
