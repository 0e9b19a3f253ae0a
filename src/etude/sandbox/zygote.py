"""The fork server: an interpreter with pytest imported, inside the base file system, and how a fork of it becomes a sandbox.

    sandboxd -- forks, enters new user, mount and pid namespaces, builds the base file system, executes Python --> zygote
    zygote   -- forks one child per sandbox: new pid namespace, then `become_sandbox` --> tool server, process 1 of the sandbox

The zygote is process 1 of its own pid namespace and all sandboxes live in namespaces below it. When it dies, or sandboxd
dies and its socket closes, the kernel kills every process of every sandbox and drops every mount: nothing can be left.

Identity: sandboxd's user (or SANDBOX_UID when that is root, given up before the first namespace is made) is user 0 of
the zygote's namespace, which may mount; each sandbox has a user namespace below it where the same user is 1000, has no
capability, and where the kernel counts its processes apart from those of other sandboxes.

This file runs where the etude package is not visible: sandboxd passes the source text of it, of `linux`, `redirect` and
`toolserver` through a descriptor. It imports nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import traceback
from typing import Any

from etude.sandbox import linux, redirect, toolserver

INSIDE_ID = 1000
REPO = "/repo"
"""The workspace, as every sandbox sees it."""
LAYERS, SCRATCH = "/mnt/layers", "/mnt/scratch"
WRITABLE = (REPO, "/tmp", "/dev/shm")
MAX_MESSAGE = 1 << 16
MAX_FDS = 32
MAX_EVIDENCE = 8 * 2**20
"""Bytes of command lines that are kept of one sandbox."""


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] | list[int] = ()) -> None:
    socket.send_fds(sock, [json.dumps(message).encode()], list(fds))


def receive(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """One message and the descriptors that came with it; None at the end of the stream."""
    data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    return (json.loads(data) if data else None), fds


class Zygote:
    """Forks shells on request, kills them on request, reaps them, reports their end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, str] = {}
        self._evidence: dict[str, Evidence] = {}
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        self._selector = selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if isinstance(key.data, Evidence):
                    if selector.get_map().get(key.fd) is key:  # an event before it in this batch may have closed it
                        key.data.more(selector)
                elif key.fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    self._reap()
                elif not self._handle():
                    return

    def _handle(self) -> bool:
        message, fds = receive(self._control)
        if message is None:
            return False
        name = message["id"]
        if message["op"] == "spawn":
            try:
                self._spawn(name, fds)
            except OSError as error:
                send(self._control, {"dead": name, "why": f"the fork server could not fork: {error}"})
            for fd in fds:
                os.close(fd)
        elif message["op"] == "kill":
            for pid, other in self._children.items():
                if other == name:
                    os.kill(pid, signal.SIGKILL)
        return True

    def _spawn(self, name: str, fds: list[int]) -> None:
        linux.unshare(linux.CLONE_NEWPID)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        finally:
            if "pid" not in locals() or pid != 0:
                linux.setns(self._own_pid_namespace, linux.CLONE_NEWPID)
        if pid == 0:
            code = 1
            try:
                become_sandbox(fds[0], fds[1:], theirs.detach())
                code = 0
            except Exception:
                traceback.print_exc()  # into the log of sandboxd
            finally:
                os._exit(code)
        theirs.close()
        self._children[pid] = name
        self._evidence[name] = evidence = Evidence(ours)
        self._selector.register(ours, selectors.EVENT_READ, evidence)
        send(self._control, {"evidence": name}, [evidence.file])

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self._children.pop(pid, None)
            if name is not None:
                self._evidence.pop(name).close(self._selector)
                send(self._control, {"dead": name, "why": _how(os.waitstatus_to_exitcode(status))})


