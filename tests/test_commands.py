"""The commands on the shipped policy, as a user runs them; every `--json` output against its schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from etude import launch
from etude.errors import UserError
from etude.evals.report import write_report
from etude.evals.suite import Suite, evaluate
from etude.events import read_events
from etude.rollout.check import check_run
from etude.sandbox.probe import probe
from etude.tasks.source import heldout_tasks

pytestmark = pytest.mark.skipif(not probe().works, reason="needs user namespaces; see `etude doctor`")
SCHEMAS = Path(__file__).resolve().parents[1] / "docs" / "schemas"


def valid(data: Any, schema: str) -> Any:
    jsonschema.validate(data, json.loads((SCHEMAS / f"{schema}.json").read_text()))
    return data


def last_line(text: str) -> Any:
    return json.loads(text.strip().splitlines()[-1])


def test_tasks_are_made_checked_and_used_as_a_suite(tmp_path, capsys):
    folder = tmp_path / "tasks"
    assert launch.tasks_make(sources=["katas:heldout"], out=folder, count=6, seed=4, json=True) == 0
    assert valid(last_line(capsys.readouterr().out), "tasks_made")["counts"] == {"written": 6, "rejected": 0}
    assert launch.tasks_check(folder=folder, json=True) == 0
    assert valid(last_line(capsys.readouterr().out), "tasks")["counts"]["accepted"] == 6
    assert launch.evaluate(suite=str(folder), model="nano", out=tmp_path / "eval", json=True) == 0
    answer = valid(last_line(capsys.readouterr().out), "eval")
    assert answer["n"] == 6
    assert answer == json.loads((tmp_path / "eval" / "eval.json").read_text())


def test_a_damaged_task_is_counted_and_the_others_are_judged(tmp_path, capsys):
    launch.tasks_make(sources=["katas"], out=tmp_path, count=2, seed=0)
    first, _ = sorted(tmp_path.iterdir())
    (first / "task.json").write_text("{")
    assert launch.tasks_check(folder=tmp_path, json=True) == 1
    answer = last_line(capsys.readouterr().out)
    assert answer["counts"] == {"tasks": 2, "accepted": 1, "rejected": 1}
    assert answer["reasons"] == {"unreadable": 1}


def test_a_package_and_katas_in_one_command(tmp_path, capsys):
    project = tmp_path / "project"
    (project / "shop").mkdir(parents=True)
    (project / "shop" / "__init__.py").write_text(
        "def clip(x, low, high):\n    if x < low:\n        return low\n    if x > high:\n        return high\n    return x\n"
    )
    tests = ["clip(1, 2, 3) == 2", "clip(9, 2, 3) == 3", *["True"] * 5]
    lines = [f"def test_{i}():\n    assert {'shop.' if 'clip' in each else ''}{each}\n" for i, each in enumerate(tests)]
    (project / "test_shop.py").write_text("\n\n".join(["import shop", *lines]))
    (tmp_path / "empty").mkdir()
    words = ["katas", str(project), str(tmp_path / "empty")]
    assert launch.tasks_make(sources=words, out=tmp_path / "tasks", count=1, seed=0, json=True) == 0
    answer = valid(last_line(capsys.readouterr().out), "tasks_made")
    assert answer["counts"]["written"] == 2
    assert answer["counts"]["packages_skipped"] == 1
    assert answer["reasons"]["package: not_python"] == 1
    assert [row["accepted"] for row in answer["packages"]] == [1, 0]
    assert answer["core_s"] > 0
    assert launch.tasks_check(folder=tmp_path / "tasks", json=True) == 0
    assert valid(last_line(capsys.readouterr().out), "tasks")["counts"] == {"tasks": 2, "accepted": 2, "rejected": 0}


def test_folders_that_hold_no_task_are_errors(tmp_path):
    with pytest.raises(UserError, match="no folder"):
        launch.tasks_check(folder=tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no task folder"):
        launch.tasks_check(folder=tmp_path)
    with pytest.raises(UserError, match="holds no task folder"):
        launch.evaluate(suite=str(tmp_path), model="nano", out=tmp_path / "eval")
    with pytest.raises(UserError, match="no task source 'kata'"):
        launch.tasks_make(sources=["kata"], out=tmp_path, count=1, seed=0)


def test_generate_answers_in_the_chat_format(capsys):
    task = heldout_tasks(1)[0]
    assert launch.generate(model="nano", prompt=task.prompt, max_tokens=64, temperature=0.0) == 0
    assert capsys.readouterr().out.startswith('<call name="')


def test_a_suite_that_nobody_could_run_is_an_error_and_no_score():
    from etude.errors import InfraError

    async def broken(task, *, group, member, seed):
        raise InfraError("the engine process ended")

    import asyncio

    with pytest.raises(InfraError, match="the engine process ended"):
        asyncio.run(evaluate(Suite(name="heldout", tasks=tuple(heldout_tasks(2))), broken))


@pytest.mark.slow
def test_the_demo_trains_measures_shows_and_names_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["loop.steps=2", "loop.groups_per_step=3", "eval.heldout=16", "eval.unseen=4"]
    assert launch.demo(seed=0, name="tiny", overrides=small) == 0
    out = capsys.readouterr().out
    assert out.strip().splitlines()[-1] == "runs/tiny"
    assert "pass@1" in out
    run = tmp_path / "runs" / "tiny"
    report = valid(json.loads((run / "report.json").read_text()), "report")
    assert [(e["suite"], e["step"], e["n"]) for e in report["eval"]] == [
        ("heldout", 0, 16),
        ("unseen", 0, 4),
        ("heldout", 2, 16),
        ("unseen", 2, 4),
    ]
    assert report["rollouts"] == 2 * 3 * 8
    assert abs(sum(report["time"].values()) - report["wall_s"]) < 0.01
    event_schema = json.loads((SCHEMAS / "event.json").read_text())
    for event in read_events(run / "events.jsonl"):
        jsonschema.validate(event, event_schema)
    assert check_run(run).ok
    assert write_report(run) == report


@pytest.mark.slow
def test_a_live_field_may_change_at_a_resume_and_the_run_keeps_both_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["loop.steps=1", "loop.groups_per_step=2", "loop.group_size=2", "eval.heldout=0", "eval.unseen=0"]
    launch.train(recipe="nano", overrides=small, name="live")
    run = tmp_path / "runs" / "live"
    with pytest.raises(UserError, match=r"loop\.steps cannot change"):
        launch.train(recipe=None, resume=str(run), overrides=["loop.steps=2"])
    launch.train(recipe=None, resume=str(run), overrides=["rewards.tool_error=0.5"])
    assert json.loads((run / "config.0.json").read_text())["rewards"]["tool_error"] != 0.5
    assert json.loads((run / "config.json").read_text())["rewards"]["tool_error"] == 0.5
    revised = [e for e in read_events(run / "events.jsonl") if e["kind"] == "config_revision"]
    assert [(e["revision"], e["changed"]) for e in revised] == [(1, {"rewards.tool_error": 0.5})]
    assert check_run(run).ok
