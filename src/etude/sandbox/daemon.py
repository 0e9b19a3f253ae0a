"""sandboxd: one small process that makes, leases and removes the sandboxes of a machine. Standard library, one thread.

    python -m etude.sandbox.daemon --root DIR [--socket PATH] [--warm N]

Why a process of its own: forking a process that runs torch's threads is unsafe, and unsharing a user namespace needs a
process with one thread. So it is started first and imports nothing.

It owns: the zygote (zygote.py), control groups, leases. It does not own file trees: clients write images into
ROOT/layers themselves. Everything else of a sandbox lives in namespaces that end with the zygote, so that after a
kill -9 of sandboxd only control groups and the root folder are left, and the next start removes them.

    warm -- create --> starting -- started --> live -- destroy, lease over, client gone --> dying -- reaped --> gone
                           `-- error ----------------------------------------------------------^

Clients speak JSON over a SOCK_SEQPACKET socket, one message a packet, answers in any order with the request's "n".
The client passes one end of a socket pair with "create"; sandboxd hands it to the sandbox and is not part of the
conversation. The answer brings a descriptor of the upper layer.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import heapq
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.sandbox import base, linux
from etude.sandbox.cgroups import Cgroups, Group, reap_root
from etude.sandbox.interpreter import Interpreter

MAX_MESSAGE = 1 << 16
MAX_FDS = 32
ADOPTION_S = 30.0
"""How long a sandbox with a create_id outlives its client's connection."""
KEPT_FATES = 512
MAX_LISTED = 300
"""Sandboxes told in one answer; it must fit into a packet."""
EXECS_COVER = (
    "program and arguments of every execve and execveat, of grandchildren too, that found its program, up to 8 MiB; as they were when the "
    "call was made, which another thread of the process can still change; test runs are forks of a warm interpreter, and no exec"
)
YOUNG_S = 30.0
"""A temporary root younger than this may belong to a sandboxd that is just starting."""


def root_key(root: Path) -> str:
    return hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:12]