class Evidence:
    """Command lines of one sandbox, as JSON lines in a memory file that sandboxd and the client read."""

    def __init__(self, sock: socket.socket) -> None:
        self.file = os.memfd_create("execs", os.MFD_CLOEXEC)
        self._sock: socket.socket | None = sock
        self._listener = -1
        self._size = 0

    def more(self, selector: selectors.BaseSelector) -> None:
        """The listener has arrived, or an exec waits for it."""
        if self._listener >= 0:
            try:
                seen = linux.next_exec(self._listener)
            except OSError:  # no process is left that could exec
                self.close(selector, file=False)
                return
            if seen is not None:
                self._write(*seen)
            elif linux.hung_up(self._listener):  # readable for ever after its last process
                self.close(selector, file=False)
            return
        assert self._sock is not None
        message, fds = receive(self._sock)
        selector.unregister(self._sock)
        self._sock.close()
        self._sock = None
        if message is not None and fds:
            self._listener = fds[0]
            selector.register(self._listener, selectors.EVENT_READ, self)

    def _write(self, pid: int, path: str, words: list[str]) -> None:
        if self._size > MAX_EVIDENCE:
            return
        line = json.dumps({"pid": pid, "path": path, "argv": words}).encode() + b"\n"
        if self._size + len(line) > MAX_EVIDENCE:
            line = b'{"full": true}\n'
            self._size = MAX_EVIDENCE
        self._size += len(line)
        os.write(self.file, line)

    def close(self, selector: selectors.BaseSelector, *, file: bool = True) -> None:
        """Drop the listener: an exec that still waits is then refused. And the file, when the sandbox is gone."""
        if self._sock is not None:
            selector.unregister(self._sock)
            self._sock.close()
            self._sock = None
        if self._listener >= 0:
            selector.unregister(self._listener)
            os.close(self._listener)
            self._listener = -1
        if file:
            os.close(self.file)


def _how(code: int) -> str:
    return f"its first process was killed by signal {-code}" if code < 0 else f"its first process ended with status {code}"


def become_sandbox(control_fd: int, cgroup_fds: list[int], evidence_fd: int) -> None:
    """In a fresh fork: wait as a shell for the order to start, then shut every door and serve."""
    for fd in cgroup_fds:
        os.write(fd, b"0")
    kept = sorted({0, 1, 2, control_fd, evidence_fd})
    for low, high in zip(kept, [*kept[1:], 1 << 16], strict=True):
        os.closerange(low + 1, high)
    signal.set_wakeup_fd(-1)
    os.setsid()
    control = socket.socket(fileno=control_fd)
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    order, fds = receive(control)
    if order is None:
        return
    try:
        mount = mount_workspace if order["overlay"] else copy_workspace
        upper = mount(order["layers"], order["limits"])
        network = order.get("network")
        if network:
            redirect.trust(network["authority"])
        score_fd, ways_out = close_doors(order["limits"], count_processes=not order["poll_pids"], network=network)
        with socket.socket(fileno=evidence_fd) as evidence:
            listener = linux.notify_execs() if order["execs"] else -1
            if listener >= 0:
                send(evidence, {}, [listener])
                os.close(listener)
            elif order["execs"]:
                raise OSError("no listener for execs can be installed any more; start sandboxd with --no-execs")
        server = toolserver.Server(
            workdir=REPO,
            limits=order["limits"],
            environment=order["environment"],
            bin_dir=os.path.dirname(sys.executable),
            guard=lambda: linux.prctl(linux.PR_SET_DUMPABLE, 1),
            counters=dict(zip(order["counters"], fds[1:], strict=True)),
            score_fd=score_fd,
            poll_memory=order["poll_memory"],
            poll_pids=order["poll_pids"],
        )
        server.connect(socket.socket(fileno=fds[0]))
    except (OSError, KeyError) as error:
        send(control, {"error": str(error)})
        return
    send(control, {"started": True}, [upper, *(sock.fileno() for sock in ways_out)])
    os.close(upper)
    for sock in ways_out:  # the host has them now; nothing inside may answer in its place
        sock.close()

    def ordered(_mask: int) -> None:
        message, more = receive(control)
        if message is None:
            os._exit(0)
        if message["op"] == "attach":
            server.connect(socket.socket(fileno=more[0]))

    server.watch(control.fileno(), ordered)
    server.serve()


