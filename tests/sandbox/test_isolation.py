"""Attempts to look, write, call or reach out of a namespace sandbox. Every one must fail, and the sandbox must go on working."""

from __future__ import annotations

import ast
import asyncio
import http.server
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.sandbox.client import NamespaceHost, start_daemon


def test_nothing_of_the_host_can_be_read(shell, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    home = os.path.expanduser("~")
    answer = shell(f"cat {secret}; ls {tmp_path} {home} /root /home /work /run /sys /boot /etc/shadow /etc/passwd; cat /etc/shadow; ls /")
    assert "host secret" not in answer["output"]
    assert "/etc/passwd" in answer["output"]
    listing = answer["output"].split("No such file or directory")[-1].split()
    expected = {"bin", "dev", "etc", "lib", "mnt", "opt", "proc", "repo", "sbin", "tmp", "usr", "var"}
    assert set(listing) - {"lib32", "lib64", "libx32"} == expected
    passwd = shell("cat /etc/passwd; ls /mnt/layers /mnt/scratch; cat /proc/1/environ; ls -l /proc/1/root /proc/1/fd")["output"]
    assert "agent:x:1000" in passwd
    assert passwd.count("Permission denied") >= 3


def test_only_chosen_packages_are_visible(python, own_packages) -> None:
    program = """
        import importlib.metadata, sys
        print(sorted({d.metadata["Name"].lower() for d in importlib.metadata.distributions()}))
        for name in ("numpy", "torch", "etude", "pip"):
            try: __import__(name); print("SEEN", name)
            except ImportError: pass
        print(sys.executable, sys.version_info[:2])
    """
    names, place = python(program)["output"].splitlines()
    assert {"pytest", "pluggy", "iniconfig", "packaging", "pygments"} <= set(ast.literal_eval(names))
    assert len(ast.literal_eval(names)) <= 8
    assert place == f"/opt/venv/bin/python {sys.version_info[:2]}"

    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image({"a": b""}))
        look = "import hypothesis, sys; print(hypothesis.__file__)"
        assert b"/opt/venv" in (await sandbox.exec(["python", "-c", look])).output
        assert (await sandbox.exec(["python", "-c", "import numpy"])).code == 1

    own_packages(scene)


@pytest.fixture
def own_packages(machine, tmp_path: Path):
    """Scenes on a sandboxd whose sandboxes see one package more."""

    def run(scene) -> None:
        handle = start_daemon(tmp_path / "packages", warm=0, packages=["pytest", "hypothesis"])

        async def main() -> None:
            await scene(NamespaceHost(handle, own_daemon=False))

        try:
            asyncio.run(main())
        finally:
            handle.close()

    return run


