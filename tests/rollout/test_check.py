"""`etude check`: valid histories, with kills and resumes, pass; every planted violation is found and named."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import RecordError
from etude.events import EventLog
from etude.rollout.check import Violation, check_events, check_run

LIMIT, PER_STEP, MEMBERS, STEPS, EVERY = 2, 2, 3, 6, 2


class Killed(Exception):
    pass


class Simulation:
    """A loop in the order of events of the real one: slots, groups in admission order, checkpoints, kills, resumes."""

    def __init__(self, seed: int, *, schedule: str = "free", list_unfinished: bool = False) -> None:
        self.rng = random.Random(seed)
        self.schedule = schedule
        self.list_unfinished = list_unfinished
        self.events: list[dict] = []
        self.lineage = 0
        self.disk: dict | None = None
        self.die_at: int | None = None

    def log(self, kind: str, **fields) -> None:
        self.maybe_die()
        self.events.append({"n": len(self.events), "t": 0.0, "kind": kind, **fields})

    def maybe_die(self) -> None:
        if self.die_at is not None and len(self.events) >= self.die_at:
            raise Killed

    def run(self, kills: list[int]) -> list[dict]:
        """Each kill is a number of events after which the process dies; the last life runs to the end."""
        self.log("run_started", name="r", recipe="x", seed=0, schedule="free", lineage=0, versions={})
        state = {"step": 0, "next": 0, "trained": 0, "again": [], "ready": {}}
        for extra in [*kills, None]:
            self.die_at = None if extra is None else len(self.events) + extra
            try:
                self.live(state)
                return self.events
            except Killed:
                self.die_at = None
                state = json.loads(json.dumps(self.disk)) if self.disk else {"step": 0, "next": 0, "trained": 0, "again": [], "ready": {}}
                state["ready"] = {int(a): g for a, g in state["ready"].items()}
                self.lineage += 1
                self.log("run_resumed", from_step=state["step"], lineage=self.lineage)
        raise AssertionError("the last life has no end")

    def live(self, state: dict) -> None:
        self.next, self.trained, self.released = state["next"], state["trained"], state["trained"]
        self.step, self.ready, self.again = state["step"], state["ready"], list(state["again"])
        self.rolling: dict[int, dict] = {}
        for step in range(self.step, STEPS):
            self.step = step
            wanted = range(self.trained, self.trained + PER_STEP)
            while not all(a in self.ready for a in wanted):
                self.roll()
            for _ in range(self.rng.randint(0, 6)):
                self.roll()
            version = f"v{self.lineage}.{step + 1}"
            for a in wanted:
                oldest = self.ready[a]["oldest"]
                self.log("group_trained", admission=a, step=step, lineage=self.lineage, staleness=0 if oldest is None else step - oldest)
            self.log("step", step=step, version=version, metrics={}, seconds={})
            self.log("published", step=step, version=version, hash=f"h{self.lineage}.{step}", bytes=1, seconds=0.1)
            self.log("served", step=step, version=version, hash=f"h{self.lineage}.{step}", pause_s=0.1)
            for a in wanted:
                del self.ready[a]
            self.trained += PER_STEP
            self.step = step + 1
            if (step + 1) % EVERY == 0 or step + 1 == STEPS:
                self.checkpoint(step + 1)
            self.released = self.trained
        self.log("run_ended", outcome="done", detail="")

    def checkpoint(self, step: int) -> None:
        for _ in range(self.rng.randint(0, 3)):
            self.roll()
        state = {"step": step, "next": self.next, "trained": self.trained, "again": sorted(self.rolling) + self.again}
        snapshot = json.loads(json.dumps(state | {"ready": self.ready}))
        unfinished = sorted([*self.rolling, *self.again, *self.ready])
        if not self.list_unfinished:
            unfinished = len(unfinished)
        self.maybe_die()
        self.disk = snapshot
        self.log("checkpoint", step=step, path=f"step-{step}", unfinished=unfinished)

    def roll(self) -> None:
        """One thing happens to the groups: an admission, or the end of one rollout."""
        can_admit = self.again or self.next < min(self.released + (LIMIT + 1) * PER_STEP, STEPS * PER_STEP)
        if can_admit and (not self.rolling or self.rng.random() < 0.3):
            if self.again:
                a = self.again.pop(0)
            else:
                a, self.next = self.next, self.next + 1
            self.rolling[a] = {"left": list(range(MEMBERS)), "oldest": None, "members": 0, "dropped": 0, "start": self.step}
            self.log("group_admitted", admission=a, task="t", version=f"v{self.step}")
        elif self.rolling:
            self.end_rollout(self.rng.choice(sorted(self.rolling)))

    def end_rollout(self, a: int) -> None:
        g = self.rolling[a]
        member = g["left"].pop(self.rng.randrange(len(g["left"])))
        if self.rng.random() < 0.15:
            g["dropped"] += 1
            self.log("rollout_failed", admission=a, member=member, where="SandboxError", error="died")
        else:
            oldest = self.rng.randint(g["start"], self.step)
            g["oldest"] = oldest if g["oldest"] is None else min(oldest, g["oldest"])
            g["members"] += 1
            fields = {"trajectory": f"t{a}", "stop": "done", "reward": 1.0, "solved": True, "tokens": 5, "turns": 1, "seconds": 0.1}
            self.log("rollout_ended", admission=a, member=member, oldest=oldest, **fields)
        if not g["left"]:
            self.log("group_ready", admission=a, members=g["members"], dropped=g["dropped"], oldest=g["oldest"])
            self.ready[a] = self.rolling.pop(a)


def history(seed: int = 0, kills: tuple[int, ...] = ()) -> list[dict]:
    return Simulation(seed).run(list(kills))


def renumber(events: list[dict]) -> list[dict]:
    return [e | {"n": n} for n, e in enumerate(events)]


def kinds(events: list[dict], limit: int = LIMIT) -> set[Violation]:
    return {p.kind for p in check_events(renumber(events), limit).problems}


def find(events: list[dict], kind: str, which: int = 0) -> int:
    return [i for i, e in enumerate(events) if e["kind"] == kind][which]


@given(seed=st.integers(0, 10**6), kills=st.lists(st.integers(0, 120), max_size=4), list_unfinished=st.booleans())
@settings(deadline=None, max_examples=250)
def test_valid_histories_pass(seed, kills, list_unfinished):
    events = Simulation(seed, list_unfinished=list_unfinished).run(kills)
    report = check_events(events, LIMIT)
    assert report.ok, report.text()
    assert report.counts["trained"] == report.counts["admitted"] == STEPS * PER_STEP
    assert report.counts["in_flight"] == 0
    assert sum(report.staleness.values()) == STEPS * PER_STEP
    assert max(report.staleness) <= LIMIT
    assert report.outcome == "done"


@given(seed=st.integers(0, 10**6), kills=st.lists(st.integers(0, 120), max_size=3), data=st.data())
@settings(deadline=None, max_examples=100)
def test_any_prefix_of_a_valid_history_passes(seed, kills, data):
    """A run that is still going, or was killed, has groups in flight and no problem."""
    events = history(seed, tuple(kills))
    cut = data.draw(st.integers(1, len(events)))
    ends = cut == len(events)
    report = check_events(events[:cut], LIMIT)
    assert report.ok, report.text()
    assert (report.outcome == "done") == ends


@given(seed=st.integers(0, 10**6), kills=st.lists(st.integers(0, 120), max_size=3), data=st.data())
@settings(deadline=None, max_examples=150)
def test_a_lost_or_repeated_line_about_a_group_is_found(seed, kills, data):
    """Without its training, readiness or rollout a group cannot add up; nor with two of them. Only void events may go."""
    events = history(seed, tuple(kills))
    last_resume = max((i for i, e in enumerate(events) if e["kind"] == "run_resumed"), default=0)
    matter = [
        i
        for i, e in enumerate(events)
        if i > last_resume and e["kind"] in ("group_trained", "group_ready", "group_admitted", "rollout_ended", "published")
    ]
    at = data.draw(st.sampled_from(matter))
    doubled = [*events[: at + 1], events[at], *events[at + 1 :]]
    if events[at]["kind"] != "published":
        assert kinds(doubled)
    resumed = any(e["kind"] == "run_resumed" for e in events)
    if not resumed:
        assert kinds([*events[:at], *events[at + 1 :]])


def test_a_lost_group():
    events = history()
    at = find(events, "group_trained", 3)
    lost = events[at]["admission"]
    report = check_events(renumber([*events[:at], *events[at + 1 :]]), LIMIT)
    assert [p.kind for p in report.problems] == [Violation.LOST]
    assert report.problems[0].admission == lost
    assert f"group {lost} was neither trained nor dropped" in report.text()
    running = [e for e in events if e["kind"] != "run_ended"]
    cut = find(running, "group_trained", 3)
    assert kinds([*running[:cut], *running[cut + 1 :]]) == {Violation.LOST}


def test_a_group_in_flight_at_the_end_of_a_finished_run_is_lost():
    events = [e for e in history() if e.get("admission") != STEPS * PER_STEP - 1 or e["kind"] == "group_admitted"]
    assert kinds(events) == {Violation.LOST}
    assert kinds([e for e in events if e["kind"] != "run_ended"]) == set()


def test_a_dropped_group_is_not_lost():
    events = history()
    at = find(events, "group_trained", 3)
    events[at] = {"kind": "group_dropped", "admission": events[at]["admission"], "step": events[at]["step"], "reason": "stale"}
    report = check_events(renumber(events), LIMIT)
    assert report.ok, report.text()
    assert report.counts["dropped"] == 1
    late = [
        *events[:-1],
        {"kind": "group_trained", "admission": events[at]["admission"], "step": 5, "lineage": 0, "staleness": 0},
        events[-1],
    ]
    assert Violation.ORDER in kinds(late)
    twice = [*events[:-1], events[at], events[-1]]
    assert kinds(twice) == {Violation.ORDER}


def test_trained_twice_in_one_lineage():
    events = history()
    at = find(events, "group_trained", 2)
    again = events[at] | {"step": events[at]["step"] + 1, "staleness": LIMIT}
    assert Violation.TWICE in kinds([*events[: at + 3], again, *events[at + 3 :]])


def killed_after_checkpoint():
    """A history with one kill after the first checkpoint and some trainings, so that something is void."""
    for seed in range(100):
        events = history(seed, (50 + seed % 40,))
        report = check_events(events, LIMIT)
        if report.counts["void"] and events[find(events, "run_resumed")]["from_step"] > 0:
            return events
    raise AssertionError("no seed gives a void training")


def test_void_trainings_may_be_repeated_and_others_may_not():
    events = killed_after_checkpoint()
    resume = find(events, "run_resumed")
    assert check_events(events, LIMIT).ok
    before = next(e for e in events[:resume] if e["kind"] == "group_trained")
    repeated = before | {"lineage": 1, "step": events[resume]["from_step"], "staleness": LIMIT}
    assert Violation.TWICE in kinds([*events[: resume + 1], repeated, *events[resume + 1 :]])


def test_a_resume_that_trains_again_what_the_checkpoint_holds():
    """The same log with the resume claimed from further on: its repeated trainings are now trained twice."""
    events = killed_after_checkpoint()
    resume = find(events, "run_resumed")
    done = max(e["step"] for e in events[:resume] if e["kind"] == "group_trained") + 1
    events[resume] = events[resume] | {"from_step": done}
    assert Violation.TWICE in kinds(events)


def test_lineages_must_rise_and_match():
    events = history(3, (60,))
    resume = find(events, "run_resumed")
    assert Violation.ORDER in kinds([*events[:resume], events[resume] | {"lineage": 0}, *events[resume + 1 :]])
    at = find(events, "group_trained", -1)
    events[at] = events[at] | {"lineage": 7}
    assert Violation.ORDER in kinds(events)


def test_beyond_the_staleness_limit():
    events = history(1)
    worst = max(e["staleness"] for e in events if e["kind"] == "group_trained")
    assert worst > 0
    assert kinds(events, limit=worst) == set()
    assert kinds(events, limit=worst - 1) == {Violation.STALE}


def test_an_age_that_is_reported_too_low():
    events = history(1)
    at = next(i for i, e in enumerate(events) if e["kind"] == "group_trained" and e["staleness"] > 0)
    events[at] = events[at] | {"staleness": 0}
    report = check_events(renumber(events), LIMIT)
    assert [p.kind for p in report.problems] == [Violation.STALE]
    assert "reports staleness 0" in report.problems[0].text


def test_a_group_that_hides_its_oldest_token():
    for seed in range(20):
        events = history(seed)
        for at, e in enumerate(events):
            if e["kind"] == "group_ready" and e["dropped"] == 0:
                forged = [*events[:at], e | {"oldest": e["oldest"] + 1}, *events[at + 1 :]]
                assert Violation.STALE in kinds(forged)
                return
    raise AssertionError("no group without a drop")


def test_a_served_hash_that_was_not_published():
    events = history()
    at = find(events, "served", 2)
    other = [*events[:at], events[at] | {"hash": "other"}, *events[at + 1 :]]
    assert kinds(other) == {Violation.HASH}
    unknown = [*events[:at], events[at] | {"version": "v9.9"}, *events[at + 1 :]]
    assert "never published" in check_events(renumber(unknown), LIMIT).text()
    published = find(events, "published", 2)
    mixed = [*events[:published], events[published] | {"version": "v0.1"}, *events[published + 1 :]]
    text = check_events(renumber(mixed), LIMIT).text()
    assert "step 2 made version v0.3, published was v0.1" in text
    assert "published with hash" in text


def test_rollouts_that_do_not_add_up():
    events = history()
    at = find(events, "rollout_ended", 4)
    assert Violation.ACCOUNTING in kinds([*events[:at], *events[at + 1 :]])
    assert Violation.ACCOUNTING in kinds([*events[: at + 1], events[at], *events[at + 1 :]])
    ready = find(events, "group_ready", 1)
    fewer = events[ready] | {"members": events[ready]["members"] - 1}
    assert Violation.ACCOUNTING in kinds([*events[:ready], fewer, *events[ready + 1 :]])
    late = {**events[at], "admission": events[ready]["admission"], "member": 99}
    assert Violation.ACCOUNTING in kinds([*events[: ready + 1], late, *events[ready + 1 :]])
    lists = [e | {"members": list(range(e["members"])), "dropped": [7] * e["dropped"]} if e["kind"] == "group_ready" else e for e in events]
    assert kinds(lists) == set()


def test_admissions_have_no_gaps():
    events = history()
    at = find(events, "group_admitted", 3)
    number = events[at]["admission"]
    skipped = [e for e in events if e.get("admission") != number]
    report = check_events(renumber(skipped), LIMIT)
    assert report.problems[0].kind is Violation.LOST
    assert f"admission {number} is missing" in report.problems[0].text


def test_things_that_cannot_follow_from_what_happened():
    events = history()
    at = find(events, "group_ready")
    assert Violation.ORDER in kinds([*events[:at], *events[at + 1 :]])
    unknown = {"kind": "group_trained", "admission": 77, "step": 1, "lineage": 0, "staleness": 0}
    assert "never admitted" in check_events(renumber([*events[:-1], unknown, events[-1]]), LIMIT).text()
    assert Violation.ORDER in kinds([events[0], *events])
    assert "before run_started" in check_events(renumber(events[1:]), LIMIT).text()
    assert kinds([]) == {Violation.ORDER}


def test_a_run_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"loop": {"max_staleness": LIMIT}}))
    with EventLog(tmp_path / "events.jsonl") as log:
        for event in history(5, (70,)):
            log.write(event["kind"], **{k: v for k, v in event.items() if k not in ("n", "t", "kind")})
    report = check_run(tmp_path)
    assert report.ok
    assert "nothing lost, nothing twice" in report.text()
    assert report.as_dict()["ok"] is True
    assert json.loads(json.dumps(report.as_dict()))["counts"]["resumes"] == 1
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines) + b'{"n": 999, "half')
    assert check_run(tmp_path).ok
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines[:5] + lines[6:]))
    with pytest.raises(RecordError, match="lines were lost"):
        check_run(tmp_path)


def test_a_limit_changed_during_the_run():
    events = history(1)
    worst = max(e["staleness"] for e in events if e["kind"] == "group_trained")
    revision = {"kind": "config_revision", "revision": 1, "changed": {"loop.max_staleness": worst}}
    assert kinds([events[0], revision, *events[1:]], limit=0) == set()
    flags = revision | {"changed": {"loop.max_staleness": True}}
    assert kinds([events[0], flags, *events[1:]], limit=worst - 1) == {Violation.STALE}


@pytest.mark.parametrize(
    "text, match",
    [
        (None, "no config"),
        ("{}", "no loop.max_staleness"),
        ("[", "no loop.max_staleness"),
        ('{"loop": {"max_staleness": -1}}', "whole number"),
    ],
)
def test_a_folder_that_is_not_a_run(tmp_path, text, match):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(RecordError, match=match):
        check_run(tmp_path)
    (tmp_path / "config.json").write_text('{"loop": {"max_staleness": 4}}')
    (tmp_path / "events.jsonl").unlink()
    with pytest.raises(RecordError, match="no event log"):
        check_run(tmp_path)
