"""Which host gets which environment: best fit against its slow twin, forks, pressure, failures; and the account of a long random life."""

from __future__ import annotations

import random

import pytest

from etude.errors import UserError
from etude.sandbox.service.fleet import FULL, STARTS, Fleet, Room

GIB = 2**30
HOST = Room(memory=64 * GIB, cpu=16_000, disk=256 * GIB)
SMALL = Room(memory=GIB, cpu=250, disk=GIB)


def fleet(n: int) -> Fleet:
    return Fleet({f"h{i}": HOST for i in range(n)})


def placed(fleet: Fleet, env: str, need: Room = SMALL, **options: object) -> str:
    placement = fleet.place(env, need, **options)  # type: ignore[arg-type]
    assert placement is not None
    fleet.started(env)
    return placement.host


def test_the_fullest_host_that_fits_is_taken() -> None:
    f = fleet(3)
    assert placed(f, "a") == "h0"
    assert placed(f, "b") == "h0"
    assert placed(f, "big", Room(60 * GIB, 1000, GIB)) == "h1"
    assert placed(f, "c") == "h0", "h1 has less left, and not enough memory"
    assert placed(f, "d", Room(GIB // 4, 250, GIB)) == "h1"
    assert f.used_hosts() == 2
    assert f.place("giant", Room(65 * GIB, 1, 1)) is None
    with pytest.raises(UserError, match="placed already"):
        f.place("a", SMALL)


def test_starts_of_a_host_are_throttled() -> None:
    f = fleet(2)
    hosts = []
    for i in range(2 * STARTS):
        placement = f.place(f"e{i}", SMALL)
        assert placement is not None
        hosts.append(placement.host)
    assert hosts == ["h0"] * STARTS + ["h1"] * STARTS
    assert f.place("more", SMALL) is None
    f.started("e3")
    assert placed(f, "more") == "h0"


def test_what_is_measured_counts_and_what_came_after_counts_on_top() -> None:
    f = fleet(1)
    big = Room(10 * GIB, 1000, GIB)
    for i in range(6):
        placed(f, f"e{i}", big)
    assert f.place("x", big) is None, "six were promised 60 of 64 GiB"
    f.report("h0", Room(4 * GIB, 500, GIB))
    assert f.free("h0").memory == int(64 * GIB * FULL) - 30 * GIB, "measured little, so half of what was asked for counts"
    f.report("h0", Room(41 * GIB, 500, GIB))
    assert placed(f, "x", big) == "h0"
    assert f.place("y", big) is None, "41 were measured and 10 came after"
    f.report("h0", Room(45 * GIB, 500, GIB))
    assert placed(f, "y", big) == "h0"
    f.report("h0", Room(GIB, 0, 0), stalled=50.0)
    assert f.place("z", SMALL) is None, "processes wait for memory there, whatever the numbers say"
    f.report("h0", Room(GIB, 0, 0))
    assert placed(f, "z") == "h0"


def test_what_is_still_starting_when_a_host_reports_is_counted_on_top() -> None:
    f = fleet(1)
    assert f.place("slow", Room(40 * GIB, 1000, GIB)) is not None
    f.report("h0", Room(0, 0, 0))
    assert f.place("second", Room(40 * GIB, 1000, GIB)) is None
    f.started("slow")
    f.report("h0", Room(5 * GIB, 0, 0))
    assert f.place("second", Room(40 * GIB, 1000, GIB)) is not None


def test_forks_stay_beside_their_parent_or_bring_the_snapshot_once() -> None:
    f = fleet(3)
    placed(f, "filler", Room(56 * GIB, 100, GIB))
    placed(f, "parent", SMALL)
    made = f.fork("parent", [f"c{i}" for i in range(6)], snapshot_bytes=7)
    assert made is not None
    assert [(p.host, p.moved_bytes) for p in made] == [("h0", 0)] * 3 + [("h1", 7)] + [("h1", 0)] * 2
    before = f.used_hosts()
    assert f.fork("parent", [f"d{i}" for i in range(1000)], snapshot_bytes=7) is None
    assert f.used_hosts() == before
    assert all(f.where(f"d{i}") == "" for i in range(1000)), "all or nothing"
    with pytest.raises(UserError, match="not placed"):
        f.fork("nobody", ["x"], 1)


def test_closed_and_lost_hosts() -> None:
    f = fleet(2)
    placed(f, "a")
    f.close("h0")
    assert placed(f, "b") == "h1"
    assert placed(f, "c", beside="a") == "h1"
    assert f.lose("h0") == ["a"]
    assert f.where("a") == ""
    f.release("a")
    f.started("a")
    assert placed(f, "a") == "h1"
    f.add("h2", HOST)
    for call in (lambda: f.lose("h0"), lambda: f.report("h9", SMALL), lambda: f.close("h9"), lambda: f.add("h2", HOST)):
        with pytest.raises(UserError):
            call()
    with pytest.raises(UserError, match="no room"):
        f.add("h3", Room(0, 1, 1))


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_fit_through_a_long_random_life(seed) -> None:
    """Every placement equals the slow twin's, hosts of different sizes included, and at the end nothing is left."""
    dice = random.Random(seed)
    sizes = [HOST, Room(128 * GIB, 32_000, 256 * GIB), Room(32 * GIB, 16_000, 64 * GIB)]
    f = Fleet((f"h{i}", dice.choice(sizes)) for i in range(30))
    empty = {f"h{i}": f.free(f"h{i}") for i in range(30)}
    live: list[str] = []
    refused = 0
    for step in range(4000):
        if live and dice.random() < 0.42:
            f.release(live.pop(dice.randrange(len(live))))
        else:
            need = Room(int(GIB * dice.lognormvariate(1, 1)), dice.choice((100, 250, 1000, 4000)), GIB * dice.randrange(1, 16))
            twin, placement = f.fits_best(need), f.place(f"e{step}", need)
            assert (placement.host if placement is not None else "") == twin
            refused += placement is None
            if placement is not None:
                live.append(placement.env)
                if dice.random() < 0.9:
                    f.started(placement.env)
        if dice.random() < 0.02:
            f.report(
                f"h{dice.randrange(30)}", Room(GIB * dice.randrange(20), dice.randrange(8000), GIB * dice.randrange(20)), dice.random() * 25
            )
    assert refused
    assert live
    for env in live:
        f.release(env)
    for i in range(30):
        f.report(f"h{i}", Room(0, 0, 0))
        assert f.free(f"h{i}") == empty[f"h{i}"]
    assert f.used_hosts() == 0


def test_the_same_calls_give_the_same_places() -> None:
    def life() -> list[str]:
        dice, f, places = random.Random(9), fleet(20), []
        for i in range(500):
            placement = f.place(f"e{i}", Room(GIB * dice.randrange(1, 9), 100 * dice.randrange(1, 9), GIB))
            places.append(placement.host if placement is not None else "")
            f.started(f"e{i}")
        return places

    assert life() == life()
