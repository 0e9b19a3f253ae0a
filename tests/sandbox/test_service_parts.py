"""The parts of the environment service that need no sandbox: values on the wire, errors and their classes, admission, leases, counts."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time

import pytest

from etude.errors import DeadlineError, PatchError, SandboxError, UserError
from etude.protocols import Change, ExecResult, GradeBundle, Limits
from etude.sandbox.service import wire
from etude.sandbox.service.admission import Admission, Capacity, Pressure, machine_pressure
from etude.sandbox.service.commands import read_tokens
from etude.sandbox.service.ledger import BEAT_GRACE_S, GRADE, ROLLOUT, Entry, Ledger
from etude.sandbox.service.metrics import Metrics
from etude.sandbox.service.wire import ErrorClass, PolicyError, WireError

GIB = 2**30


def test_values_come_back_as_they_were() -> None:
    value = {
        "a": [b"\0\xff", {"$bytes": [0, 5]}, {"$dict": {"x": b"y"}}],
        "n": None,
        "f": 1.5,
        "t": "\u00e9\udc80",
        "b": b"",
        "deep": [[[b"z" * 1000]]],
    }
    assert wire.unpack(wire.pack(value)) == value
    result = ExecResult(code=-9, output=b"\xff", timed_out=True, limit="wall", seconds=0.5)
    assert wire.exec_result(wire.unpack(wire.pack(wire.plain(result)))) == result
    bundle = GradeBundle(
        changes=(Change(path="a", data=None), Change(path="b", data=b"x", mode=0o755)), files={"t.py": b"1"}, limits=Limits(pids=3)
    )
    assert wire.bundle(wire.unpack(wire.pack(wire.plain(bundle)))) == bundle


def test_broken_bodies_are_refused() -> None:
    good = wire.pack({"a": b"bytes"})
    dice = random.Random(1)
    for cut in range(len(good)):
        with pytest.raises(WireError):
            wire.unpack(good[:cut])
    for _ in range(300):
        broken = bytearray(good)
        broken[dice.randrange(len(broken))] ^= 1 << dice.randrange(8)
        try:
            wire.unpack(bytes(broken))
        except WireError:
            pass
    for head in (b'{"a": {"$bytes": [0, 99]}}', b'{"a": {"$bytes": [-1, 1]}}', b'{"a": {"$bytes": "x"}}', b"[" * 100_000):
        with pytest.raises(WireError):
            wire.unpack(len(head).to_bytes(4, "big") + bytes(4) + head)


@pytest.mark.parametrize(
    ("error", "by_agent", "kind", "comes_back"),
    [
        (SandboxError("died"), False, ErrorClass.INFRA, SandboxError),
        (DeadlineError("exec", 3.0), False, ErrorClass.INFRA, DeadlineError),
        (UserError("no image"), False, ErrorClass.TASK, UserError),
        (PatchError("hunk 1"), True, ErrorClass.AGENT, PatchError),
        (FileNotFoundError("no such file: x"), True, ErrorClass.AGENT, FileNotFoundError),
        (IsADirectoryError("x"), True, ErrorClass.AGENT, IsADirectoryError),
        (OSError(28, "disk full"), False, ErrorClass.INFRA, SandboxError),
        (PolicyError("too much"), False, ErrorClass.POLICY, PolicyError),
        (RuntimeError("a bug"), False, ErrorClass.INFRA, SandboxError),
    ],
)
def test_errors_have_a_class_and_come_back_as_what_they_were(error, by_agent, kind, comes_back) -> None:
    fields = json.loads(json.dumps(wire.error_fields(error, by_agent=by_agent)))
    assert fields["class"] == kind
    again = wire.rebuilt(fields)
    assert type(again) is comes_back
    assert str(error) in str(again)


def test_a_name_that_is_no_error_is_not_called() -> None:
    assert type(wire.rebuilt({"class": "agent", "type": "exit", "text": "x"})) is OSError
    assert type(wire.rebuilt({"class": "task", "type": "SystemExit", "text": "x"})) is UserError


def room(available: int = 64 * GIB, **capacity: object) -> Admission:
    pressure = Pressure(total=64 * GIB, available=available)
    return Admission(Capacity(**{"memory_bytes": 10 * GIB, "overcommit": 1.0, "starts": 100, **capacity}), lambda: pressure)


def test_memory_that_was_promised_is_not_promised_twice() -> None:
    async def main() -> None:
        admission = room()
        for _ in range(2):
            async with admission.start(4 * GIB, 0.0):
                pass
        with pytest.raises(SandboxError, match="are promised"):
            async with admission.start(4 * GIB, 0.05):
                raise AssertionError("admitted")
        admission.leave(4 * GIB)
        async with admission.start(4 * GIB, 0.0):
            assert admission.starting == 1
        with pytest.raises(PolicyError, match="never be admitted"):
            async with admission.start(11 * GIB, 60.0):
                pass
        with pytest.raises(RuntimeError):
            async with admission.start(2 * GIB, 0.0):
                raise RuntimeError
        assert (admission.promised, admission.held, admission.starting, admission.queued) == (8 * GIB, 2, 0, 0)

    asyncio.run(main())


def test_who_waits_longest_comes_first_and_small_ones_do_not_overtake() -> None:
    async def main() -> None:
        admission, order = room(), []
        async with admission.start(8 * GIB, 0.0):
            pass

        async def wanting(name: str, need: int) -> None:
            async with admission.start(need, 10.0):
                order.append(name)

        waiting = []
        for name, need in (("large", 8 * GIB), ("small", GIB), ("smaller", GIB // 2)):
            waiting.append(asyncio.create_task(wanting(name, need)))
            await asyncio.sleep(0.01)
        assert (order, admission.queued) == ([], 3), "the small ones would fit, and wait behind the large one"
        admission.leave(8 * GIB)
        await asyncio.gather(*waiting)
        assert order == ["large", "small", "smaller"]

    asyncio.run(main())


def test_starts_are_throttled_and_a_waiter_that_gives_up_blocks_nobody() -> None:
    async def main() -> None:
        admission, most, running = room(starts=2), 0, 0

        async def one() -> None:
            nonlocal most, running
            async with admission.start(1, 10.0):
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.01)
                running -= 1

        tasks = [asyncio.create_task(one()) for _ in range(20)]
        await asyncio.sleep(0.005)
        tasks[5].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (most, admission.held, admission.queued) == (2, 19, 0)

    asyncio.run(main())


def test_what_really_is_left_has_the_last_word() -> None:
    async def main() -> None:
        for admission, says in (
            (room(available=100 * 2**20), "kept in reserve"),
            (Admission(Capacity(), lambda: Pressure(total=64 * GIB, available=32 * GIB, stalled=50.0)), "waited for memory"),
            (room(sandboxes=0), "that is the limit"),
        ):
            with pytest.raises(SandboxError, match=says):
                async with admission.start(1, 0.0):
                    pass

    asyncio.run(main())
    here = machine_pressure()
    assert 0 < here.available <= here.total


def entry(**leases: float) -> Entry:
    made = Entry(id="e1", owner="me", create_id="c", image="i", limits={}, network={})
    for kind, ttl_s in leases.items():
        made.take(kind, f"holder of {kind}", ttl_s)
    return made


def test_an_environment_lives_as_long_as_one_lease() -> None:
    both = entry(rollout=100.0, grade=300.0)
    now = time.monotonic()
    assert both.why_over(now) == ""
    assert both.why_over(now + BEAT_GRACE_S + 1).startswith("nothing was heard of holder of rollout")
    both.leases[GRADE].heard = now + 1000
    assert both.why_over(now + 200) == "", "the grader is heard of and its lease is longer"
    assert both.why_over(now + 400)
    del both.leases[GRADE]
    both.leases[ROLLOUT].holder = ""
    assert both.why_over(now + 99) == "", "a lease without a name needs no beat"
    assert both.why_over(now + 101) == "its lease ran out"
    assert entry().why_over(now) == "it has no lease"
    for kind, ttl_s in (("lunch", 1.0), (GRADE, 0.0), (GRADE, float("nan"))):
        with pytest.raises(UserError):
            entry().take(kind, "x", ttl_s)


def test_leases_survive_on_disk_and_holders_get_a_grace_period(tmp_path) -> None:
    ledger = Ledger(tmp_path / "envs")
    ledger.write(entry(rollout=100.0))
    (tmp_path / "envs" / "e2.json").write_text('{"id": "e2"')
    (tmp_path / "envs" / "e3.tmp").write_text("half")
    (again,), broken = Ledger(tmp_path / "envs").read()
    assert broken == ["e2"]
    assert (again.id, again.owner, again.create_id) == ("e1", "me", "c")
    now = time.monotonic()
    assert 98 < again.leases[ROLLOUT].until - now <= 100
    assert again.leases[ROLLOUT].heard >= now - 1
    ledger.remove("e1")
    ledger.remove("e1")
    assert sorted(os.listdir(tmp_path / "envs")) == ["e2.json"]


def test_counts_are_what_prometheus_reads() -> None:
    metrics = Metrics()
    metrics.count("errors", "class=infra")
    metrics.count("errors", "class=infra")
    metrics.observe("op", 0.02, "op=exec")
    metrics.observe("op", 500.0, "op=exec")
    lines = metrics.text({"live": 3}).splitlines()
    assert "etude_env_live 3" in lines
    assert 'etude_env_errors_total{class="infra"} 2' in lines
    assert 'etude_env_op_seconds_bucket{op="exec",le="0.01"} 0' in lines
    assert 'etude_env_op_seconds_bucket{op="exec",le="0.03"} 1' in lines
    assert 'etude_env_op_seconds_bucket{op="exec",le="+Inf"} 2' in lines
    assert 'etude_env_op_seconds_count{op="exec"} 2' in lines
    assert metrics.total("errors") == 2


def test_token_files_are_private_and_hold_tokens(tmp_path) -> None:
    path = tmp_path / "tokens"
    ((token, owner),) = read_tokens(path).items()
    assert owner == "default"
    assert read_tokens(path) == {token: owner}
    path.write_text("# two\nann:0123456789abcdef\n\nbob:fedcba9876543210\n")
    assert read_tokens(path) == {"0123456789abcdef": "ann", "fedcba9876543210": "bob"}
    for text in ("ann:short\n", "no colon in this line\n", "", ":0123456789abcdef\n"):
        path.write_text(text)
        with pytest.raises(UserError):
            read_tokens(path)
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        read_tokens(path)
