"""The corpus of escapes: every attempt gets out of the plain backend, and none out of what another backend claims to hold.

The host sets out what there is to get: secrets with open permissions, a process that keeps more of them, victims, servers, a
neighbour. The attempts of corpus.toml run inside; whether one got through is judged here, by what it printed or changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.protocols import Limits
from etude.sandbox.boundary import ASPECTS
from etude.sandbox.landlock import LandlockHost
from etude.sandbox.plain import PlainHost

HERE = Path(__file__).parent
CORPUS = tomllib.loads((HERE / "corpus.toml").read_text())["attempt"]
DOCS = HERE.parents[2] / "docs" / "sandboxes.md"
ENOUGH = 60
KEEPER = """
import ctypes, json, os, sys, tempfile
token = os.environ["TOKEN"]
buffer = ctypes.create_string_buffer(token.encode())
fd = os.open("deleted", os.O_RDWR | os.O_CREAT, 0o666)
os.write(fd, token.encode()); os.unlink("deleted")
writable = os.open(sys.argv[2], os.O_RDWR)
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(2**64 - 1))  # what Yama allows is not the boundary under test
print(json.dumps({"pid": os.getpid(), "fd": fd, "writable": writable, "address": ctypes.addressof(buffer)}), flush=True)
sys.stdin.read()
"""
NEIGHBOUR = """
import contextlib, ctypes, json, os, socket, subprocess, tempfile, threading, time
token, up = os.environ["TOKEN"], {}
libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p
open("token.txt", "w").write(token)
up["temporary"] = os.path.join(tempfile.gettempdir(), "token.txt"); open(up["temporary"], "w").write(token)
def serve(server):
    while True:
        peer, _ = server.accept(); peer.sendall(token.encode()); peer.close()
with contextlib.suppress(OSError):
    tcp = socket.create_server(("127.0.0.1", 0)); up["tcp"] = tcp.getsockname()[1]
    threading.Thread(target=serve, args=(tcp,), daemon=True).start()
    unix = socket.socket(socket.AF_UNIX); up["abstract"] = "neighbour-" + token; unix.bind("\\0" + up["abstract"]); unix.listen()
    threading.Thread(target=serve, args=(unix,), daemon=True).start()
segment = libc.shmget(0, 4096, 0o1666)
if segment >= 0:
    up["segment"] = segment; ctypes.memmove(libc.shmat(segment, None, 0), token.encode(), len(token))
queue = libc.msgget(0, 0o1666)
if queue >= 0:
    up["queue"] = queue
    libc.msgsnd(queue, ctypes.create_string_buffer((1).to_bytes(8, "little") + token.encode()), ctypes.c_size_t(40), 0)
