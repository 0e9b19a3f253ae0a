"""Nothing is silently less than what was asked for: every level, network, backend and boundary that cannot be had is an error."""

from __future__ import annotations

import pytest

from etude.errors import UserError
from etude.records import Level
from etude.sandbox.egress.policy import Allow, NetworkPolicy


def test_a_level_that_is_not_there_is_an_error_and_never_a_cheaper_one(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        levels = (await sandbox.info()).boundary.levels
        assert Level.FILES in levels
        missing = [level for level in Level if level not in levels]
        assert missing
        live = (await host.stats())["live"]
        for level in missing:
            for ask in (lambda level=level: sandbox.snapshot(level), lambda level=level: sandbox.fork(1, level, require=True)):
                with pytest.raises(UserError, match=f"{on.backend} backend keeps L0 .*, not {level.value}"):
                    await ask()
        assert (await host.stats())["live"] == live
        (child,) = await sandbox.fork(1, missing[-1], require=False)
        assert (await child.info()).boundary.level is max(levels)

    on(scene)


def test_a_network_is_limited_to_what_was_asked_for_or_refused(on, shop) -> None:
    policy = NetworkPolicy(allow=(Allow(host="pypi.org", through="pass"),))

    async def scene(host) -> None:
        image = await host.add_image(shop)
        if on.backend != "namespace" or on.variant == "remote":  # a service gives none unless its operator says so
            with pytest.raises(UserError, match="network"):
                await host.create(image, network=policy)
            return
        sandbox = await host.create(image, network=policy)
        assert (await sandbox.info()).boundary.network == f"allow-list {policy.hash}"

    on(scene)


def test_every_boundary_says_what_holds_it(on, shop) -> None:
    async def scene(host) -> None:
        boundary = (await (await host.create(await host.add_image(shop))).info()).boundary
        assert set(boundary.limits) == {"memory", "pids", "disk", "cpu", "wall", "output"}
        assert all(boundary.limits.values())
        assert set(boundary.coverage) == set(boundary.evidence)
        assert boundary.shared_kernel
        assert (boundary.hypervisor, boundary.hardware) == ("", "native")

    on(scene)
