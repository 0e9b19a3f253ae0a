"""Reports from events: the fixed JSON, the sums that must hold, and what people read."""

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import jsonschema
import pytest

from etude.errors import RecordError
from etude.evals.plot import Point, Series, braille, sparkline, svg
from etude.evals.report import as_terminal, pooled, read_facts, time_parts, write_report
from etude.evals.statistics import paired, wilson

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


class Log:
    """Writes event lines with chosen times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []

    def __call__(self, t: float, kind: str, **fields) -> None:
        self.lines.append(json.dumps({"n": len(self.lines), "t": t, "kind": kind, **fields}))

    def close(self) -> Path:
        (self.folder / "events.jsonl").write_text("".join(line + "\n" for line in self.lines))
        return self.folder


def evaluation(log: Log, t: float, step: int, suite: str, solved: list, **detail) -> None:
    known = [s for s in solved if s is not None]
    low, high = wilson(sum(known), len(known))
    rate = sum(known) / len(known)
    detail = {"solved": solved, "turns": 4.0 - step / 10, "tokens": 300.0, "tool_error_rate": 0.2, **detail}
    log(t, "eval", step=step, suite=suite, tasks=len(known), pass_at_1=rate, low=low, high=high, detail=detail)


def rollout(log: Log, t: float, admission: int, member: int, **fields) -> None:
    values = {"trajectory": f"t{admission}", "stop": "done", "reward": 1.0, "solved": True, "oldest": 0, "tokens": 100, "turns": 3}
    log(t, "rollout_ended", admission=admission, member=member, **{**values, "seconds": 2.0, "calls": 5, "tool_errors": 1, **fields})


def run(folder: Path, *, ledger: dict | None = None, name: str = "r") -> Path:
    """Two steps over 40 seconds: evaluation, rollouts, training, evaluation."""
    log = Log(folder)
    log(0.0, "run_started", name=name, recipe="recipes/nano", seed=3, schedule="free", lineage=0, versions={"etude": "0.1.0"})
    evaluation(log, 8.0, 0, "heldout", [1, 0, 0, 0, 1, 0, 0, 0, None, 0] * 20)
    evaluation(log, 10.0, 0, "unseen", [0, 1] * 20)
    for step in range(2):
        t = 10.0 + 10 * step
        log(t, "group_admitted", admission=step, task="k", version="v0.0")
        rollout(log, t + 4, step, 0)
        rollout(log, t + 6, step, 1, stop="out_of_turns", solved=False, seconds=5.0)
        log(t + 6, "rollout_failed", admission=step, member=2, where="SandboxError", error="died")
        log(t + 6, "group_ready", admission=step, members=2, dropped=1, oldest=0)
        log(t + 9, "group_trained", admission=step, step=step, lineage=0, staleness=step)
        metrics = {"dlogp_mean": 0.001 * (step + 1), "dlogp_max": 0.5, "ess": 0.9, "loss": 1.0}
        log(t + 9, "step", step=step, version=f"v0.{step + 1}", metrics=metrics, seconds={"forward": 1.5, "backward": 1.5})
        log(t + 9.5, "published", step=step, version=f"v0.{step + 1}", hash="h", bytes=1_000_000, seconds=0.5)
        log(t + 10, "served", step=step, version=f"v0.{step + 1}", hash="h", pause_s=0.5)
    log(30.0, "finding", trajectory="t0", rule="reads_cache", action="note", evidence="x")
    evaluation(log, 38.0, 2, "heldout", [1, 1, 0, 1, 1, 0, 1, 0, 1, 0] * 20, seconds=8.0)
    evaluation(log, 39.0, 2, "unseen", [1, 1, 0, 1] * 10, seconds=1.0)
    log(40.0, "run_ended", outcome="done", detail="", **({"time": ledger, "cpu_s": 60.0} if ledger else {}))
    return log.close()


def test_report_json_is_the_fixed_interface(tmp_path):
    report = write_report(run(tmp_path))
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert list(report) == ["recipe", "seed", "wall_s", "eval", "rollouts", "failures", "time", "versions"]
    assert report["recipe"] == "recipes/nano"
    assert report["seed"] == 3
    assert report["rollouts"] == 4
    assert report["failures"] == {"SandboxError": 2}
    assert report["versions"] == {"etude": "0.1.0"}
    assert [(e["step"], e["suite"], e["n"]) for e in report["eval"]] == [
        (0, "heldout", 180),
        (0, "unseen", 40),
        (2, "heldout", 200),
        (2, "unseen", 40),
    ]
    assert set(report["eval"][0]) == {"step", "suite", "n", "pass_at_1", "low", "high"}
    if (SCHEMAS / "report.json").exists():
        jsonschema.validate(report, json.loads((SCHEMAS / "report.json").read_text()))


def test_time_sums_to_the_wall_clock_from_spans(tmp_path):
    report = write_report(run(tmp_path))
    assert report["wall_s"] == 40.0
    assert math.fsum(report["time"].values()) == pytest.approx(40.0)
    expected = {"train": 6.0, "publish": 1.0, "swap": 1.0, "evaluate": 9.0, "wait_groups": 10.0, "start": 10.0, "other": 3.0}
    assert report["time"] == pytest.approx(expected)


def test_time_sums_to_the_wall_clock_from_the_loops_own_ledger(tmp_path):
    report = write_report(run(tmp_path, ledger={"wait_groups": 20.0, "train": 12.5}))
    assert report["time"] == {"train": 12.5, "wait_groups": 20.0, "other": 7.5}
    assert "0.13 (CPU time of all processes, evaluation included)" in (tmp_path / "report.md").read_text()


def test_waiting_events_of_the_loop_are_a_ledger_too(tmp_path):
    log = Log(tmp_path)
    log(0.0, "run_started", name="r", recipe="x", seed=0, schedule="free", lineage=0, versions={})
    log(5.0, "waiting", part="loop", what="train", seconds=2.0)
    log(6.0, "waiting", part="loop", what="train", seconds=1.0)
    log(7.0, "waiting", part="engine", what="requests", seconds=4.0)
    log(10.0, "run_ended", outcome="done", detail="")
    report = write_report(log.close())
    assert report["time"] == {"train": 3.0, "other": 7.0}
    assert "engine waited for requests 4.0 s" in (tmp_path / "report.md").read_text()


def test_a_ledger_larger_than_the_clock_is_the_clock(tmp_path):
    log = Log(tmp_path)
    log(0, "run_started", name="r", recipe="x", seed=0, schedule="lockstep", lineage=0, versions={})
    log(0, "run_ended", outcome="done", detail="", time={"train": 2.0})
    report = write_report(log.close())
    assert report["wall_s"] == 2.0
    assert report["time"] == {"train": 2.0, "other": 0.0}


def test_a_killed_life_is_charged_from_its_spans_and_its_void_steps_count_once(tmp_path):
    log = Log(tmp_path)
    log(0.0, "run_started", name="r", recipe="x", seed=0, schedule="free", lineage=0, versions={})
    step = {"version": "v", "metrics": {}, "seconds": 1.0}
    for n in range(3):
        log(n + 1.0, "group_trained", admission=n, step=n, lineage=0, staleness=3)
        log(n + 1.0, "step", step=n, **step)
    evaluation(log, 3.5, 3, "heldout", [0, 0, 0, 0])
    log(4.0, "run_resumed", from_step=1, lineage=1)
    for n in range(1, 3):
        log(n + 4.0, "group_trained", admission=n, step=n, lineage=1, staleness=0)
        log(n + 4.0, "step", step=n, **step)
    evaluation(log, 6.5, 3, "heldout", [1, 1, 0, 0])
    log(9.0, "run_ended", outcome="done", detail="", time={"train": 2.0, "wait_groups": 3.0})
    report = write_report(log.close())
    assert report["time"] == pytest.approx({"train": 5.0, "wait_groups": 3.0, "other": 1.0})
    assert [e["pass_at_1"] for e in report["eval"]] == [0.5]
    facts = read_facts(tmp_path)
    assert len(facts.steps) == 3
    assert facts.staleness == {0: 3, 1: 0, 2: 0}
    assert "resumed 1 times" in (tmp_path / "report.md").read_text()


def test_alarms_are_told_with_their_remedy_and_void_ones_do_not_count(tmp_path):
    log = Log(tmp_path)
    log(0.0, "run_started", name="r", recipe="x", seed=0, schedule="free", lineage=0, versions={})

    def step(n, *values):
        log(1.0, "step", step=n, version="v", metrics={"ess": 0.5}, seconds=0.1)
        for value in values:
            log(1.0, "alarm", step=n, metric="ess", value=value, threshold=0.3, advice="slow down")

    step(0, 0.29)
    step(1, 0.1)
    log(2.0, "run_resumed", from_step=1, lineage=1)
    step(1)
    step(2, 0.21)
    step(3)
    log(9.0, "run_ended", outcome="done", detail="")
    write_report(log.close())
    text = (tmp_path / "report.md").read_text()
    assert "- Alarm: `ess` crossed 0.3 at 2 of 4 steps, last at step 2 with 0.21: slow down." in text
    write_report(run(tmp_path))
    assert "Alarm" not in (tmp_path / "report.md").read_text()


def test_report_md_says_what_a_reader_wants(tmp_path):
    write_report(run(tmp_path))
    text = (tmp_path / "report.md").read_text()
    solved = [1, 0, 0, 0, 1, 0, 0, 0, None, 0] * 20, [1, 1, 0, 1, 1, 0, 1, 0, 1, 0] * 20
    change = paired(*solved)
    assert change.n == 180
    assert f"{change.value:+.3f} [{change.low:+.3f}, {change.high:+.3f}]" in text
    low, high = wilson(40, 180)
    assert f"0.222 [{low:.3f}, {high:.3f}]" in text
    assert text.index("| heldout |") < text.index("| unseen |")
    assert "20.0 % -> 20.0 %" in text
    assert "4.0 -> 3.8" in text
    assert "at most" in text
    assert "mean 0.50, largest 1 (groups by age: 0: 1, 1: 1)" in text
    assert "| dlogp_mean | 0.001 | 0.002 | 0.0015 | 0.002 |" in text
    assert "forward 3.0 s, backward 3.0 s" in text
    assert "| **total** | 40.0 | 100 % |" in text
    assert "reads_cache (note) 1" in text
    assert "![pass@1 over steps](plot.svg)" in text
    assert text.isascii()


def test_the_same_events_give_the_same_bytes(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for name in ("a", "b"):
        write_report(run(tmp_path / name))
        write_report(tmp_path / name)
    for file in ("report.json", "report.md", "plot.svg"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["events.jsonl", "plot.svg", "report.json", "report.md"]


def test_several_attempts_a_task(tmp_path):
    log = Log(tmp_path)
    log(0.0, "run_started", name="r", recipe="x", seed=0, schedule="free", lineage=0, versions={})
    evaluation(log, 1.0, 0, "heldout", [1, 0, 0, 1] * 10, attempts=[[1, 0], [0, 0], [0, 1], [1, 1]] * 10)
    write_report(log.close())
    text = (tmp_path / "report.md").read_text()
    assert "| 0 | heldout | 2 | 0.500 [" in text
    assert "0.750 [" in text


def test_a_run_that_has_hardly_begun(tmp_path):
    log = Log(tmp_path)
    log(0.0, "run_started", name="r", recipe="x", seed=0, schedule="free", lineage=0, versions={})
    report = write_report(log.close())
    assert report["eval"] == []
    assert report["time"] == {"other": 0.0}
    assert "No evaluation was recorded" in (tmp_path / "report.md").read_text()
    assert not (tmp_path / "plot.svg").exists()
    assert as_terminal(read_facts(tmp_path)) == ""


def test_bad_folders(tmp_path):
    with pytest.raises(RecordError, match="no event log"):
        write_report(tmp_path)
    log = Log(tmp_path)
    log(0.0, "run_started", name="r", recipe="", seed=0, schedule="free", lineage=0, versions={})
    log.close()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RecordError, match="not JSON"):
        write_report(tmp_path)
    (tmp_path / "config.json").write_text('{"recipe": "recipes/x", "seed": 5}')
    assert write_report(tmp_path)["recipe"] == "recipes/x"


def test_the_terminal_report_shows_both_suites(tmp_path):
    text = as_terminal(read_facts(run(tmp_path)))
    assert "heldout: pass@1 0.222" in text
    assert "unseen: pass@1 0.500" in text
    assert "paired difference +0.250" in text
    assert any("\u2801" <= c <= "\u28ff" for c in text)


def test_pooling_over_runs_pairs_within_each(tmp_path):
    folders = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        folders.append(run(tmp_path / name))
    got = pooled(folders, "unseen")
    assert got.n == 120
    assert got.value == pytest.approx(0.25)
    one = pooled(folders[:1], "unseen")
    assert got.high - got.low < one.high - one.low
    with pytest.raises(RecordError, match="0 evaluations of 'other'"):
        pooled(folders, "other")


def test_time_parts_never_lose_or_invent_a_second(tmp_path):
    """Spans that overlap in every way still give a partition."""
    log = Log(tmp_path)
    log(0.0, "run_started", name="r", recipe="x", seed=0, schedule="free", lineage=0, versions={})
    for i in range(30):
        rollout(log, 1.0 + 0.37 * i, i, 0, seconds=0.9 + (i % 5))
        if i % 4 == 0:
            log(1.0 + 0.37 * i, "step", step=i, version="v", metrics={}, seconds={"a": 0.8, "b": 0.1})
    facts = read_facts(log.close())
    wall, parts = time_parts(facts)
    assert wall == pytest.approx(1.0 + 0.37 * 29)
    assert math.fsum(parts.values()) == pytest.approx(wall)
    assert min(parts.values()) >= 0
    assert parts["train"] == pytest.approx(8 * 0.9)


# -- plots ---------------------------------------------------------------------------------------------


def line(name: str, ys: list[float], bars: bool = True) -> Series:
    return Series(
        name=name, points=tuple(Point(x=i, y=y, low=y - 0.1 if bars else None, high=y + 0.1 if bars else None) for i, y in enumerate(ys))
    )


def test_sparkline():
    assert sparkline([0, 1]) == "\u2581\u2588"
    assert sparkline([0.5, float("nan"), 0.5]) == "\u2585 \u2585"
    assert sparkline([0.0, 0.5, 1.0, 2.0, -1.0], low=0, high=1) == "\u2581\u2585\u2588\u2588\u2581"
    assert sparkline([]) == ""


def test_braille_puts_high_values_high():
    text = braille([line("a", [0.0, 1.0])], width=10, height=4, y_range=(0, 1))
    rows = text.splitlines()
    assert len(rows) == 5
    assert rows[0].startswith("1 ")
    assert rows[3].startswith("0 ")
    assert rows[0][-1] != "\u2800"
    assert rows[0][2] == "\u2800"
    assert rows[3][2] != "\u2800"
    assert braille([line("a", [0.5])], width=4, height=3)
    assert braille([], width=4, height=3)


def test_svg_is_xml_with_a_line_and_a_bar_for_each_series():
    series = [line("held < out", [0.2, 0.4, 0.6]), line("unseen", [0.1, 0.2, 0.3]), line("bare", [0.9], bars=False)]
    text = svg(series, title="a & b", x_label="steps", y_label="pass@1", y_range=(0, 1))
    root = ET.fromstring(text)
    tag = "{http://www.w3.org/2000/svg}"
    lines = root.findall(f"{tag}polyline")
    assert len(lines) == 2
    assert len(root.findall(f"{tag}circle")) == 7
    words = [e.text for e in root.iter(f"{tag}text")]
    assert {"held < out", "unseen", "bare", "a & b", "steps", "pass@1"} <= set(words)
    ys = [float(p.split(",")[1]) for p in lines[0].get("points").split()]
    assert ys == sorted(ys, reverse=True)
    assert all(0 <= float(c.get("cx")) <= 640 and 0 <= float(c.get("cy")) <= 360 for c in root.iter(f"{tag}circle"))
    assert text == svg(series, title="a & b", x_label="steps", y_label="pass@1", y_range=(0, 1))
    assert ET.fromstring(svg([line("flat", [0.5])]))
    assert ET.fromstring(svg([]))