subprocess.Popen(["sleep", os.environ["SLEEP"]])
json.dump(up, open("up.tmp", "w")); os.rename("up.tmp", "up.json")
time.sleep(600)
"""


class Outside:
    """What there is on the host to get at. Readable and writable by everybody: nothing but the boundary may be in the way."""

    def __init__(self) -> None:
        self.token = "token" + secrets.token_hex(8)
        self.heard: set[str] = set()
        self._open: list[socket.socket] = []
        self._processes: list[subprocess.Popen[Any]] = []
        self._stop = threading.Event()
        self.folder = Path(tempfile.mkdtemp(prefix="etude-outside-"))
        self.data, self.planted = self.folder / "data", self.folder / "planted"
        for folder in (self.folder, self.data, self.planted):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
        self.secret, self.script = self.data / "secret", self.data / "script"
        self._file(self.secret, f"{self.token}\n")
        self._file(self.script, f"#!/bin/sh\necho {self.token}\n", 0o777)
        (self.data / self.token).touch()
        self.shared = [Path(f"/dev/shm/etude-{os.getpid()}-{name}") for name in ("read", "write")]
        for path in self.shared:
            self._file(path, self.token)
        self.files = {}
        for index, entry in enumerate(CORPUS):
            if entry["proof"] == "file" or "FILE" in entry["program"]:
                self.files[entry["name"]] = self.data / f"file-{index}"
                self._file(self.files[entry["name"]], self.token)
        self.files["plant in the host's shared memory"] = self.shared[1]
        self.victims = {e["name"]: self._run(["sleep", "600"]) for e in CORPUS if e["proof"] == "victim" or "VICTIM" in e["program"]}
        self._serve()
        keeper = self._run(
            [sys.executable, "-S", "-c", KEEPER, self.token, str(self.files["write through a descriptor of a host process"])],
            cwd=self.data,
            env={"TOKEN": self.token, "PATH": os.environ["PATH"]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert keeper.stdout is not None
        self.keeper = json.loads(keeper.stdout.readline())
        self.before = self._state()

    def _file(self, path: Path, text: str, mode: int = 0o666) -> None:
        path.write_text(text)
        path.chmod(mode)

    def _run(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        self._processes.append(subprocess.Popen(argv, start_new_session=True, **{"stdin": subprocess.DEVNULL, **options}))
        return self._processes[-1]

    def _serve(self) -> None:
        abstract = f"etude-{os.getpid()}"
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        self.unix = str(self.folder / "socket")
        self.abstract = abstract
        servers = []
        for family, kind, address in (
            (socket.AF_INET, stream, ("0.0.0.0", 0)),
            (socket.AF_INET, datagram, ("0.0.0.0", 0)),
            (socket.AF_UNIX, stream, self.unix),
            (socket.AF_UNIX, stream, "\0" + abstract),
            (socket.AF_UNIX, datagram, f"\0{abstract}-datagram"),
            (socket.AF_INET, stream, ("0.0.0.0", 0)),
        ):
            server = socket.socket(family, kind)
            server.bind(address)
            servers.append((server, kind))
        os.chmod(self.unix, 0o777)
        self.tcp, self.udp, self.wanted = (servers[i][0].getsockname()[1] for i in (0, 1, 5))
        servers.pop()[0].close()  # its port is now free, and a client of ours wants it
        for server, kind in servers:
            self._open.append(server)
            if kind == stream:
                server.listen()
            threading.Thread(target=self._listen, args=(server, kind == stream), daemon=True).start()
        threading.Thread(target=self._call, daemon=True).start()

    def _listen(self, server: socket.socket, connects: bool) -> None:
        server.settimeout(0.2)
        while not self._stop.is_set():
            try:
                if connects:
                    peer, _ = server.accept()
                    peer.settimeout(2)
                    with peer:
                        self.heard.add(peer.recv(200).decode())
                else:
                    self.heard.add(server.recv(200).decode())
            except OSError:
                continue

    def _call(self) -> None:
        """A client of the host that connects to a port where nobody should answer."""
        while not self._stop.wait(0.05):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.wanted), timeout=1) as sock:
                self.heard.add(sock.recv(200).decode())

    def targets(self, neighbour: dict[str, Any], server: int) -> dict[str, Any]:
        return {
            "secret": str(self.secret),
            "script": str(self.script),
            "planted": str(self.planted),
            "device": os.stat("/").st_dev,
            "shared_memory": str(self.shared[0]),
            "shared_file": str(self.shared[1]),
            "files": {name: str(path) for name, path in self.files.items()},
            "victims": {name: process.pid for name, process in self.victims.items()},
            "keeper": self.keeper,
            "tcp": self.tcp,
            "udp": self.udp,
            "unix": self.unix,
            "abstract": self.abstract,
            "wanted": self.wanted,
            "interfaces": [name for _, name in socket.if_nameindex()],
            "neighbour": neighbour,
            "server": server,
        }

    def _state(self) -> dict[str, Any]:
        """Of every file and victim that an attempt may change."""
        return {**{n: _file_state(p) for n, p in self.files.items()}, **{n: _process_state(p.pid) for n, p in self.victims.items()}}

    def escaped(self, said: dict[str, str]) -> dict[str, str]:
        """Attempts that got through, with the proof."""
        time.sleep(0.3)  # for servers to hear what was sent last
        now, found = self._state(), {}
        for entry in CORPUS:
            name, proof = entry["name"], entry["proof"]
            text = said.get(name, "")
            through = {
                "token": self.token in text,
                "allowed": "ALLOWED" in text,
                "planted": os.path.lexists(self.planted / name.replace(" ", "-")),
                "file": name in now and now[name] != self.before[name],
                "victim": name in now and now[name] != self.before[name],
                "reached": name in self.heard,
                "server": "DEAD" in text,
            }[proof]
            if through:
                found[name] = f"{proof}: {text[-200:]}"
        return found

    def close(self) -> None:
        self._stop.set()
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        time.sleep(0.25)
        for server in self._open:
            server.close()
        for path in self.shared:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder)


def _file_state(path: Path) -> Any:
    if not os.path.lexists(path):
        return "gone"
    info = path.stat()
    return path.read_bytes(), info.st_mode, int(info.st_mtime) == 1, info.st_uid, os.listxattr(path)


def _process_state(pid: int) -> Any:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if fields[0] == "Z":
        return "ended"
    return (
        fields[0] == "T",
        os.getpriority(os.PRIO_PROCESS, pid),
        os.sched_getscheduler(pid),
        sorted(os.sched_getaffinity(pid)),
        resource.prlimit(pid, resource.RLIMIT_NOFILE),
        Path(f"/proc/{pid}/oom_score_adj").read_text(),
    )


@pytest.fixture
def outside() -> Iterator[Outside]:
    place = Outside()
    yield place
    place.close()


def pid_of(command: str) -> int:
    """The host's number of the process with this command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() == command:
                return int(path.parent.name)
    raise AssertionError(f"no process {command!r}")


