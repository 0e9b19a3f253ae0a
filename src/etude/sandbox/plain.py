"""A backend without a boundary, for platforms without namespaces. It is not a sandbox.

The same tool server runs in a temporary folder as an ordinary subprocess of this user. What it runs can read and change
every file of the user, reach the network, see and signal other processes, fill the disk, and outlive its rollout.
Enforced are only: the wall clock and output of commands, CPU seconds of a process, file operations staying inside of
the workspace (commands do not), and the kill of process groups at the end. Its boundary record says so.

It starts only when named and with unsafe=True. Use it for code you would run in your own shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from etude.errors import DeadlineError, SandboxError, UserError
from etude.protocols import Change, GradeBundle, GradedRun, Limits, Sandbox, SandboxInfo
from etude.records import Boundary, Level
from etude.sandbox.boundary import ASPECTS
from etude.sandbox.channel import Channel, ServedSandbox, check_level
from etude.sandbox.egress.policy import Network, NetworkPolicy
from etude.sandbox.graded import graded_run
from etude.sandbox.images import Diff, ImageStore, remove_tree

BOUNDARY = Boundary(
    backend="plain",
    network="host",
    capabilities=("all of the user's",),
    separates={**dict.fromkeys(ASPECTS, "nothing"), "server": "path checks of the tool server"},
    limits={
        "memory": "nothing",
        "pids": "nothing",
        "disk": "nothing",
        "cpu": "RLIMIT_CPU of each process",
        "wall": "timer of the tool server",
        "output": "count of the tool server",
    },
    evidence=("workspace diff",),
    coverage={"workspace diff": "every file of the workspace at its end, and nothing that was written elsewhere"},
    levels=(Level.FILES, Level.SESSION),
)


class ProcessHost:
    """Makes tool servers that are children of this process. What surrounds them is up to the subclass."""

    def __init__(self, boundary: Boundary, root: Path | str | None) -> None:
        self.boundary = boundary
        self._temporary = root is None
        self.root = Path(tempfile.mkdtemp(prefix=f"etude-{boundary.backend}-")) if root is None else Path(root).absolute()
        for name in ("layers", "snapshots", "work", "bin"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for name in ("python", "python3"):  # some installations have only python3.11
            if not Path(os.path.dirname(sys.executable), name).exists() and not (self.root / "bin" / name).is_symlink():
                (self.root / "bin" / name).symlink_to(sys.executable)
        self.store = ImageStore(self.root)
        self._sandboxes: dict[str, ProcessSandbox] = {}
        self._by_create_id: dict[str, asyncio.Task[ProcessSandbox]] = {}
        self._totals = {"created": 0, "destroyed": 0, "expired": 0, "died": 0}

    program: tuple[str, ...] = (str(Path(__file__).parent / "toolserver.py"),)
    """What the interpreter runs; it gets a descriptor and JSON."""

    async def add_image(self, files: Any) -> str:
        return await asyncio.to_thread(self.store.add, files)

    async def create(
        self, image: str, *, limits: Limits = Limits(), network: Network = (), ttl_s: float = 900.0, create_id: str = ""
    ) -> ProcessSandbox:
        """A folder with the files of `image` and a tool server in it."""
        if NetworkPolicy.of(network):
            reach = "reaches everything" if self.boundary.network == "host" else "has none"
            raise UserError(f"the {self.boundary.backend} backend cannot limit the network to a list of hosts; it {reach}")
        known = self._by_create_id.get(create_id) if create_id else None
        if known is not None and not (known.done() and known.exception() is None and known.result().gone):
            return await asyncio.shield(known)
        task = asyncio.get_running_loop().create_task(self._create(image, limits, ttl_s))
        if create_id:
            self._by_create_id[create_id] = task
        return await task

    async def _create(self, image: str, limits: Limits, ttl_s: float) -> ProcessSandbox:
        origin = self.store.describe(image)
        name = f"p{self._totals['created'] + 1}"
        self._totals["created"] += 1
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.root / "work"))
        await asyncio.to_thread(self._copy, image, folder / "repo")
        ours, theirs = socket.socketpair()
        settings = {"workdir": os.path.realpath(folder / "repo"), "limits": asdict(limits), "environment": self._environment(folder)}
        command = [sys.executable, *self.program, str(theirs.fileno()), json.dumps(settings)]
        process = await asyncio.to_thread(
            subprocess.Popen,
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": site()},
        )
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        sandbox = ProcessSandbox(self, Channel(reader, writer, name), process, folder, image=image, limits=limits, ttl_s=ttl_s)
        self._sandboxes[name] = sandbox
        try:
            await sandbox.ready(origin.session)
        except (SandboxError, DeadlineError):
            await sandbox.destroy()
            raise
        return sandbox

    def _copy(self, image: str, target: Path) -> None:
        target.mkdir()
        for path, (source, mode) in self.store.files(image).items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / path)
            (target / path).chmod(mode)

    def _environment(self, folder: Path) -> dict[str, str]:
        (folder / "tmp").mkdir()
        return {
            "PATH": os.pathsep.join((os.path.dirname(sys.executable), str(self.root / "bin"), os.environ.get("PATH", ""))),
            "HOME": str(folder / "tmp"),
            "TMPDIR": str(folder / "tmp"),
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "TERM": "dumb",
            "COLUMNS": "80",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
        }

    async def stats(self) -> dict[str, float]:
        return {"live": len(self._sandboxes), "orphans": 0, **self._totals}

    def forget(self, sandbox: ProcessSandbox, *, expired: bool) -> None:
        if self._sandboxes.pop(sandbox.id, None) is not None:
            self._totals["destroyed"] += 1
            self._totals["expired"] += expired

    async def close(self) -> None:
        for sandbox in list(self._sandboxes.values()):
            await sandbox.destroy()
        if self._temporary:
            await asyncio.to_thread(remove_tree, self.root)


class PlainHost(ProcessHost):
    """Makes plain processes. Refuses unless `unsafe=True`."""

    def __init__(self, *, root: Path | str | None = None, unsafe: bool = False) -> None:
        if unsafe is not True:
            raise UserError(
                "the plain backend protects nothing: commands run as you, with your files and your network. "
                "Pass unsafe=True if you trust the code that will run, or use backend='namespace'"
            )
        super().__init__(BOUNDARY, root)


class ProcessSandbox(ServedSandbox):
    """A folder and a tool server in a process of its own."""

    def __init__(
        self,
        host: ProcessHost,
        channel: Channel,
        process: subprocess.Popen[bytes],
        folder: Path,
        *,
        image: str,
        limits: Limits,
        ttl_s: float,
    ) -> None:
        super().__init__(channel, os.path.realpath(folder / "repo"))
        self.id, self.gone = channel.name, False
        self._host, self._process, self._folder, self._image = host, process, folder, image
        self._files, self._boundary = host.store.describe(image).files, host.boundary
        self._limits, self._ttl_s, self._snapshot, self._why = limits, ttl_s, "", ""
        channel.fate = self._fate
        self._lease: asyncio.TimerHandle | None = None

    async def ready(self, session: Mapping[str, Any] | None) -> None:
        await self._channel.request("ping", {}, timeout_s=60.0)
        if session is not None:
            await self._restore_session(session)
            self._boundary = self._boundary.replace(level=Level.SESSION)
        self._lease = asyncio.get_running_loop().call_later(self._ttl_s, self._expire)

    async def _fate(self) -> str:
        return self._why or "its tool server ended"

    def _expire(self) -> None:
        self._why = "its lease ran out"
        self._expiry = asyncio.get_running_loop().create_task(self._end(expired=True))

    async def info(self) -> SandboxInfo:
        return SandboxInfo(id=self.id, image=self._image, snapshot=self._snapshot, boundary=self._boundary, workdir=self._workdir)

    async def diff(self) -> list[Change]:
        return list((await self.diff_report()).changes)

    async def diff_report(self) -> Diff:
        with self._tree() as tree:
            return await asyncio.to_thread(self._host.store.diff_tree, tree, self._files)

    @contextlib.contextmanager
    def _tree(self) -> Iterator[int]:
        if self.gone:
            raise SandboxError(f"sandbox {self.id} was destroyed; read what it changed before that")
        fd = os.open(self._workdir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield fd
        finally:
            os.close(fd)

    async def snapshot(self, level: Level = Level.FILES, *, require: bool = True) -> str:
        level, store = check_level(self._boundary.backend, level, self._boundary.levels, require), self._host.store
        with self._tree() as tree:
            snapshot = await asyncio.to_thread(store.add_tree, tree, self._files)
        if level is Level.SESSION:
            snapshot = await asyncio.to_thread(store.add_session, snapshot, await self._session_state())
        self._snapshot = snapshot
        return snapshot

    async def grade(self, bundle: GradeBundle) -> GradedRun:
        return await graded_run(self._host, replace(bundle, image=bundle.image or self._host.store.describe(self._image).base))

    async def fork(self, n: int, level: Level = Level.FILES, *, require: bool = True) -> list[Sandbox]:
        snapshot = await self.snapshot(level, require=require)
        return [await self._host.create(snapshot, limits=self._limits, ttl_s=self._ttl_s) for _ in range(n)]

    async def destroy(self) -> None:
        self._why = self._why or "it was destroyed"
        await self._end(expired=False)

    async def _end(self, *, expired: bool) -> None:
        if self.gone:
            return
        self.gone = True
        if self._lease is not None:
            self._lease.cancel()
        self._channel.close(self._why)
        await asyncio.to_thread(self._reap)
        self._host.forget(self, expired=expired)

    def _reap(self) -> None:
        try:
            self._process.wait(5.0)  # it kills its runs when the connection closes
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        remove_tree(self._folder)


def site() -> str:
    """Where the tool server finds pytest: an interpreter may have been given its packages by PYTHONPATH."""
    return os.pathsep.join(path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))