def test_a_package_that_is_not_installed_is_named(machine, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no-such-package is not installed"):
        start_daemon(tmp_path / "root", packages=["no-such-package"])


def test_nothing_outside_the_workspace_can_be_written(shell) -> None:
    answer = shell(
        "for d in / /etc /usr /usr/bin /bin /opt /opt/python /opt/venv /opt/venv/bin /dev /var /mnt /mnt/layers /proc /proc/sys/kernel; do"
        " if touch $d/planted 2>/dev/null; then echo WROTE $d; fi; done;"
        " echo x > /proc/sys/kernel/hostname && echo WROTE hostname; echo x > /proc/sysrq-trigger && echo WROTE sysrq;"
        " echo x >> /opt/venv/lib/python3*/site-packages/pytest/__init__.py && echo WROTE pytest;"
        " touch /repo/ok /tmp/ok /dev/shm/ok && echo fine"
    )
    assert "WROTE" not in answer["output"]
    assert answer["output"].rstrip().endswith("fine")


def test_the_network_is_not_there(python) -> None:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    abstract = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    abstract.bind(f"\0etude-test-{os.getpid()}")
    abstract.listen(1)
    try:
        answer = python(f"""
            import socket
            for target in [("127.0.0.1", {server.server_port}), ("169.254.169.254", 80), ("1.1.1.1", 53), ("::1", {server.server_port})]:
                try:
                    socket.create_connection(target, timeout=2)
                    print("REACHED", target)
                except OSError as error:
                    print("refused", target)
            try:
                print("RESOLVED", socket.getaddrinfo("example.com", 80))
            except OSError:
                print("no resolver")
            try:
                s = socket.socket(socket.AF_UNIX); s.connect("\\0etude-test-{os.getpid()}"); print("REACHED abstract")
            except OSError:
                print("no abstract socket")
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                udp.sendto(b"x", ("8.8.8.8", 53)); print("SENT")
            except OSError:
                print("no route")
            a = socket.create_server(("127.0.0.1", 0)); b = socket.create_connection(a.getsockname()); print("own loopback works")
        """)
    finally:
        server.shutdown()
        server.server_close()
        abstract.close()
    assert answer["code"] == 0, answer
    for bad in ("REACHED", "RESOLVED", "SENT"):
        assert bad not in answer["output"]
    assert answer["output"].count("refused") == 4
    assert "own loopback works" in answer["output"]


def test_two_sandboxes_cannot_meet(on_namespace, shop) -> None:
    async def scene(host) -> None:
        one, two = [await host.create(await host.add_image(shop)) for _ in range(2)]
        listen = (
            "import socket, time\n"
            "s = socket.create_server(('127.0.0.1', 4567))\n"
            "u = socket.socket(socket.AF_UNIX); u.bind('\\0meet'); u.listen()\n"
            "open('up', 'w'); time.sleep(60)\n"
        )
        await one.write("listen.py", listen.encode())
        await one.call("job_start", {"command": "python listen.py"})
        while await one.stat("up") is None:
            pass
        attempt = (
            "import socket\n"
            "for family, where in ((socket.AF_INET, ('127.0.0.1', 4567)), (socket.AF_UNIX, '\\0meet')):\n"
            "    try: socket.socket(family).connect(where); print('MET')\n"
            "    except OSError as e: print('alone')\n"
        )
        assert (await two.exec(["python", "-c", attempt])).output == b"alone\nalone\n"
        assert (await one.exec(["python", "-c", attempt])).output == b"MET\nMET\n"
        processes = (await two.exec(["sh", "-c", "ls /proc | grep -c '^[0-9]'"])).output
        assert int(processes) <= 5

    on_namespace(scene)


def test_host_processes_are_out_of_reach(python) -> None:
    answer = python(f"""
        import os, signal
        seen = sorted(int(n) for n in os.listdir("/proc") if n.isdigit())
        print("sees", len(seen))
        for pid in ({os.getpid()}, {os.getppid()}, 1):
            try:
                os.kill(pid, signal.SIGKILL)
                print("signalled", pid)
            except OSError as error:
                print("no process", pid)
        print("still here")
    """)
    assert answer["code"] == 0
    assert "still here" in answer["output"]
    assert int(answer["output"].split()[1]) <= 5
    os.kill(os.getpid(), 0)


def test_privileged_calls_are_refused(python) -> None:
    answer = python("""
        import ctypes, errno, os, platform
        libc = ctypes.CDLL(None, use_errno=True)
        x86 = platform.machine() == "x86_64"
        def attempt(name, *args, number=None):
            ctypes.set_errno(0)
            result = libc.syscall(number, *args) if number is not None else getattr(libc, name)(*args)
            print(name, "ALLOWED" if result >= 0 else errno.errorcode[ctypes.get_errno()])
        attempt("mount", b"none", b"/tmp", b"tmpfs", 0, None)
        attempt("umount2", b"/repo", 2)
        attempt("unshare", 0x10000000)
        attempt("unshare", 0x00020000)
        attempt("setns", 0, 0)
        attempt("chroot", b"/tmp")
        attempt("ptrace", 16, 1, 0, 0)
        attempt("bpf", 0, 0, 0, number=321 if x86 else 280)
        attempt("perf_event_open", 0, 0, -1, -1, 0, number=298 if x86 else 241)
        attempt("keyctl", 0, -3, 1, number=250 if x86 else 219)
        attempt("userfaultfd", 0, number=323 if x86 else 282)
        attempt("io_uring_setup", 1, 0, number=425)
        attempt("open_by_handle_at", -100, 0, 0, number=304 if x86 else 265)
        attempt("pidfd_getfd", 0, 0, 0, number=438)
        attempt("sethostname", b"x", 1)
        attempt("clone", 0x10000000 | 17, 0, 0, 0, 0, number=56 if x86 else 220)
        attempt("clone3", 0, 0, number=435)
        attempt("socket", 40, 1, 0)
        attempt("socket", 17, 3, 0)
        attempt("socket", 38, 5, 0)
        attempt("tiocsti", 0, 0x5412, b"x", number=16 if x86 else 29)
        if x86:
            attempt("x32_getpid", number=0x40000000 + 39)
        attempt("mknod", b"/repo/dev", 0o60666, os.makedev(8, 0))
        print(open("/proc/self/status").read())
    """)
    lines = answer["output"].splitlines()
    refused = lines[: next(i for i, line in enumerate(lines) if line.startswith("Name:"))]
    assert len(refused) >= 22
    assert not [line for line in refused if "ALLOWED" in line]
    assert {line.split()[1] for line in refused if line.split()[0] in ("clone3", "x32_getpid")} == {"ENOSYS"}
    assert {line.split()[1] for line in refused if line.startswith("socket")} == {"EAFNOSUPPORT"}
    status = answer["output"]
    for wanted in ("NoNewPrivs:\t1", "Seccomp:\t2", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "CapPrm:\t0000000000000000"):
        assert wanted in status


def test_set_uid_programs_gain_nothing(shell) -> None:
    answer = shell("cp /bin/sh own; chmod 6755 own; ./own -c 'id'; find /usr/bin -perm -4000 | head -1; su -c id; id -u")
    assert "uid=0" not in answer["output"]
    assert answer["output"].splitlines()[-1] == "1000"


def test_the_tool_server_cannot_be_touched_by_what_it_runs(on_namespace, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        program = (
            "import os, signal\n"
            "for n in range(1, 32):\n"
            "    try: os.kill(1, n)\n"
            "    except OSError: pass\n"
            "for name in ('mem', 'environ'):\n"
            "    try: print(name, len(open(f'/proc/1/{name}', 'rb').read(10)), 'READ')\n"
            "    except OSError as error: print(name, 'denied')\n"
            "print(os.listdir('/proc/self/fd'))\n"
        )
        result = await sandbox.exec(["python", "-c", program])
        assert b"mem denied" in result.output
        assert b"environ denied" in result.output
        assert (await sandbox.call("list", {}))["text"].startswith("README.md")
        assert eval(result.output.splitlines()[-1]) == ["0", "1", "2", "3"]
        await sandbox.write(
            "test_look.py",
            b"import os\ndef test_look():\n    print('OPEN', sorted(os.listdir('/proc/self/fd')))\n    open('/proc/self/environ').read()\n",
        )
        run = await sandbox.call("pytest", {"args": ["-q", "-s", "test_look.py"]})
        assert run["code"] == 0, run["output"]
        opened = eval(run["output"][run["output"].index("OPEN") + 4 :].splitlines()[0])
        assert len(opened) <= 6
        for path in ("/proc/self/mem", "/proc/1/fd/3", "/dev/null", "/sys/kernel"):
            assert (await sandbox.call("read", {"path": path}))["error"] == "forbidden"
            assert (await sandbox.call("write", {"path": path, "text": "x"}))["error"] == "forbidden"

    on_namespace(scene)


def test_links_and_dots_lead_nowhere(on_namespace, shop, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("host secret")

    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        dots = "../" * 30
        await sandbox.exec(
            [
                "sh",
                "-c",
                f"ln -s {secret} link; ln -s {tmp_path} folder; ln -s / root; ln -s /proc/1/root proc; ln -s loop loop; mkfifo fifo",
            ]
        )
        for path in ("link", str(secret), f"{dots}{secret}", "folder/secret.txt", f"root{secret}", f"proc{secret}"):
            answer = await sandbox.call("read", {"path": path})
            assert answer["error"] in ("failed", "forbidden"), path
            with pytest.raises(OSError):
                await sandbox.read(path)
        assert (await sandbox.call("read", {"path": "loop"}))["error"] == "failed"
        assert (await sandbox.call("read", {"path": "fifo"}))["error"] == "failed"
        assert (await sandbox.call("write", {"path": "fifo", "text": "x"}))["error"] == "failed"
        await sandbox.call("write", {"path": f"{dots}tmp/out.txt", "text": "inside"})
        assert (await sandbox.call("read", {"path": "/tmp/out.txt"}))["text"] == "inside"
        assert not Path("/tmp/out.txt").exists() or Path("/tmp/out.txt").read_text() != "inside"
        await sandbox.call("write", {"path": "folder/planted", "text": "x"})
        assert not (tmp_path / "planted").exists()
        report = await sandbox.diff_report()
        assert report.changes == ()
        assert {path for path, _ in report.refused} == {"link", "folder", "root", "proc", "loop", "fifo"}
        snapshot = await sandbox.snapshot()
        copied = await host.create(snapshot)
        assert await copied.stat("link") is None

    on_namespace(scene)
    assert secret.read_text() == "host secret"


def test_size_bombs_and_odd_names_stay_inside(on_namespace, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        program = (
            "import os\n"
            "open('sparse', 'wb').truncate(60 * 2**20)\n"
            "os.makedirs('/'.join(['d'] * 100))\n"
            "open(b'bad\\xff', 'w')\n"
            "open('fine.txt', 'w').write('ok')\n"
            "try: open('huge', 'wb').truncate(2**40)\n"
            "except OSError: print('huge refused')\n"
        )
        result = await sandbox.exec(["python", "-c", program])
        assert result.output == b"huge refused\n"
        report = await sandbox.diff_report()
        reasons = dict(report.refused)
        assert any("UTF-8" in reason for reason in reasons.values())
        assert any("deeper than" in reason for reason in reasons.values())
        assert {change.path for change in report.changes} == {"fine.txt", "sparse", "huge"}

    on_namespace(scene)


def test_an_escape_of_the_frame_is_an_error_of_the_machine(on_namespace, shop) -> None:
    """When process 1 of a sandbox dies its calls fail as infrastructure, with what sandboxd saw."""

    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        waiting = sandbox.exec(["sleep", "100"])
        other = await host.create(await host.add_image(shop))
        link = await host.link()
        await link.request("destroy", id=sandbox.id)
        with pytest.raises(SandboxError, match=f"sandbox {sandbox.id} .*destroyed"):
            await waiting
        assert (await other.exec(["true"])).code == 0

    on_namespace(scene)
