"""The event log: a line counts when it is whole, numbers have no gap, and a crash costs at most the line it cut."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given

from etude.errors import RecordError
from etude.events import KINDS, EventLog, read_events


def write(path, *texts: str) -> None:
    with EventLog(path) as log:
        for text in texts:
            log.write("note", text=text)


def texts(path) -> list[str]:
    return [e["text"] for e in read_events(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "events.jsonl"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_written_and_read_again(path, kind, event_fields):
    fields = event_fields(kind)
    with EventLog(path) as log:
        log.write("note", text="before")
        log.write(kind, **fields)
        log.write("note", text="after")
    events = list(read_events(path))
    assert [e["n"] for e in events] == [0, 1, 2]
    assert events[1]["kind"] == kind
    assert {k: v for k, v in events[1].items() if k not in ("n", "t", "kind")} == fields


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_field_is_named(path, kind, event_fields):
    for name in KINDS[kind]:
        fields = event_fields(kind)
        del fields[name]
        with EventLog(path) as log, pytest.raises(RecordError, match=f"event '{kind}' needs the field '{name}'"):
            log.write(kind, **fields)
    assert list(read_events(path)) == []


def test_an_unknown_kind_names_the_nearest(path):
    with EventLog(path) as log, pytest.raises(RecordError, match="unknown event kind 'setp'; did you mean 'step'"):
        log.write("setp")


@pytest.mark.parametrize("name", ["n", "t"])
def test_the_logs_own_fields_cannot_be_overwritten(path, name):
    with EventLog(path) as log, pytest.raises(RecordError, match=f"'{name}'"):
        log.write("note", text="x", **{name: 7})
    assert list(read_events(path)) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}])
def test_what_is_not_json_is_refused_and_leaves_no_trace(path, value):
    with EventLog(path) as log:
        with pytest.raises((ValueError, TypeError)):
            log.write("note", text=value)
        log.write("note", text="next")
    assert texts(path) == ["next"]


def test_a_crash_at_any_byte_costs_only_the_line_it_cut(path):
    write(path, "first", "second \u00e9 \u2028 line\nbreak", "third")
    whole = path.read_bytes()
    ends = [i + 1 for i, b in enumerate(whole) if b == 0x0A]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        survivors = sum(end <= size for end in ends)
        assert len(texts(path)) == survivors
        write(path, "after the crash")
        assert texts(path)[survivors:] == ["after the crash"]
        assert [e["n"] for e in read_events(path)] == list(range(survivors + 1))


@given(pieces=st.lists(st.lists(st.text(max_size=20), max_size=3), max_size=4))
def test_a_log_opened_again_continues(pieces, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    for piece in pieces:
        write(path, *piece)
    written = [text for piece in pieces for text in piece]
    if pieces:
        assert texts(path) == written
        assert [e["text"] for e in read_events(path, after=1)] == written[2:]
        assert path.read_bytes().count(b"\n") == len(written)


def test_time_goes_on_after_a_resume_and_stands_still_in_lockstep(path, tmp_path):
    write(path, "a", "b")
    time.sleep(0.02)
    write(path, "c", "d")
    times = [e["t"] for e in read_events(path)]
    assert times == sorted(times)
    still = tmp_path / "still.jsonl"
    with EventLog(still, clock=False) as log:
        log.write("note", text="a")
        time.sleep(0.002)
        log.write("note", text="b")
    assert [e["t"] for e in read_events(still)] == [0, 0]


def test_lockstep_logs_are_the_same_bytes(tmp_path, event_fields):
    for name in ("a", "b"):
        with EventLog(tmp_path / name, clock=False) as log:
            log.write("note", text="x")
            log.write("step", **event_fields("step"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_lost_line_is_found(path):
    write(path, "a", "b", "c")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(RecordError, match="line 2 has n=2, expected 1: lines were lost"):
        texts(path)
    with pytest.raises(RecordError, match="lost"):
        EventLog(path)
    path.write_bytes(lines[0] + lines[1] + lines[1])
    with pytest.raises(RecordError, match="line 3 has n=1, expected 2"):
        texts(path)


@pytest.mark.parametrize("line", [b"not json\n", b"[1]\n", b"7\n", b"{}\n", b"\xff\n", b"\n"])
def test_a_broken_line_is_found(path, line):
    write(path, "a", "b")
    whole = path.read_bytes()
    path.write_bytes(line + whole)
    with pytest.raises(RecordError, match=r"events\.jsonl line 1"):
        texts(path)
    path.write_bytes(whole + line)
    with pytest.raises(RecordError, match=r"events\.jsonl"):
        texts(path)
    with pytest.raises(RecordError, match=r"events\.jsonl"):
        EventLog(path)


def test_no_log_is_a_clear_error(tmp_path):
    with pytest.raises(RecordError, match="no event log at"):
        list(read_events(tmp_path / "events.jsonl"))


def test_a_closed_log_can_be_closed_again(path):
    log = EventLog(path)
    log.write("note", text="a")
    log.sync()
    log.close()
    log.close()
    assert texts(path) == ["a"]


FULL_DISK = """
import resource, sys
from etude.events import EventLog
log = EventLog(__import__("pathlib").Path(sys.argv[1]))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
log.write("note", text="fits")
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
try:
    log.write("note", text="x" * 200)
except OSError as error:
    print("refused:", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log.write("note", text="room again")
log.close()
"""


def test_a_full_disk_is_reported_and_leaves_no_half_line(path):
    """A file-size limit cuts a write short as a full disk does."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("refused:")
    assert texts(path) == ["fits", "room again"]


KILLED = """
import sys
from etude.events import EventLog
log = EventLog(__import__("pathlib").Path(sys.argv[1]))
i = 0
while True:
    log.write("note", text=str(i) * 50)
    i += 1
    if i == 50:
        print("going", flush=True)
"""


def test_a_killed_writer_leaves_a_log_that_reads_and_continues(path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "going\n"
        os.kill(writer.pid, signal.SIGKILL)
    count = len(texts(path))
    assert count >= 50
    write(path, "back")
    last = list(read_events(path))[-1]
    assert (last["n"], last["text"]) == (count, "back")
    assert json.loads(path.read_bytes().splitlines()[-1])["kind"] == "note"