def send(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    socket.send_fds(sock, [json.dumps(message).encode()], fds or [])


def receive(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """One message and the descriptors that came with it; None at the end of the stream."""
    data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    return (json.loads(data) if data else None), fds


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line decides."""

    warm: int = 2
    """Shells kept ready."""
    packages: tuple[str, ...] = ("pytest",)
    """Distributions that sandboxes see, with what they require; "all" for everything installed beside pytest."""
    overlay: bool = True
    """False: copy workspaces even where an overlay works."""
    linger_s: float = 0.0
    """End when nobody was connected and nothing lived for this long; 0 for never."""
    execs: bool = True
    """False: collect no command lines."""
    cgroups: bool = True
    """False: poll even where control groups can be written."""


@dataclass(eq=False)
class Client:
    sock: socket.socket
    owner: str = ""


@dataclass(eq=False)
class Box:
    """One sandbox, from the fork of its shell to its burial."""

    id: str
    control: socket.socket
    group: Group
    state: str = "warm"
    image: str = ""
    create_id: str = ""
    client: Client | None = None
    deadline: float = float("inf")
    upper: int = -1
    ways_out: list[int] = field(default_factory=list)
    """Sockets of its network namespace, for the client that serves them; empty without a network."""
    keep: str = ""
    """What its client wants back when it adopts it: the key of the authority that the sandbox trusts."""
    execs: int = -1
    """Memory file of the command lines that ran in it."""
    why: str = ""
    dying_since: float = 0.0
    on_started: list[tuple[Client, int]] = field(default_factory=list)
    on_gone: list[tuple[Client, int]] = field(default_factory=list)


class Daemon:
    """The event loop and its tables. Nothing here waits, except at start and at the end."""

    def __init__(self, root: Path, listener: socket.socket, settings: Settings, ready: Callable[[dict[str, Any]], None]) -> None:
        self.root, self.key = root, root_key(root)
        self._listener, self._settings, self._announce = listener, settings, ready
        self._selector = selectors.DefaultSelector()
        self._boxes: dict[str, Box] = {}
        self._warm: list[Box] = []
        self._by_create_id: dict[str, Box] = {}
        self._clients: set[Client] = set()
        self._fates: dict[str, str] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._totals = {"created": 0, "destroyed": 0, "expired": 0, "failed": 0, "died": 0, "zygote_restarts": 0, "errors": 0}
        self._stop = False
        self._busy = time.monotonic()
        self._interpreter = Interpreter.current(settings.packages)
        self._environment = self._interpreter.environment()
        reaped = reap_root(root)
        self._cgroups = Cgroups(self.key, use=settings.cgroups)
        self._overlay, self._execs = settings.overlay, settings.execs
        self._reaped = reaped + self._cgroups.reap()
        self._cgroups.record(root)
        self._broken = ""
        self._zygote: socket.socket | None = None
        self._zygote_pid = 0
        self._zygote_ready = False

    def boundary(self) -> dict[str, Any]:
        """The fields of records.Boundary, as this machine enforces them."""
        memory, pids = self._cgroups.enforces("memory"), self._cgroups.enforces("pids")
        counted = "RLIMIT_NPROC, counted per user namespace" if counts_per_namespace() else "polling every 50 ms"
        coverage = {"layer diff": "every file of the workspace at its end; links, devices and names that are not UTF-8 by name only"}
        if self._execs:
            coverage["execs"] = EXECS_COVER
        return {
            "backend": "namespace",
            "shared_kernel": True,
            "network": "none",
            "filter_hash": linux.filter_hash(),
            "separates": self._separates(),
            "limits": {
                "memory": memory or "polling of resident memory every 50 ms, and RLIMIT_AS per process",
                "pids": pids or counted,
                "disk": "size of the tmpfs that holds all writes",
                "cpu": "RLIMIT_CPU of each process",
                "wall": "timer of the tool server, and the lease kept by sandboxd",
                "output": "count of the tool server",
            },
            "evidence": list(coverage),
            "coverage": coverage,
        }

    @staticmethod
    def _separates() -> dict[str, str]:
        """The aspects of boundary.py."""
        abi = linux.landlock_abi()
        landlock = f"; Landlock ABI {abi}" if abi >= linux.LANDLOCK_NEEDED else ""
        filtered = "system-call filter; " if linux.filter_hash() else ""
        return {
            "read": "mount namespace with nothing of the host but /usr, /lib and this Python" + landlock,
            "write": "mount namespace, read-only but for the workspace, /tmp and /dev/shm" + landlock,
            "metadata": "read-only mounts",
            "processes": "pid, ipc and user namespace" + ("; Landlock scope" if abi >= 6 else ""),
            "network": "network namespace with a loopback of its own",
            "neighbours": "namespaces and a tmpfs of each sandbox's own",
            "kernel": filtered + "no capabilities",
            "privileges": "user namespace with one user, no capabilities, no_new_privs, no device but five",
            "server": "it is process 1 of the namespaces, not dumpable, and as confined as what it runs",
        }

    # -- loop

    def serve(self, parent_fd: int = -1) -> None:
        self._start_zygote()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if parent_fd >= 0:
            self._selector.register(parent_fd, selectors.EVENT_READ, self._parent_gone)
        wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._terminated)
        self._selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
        self._at(1.0, self._sweep)
        try:
            self._loop()
        finally:
            self._shut_down()

    def _loop(self) -> None:
        while not self._stop:
            timeout = max(self._timers[0][0] - time.monotonic(), 0.0) if self._timers else None
            for key, _ in self._selector.select(timeout):
                if self._selector.get_map().get(key.fd) is key:  # an event before it in this batch may have closed it
                    self._guarded(key.data)
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._guarded(heapq.heappop(self._timers)[2])

    def _guarded(self, action: Callable[[], Any]) -> None:
        """One broken event must not end the sandboxes of everybody else: it is written to the log and counted in `errors`."""
        try:
            action()
        except Exception:
            self._totals["errors"] += 1
            traceback.print_exc()

    def _terminated(self, *_: object) -> None:
        self._stop = True

    def _parent_gone(self) -> None:
        self._stop = True

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._timers, (time.monotonic() + delay, self._count, action))

    def _shut_down(self) -> None:
        self._listener.close()
        for box in list(self._boxes.values()):
            self._bury(box, "sandboxd was stopped")
        if self._zygote is not None:
            self._zygote.close()
        if self._zygote_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._zygote_pid, signal.SIGKILL)
            os.waitpid(self._zygote_pid, 0)
        self._cgroups.close()

    def _sweep(self) -> None:
        """Once a second: end leases that ran out, and clean up what could not be removed before."""
        now = time.monotonic()
        for box in list(self._boxes.values()):
            if box.state in ("live", "starting") and box.deadline <= now:
                self._totals["expired"] += 1
                self._kill(box, "its lease ran out")
        self._cgroups.sweep()
        if self._zygote is None and not self._broken:
            self._start_zygote()
        if self._clients or len(self._boxes) > len(self._warm):
            self._busy = now
        elif self._settings.linger_s and now - self._busy > self._settings.linger_s:
            self._stop = True
        self._at(0.05 if self._cgroups.leaving else 1.0, self._sweep)

    # -- zygote

    def _start_zygote(self) -> None:
        try:
            self._zygote_pid, self._zygote = base.start_zygote(self.root, self._interpreter)
        except OSError as error:
            self._zygote_failed(str(error))
            return
        self._zygote_ready = False
        self._selector.register(self._zygote, selectors.EVENT_READ, self._zygote_said)

    def _zygote_said(self) -> None:
        assert self._zygote is not None
        try:
            message, fds = receive(self._zygote)
        except OSError:
            message = None
        if message is None:
            self._zygote_lost()
        elif "failed" in message:
            self._zygote_failed(message["failed"])
        elif "ready" in message:
            self._zygote_ready = True
            self._overlay = self._overlay and message["overlay"]
            self._execs = self._execs and message["execs"]
            self._announce({"ready": True, "boundary": self.boundary(), "reaped": self._reaped})
            self._refill()
        elif "evidence" in message:
            if message["evidence"] in self._boxes:
                self._boxes[message["evidence"]].execs = fds.pop()
            for fd in fds:
                os.close(fd)
        elif message["dead"] in self._boxes:
            self._bury(self._boxes[message["dead"]], message["why"])

    def _zygote_failed(self, why: str) -> None:
        self._broken = why
        self._announce({"failed": why})

    def _zygote_lost(self) -> None:
        """The fork server died: the kernel has killed every sandbox with it."""
        assert self._zygote is not None
        self._selector.unregister(self._zygote)
        self._zygote.close()
        self._zygote = None
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._zygote_pid, 0)
        self._zygote_pid = 0
        for box in list(self._boxes.values()):
            self._bury(box, "the fork server died")
        self._warm.clear()
        self._totals["zygote_restarts"] += 1
        if not self._zygote_ready:
            self._zygote_failed(self._broken or "the fork server died while starting; see the output of sandboxd")

    # -- boxes

    def _spawn(self) -> Box:
        """Ask for one more shell."""
        assert self._zygote is not None
        self._count += 1
        name = f"{self.key[:4]}{self._count:x}"
        group = self._cgroups.make(name)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        box = Box(id=name, control=ours, group=group)
        try:
            send(self._zygote, {"op": "spawn", "id": name}, [theirs.fileno(), *group.attach])
        except OSError:
            ours.close()
            self._cgroups.remove(group)
            raise
        finally:
            theirs.close()
        self._boxes[name] = box
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._box_said(box))
        return box

    def _refill(self) -> None:
        while len(self._warm) < self._settings.warm and self._zygote is not None and not self._stop:
            self._warm.append(self._spawn())

    def _box_said(self, box: Box) -> None:
        try:
            message, fds = receive(box.control)
        except OSError:
            message, fds = None, []
        if message is None:
            self._selector.unregister(box.control)
            if box.state != "dying":
                self._kill(box, "its tool server ended")
        elif "error" in message:
            self._totals["failed"] += 1
            self._kill(box, f"it could not be set up: {message['error']}")
        elif "started" in message:
            box.state, box.upper, box.ways_out = "live", fds[0], fds[1:]
            for client, number in box.on_started:
                self._reply(client, number, self._description(box), [box.upper, *box.ways_out])
            box.on_started.clear()

    def _description(self, box: Box) -> dict[str, Any]:
        return {"id": box.id, "image": box.image, "keep": box.keep}

    def _kill(self, box: Box, why: str) -> None:
        if box.state == "dying":
            return
        box.state, box.why, box.dying_since = "dying", why, time.monotonic()
        if box in self._warm:
            self._warm.remove(box)
        if self._zygote is not None:
            send(self._zygote, {"op": "kill", "id": box.id})

    def _bury(self, box: Box, how: str) -> None:
        """Every process of the box is gone. Tell whoever waits, and remove what the daemon held for it."""
        why = box.why or how
        if box.state == "live":
            self._totals["died"] += 1
        self._boxes.pop(box.id, None)
        if box in self._warm:
            self._warm.remove(box)
        if self._by_create_id.get(box.create_id) is box:
            del self._by_create_id[box.create_id]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(box.control)
        box.control.close()
        for fd in (box.upper, box.execs, *box.ways_out):
            if fd >= 0:
                os.close(fd)
        self._cgroups.remove(box.group)
        if box.image:
            self._totals["destroyed"] += 1
            self._fates[box.id] = why
            while len(self._fates) > KEPT_FATES:
                del self._fates[next(iter(self._fates))]
        for client, number in box.on_started:
            self._reply(client, number, {"error": f"the sandbox could not be started: {why}"})
        for client, number in box.on_gone:
            self._reply(client, number, {})

    # -- clients

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        client = Client(sock)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._client_said(client))

    def _reply(self, client: Client, number: int, message: dict[str, Any], fds: list[int] | None = None) -> None:
        if client not in self._clients:
            return
        try:
            send(client.sock, {"n": number, **message}, fds)
        except OSError:  # it went away, or does not read what it asked for
            self._client_gone(client)

    def _client_said(self, client: Client) -> None:
        try:
            message, fds = receive(client.sock)
        except BlockingIOError:
            return
        except OSError:
            message, fds = None, []
        if message is None:
            self._client_gone(client)
            return
        try:
            operation = getattr(self, "_op_" + str(message.get("op")), None)
            if operation is None:
                raise ValueError(f"no operation {message.get('op')!r}")
            operation(client, message, fds)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._reply(client, int(message.get("n", 0)), {"error": f"{type(error).__name__}: {error}"})
        finally:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _client_gone(self, client: Client) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        for box in list(self._boxes.values()):
            if box.client is not client:
                continue
            if box.create_id:
                box.client = None
                box.deadline = min(box.deadline, time.monotonic() + ADOPTION_S)
            else:
                self._kill(box, "its client went away")

    def _op_hello(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        client.owner = str(message.get("owner", ""))
        self._reply(client, message["n"], {"boundary": self.boundary(), "overlay": self._overlay, "pid": os.getpid()})

    def _op_create(self, client: Client, message: dict[str, Any], fds: list[int]) -> None:
        number, create_id = message["n"], str(message.get("create_id", ""))
        known = self._by_create_id.get(create_id) if create_id else None
        if known is not None and known.state in ("live", "starting"):
            self._adopt(known, client, message, fds)
            return
        if self._broken or self._zygote is None:
            raise OSError(f"no sandbox can be made: {self._broken or 'the fork server is being restarted'}")
        box = self._warm.pop(0) if self._warm else self._spawn()
        try:
            self._order_start(box, client, message, fds)
        except (OSError, ValueError, KeyError, TypeError):
            self._kill(box, "it could not be started")
            raise
        box.on_started.append((client, number))
        self._totals["created"] += 1
        self._refill()

    def _order_start(self, box: Box, client: Client, message: dict[str, Any], fds: list[int]) -> None:
        """Make a warm shell the sandbox that `message` asks for."""
        limits = {str(k): float(v) for k, v in message["limits"].items()}
        create_id = str(message.get("create_id", ""))
        box.state, box.image, box.create_id, box.client = "starting", message["image"], create_id, client
        box.keep = str(message.get("keep", ""))
        if create_id:
            self._by_create_id[create_id] = box
        self._cgroups.limit(box.group, memory_bytes=int(limits["memory_bytes"] + limits["disk_bytes"]), pids=int(limits["pids"]) + 1)
        # Where a control group counts processes it should be the one to say no: it keeps count of refusals.
        inside = {**limits, "pids": limits["pids"] + (16 if "pids" in box.group.folders else 1)}
        order = {
            "op": "start",
            "layers": message["layers"],
            "limits": inside,
            "environment": {**self._environment, **message.get("environment", {})},
            "network": message.get("network"),
            "counters": list(box.group.counters),
            "poll_memory": "memory" not in box.group.folders,
            "poll_pids": "pids" not in box.group.folders and not counts_per_namespace(),
            "overlay": self._overlay,
            "execs": self._execs,
        }
        send(box.control, order, [fds[0], *box.group.counters.values()])
        box.deadline = time.monotonic() + float(message["ttl_s"])

    def _adopt(self, box: Box, client: Client, message: dict[str, Any], fds: list[int]) -> None:
        """The same create_id again: the caller gave up waiting, or lost its connection. It gets the sandbox that exists."""
        if message["image"] != box.image:
            raise ValueError(f"create_id {box.create_id!r} is in use for image {box.image[:12]}, and was asked for {message['image'][:12]}")
        box.client = client
        box.deadline = time.monotonic() + float(message["ttl_s"])
        send(box.control, {"op": "attach"}, [fds[0]])
        if box.state == "live":
            self._reply(client, message["n"], self._description(box), [box.upper, *box.ways_out])
        else:
            box.on_started.append((client, message["n"]))

    def _op_renew(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        box = self._boxes.get(message["id"])
        if box is None or box.state == "dying":
            self._reply(client, message["n"], {"error": f"sandbox {message['id']} is gone: {self._why(message['id'])}"})
            return
        box.deadline = time.monotonic() + float(message["ttl_s"])
        self._reply(client, message["n"], {})

    def _why(self, name: str) -> str:
        box = self._boxes.get(name)
        return box.why or "it does not answer" if box is not None else self._fates.get(name, "unknown")

    def _op_destroy(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        box = self._boxes.get(message["id"])
        if box is None:
            self._reply(client, message["n"], {})
            return
        box.on_gone.append((client, message["n"]))
        self._kill(box, "it was destroyed")

    def _op_evidence(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        box = self._boxes.get(message["id"])
        if box is None or box.execs < 0:
            self._reply(client, message["n"], {"error": f"no evidence of sandbox {message['id']}: {self._why(message['id'])}"})
            return
        self._reply(client, message["n"], {}, [box.execs])

    def _op_fate(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        self._reply(client, message["n"], {"why": self._why(message["id"])})

    def _op_list(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        """Some of those that live, from number `skip` on; the last answer is empty."""
        live = [box for box in self._boxes.values() if box.state in ("starting", "live")]
        told = live[int(message["skip"]) :][:MAX_LISTED]
        boxes = [{"id": box.id, "image": box.image, "create_id": box.create_id} for box in told]
        self._reply(client, message["n"], {"boxes": boxes})

    def _op_stats(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        now = time.monotonic()
        states = [box.state for box in self._boxes.values()]
        stuck = sum(box.state == "dying" and now - box.dying_since > 5.0 for box in self._boxes.values())
        abandoned = sum(box.state == "live" and box.client is None for box in self._boxes.values())
        numbers = {
            "live": states.count("live") + states.count("starting"),
            "warm": states.count("warm"),
            "dying": states.count("dying"),
            "orphans": stuck + abandoned + self._cgroups.sweep(),
            "clients": len(self._clients),
            "reaped": self._reaped,
            **self._totals,
        }
        self._reply(client, message["n"], {"stats": numbers})

    def _op_stop(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        self._reply(client, message["n"], {})
        self._stop = True


# ---------------------------------------------------------------------------------------------------
# Process


def counts_per_namespace() -> bool:
    """Since Linux 5.14 RLIMIT_NPROC counts in each user namespace apart; before, in all sandboxes of a user together."""
    major, minor, *_ = os.uname().release.split(".")
    return (int(major), int("".join(c for c in minor if c.isdigit()) or 0)) >= (5, 14)


def lock(root: Path) -> int:
    """Take the root for this process, or -1 when another sandboxd has it."""
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return -1
    return fd


def listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_PATH)
    try:  # by way of the folder's descriptor: a socket's path may be no longer than 107 bytes
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
    os.chmod(path, 0o600)
    listener.listen(64)
    return listener


def reap_siblings(root: Path) -> int:
    """Remove the temporary roots beside ours whose sandboxd is gone."""
    count = 0
    for sibling in root.parent.glob("sandbox-*"):
        try:
            if sibling == root or time.time() - sibling.stat().st_mtime < YOUNG_S:
                continue
            held = lock(sibling)
        except FileNotFoundError:  # its sandboxd has just removed it
            continue
        if held < 0:
            continue
        count += 1 + reap_root(sibling)
        remove(sibling)
        os.close(held)
    return count


def remove(root: Path) -> None:
    """Remove a temporary root. A client that has not heard may write another image into it at this moment."""
    for _ in range(3):
        shutil.rmtree(root, ignore_errors=True)
        if not root.exists():
            return


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m etude.sandbox.daemon", description="Make and lease sandboxes for this machine.")
    parser.add_argument("--root", required=True, type=Path, help="folder for images, snapshots and the socket; one sandboxd per root")
    parser.add_argument("--socket", default="", help="default: ROOT/socket")
    parser.add_argument("--warm", type=int, default=2, help="shells kept ready (default: %(default)s)")
    parser.add_argument("--packages", default="pytest", help="distributions that sandboxes see, separated by commas; or: all")
    parser.add_argument("--no-overlay", action="store_true", help="copy workspaces into memory, as is done where overlayfs does not work")
    parser.add_argument("--no-cgroups", action="store_true", help="poll memory, as is done where no control group can be written")
    parser.add_argument("--no-execs", action="store_true", help="collect no command lines as evidence")
    parser.add_argument("--with-parent", action="store_true", help="stop when standard input closes")
    parser.add_argument("--linger", type=float, default=0.0, metavar="S", help="stop after S seconds without a client and a sandbox")
    parser.add_argument("--temporary", action="store_true", help="remove ROOT at the end, and dead temporary roots beside it at the start")
    arguments = parser.parse_args(argv)
    root: Path = arguments.root.absolute()

    def announce(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # whoever started us may not listen any more
            print(json.dumps(message), flush=True)

    os.umask(0o022)
    root.mkdir(parents=True, exist_ok=True)
    held = lock(root)
    if held < 0:
        announce({"failed": f"another sandboxd uses {root}; give another --root or connect to its socket"})
        return 1
    if arguments.temporary:
        reap_siblings(root)
    for folder in ("layers", "snapshots"):
        (root / folder).mkdir(exist_ok=True)
        for leftover in (root / folder).glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink()
    path = arguments.socket or str(root / "socket")
    settings = Settings(
        warm=arguments.warm,
        packages=tuple(name for name in arguments.packages.split(",") if name),
        overlay=not arguments.no_overlay,
        cgroups=not arguments.no_cgroups,
        linger_s=arguments.linger,
        execs=not arguments.no_execs,
    )
    try:
        Daemon(root, listen(path), settings, announce).serve(0 if arguments.with_parent else -1)
    except OSError as error:
        announce({"failed": str(error)})
        return 1
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        if arguments.temporary:
            remove(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