async def neighbour(host: Any, outside: Outside) -> dict[str, Any]:
    """A second sandbox with something to get at in it; what its addresses are."""
    sandbox = await host.create(await host.add_image({"neighbour.py": NEIGHBOUR.encode()}))
    length = f"600.{int.from_bytes(os.urandom(3), 'big')}"
    await sandbox.call("job_start", {"command": f"exec python neighbour.py {length}", "env": {"TOKEN": outside.token, "SLEEP": length}})
    for _ in range(600):
        if await sandbox.stat("up.json") is not None:
            break
        await asyncio.sleep(0.05)
    up = json.loads(await sandbox.read("up.json"))
    missing = {"tcp": 1, "abstract": "none", "segment": -1, "queue": -1}
    pids = {"pid": pid_of(f"python neighbour.py {length}"), "sleeper": pid_of(f"sleep {length}")}
    return {**missing, **up, **pids, "file": (await sandbox.info()).workdir + "/token.txt"}


def server_of(host: Any, sandbox: Any) -> int:
    """The tool server, as the sandbox's own processes could name it."""
    if isinstance(host, LandlockHost):
        (server,) = [int(pid) for pid in Path(f"/proc/{sandbox._process.pid}/task/{sandbox._process.pid}/children").read_text().split()]
        return server
    return sandbox._process.pid if isinstance(host, PlainHost) else 1


async def run_attempts(host: Any, outside: Outside) -> tuple[dict[str, str], Any]:
    """What each attempt printed, and the boundary record that should have held it."""
    image = await host.add_image({"runner.py": (HERE / "runner.py").read_bytes()})
    limits = Limits(pids=64, wall_s=300)
    said: dict[str, str] = {}
    beside = await neighbour(host, outside)
    single = [entry for entry in CORPUS if entry["proof"] == "server"]
    for entries in ([entry for entry in CORPUS if entry not in single], *([entry] for entry in single)):
        sandbox = await host.create(image, limits=limits)
        await sandbox.write("targets.json", json.dumps(outside.targets(beside, server_of(host, sandbox))).encode())
        await sandbox.write("corpus.json", json.dumps(entries).encode())
        boundary = (await sandbox.info()).boundary
        try:
            result = await asyncio.wait_for(sandbox.exec(["python", "runner.py"], timeout_s=200), 20 if len(entries) == 1 else 300)
            await asyncio.wait_for(sandbox.call("ping", {}), 5)
            assert result.code == 0, result.output
            said |= json.loads(result.output.splitlines()[-1])
        except (TimeoutError, Exception) as error:
            if len(entries) != 1 or isinstance(error, AssertionError):
                raise
            said[entries[0]["name"]] = f"DEAD {error!r}"
            if isinstance(host, PlainHost):  # a stopped tool server hears no end of its connection
                with contextlib.suppress(ProcessLookupError):
                    os.kill(sandbox._process.pid, 18)
        await sandbox.destroy()
    return said, boundary


