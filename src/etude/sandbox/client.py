"""The namespace backend as the rest of etude sees it: `NamespaceHost` and `NamespaceSandbox` over sandboxd's socket.

    handle = start_daemon(root)            # before torch is imported
    host = NamespaceHost(handle)           # belongs to the event loop that first uses it

A sandbox is reached over its own socket; sandboxd is asked only to create, renew and destroy. File trees (images,
snapshots, diffs) are read and written by this process, in a thread. Whatever breaks is a SandboxError that names the
sandbox and what sandboxd knows about its end; whatever takes too long is a DeadlineError.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from etude.errors import DeadlineError, SandboxError, UserError
from etude.protocols import Change, GradeBundle, GradedRun, Limits, Sandbox, SandboxInfo
from etude.records import Boundary, Level
from etude.sandbox import base, zygote
from etude.sandbox.channel import Channel, ServedSandbox, check_level
from etude.sandbox.egress.door import Door
from etude.sandbox.egress.policy import Network, NetworkPolicy
from etude.sandbox.graded import graded_run
from etude.sandbox.images import Diff, ImageStore

CREATE_TIMEOUT_S = 60.0
DAEMON_TIMEOUT_S = 30.0
START_TIMEOUT_S = 60.0
LEVELS = (Level.FILES, Level.SESSION)
"""Live processes (L2) would need a checkpoint of the kernel's state of them, a machine (L3) a machine."""
MAX_LINE = 1 << 12
PARALLEL_CREATES = 8
"""More at once only wait for each other: the knee was at two workers on two cores."""


class DaemonHandle:
    """A sandboxd that this process started, or one that runs already."""

    def __init__(self, root: Path, path: str, process: subprocess.Popen[bytes] | None, boundary: dict[str, Any]) -> None:
        self.root, self.socket, self.boundary = root, path, boundary
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the daemon that was started here, and everything in it. One that was only connected to goes on."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def start_daemon(
    root: Path | str | None = None, *, warm: int = 2, packages: Sequence[str] = ("pytest",), options: Sequence[str] = ()
) -> DaemonHandle:
    """Start sandboxd and wait until it can make sandboxes. It stops with this process.

    Without a root it gets a temporary one, removed at the end (or, after a kill -9, by the next one started).
    `packages` are the distributions that sandboxes see; `options` are further ones of its command line.
    """
    temporary = root is None
    folder = _temporary_root() if root is None else Path(root).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "etude.sandbox.daemon", "--root", str(folder), "--warm", str(warm), "--with-parent"]
    command += ["--packages", ",".join(packages), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONDONTWRITEBYTECODE": "1"}
    with open(folder / "daemon.log", "ab") as log:
        process = subprocess.Popen(
            [*command, "--temporary"] if temporary else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], START_TIMEOUT_S)[0]:
        process.kill()
    line = process.stdout.readline()
    said: dict[str, Any] = json.loads(line) if line else {"failed": _last_words(folder / "daemon.log")}
    if "failed" in said:
        DaemonHandle(folder, "", process, {}).close()
        if temporary:
            shutil.rmtree(folder, ignore_errors=True)
        raise SandboxError(f"sandboxd could not start: {said['failed']}; `etude doctor` says what this machine lacks")
    return DaemonHandle(folder, str(folder / "socket"), process, said["boundary"])


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return f"it ended, or said nothing for {START_TIMEOUT_S:g} s; the last line of {log} is {lines[-1] if lines else 'missing'!r}"


def connect_daemon(root: Path | str) -> DaemonHandle:
    """Use the sandboxd that runs at `root`."""
    folder = Path(root).absolute()
    if not (folder / "socket").exists():
        raise UserError(f"no sandboxd at {folder}; start one with: python -m etude.sandbox.daemon --root {folder}")
    return DaemonHandle(folder, str(folder / "socket"), None, {})


