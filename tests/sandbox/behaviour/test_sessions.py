"""Shell sessions: what lasts from one command to the next, what does not, and what a fork at level L1 carries."""

from __future__ import annotations

import asyncio

import pytest

from etude.records import Level


def test_a_session_keeps_what_a_shell_keeps(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        session = await sandbox.open_session(cwd="shop", env={"COLOUR": "deep blue"})

        async def said(command: str) -> tuple[int, str]:
            result = await session.run(command)
            assert result.kept
            return result.code, result.output.decode()

        workdir = (await sandbox.info()).workdir
        assert await said('pwd; echo "$COLOUR"') == (0, f"{workdir}/shop\ndeep blue\n")
        await said("cd ..; COLOUR=red; export SHADE='two\nlines \"and\" $quotes'; plain=1; list=(1 'b c'); greet() { echo hello $1; }")
        assert await said('pwd; printenv COLOUR; printenv SHADE; echo $plain "${list[1]}"; greet you; printenv plain') == (
            1,
            f'{workdir}\nred\ntwo\nlines "and" $quotes\n1 b c\nhello you\n',
        )
        await said("umask 027; shopt -s expand_aliases; alias ll='echo aliased'; set -u; IFS=,")
        assert await said('umask; ll; echo "[$IFS]"') == (0, "0027\naliased\n[,]\n")
        assert (await said("echo $missing"))[0] != 0
        await said("set +u; unset HOME; unset -f greet")
        assert await said('echo "${HOME-gone}"; type -t greet') == (1, "gone\n")
        assert await said("false; exit 7") == (7, "")
        assert await said("kept=yes; set -e; false; kept=no") == (1, "")
        assert await said("echo $kept; set +e") == (0, "yes\n")
        assert await said("{ set -x; } 2>/dev/null; true") == (0, "++ true\n")
        assert await said("{ set +x; } 2>/dev/null; echo quiet") == (0, "+ eval '{ set +x; } 2>/dev/null; echo quiet'\nquiet\n")
        assert await said("cat; echo end") == (0, "end\n")
        assert (await sandbox.exec(["sh", "-c", "ls -A $TMPDIR"])).output == b""

    on(scene)


def test_sessions_are_apart_and_closed_ones_are_gone(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        one, two = await sandbox.open_session(), await sandbox.open_session("two")
        assert {one.name, two.name} == {"1", "two"}
        await one.run("x=1")
        assert (await two.run("echo ${x-unset}")).output == b"unset\n"
        assert (await (await sandbox.open_session(one.name)).run("echo $x")).output == b"1\n"
        slow = asyncio.create_task(one.run("sleep 5; x=2", timeout_s=0.5))
        await asyncio.sleep(0.1)
        busy = await one.run("echo no")
        assert (busy.code, busy.kept) == (126, False)
        assert b"busy" in busy.output
        stopped = await slow
        assert (stopped.timed_out, stopped.kept) == (True, False)
        assert (await one.run("echo $x")).output == b"1\n"
        replaced = await one.run("x=3; exec true")
        assert (replaced.code, replaced.kept) == (0, False)
        await one.close()
        await one.close()
        assert b"no session '1'" in (await one.run("echo gone")).output
        for bad in ("a/b", "x" * 65, "a b"):
            with pytest.raises(OSError, match="session name"):
                await sandbox.open_session(bad)
        with pytest.raises(OSError, match="no such directory"):
            await sandbox.open_session(cwd="nowhere")
        assert (await sandbox.call("session_run", {"session": "two", "command": 3}))["error"] == "bad_arguments"

    on(scene)


def test_a_fork_at_level_one_carries_sessions_both_ways_apart(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        session = await sandbox.open_session("main")
        await session.run("cd shop; mood=calm; twice() { echo $1 $1; }; echo more > more.txt")
        await sandbox.call("job_start", {"command": "sleep 100"})
        one, two = await sandbox.fork(2, Level.SESSION)
        (bare,) = await sandbox.fork(1)
        levels = [(await each.info()).boundary.level for each in (sandbox, one, two, bare)]
        assert levels == [Level.FILES, Level.SESSION, Level.SESSION, Level.FILES]
        first, second = [await each.open_session("main") for each in (one, two)]
        for each in (first, second):
            assert (await each.run("echo $mood ${PWD##*/}; twice x; cat more.txt")).output == b"calm shop\nx x\nmore\n"
        for each, shell in ((one, first), (two, second)):
            places = (await shell.run('pwd; echo $TMPDIR; cd "$HOME"; cd - >/dev/null')).output.decode().split()
            assert places[0] == (await each.info()).workdir + "/shop"
            assert places[1] == (await each.exec(["sh", "-c", "echo $TMPDIR"])).output.decode().strip()
        await first.run("mood=wild; echo less > more.txt; cd ..")
        assert (await session.run("cat more.txt")).output == b"more\n"
        assert (await second.run("echo $mood ${PWD##*/}")).output == b"calm shop\n"
        assert (await session.run("echo $mood ${PWD##*/}")).output == b"calm shop\n"
        poll = await one.call("job_poll", {"job": "1"})
        assert poll["error"] == "failed"
        assert "sleep 100" in poll["text"]
        assert (await one.call("job_start", {"command": "true"}))["job"] == "2"
        assert (await (await bare.open_session("main")).run("echo ${mood-unset}")).output == b"unset\n"
        assert await two.diff() == []

        snapshot = await two.snapshot(Level.SESSION)
        files_only = await two.snapshot()
        assert files_only != snapshot
        again = await host.create(snapshot)
        assert (await (await again.open_session("main")).run("echo $mood")).output == b"calm\n"
        plain = await host.create(files_only)
        assert (await plain.info()).boundary.level is Level.FILES
        assert (await (await plain.open_session("main")).run("echo ${mood-unset}")).output == b"unset\n"

    on(scene)
