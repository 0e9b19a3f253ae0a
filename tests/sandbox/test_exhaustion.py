"""Attempts to use up the machine. Each ends at its limit, which is named, and the sandbox next door does not notice."""

from __future__ import annotations

import time

from etude.protocols import Limits

SMALL = Limits(memory_bytes=96 * 2**20, pids=24, disk_bytes=8 * 2**20, cpu_s=1.0)


def test_a_fork_bomb_stops_at_its_limit(on_namespace, shop) -> None:
    async def scene(host) -> None:
        image = await host.add_image(shop)
        sandbox, neighbour = await host.create(image, limits=SMALL), await host.create(image, limits=SMALL)
        program = (
            "import os, time\n"
            "n = 0\n"
            "while True:\n"
            "    try: pid = os.fork()\n"
            "    except OSError as error:\n"
            "        print(n, flush=True); raise\n"
            "    if pid == 0: time.sleep(60); os._exit(0)\n"
            "    n += 1\n"
        )
        result = await sandbox.exec(["python", "-c", program])
        assert 10 <= int(result.output.split()[0]) <= 24
        assert result.code == 1
        assert result.limit == "pids"
        bomb = await sandbox.exec(["bash", "-c", "f() { f | f & }; f; sleep 0.5; echo end"], timeout_s=20)
        assert bomb.limit in ("pids", "")
        assert (await neighbour.exec(["sh", "-c", "for i in 1 2 3 4 5 6 7 8; do sleep 0 & done; wait; echo fine"])).output == b"fine\n"
        await sandbox.destroy()

    on_namespace(scene)


def test_a_memory_hog_is_killed_and_the_sandbox_lives(on_namespace, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop), limits=SMALL)
        hog = "x = []\nwhile True: x.append(bytearray(b'1') * (4 * 2**20))\n"
        result = await sandbox.exec(["python", "-c", hog], timeout_s=60)
        assert result.code != 0
        assert result.limit == "memory"
        await sandbox.write("test_hog.py", f"def test_hog():\n    {hog.replace(chr(10), chr(10) + '    ')}\n".encode())
        run = await sandbox.call("pytest", {"args": ["-q", "test_hog.py"], "report": True}, timeout_s=60)
        assert (run["limit"], run["complete"]) == ("memory", False)
        assert [(test["id"], test["outcome"]) for test in run["tests"]] == [("test_hog.py::test_hog", "failed")]
        assert (await sandbox.exec(["echo", "alive"])).output == b"alive\n"

    on_namespace(scene)


def test_without_control_groups_memory_is_polled_and_processes_are_counted(on_frugal, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop), limits=SMALL)
        limits = (await sandbox.info()).boundary.limits
        assert limits["memory"].startswith("polling")
        assert "cgroup" not in limits["pids"]
        slow_hog = "import time\nx = []\nwhile True: x.append(bytearray(b'1') * (4 * 2**20)); time.sleep(0.005)\n"
        assert (await sandbox.exec(["python", "-c", slow_hog], timeout_s=60)).limit == "memory"
        greedy = "try: x = bytearray(8 * 2**30)\nexcept MemoryError: print('refused')\n"
        assert (await sandbox.exec(["python", "-c", greedy])).output == b"refused\n"
        forks = (
            "import os, time\nn = 0\n"
            "try:\n    while n < 200:\n        if os.fork() == 0: time.sleep(60); os._exit(0)\n        n += 1\n"
            "finally: print(n, flush=True)\n"
        )
        result = await sandbox.exec(["python", "-c", forks])
        assert int(result.output.split()[0]) <= 24
        assert (await sandbox.exec(["echo", "alive"])).output == b"alive\n"
        full = await sandbox.exec(["sh", "-c", "head -c 12000000 /dev/zero > /tmp/fill"])
        assert full.code != 0

    on_frugal(scene)