def report(title: str, names: Any, found: dict[str, str], said: dict[str, str]) -> str:
    return "\n".join([title, *(f"  {name}: {found.get(name) or said.get(name, '').strip()[-160:]!r}" for name in names)])


def test_the_corpus_is_well_formed() -> None:
    names = [entry["name"] for entry in CORPUS]
    assert len(names) == len(set(names))
    assert {entry["aspect"] for entry in CORPUS} == set(ASPECTS)
    assert all(set(entry) <= {"name", "aspect", "proof", "root", "program"} for entry in CORPUS)


def test_every_attempt_gets_out_where_there_is_no_boundary(outside: Outside, capsys) -> None:
    """What this host itself refuses everybody (a kernel without it, a hardened setting) cannot be shown here, and is named."""

    async def scene() -> tuple[dict[str, str], Any]:
        host = PlainHost(unsafe=True)
        try:
            return await run_attempts(host, outside)
        finally:
            await host.close()

    said, _ = asyncio.run(scene())
    found = outside.escaped(said)
    wanted = [entry["name"] for entry in CORPUS if os.geteuid() == 0 or not entry.get("root")]
    refused = [name for name in wanted if name not in found]
    with capsys.disabled():
        print(report(f"\n{len(found)} attempts are real here as user {os.geteuid()}; refused by this host itself:", refused, found, said))
    assert len(found) >= ENOUGH
    assert len(refused) <= len(wanted) // 6
    assert {entry["aspect"] for entry in CORPUS if entry["name"] in found} == set(ASPECTS)


@pytest.mark.parametrize("backend", ["namespace", "frugal", "landlock"])
def test_none_gets_out_of_what_a_backend_claims(backend: str, outside: Outside, request: pytest.FixtureRequest) -> None:
    if backend == "landlock":
        found_here = request.getfixturevalue("landlock")
        if not found_here.works:
            pytest.skip(found_here.explain("landlock"))

        async def confined() -> tuple[dict[str, str], Any]:
            host = LandlockHost(probe=found_here)
            try:
                return await run_attempts(host, outside)
            finally:
                await host.close()

        said, boundary = asyncio.run(confined())
    else:
        play = request.getfixturevalue("on_namespace" if backend == "namespace" else "on_frugal")
        said, boundary = play(lambda host: run_attempts(host, outside))
    found = outside.escaped(said)
    assert set(boundary.separates) == set(ASPECTS)
    held = {aspect for aspect, how in boundary.separates.items() if not how.startswith("nothing")}
    through = [entry["name"] for entry in CORPUS if entry["name"] in found and entry["aspect"] in held]
    assert through == [], report(f"got out of {boundary.backend}:", through, found, said)
    for aspect in set(ASPECTS) - held:
        assert any(entry["aspect"] == aspect and entry["name"] in found for entry in CORPUS), f"{aspect} is held, and not claimed"
    if backend != "landlock" or int(re.search(r"ABI (\d+)", boundary.separates["read"])[1]) >= 6:  # type: ignore[index]
        assert documented(boundary.backend) == held


def documented(backend: str) -> set[str]:
    """The aspects that the table in the docs says a backend holds."""
    lines = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    start = next(i for i, cells in enumerate(lines) if cells[0] == "aspect")
    column = lines[start].index(backend)
    rows = {cells[0]: cells[column] for cells in lines[start + 2 : start + 2 + len(ASPECTS)]}
    assert set(rows) == set(ASPECTS)
    return {aspect for aspect, cell in rows.items() if cell == "yes"}


def test_the_docs_say_that_plain_holds_nothing() -> None:
    assert documented("plain") == set()


@pytest.mark.slow
def test_the_same_as_an_ordinary_user(as_ordinary_user: Any) -> None:
    said = as_ordinary_user("tests/sandbox/escapes", "-m", "not slow")
    assert re.search(r"\d+ attempts are real here as user 65534", said), said
    print(said)
