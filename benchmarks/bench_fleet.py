"""Placing 100,000 simulated environments: how many a second, and how tightly.

The scheduler of `etude.sandbox.service.fleet` alone, against simulated hosts of 256 GiB and 64 cores. What environments ask for is
heavy-tailed (median 1.5 GiB, a quarter of a core; some ask for twenty times that). Two lives, same dice for everybody:

    burst    all arrive at once on an empty fleet
    churn    one leaves and one arrives, at 100,000 live, while hosts report what they measure (ours only: the peers know no pressure)

Peers, on the same trace in the same run: best fit that looks at every host (one numpy pass each, and no account of what is where; the
standard that packing is stated against), first fit, and spreading over the emptiest host, which is what cluster schedulers do by
default. Packing is hosts in use; `floor` is the sum of what was asked for over a host, which no scheduler can beat.
Rates are per second of processor time: both sides are one thread of pure computing, and what else the machine does is not theirs.
Goal: 500 placements a second at the packing of best fit.
"""

from __future__ import annotations

import random
import time

import numpy as np

from etude.bench import Row
from etude.sandbox.service.fleet import FULL, Fleet, Room

GIB = 2**30
HOST = Room(memory=256 * GIB, cpu=64_000, disk=4096 * GIB)


def demands(n: int, seed: int = 0) -> list[Room]:
    dice = random.Random(seed)
    return [
        Room(
            min(int(GIB * dice.lognormvariate(0.4, 0.8)), 32 * GIB),
            min(int(dice.lognormvariate(5.5, 0.8)), 8000),
            int(GIB * dice.lognormvariate(2.0, 0.7)),
        )
        for _ in range(n)
    ]


def burst(needs: list[Room], hosts: int) -> tuple[Fleet, float]:
    """The fleet after all were placed, and placements a second."""
    fleet = Fleet({f"h{i}": HOST for i in range(hosts)})
    start = time.process_time()
    for i, need in enumerate(needs):
        if fleet.place(f"e{i}", need) is None:
            raise RuntimeError(f"environment {i} found no room on {hosts} hosts")
        fleet.started(f"e{i}")
    return fleet, len(needs) / (time.process_time() - start)


def churn(fleet: Fleet, live: int, hosts: int, turns: int) -> float:
    """Placements a second while as many leave, and every host reports in its turn."""
    dice, needs = random.Random(1), demands(turns, seed=2)
    names = [f"e{i}" for i in range(live)]
    start = time.process_time()
    for i, need in enumerate(needs):
        at = dice.randrange(live)
        fleet.release(names[at])
        names[at] = f"n{i}"
        if fleet.place(names[at], need) is None:
            raise RuntimeError("no room in churn")
        fleet.started(names[at])
        if i % 16 == 0:
            name = f"h{(i // 16) % hosts}"
            free = fleet.free(name)
            share = 0.5 + 0.4 * dice.random()
            used = Room(*(int((total * FULL - left) * share) for total, left in zip(_parts(HOST), _parts(free), strict=True)))
            fleet.report(name, Room(*(max(0, part) for part in _parts(used))))
    return turns / (time.process_time() - start)


def _parts(room: Room) -> tuple[int, int, int]:
    return room.memory, room.cpu, room.disk


def exhaustive(needs: list[Room], hosts: int, how: str) -> tuple[int, float]:
    """(hosts in use, placements a second) of a scheduler that looks at every host each time."""
    total_3 = np.array(_parts(HOST), dtype=np.float64)
    free_H3 = np.tile(np.floor(total_3 * FULL), (hosts, 1))
    needs_N3 = np.array([_parts(need) for need in needs], dtype=np.float64)
    used_H = np.zeros(hosts, dtype=bool)
    weight_3 = 1.0 / total_3
    start = time.process_time()
    for need_3 in needs_N3:
        fits_H = (free_H3 >= need_3).all(axis=1)
        if how == "first":
            host = int(fits_H.argmax())
        else:
            left_H = free_H3 @ weight_3
            host = int(np.where(fits_H, left_H, np.inf).argmin()) if how == "best" else int(np.where(fits_H, left_H, -np.inf).argmax())
        free_H3[host] -= need_3
        used_H[host] = True
    return int(used_H.sum()), len(needs) / (time.process_time() - start)


def run(device: str, quick: bool) -> list[Row]:
    n = 10_000 if quick else 100_000
    needs = demands(n)
    floor = max(sum(parts) / (total * FULL) for parts, total in zip(zip(*map(_parts, needs), strict=True), _parts(HOST), strict=True))
    hosts = int(floor * 1.25) + 2
    fleet, rate = burst(needs, hosts)
    in_use = fleet.used_hosts()
    best, best_rate = exhaustive(needs, hosts, "best")
    first, _ = exhaustive(needs, hosts, "first")
    spread, _ = exhaustive(needs, hosts, "spread")
    churned = churn(fleet, n, hosts, n // 2)
    everyone = f"best fit over all {hosts} hosts"

    def row(name: str, unit: str, ours: float, peer: float | None = None, peer_name: str | None = None, more: bool = True) -> Row:
        return Row(name=name, unit=unit, ours=ours, peer=peer, peer_name=peer_name, higher_is_better=more)

    return [
        row("placements, burst", "1/s", rate, best_rate, everyone),
        row("placements, churn with live reports", "1/s", churned),
        row("hosts in use", "hosts", in_use, best, everyone, more=False),
        row("hosts in use, against first fit", "hosts", in_use, first, "first fit", more=False),
        row("hosts in use, against spreading", "hosts", in_use, spread, "emptiest host", more=False),
        row("packing: floor over hosts in use", "share", floor / in_use, floor / best, everyone),
    ]