def mount_workspace(layers: list[str], limits: dict[str, float]) -> int:
    """Mount the workspace over its read-only layers, and /tmp beside its upper layer: one tmpfs bounds both.

    Returns a descriptor of the upper layer, by which the host reads what changed. The tmpfs itself is unmounted again:
    inside, nothing but the overlay leads to it, and the layers of other sandboxes are out of sight.
    """
    _mount_scratch(int(limits["disk_bytes"]), ("upper", "work", "tmp"))
    upper = os.open(f"{SCRATCH}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    lower = ":".join(f"{LAYERS}/{layer}" for layer in layers)
    flags = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("sandbox", REPO, "overlay", flags, f"userxattr,lowerdir={lower},upperdir={SCRATCH}/upper,workdir={SCRATCH}/work")
    _hide_scratch()
    return upper


def copy_workspace(layers: list[str], limits: dict[str, float]) -> int:
    """The same without overlay: the files are copied into memory. Layers are then whole trees, never changes over others.

    Returns a descriptor of the workspace itself, which the host compares with the image file by file.
    """
    if len(layers) != 1:
        raise OSError(f"a snapshot of {len(layers)} layers needs overlayfs, which does not work here")
    tree = f"{LAYERS}/{layers[0]}"
    size = sum(os.lstat(os.path.join(folder, name)).st_size + 4096 for folder, _, names in os.walk(tree) for name in names)
    _mount_scratch(int(limits["disk_bytes"]) + size, ("repo", "tmp"))
    shutil.copytree(tree, f"{SCRATCH}/repo", symlinks=True, dirs_exist_ok=True)
    linux.mount(f"{SCRATCH}/repo", REPO, flags=linux.MS_BIND)
    upper = os.open(REPO, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _hide_scratch()
    return upper


def _mount_scratch(size: int, folders: tuple[str, ...]) -> None:
    """One tmpfs for all that a sandbox writes."""
    inodes = max(4096, size // 4096)
    linux.mount("sandbox", SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, f"size={size},nr_inodes={inodes},mode=755")
    for name in folders:
        os.mkdir(f"{SCRATCH}/{name}")
        os.chmod(f"{SCRATCH}/{name}", 0o1777 if name == "tmp" else 0o755)


def _hide_scratch() -> None:
    for target in ("/tmp", "/dev/shm"):
        linux.mount(f"{SCRATCH}/tmp", target, flags=linux.MS_BIND)
    linux.unmount(SCRATCH)
    linux.unmount(LAYERS)


def close_doors(
    limits: dict[str, float], *, count_processes: bool, network: dict[str, Any] | None = None
) -> tuple[int, list[socket.socket]]:
    """Give up everything that agent code must not have. Returns a descriptor of this process's out-of-memory score, and the sockets
    by which the host serves the network where there is one."""
    linux.prctl(linux.PR_SET_NAME, _text("sandbox"))
    flags = linux.CLONE_NEWUSER | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    try:
        linux.unshare(flags | linux.CLONE_NEWCGROUP)
    except OSError:  # kernels without cgroup namespaces
        linux.unshare(flags)
    linux.map_ids(INSIDE_ID, 0, 0)
    socket.sethostname("sandbox")
    linux.loopback_up()
    ways_out = redirect.ways_out(network) if network else []
    os.chdir(REPO)
    os.umask(0o022)
    score_fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    for kind, wanted in (
        (resource.RLIMIT_NPROC, int(limits["pids"]) if count_processes else 1 << 22),
        (resource.RLIMIT_FSIZE, int(limits["disk_bytes"])),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, value))
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.landlock(read=("/",), write=WRITABLE, devices=[f"/dev/{name}" for name in linux.DEVICES])
    linux.install_filter()
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    return score_fd, ways_out


def _text(name: str) -> int:
    """A pointer to a C string that stays alive."""
    import ctypes

    _KEPT.append(ctypes.create_string_buffer(name.encode()))
    return ctypes.addressof(_KEPT[-1])


_KEPT: list[Any] = []


def main(control_fd: int) -> None:
    """Entry after the exec: warm up, say so, serve until sandboxd goes away."""
    control = socket.socket(fileno=control_fd)
    try:
        toolserver.warm_up()
        linux.deny_filter()
    except Exception as error:  # whatever an import can raise is one line for the person who asked for a sandbox
        send(control, {"failed": f"the fork server could not import pytest: {error!r}"})
        return
    send(control, {"ready": True, "overlay": linux.overlay_works(SCRATCH), "execs": linux.execs_can_be_seen()})
    Zygote(control).serve()
