"""What a step leaves in the event log."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from etude.events import read_events
from etude.records import Alarm, Manifest, StepReport, Version
from etude.rollout.recorder import Recorder

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "event.json"
NOW = Version(lineage=0, ordinal=1, hash="h")


def test_alarms_follow_their_step_as_events_of_their_own(tmp_path):
    alarms = (
        Alarm(metric="ess", value=0.2, threshold=0.3, advice="lower the learning rate"),
        Alarm(metric="f2", value=0.5, threshold=0.1, advice="look at stale_f2"),
    )
    report = StepReport(step=1, version=NOW, metrics={"ess": 0.2, "f2": 0.5, "a number of another trainer": 1.0}, alarms=alarms)
    seen = []
    recorder = Recorder(tmp_path, watch=seen.append)
    for one in (report, report.replace(alarms=())):
        recorder.step(0, one, Manifest(lineage=0, base=None, version=NOW, tensors=()), NOW, [])
    recorder.close()
    events = list(read_events(tmp_path / "events.jsonl"))
    assert [e["kind"] for e in events] == ["step", "alarm", "alarm", "published", "served", "step", "published", "served"]
    assert {k: events[1][k] for k in ("step", "metric", "value", "threshold", "advice")} == {
        "step": 0,
        "metric": "ess",
        "value": 0.2,
        "threshold": 0.3,
        "advice": "lower the learning rate",
    }
    check = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    for event in events:
        check.validate(event)
    assert not check.is_valid({**events[0], "metrics": {"ess": "low"}})
    assert [e["kind"] for e in seen] == [e["kind"] for e in events]