def test_a_full_disk_is_the_sandboxs_own(on_namespace, shop) -> None:
    async def scene(host) -> None:
        image = await host.add_image(shop)
        sandbox, neighbour = await host.create(image, limits=SMALL), await host.create(image, limits=SMALL)
        result = await sandbox.exec(["sh", "-c", "for i in 1 2 3; do head -c 4000000 /dev/zero > /repo/fill$i || exit 1; done"])
        assert (result.code, result.limit) == (1, "disk")
        assert b"No space left on device" in result.output
        refused = await sandbox.call("write", {"path": "x.txt", "text": "x" * 100_000})
        assert refused["error"] == "failed"
        assert "No space left" in refused["text"]
        temporary = await sandbox.exec(["sh", "-c", "head -c 4000000 /dev/zero > /tmp/x"])
        assert temporary.code == 1
        files = "import os\ntry:\n    for i in range(10**6): open(f'/tmp/f{i}', 'w').close()\nexcept OSError as e: print(e.strerror)\n"
        assert b"No space left" in (await sandbox.exec(["python", "-c", files])).output
        assert (await neighbour.exec(["sh", "-c", "head -c 4000000 /dev/zero > /repo/mine"])).code == 0
        await sandbox.exec(["sh", "-c", "rm -rf /repo/fill* /tmp/*"])
        assert "error" not in await sandbox.call("write", {"path": "x.txt", "text": "x" * 1000})

    on_namespace(scene)


def test_processor_time_and_the_clock(on_namespace, shop) -> None:
    async def scene(host) -> None:
        image = await host.add_image(shop)
        sandbox = await host.create(image, limits=SMALL)
        result = await sandbox.exec(["sh", "-c", "while true; do :; done"], timeout_s=60)
        assert (result.limit, result.timed_out) == ("cpu", False)
        short = await host.create(image, limits=Limits(wall_s=0.6))
        begun = time.monotonic()
        result = await short.exec(["sleep", "60"])
        assert (result.limit, result.timed_out) == ("wall", True)
        again = await short.exec(["sleep", "60"])
        assert again.limit == "wall"
        assert time.monotonic() - begun < 30

    on_namespace(scene)


def test_what_a_command_leaves_behind_ends_with_the_sandbox(on_namespace, shop) -> None:
    marker = "4242.4242"

    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        daemons = (
            f"setsid sleep {marker} & nohup sleep {marker} > /dev/null 2>&1 & (sleep {marker} & ) ; "
            f"setsid sh -c 'setsid sleep {marker} & exec sleep {marker}' & sleep {marker} & disown -a; sleep 0.1"
        )
        result = await sandbox.call("exec", {"command": daemons})
        assert result["code"] == 0
        count = await sandbox.exec(["sh", "-c", f"ps ax -o args | grep -c '^sleep {marker}'"])
        assert int(count.output) == 6
        assert sum(marker in line for line in processes()) >= 6
        await sandbox.destroy()
        assert not [line for line in processes() if f"sleep {marker}" in line]

    from_host = __import__("os").listdir

    def processes() -> list[str]:
        lines = []
        for name in from_host("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/cmdline", "rb") as file:
                        lines.append(file.read().replace(b"\0", b" ").decode("utf-8", "replace"))
                except OSError:
                    continue
        return lines

    on_namespace(scene)


def test_a_run_that_times_out_takes_everything_it_started(on_namespace, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        await sandbox.exec(["sh", "-c", "setsid sleep 3333 > /dev/null 2>&1 &"])
        program = "setsid sleep 5555 & (setsid sh -c 'sleep 5555 & sleep 5555' &) ; sleep 5555 & wait"
        result = await sandbox.exec(["sh", "-c", program], timeout_s=0.5)
        assert result.timed_out
        left = (await sandbox.exec(["ps", "ax", "-o", "args"])).output.decode().splitlines()
        assert not [line for line in left if "5555" in line]
        assert [line for line in left if line.startswith("sleep 3333")]

    on_namespace(scene)