def _temporary_root() -> Path:
    """A folder in one that is ours alone, so that a later sandboxd may remove what a killed one left."""
    parent = Path(tempfile.gettempdir(), f"etude-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    info = parent.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        return Path(tempfile.mkdtemp(prefix="etude-"))
    return Path(tempfile.mkdtemp(prefix="sandbox-", dir=parent))


class Link:
    """The connection to sandboxd: numbered packets, descriptors both ways."""

    def __init__(self, path: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = os.open(os.path.dirname(path), os.O_PATH)
        try:  # by way of the folder's descriptor: a socket's path may be no longer than 107 bytes
            self._sock.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        except OSError as error:
            self._sock.close()
            raise SandboxError(f"cannot reach sandboxd at {path}: {error}; is it running?") from error
        finally:
            os.close(folder)
        self._sock.setblocking(False)
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._next = 0
        self._path = path
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self._sock, self._read)
        self.closed = False

    async def request(self, op: str, fds: Sequence[int] = (), *, timeout_s: float = DAEMON_TIMEOUT_S, **fields: Any) -> Any:
        """(answer, descriptors). The caller owns the descriptors."""
        if self.closed:
            raise SandboxError(f"sandboxd at {self._path} is gone; {op} cannot be done")
        self._next += 1
        number = self._next
        future: asyncio.Future[tuple[dict[str, Any], list[int]]] = self.loop.create_future()
        self._waiting[number] = future
        data = json.dumps({"n": number, "op": op, **fields}).encode()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(data, fds)
                answer, received = await future
        except TimeoutError:
            raise DeadlineError(f"sandboxd to {op}", timeout_s) from None
        except (ConnectionError, EOFError):
            raise SandboxError(f"sandboxd at {self._path} ended during {op}; its sandboxes ended with it") from None
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise SandboxError(f"sandboxd could not {op}: {answer['error']}")
        return answer, received

    async def _send(self, data: bytes, fds: Sequence[int]) -> None:
        while True:
            try:
                socket.send_fds(self._sock, [data], list(fds))
                return
            except BlockingIOError:
                await asyncio.sleep(0.002)

    def _read(self) -> None:
        try:
            message, fds = zygote.receive(self._sock)
        except BlockingIOError:
            return
        except OSError:
            message, fds = None, []
        if message is None:
            self.close()
            return
        future = self._waiting.get(message.pop("n"))
        if future is not None and not future.done():
            future.set_result((message, fds))
            return
        for fd in fds:  # an answer that came too late
            os.close(fd)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if not self.loop.is_closed():
            self.loop.remove_reader(self._sock)
        self._sock.close()
        for future in self._waiting.values():
            if not future.done() and not self.loop.is_closed():
                future.set_exception(EOFError())


class NamespaceHost:
    """Makes sandboxes out of Linux namespaces. One per event loop; several may share a sandboxd."""

    def __init__(self, handle: DaemonHandle, *, owner: str = "", own_daemon: bool = True) -> None:
        self._handle, self._own_daemon = handle, own_daemon
        self.owner = owner or f"{os.uname().nodename}:{os.getpid()}"
        owned_by = base.sandbox_owner() if os.geteuid() == 0 else None
        self.store = ImageStore(handle.root, owned_by)
        self._link: Link | None = None
        self._linking: asyncio.Lock | None = None
        self._throttle: asyncio.Semaphore | None = None
        self._boundary: Boundary | None = None
        self.overlay = True
        """Whether workspaces are overlays; else they are copies, and compared as such."""
        self._sandboxes: set[NamespaceSandbox] = set()

    @property
    def pid(self) -> int:
        """Process id of the sandboxd behind it, 0 where another process owns it."""
        return self._handle.pid

    async def link(self) -> Link:
        """The connection of the running event loop, made when first needed."""
        loop = asyncio.get_running_loop()
        if self._link is not None and self._link.loop is not loop:
            self._link.close()
            self._link = None
        if self._link is None:
            self._link = link = Link(self._handle.socket)
            self._throttle = asyncio.Semaphore(PARALLEL_CREATES)
            answer, _ = await link.request("hello", owner=self.owner)
            fields = answer["boundary"]
            self.overlay = bool(answer["overlay"])
            self._boundary = Boundary(**{**fields, "evidence": tuple(fields["evidence"]), "levels": LEVELS})
        return self._link

    async def add_image(self, files: Any) -> str:
        return await asyncio.to_thread(self.store.add, files)

    async def create(
        self, image: str, *, limits: Limits = Limits(), network: Network = (), ttl_s: float = 900.0, create_id: str = ""
    ) -> NamespaceSandbox:
        """A sandbox whose workspace is `image`. The same `create_id` again gives the same sandbox, also after a lost connection.

        `network` is an `egress.NetworkPolicy`, or short rules of one such as "pypi.org"; without it there is none.
        """
        door = Door(NetworkPolicy.of(network))
        origin = self.store.describe(image)
        layers = origin.layers
        link = await self.link()
        assert self._throttle is not None
        async with self._throttle:
            ours, theirs = socket.socketpair()
            try:
                fields = {"image": image, "layers": layers, "limits": asdict(limits), "ttl_s": ttl_s, "create_id": create_id}
                fields |= door.order()
                answer, fds = await link.request("create", [theirs.fileno()], timeout_s=CREATE_TIMEOUT_S, **fields)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        assert self._boundary is not None
        channel = Channel(reader, writer, answer["id"])
        boundary = self._boundary.replace(level=Level.SESSION if origin.session is not None else Level.FILES)
        boundary = door.open(fds[1:], answer["keep"], self._handle.root / "network" / f"{answer['id']}.jsonl", boundary)
        sandbox = NamespaceSandbox(self, channel, image=image, limits=limits, ttl_s=ttl_s, upper=fds[0], boundary=boundary, door=door)
        self._sandboxes.add(sandbox)
        if origin.session is not None:
            await sandbox.restore(origin.session)
        return sandbox

    async def boxes(self) -> list[dict[str, str]]:
        """id, image and create_id of every live sandbox of the sandboxd behind it, whoever made them."""
        found: list[dict[str, str]] = []
        while True:
            answer, _ = await (await self.link()).request("list", skip=len(found))
            found += answer["boxes"]
            if not answer["boxes"]:
                return found

    async def remove(self, name: str) -> None:
        """End a sandbox by its id, whoever made it."""
        await (await self.link()).request("destroy", id=name)

    async def stats(self) -> dict[str, float]:
        """Counts kept by sandboxd: live, created, destroyed, orphans (sandboxes without a client, or that resist removal) ..."""
        answer, _ = await (await self.link()).request("stats")
        return answer["stats"]

    def forget(self, sandbox: NamespaceSandbox) -> None:
        self._sandboxes.discard(sandbox)

    async def close(self) -> None:
        """Destroy this host's sandboxes; stop sandboxd if it was started for this host."""
        for sandbox in list(self._sandboxes):
            with contextlib.suppress(SandboxError, DeadlineError):
                await sandbox.destroy()
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._own_daemon:
            await asyncio.to_thread(self._handle.close)


class NamespaceSandbox(ServedSandbox):
    """One running sandbox. See `protocols.Sandbox`."""

    def __init__(
        self,
        host: NamespaceHost,
        channel: Channel,
        *,
        image: str,
        limits: Limits,
        ttl_s: float,
        upper: int,
        boundary: Boundary,
        door: Door,
    ) -> None:
        super().__init__(channel, zygote.REPO)
        self.network = door
        """Its way out: `network.set_phase`, `network.log`."""
        self.id = channel.name
        self._host, self._image, self._limits, self._ttl_s = host, image, limits, ttl_s
        self._upper, self._boundary = upper, boundary
        self._files = host.store.describe(image).files
        self._snapshot = ""
        self._paused = False
        channel.fate = self._fate

    async def _fate(self) -> str:
        answer, _ = await (await self._host.link()).request("fate", id=self.id)
        return answer["why"]

    async def info(self) -> SandboxInfo:
        return SandboxInfo(id=self.id, image=self._image, snapshot=self._snapshot, boundary=self._boundary, workdir=self._workdir)

    def _layer(self) -> int:
        if self._upper < 0:
            raise SandboxError(f"sandbox {self.id} was destroyed; read what it changed before that")
        return os.dup(self._upper)

    async def execs(self) -> list[dict[str, Any]]:
        """What ran so far, collected by the host: {"pid", "path", "argv"} of each exec; {"full": True} where the record ended."""
        _, fds = await (await self._host.link()).request("evidence", id=self.id)
        try:
            data = await asyncio.to_thread(os.pread, fds[0], zygote.MAX_EVIDENCE + MAX_LINE, 0)
        finally:
            os.close(fds[0])
        return [json.loads(line) for line in data.splitlines() if line.endswith(b"}")]

    async def diff(self) -> list[Change]:
        return list((await self.diff_report()).changes)

    async def diff_report(self) -> Diff:
        """What `diff` gives, and which paths it refused to let out."""
        upper = self._layer()
        try:
            diff = self._host.store.diff if self._host.overlay else self._host.store.diff_tree
            return await asyncio.to_thread(diff, upper, self._files)
        finally:
            os.close(upper)

    async def snapshot(self, level: Level = Level.FILES, *, require: bool = True) -> str:
        """Keep the workspace's files, at level L1 with the state of sessions. The snapshot's id is an image to `create` from."""
        level = check_level("namespace", level, LEVELS, require)
        upper = self._layer()
        store = self._host.store
        try:
            if not self._paused:
                await super().pause()
            try:
                keep = store.seal if self._host.overlay else store.add_tree
                snapshot = await asyncio.to_thread(keep, upper, self._files)
                if level is Level.SESSION:
                    snapshot = await asyncio.to_thread(store.add_session, snapshot, await self._session_state())
            finally:
                if not self._paused:
                    await super().resume()
        finally:
            os.close(upper)
        self._snapshot = snapshot
        return snapshot

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the sessions of a snapshot of level L1. Without them it would be less than what was asked for, so it ends."""
        try:
            await self._restore_session(state)
        except BaseException:
            await self.destroy()
            raise

    async def grade(self, bundle: GradeBundle) -> GradedRun:
        """Run tests in a new sandbox, by default on the image that this one's history began with."""
        return await graded_run(self._host, replace(bundle, image=bundle.image or self._host.store.describe(self._image).base))

    async def fork(self, n: int, level: Level = Level.FILES, *, require: bool = True) -> list[Sandbox]:
        """n sandboxes that start from this one's files, at level L1 with its sessions. No process is carried over."""
        snapshot = await self.snapshot(level, require=require)
        made = await asyncio.gather(
            *(self._host.create(snapshot, limits=self._limits, ttl_s=self._ttl_s, network=self.network.policy) for _ in range(n)),
            return_exceptions=True,
        )
        children: list[Sandbox] = [result for result in made if not isinstance(result, BaseException)]
        failures = [result for result in made if isinstance(result, BaseException)]
        if failures:
            for child in children:
                await child.destroy()
            raise failures[0]
        return children

    async def pause(self) -> None:
        await super().pause()
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        await super().resume()

    async def renew(self, ttl_s: float) -> None:
        """Extend the lease: the sandbox ends `ttl_s` from now."""
        await (await self._host.link()).request("renew", id=self.id, ttl_s=ttl_s)

    async def destroy(self) -> None:
        """End the sandbox with every process in it. Returns when they are gone. Again is harmless."""
        if self._upper < 0:
            return
        os.close(self._upper)
        self._upper = -1
        self._channel.close("it was destroyed")
        self._host.forget(self)
        await self.network.close()
        await (await self._host.link()).request("destroy", id=self.id)
