"""The tool server: what answers inside a sandbox. One file, standard library only, one thread, one event loop.

In the namespace backend it is process 1 of the sandbox; in the plain backend it is an ordinary subprocess. It speaks
frames on a stream socket: `>II` (length of a JSON header, length of a blob), the header, the blob. A request is
`{"id", "op", "args"}`; the answer repeats the id. A value that is bytes travels as the blob, and the header's "blob"
names it. A refusal that is the caller's own fault is `{"error": kind, "text": why}` with the kinds of `records.ToolError`.

Invariants:
- The loop never waits for anything but its selector. Commands, jobs, test runs and searches are child processes.
- Test runs fork from this process, which has pytest imported but never a module of a project: every run sees the files
  as they are, and no run sees another. What a fork cannot renew is PYTHONHASHSEED (0 in every sandbox).
- Every child is reaped here, and as process 1 every orphan too. A run that times out takes its process group with it,
  and the processes it left outside of that group.
- Agent code runs with this process's user, so this process is not dumpable (nobody may open its memory) and has no
  signal handlers that another process could call except the one for SIGCHLD.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fnmatch
import functools
import gc
import heapq
import json
import os
import random
import re
import resource
import selectors
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

HEADER = struct.Struct(">II")
MAX_HEADER, MAX_BLOB = 64 * 2**20, 256 * 2**20
MAX_TEXT = 1 * 2**20
"""Largest file text an operation answers with; a longer file is read in line ranges."""
MAX_RESULTS = 32 * 2**20
"""Bytes of the test-result channel that are kept."""
MAX_MESSAGE = 2000
MAX_MATCHES = 1000
REPETITION = re.compile(r"[*+?{]")
INLINE_BYTES = 1 << 16
INLINE_LINE = 2000
"""A search with at most one repetition, and none of a group, over this much text in such lines is done at once: quadratic at worst,
and a fork costs 5 ms."""
MAX_WALK = 50_000
OUTPUT_STOP = 64 * 2**20
"""A command that writes this much, and 16 times what is kept, is stopped: endless output costs a core."""
SKIPPED_DIRS = {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hg"}
SHELL = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
PLAIN_COMMAND = re.compile(r"[\w\s./:=,@%+\-\[\]'\"]+\Z")
"""Characters of a command line that no shell would interpret; brackets are those of parametrised test ids."""
PYTHON = re.compile(r"(?:.*/)?python(?:3(?:\.\d+)?)?\Z")
MAX_SESSION = 4 * 2**20
"""Bytes of variables and functions that a session may keep."""
SESSION_SHELL = """
__etude_out=$2 __etude_command=$1 __etude_save=$3
set --
IFS= read -r -d '' __etude_state
exec </dev/null
{ eval "$__etude_state"; unset __etude_state; trap '{ eval "$__etude_save"; } 2>/dev/null' EXIT; } >/dev/null 2>&1
eval "$__etude_command"
{ __etude_code=$?; trap '{ eval "$__etude_save"; } 2>/dev/null' EXIT; exit "$__etude_code"; } 2>/dev/null
"""
SESSION_SAVE = (
    """{ __etude_code=$?
{ printf 'cd -- %q\\n' "$PWD"
umask -p
declare -f
alias -p
[[ $IFS == $' \\t\\n' ]] || declare -p IFS
for __etude_name in """
    + " ".join(f'"${{!{letter}@}}"' for letter in "_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
    + """; do case $__etude_name in
__etude*|BASH*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|HOSTNAME|HOSTTYPE|IFS|LINENO|MACHTYPE|OPTIND|OSTYPE) ;;
PIPESTATUS|PPID|PWD|RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_) ;;
*) declare -p -- "$__etude_name" ;;
esac; done
shopt -p
set +o
} >| "$__etude_out"
exit "$__etude_code"; } 2>/dev/null
"""
)
"""One command of a session takes up what the last one left, runs, and writes down what it leaves: folder, umask, functions, aliases,
variables, options. A shell that lived on between commands would be lost with the first command that times out, could not be kept in a
snapshot, and would need marks in its output."""


BROKEN = 70
"""Exit status of a tool server whose machine broke under it."""


class Refusal(Exception):
    """The operation cannot be done and the caller is at fault. `kind` is a value of records.ToolError."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


# ---------------------------------------------------------------------------------------------------
# Output of one process


class Capture:
    """The first and the last half of what may be kept, and a count of what lay between."""

    def __init__(self, cap: int) -> None:
        self._half = max(cap // 2, 1)
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    @property
    def dropped(self) -> int:
        return max(self.total - 2 * self._half, 0)

    def bytes(self) -> bytes:
        if not self.dropped:
            return bytes(self._head + self._tail)
        return bytes(self._head) + b"\n[... %d bytes dropped ...]\n" % self.dropped + bytes(self._tail[-self._half :])


class Run:
    """One child process and its output. `ended` is called once, with this run, after it was reaped and drained."""

    def __init__(self, pid: int, output: int, capture: Capture, ended: Callable[[Run], None], results: int = -1) -> None:
        self.pid, self.capture, self.ended = pid, capture, ended
        self.pipes: dict[int, Callable[[bytes], None]] = {output: capture.feed}
        self.results = bytearray()
        if results >= 0:
            self.pipes[results] = self._feed_results
        self.started = time.monotonic()
        self.before: set[int] = set()
        """Processes that were there when it started."""
        self.code: int | None = None
        self.limit = ""
        self.timed_out = False
        self.timer: Timer | None = None
        self.exclusive = False
        """True for a run that may leave nothing behind (a test run)."""
        self.popen: subprocess.Popen[bytes] | None = None
        self.counters: dict[str, int] = {}

    def _feed_results(self, data: bytes) -> None:
        if len(self.results) < MAX_RESULTS:
            self.results += data

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class Session:
    """What one command of a shell leaves to the next."""

    def __init__(self, cwd: str, environment: dict[str, str], state: bytes = b"") -> None:
        self.cwd, self.environment, self.state = cwd, environment, state
        self.run: Run | None = None


class Timer:
    def __init__(self, at: float, action: Callable[[], None]) -> None:
        self.at, self.action, self.cancelled = at, action, False

    def __lt__(self, other: Timer) -> bool:
        return self.at < other.at


# ---------------------------------------------------------------------------------------------------
# Frames


class Connection:
    """One client. Reads frames, queues answers, never blocks."""

    def __init__(self, sock: socket.socket, server: Server) -> None:
        self.sock, self._server = sock, server
        sock.setblocking(False)
        self._in, self._out = bytearray(), bytearray()
        self.open = True

    def ready(self, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            self._read()
        if self.open and mask & selectors.EVENT_WRITE:
            self._flush()

    def _read(self) -> None:
        try:
            data = self.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._server.disconnect(self)
            return
        self._in += data
        while self.open and len(self._in) >= HEADER.size:
            head, blob = HEADER.unpack_from(self._in)
            if head > MAX_HEADER or blob > MAX_BLOB:
                self._server.disconnect(self)
                return
            end = HEADER.size + head + blob
            if len(self._in) < end:
                return
            request = json.loads(self._in[HEADER.size : HEADER.size + head])
            payload = bytes(self._in[HEADER.size + head : end])
            del self._in[:end]
            self._server.handle(self, request, payload)

    def answer(self, request_id: int, result: dict[str, Any]) -> None:
        blob = b""
        header: dict[str, Any] = {"id": request_id}
        for key, value in result.items():
            if isinstance(value, bytes):
                blob, header["blob"] = value, key
            else:
                header[key] = value
        text = json.dumps(header).encode()
        self._out += HEADER.pack(len(text), len(blob)) + text + blob
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                sent = self.sock.send(memoryview(self._out)[: 1 << 18])
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._server.disconnect(self)
            return
        self._server.watch_writes(self, bool(self._out))


# ---------------------------------------------------------------------------------------------------
# The server


class Server:
    """Runs operations for its connections. `guard` is called in every forked child before any foreign code.

    `subreaper`: it is not process 1, and orphans of what it started come to it all the same. Commands are then guarded too:
    as process 1 it needs no guard against them, because the kernel delivers it no signal of theirs.
    """

    def __init__(
        self,
        *,
        workdir: str,
        limits: dict[str, float],
        environment: dict[str, str],
        confined: bool = False,
        bin_dir: str = "",
        guard: Callable[[], None] = lambda: None,
        counters: dict[str, int] | None = None,
        score_fd: int = -1,
        poll_memory: bool = False,
        poll_pids: bool = False,
        subreaper: bool = False,
    ) -> None:
        self.workdir, self.limits, self.environment, self.confined = workdir, limits, environment, confined
        self._bin_dir, self._guard, self._score_fd = bin_dir, guard, score_fd
        self._counter_fds = counters or {}
        self._poll_memory, self._poll_pids = poll_memory, poll_pids
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._runs: dict[int, Run] = {}
        self._jobs: dict[str, Run] = {}
        self._commands: dict[str, str] = {}
        """Command of every job, also of those that ran where this sandbox was forked from."""
        self._sessions: dict[str, Session] = {}
        self._requests: dict[tuple[Connection, int], Run] = {}
        self._deadline = time.monotonic() + limits["wall_s"]
        self._is_init = os.getpid() == 1
        self._top = os.getpid() if self._is_init or subreaper else 0
        """The process to which orphans come, 0 where they are lost."""
        self._base_path = [entry for entry in sys.path if entry]
        self._stop = False
        self.exit_without_clients = False
        self._connections: set[Connection] = set()
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_DFL if self._is_init else signal.SIG_IGN)
        self._selector.register(wake_read, selectors.EVENT_READ, self._woken)
        self._wake = wake_read
        if poll_memory or poll_pids:
            self._watch()

    # -- loop

    def serve(self) -> None:
        while not self._stop:
            timeout = max(self._timers[0].at - time.monotonic(), 0.0) if self._timers else None
            for key, mask in self._selector.select(timeout):
                if self._selector.get_map().get(key.fd) is key:  # an event before it in this batch may have closed it
                    key.data(mask)
            while self._timers and self._timers[0].at <= time.monotonic():
                timer = heapq.heappop(self._timers)
                if not timer.cancelled:
                    timer.action()
        self.kill_all()

    def at(self, delay: float, action: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + delay, action)
        heapq.heappush(self._timers, timer)
        return timer

    def watch(self, fd: int, action: Callable[[int], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, action)

    def connect(self, sock: socket.socket) -> None:
        connection = Connection(sock, self)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection.ready)

    def disconnect(self, connection: Connection) -> None:
        if not connection.open:
            return
        connection.open = False
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._connections.discard(connection)
        if self.exit_without_clients and not self._connections:
            self._stop = True

    def watch_writes(self, connection: Connection, wanted: bool) -> None:
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        if self._selector.get_key(connection.sock).events != mask:
            self._selector.modify(connection.sock, mask, connection.ready)

    def handle(self, connection: Connection, request: dict[str, Any], blob: bytes) -> None:
        request_id = int(request.get("id", 0))
        operation = getattr(self, "op_" + str(request.get("op")), None)
        try:
            if operation is None:
                names = sorted(name[3:] for name in dir(self) if name.startswith("op_"))
                raise Refusal("bad_arguments", f"no operation {request.get('op')!r}; there are {', '.join(names)}")
            arguments = dict(request.get("args") or {})
            if blob:
                arguments["blob"] = blob

            def reply(result: dict[str, Any]) -> None:
                self._requests.pop((connection, request_id), None)
                if connection.open:
                    connection.answer(request_id, result)

            outcome = operation(arguments, reply)
            if isinstance(outcome, Run):
                self._requests[(connection, request_id)] = outcome
        except Refusal as refusal:
            connection.answer(request_id, {"error": refusal.kind, "text": str(refusal)})
        except Exception as error:  # this process is the sandbox: whatever a request does, the next one must find it alive
            kind, text = "failed", repr(error)
            if isinstance(error, (ValueError, TypeError, KeyError)):
                kind = "bad_arguments"
            if isinstance(error, OSError):
                if error.errno == errno.ENOSYS and self._is_init:
                    os._exit(BROKEN)  # nobody lets execs go on any more: the fork server is gone, and what follows is no answer of a tool
                text = f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
            connection.answer(request_id, {"error": kind, "text": text})

    # -- children

    def _woken(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            run = self._runs.pop(pid, None)
            if run is not None:
                run.code = os.waitstatus_to_exitcode(status)
                self._finish(run)

    def _finish(self, run: Run) -> None:
        if run.popen is not None:
            run.popen.returncode = run.code
        if run.timer is not None:
            run.timer.cancelled = True
        if run.exclusive or run.limit:
            self._kill_group(run.pid)
            self._kill_strays(run)
        for fd in list(run.pipes):
            for _ in range(64):  # what a closed pipe can still hold; a daemon left behind may go on writing
                if not self._drain(run, fd):
                    break
            self._close_pipe(run, fd)
        run.limit = run.limit or self._limit_hit(run)
        if run.limit == "pids":
            self._kill_strays(run)
        run.ended(run)

    def _drain(self, run: Run, fd: int) -> bool:
        """Read once; False when there is nothing more now."""
        if fd not in run.pipes:
            return False
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(run, fd)
            return False
        run.pipes[fd](data)
        if run.capture.total > max(OUTPUT_STOP, 16 * self.limits["output_bytes"]) and not run.limit and run.code is None:
            self._stop_run(run, "output")
        return True

    def _close_pipe(self, run: Run, fd: int) -> None:
        if run.pipes.pop(fd, None) is not None:
            self._selector.unregister(fd)
            os.close(fd)

    def _limit_hit(self, run: Run) -> str:
        if run.code == 0:
            return ""
        signals = {-run.code, run.code - 128} if run.code is not None else set()
        if signal.SIGXCPU in signals:
            return "cpu"
        if signal.SIGXFSZ in signals:
            return "disk"
        for name in ("memory", "pids"):
            if self._counter(name) > run.counters.get(name, 0):
                return name
        if not self.confined:
            disk = os.statvfs(self.environment.get("TMPDIR", "/tmp"))
            if disk.f_bavail * disk.f_frsize < 8192 or disk.f_favail == 0:
                return "disk"
        return ""

    def _counter(self, name: str) -> int:
        """How often the kernel enforced a limit: `oom_kill N` or `max N` of a cgroup's events file."""
        fd = self._counter_fds.get(name, -1)
        if fd < 0:
            return 0
        key = b"oom_kill " if name == "memory" else b"max "
        for line in os.pread(fd, 4096, 0).splitlines():
            if line.startswith(key):
                return int(line.split()[1])
        return 0

    def _start(self, run: Run, timeout_s: float) -> Run:
        self._runs[run.pid] = run
        for fd in run.pipes:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, lambda _mask, fd=fd: self._drain(run, fd))
        left = min(timeout_s, self._deadline - time.monotonic())
        run.timer = self.at(max(left, 0.0), lambda: self._stop_run(run, "wall"))
        return run

    def _stop_run(self, run: Run, limit: str) -> None:
        if run.code is not None or run.limit:
            return
        run.limit, run.timed_out = limit, limit == "wall"
        self._kill_group(run.pid)

    def _kill_group(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _kill_strays(self, run: Run) -> None:
        """Kill what `run` left outside of its process group: its session, its descendants, and orphans that no live run explains."""
        if not self._top:
            return
        for attempt in range(20):  # a process may fork while it is looked at, and takes its time to die
            victims = [pid for pid in self._strays(run) if pid not in self._runs]
            if not victims:
                return
            time.sleep(0.001 * attempt)
            for pid in victims:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if pid == 0:
                    break
                other = self._runs.pop(pid, None)
                if other is not None:
                    other.code = os.waitstatus_to_exitcode(status)
                    self.at(0.0, functools.partial(self._finish, other))

    def _strays(self, run: Run) -> list[int]:
        """Processes of the run's session, and, when no other run goes on that could have made them, all that came with it."""
        table = self._family()
        others = {pid for pid in self._runs if pid != run.pid}

        def is_stray(pid: int) -> bool:
            session, state = table[pid][1:]
            if pid == self._top or state == "Z" or others & {pid, session}:
                return False
            if session == run.pid:
                return True
            ancestors = set()
            while pid in table and pid != self._top and pid not in ancestors:
                ancestors.add(pid)
                pid = table[pid][0]
            return not others and not ancestors & run.before

        return [pid for pid in table if is_stray(pid)]

    def _family(self) -> dict[int, tuple[int, int, str]]:
        """pid -> (parent, session, state) of every process of the sandbox, this one too."""
        if self._is_init:
            return process_table(process_ids())
        return process_table(descendants(self._top) | {self._top}) if self._top else {}

    def kill_all(self) -> None:
        for run in list(self._runs.values()):
            self._kill_group(run.pid)
        self._signal_all(signal.SIGKILL)

    def _watch(self) -> None:
        """Where the kernel does not count: add up what the sandbox's processes are and hold, and stop the runs when it is too much."""
        if self._runs:
            excess = ""
            if self._poll_pids and len(process_ids()) > self.limits["pids"]:
                excess = "pids"
            elif self._poll_memory and resident_bytes(process_ids() - {1}) > self.limits["memory_bytes"]:
                excess = "memory"
            for run in list(self._runs.values()) if excess else ():
                self._stop_run(run, excess)
        self.at(0.05 if self._runs else 0.2, self._watch)

    @contextlib.contextmanager
    def _expendable(self) -> Iterator[None]:
        """Children made in here are what the kernel kills first when the sandbox is out of memory; this process is not."""
        self._score(b"1000")
        try:
            yield
        finally:
            self._score(b"0")

    def _score(self, value: bytes) -> None:
        if self._score_fd >= 0:
            os.pwrite(self._score_fd, value, 0)

    def _child_limits(self) -> dict[int, tuple[int, int]]:
        cpu = int(self.limits["cpu_s"])
        limits = {resource.RLIMIT_CPU: (cpu, cpu + 1), resource.RLIMIT_CORE: (0, 0)}
        if self._poll_memory:
            space = int(self.limits["memory_bytes"]) + 2**30
            limits[resource.RLIMIT_AS] = (space, space)
        return limits

    def _census(self) -> tuple[dict[str, int], set[int]]:
        """Before a run: how often limits were hit, and which processes there are."""
        return {name: self._counter(name) for name in self._counter_fds}, set(self._family())

    def _spawn(
        self, argv: list[str], cwd: str, environment: dict[str, str], stdin: bytes, ended: Callable[[Run], None], timeout_s: float
    ) -> Run:
        """Start a command with its output in one pipe."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        counters, before = self._census()
        try:
            with tempfile.TemporaryFile() if stdin else open(os.devnull, "rb") as source, self._expendable():
                if stdin:
                    source.write(stdin)
                    source.seek(0)
                popen = subprocess.Popen(
                    argv,
                    cwd=cwd,
                    env=environment,
                    stdin=source,
                    stdout=write_end,
                    stderr=write_end,
                    start_new_session=True,
                    preexec_fn=self._prepare_command if self._top and not self._is_init else None,
                )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            for kind, pair in self._child_limits().items() if self._is_init or not self._top else ():
                set_limit(popen.pid, kind, pair)
        run = Run(popen.pid, read_end, Capture(int(self.limits["output_bytes"])), ended)
        run.popen, run.counters, run.before = popen, counters, before
        return self._start(run, timeout_s)

    def _prepare_command(self) -> None:
        """In the child, before it becomes the command."""
        for kind, pair in self._child_limits().items():
            resource.setrlimit(kind, pair)
        self._guard()

    def _fork(self, body: Callable[[int], None], ended: Callable[[Run], None], timeout_s: float, *, results: bool = False) -> Run:
        """Run `body(results fd)` in a fork of this process. It must not return normally to the loop, and never does."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        results_read, results_write = os.pipe2(os.O_CLOEXEC) if results else (-1, -1)
        counters, before = self._census()
        try:
            with self._expendable():
                pid = os.fork()
        except OSError:
            for fd in (read_end, write_end, results_read, results_write):
                if fd >= 0:
                    os.close(fd)
            raise
        if pid == 0:
            code = 70
            try:
                results_fd = self._become_child(write_end, results_write)
                body(results_fd)
                code = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        os.close(write_end)
        if results:
            os.close(results_write)
        run = Run(pid, read_end, Capture(int(self.limits["output_bytes"])), ended, results_read)
        run.counters, run.before = counters, before
        return self._start(run, timeout_s)

    def _become_child(self, output: int, results: int) -> int:
        """Shed what belongs to the server: session, signal handling, descriptors, privileges to be looked at."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        first_free = 3
        if results >= 0:
            os.dup2(results, first_free, inheritable=False)
            first_free += 1
        os.closerange(first_free, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20))
        self._prepare_command()
        return 3 if results >= 0 else -1

    # -- operations: state

    def op_ping(self, _arguments: dict[str, Any], reply: Callable) -> None:
        reply({"workdir": self.workdir})

    def op_pause(self, _arguments: dict[str, Any], reply: Callable) -> None:
        self._signal_all(signal.SIGSTOP)
        reply({})

    def op_resume(self, _arguments: dict[str, Any], reply: Callable) -> None:
        self._signal_all(signal.SIGCONT)
        reply({})

    def _signal_all(self, number: int) -> None:
        if self._is_init:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)
            return
        signalled: set[int] = set()
        for _ in range(20):  # a process may fork while others are signalled
            family = {pid for pid, (_, _, state) in self._family().items() if state != "Z"} - {self._top} - signalled
            if not family:
                break
            for pid in family:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            signalled |= family
        for run in self._runs.values() if not self._top else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, number)

    def op_cancel(self, arguments: dict[str, Any], reply: Callable) -> None:
        for (_, request_id), run in list(self._requests.items()):
            if request_id == int(arguments["target"]):
                self._stop_run(run, "cancelled")
        reply({})

    # -- operations: files

    def path(self, given: Any) -> str:
        """The real path of what the caller named. Kernel file systems are refused: this process's own view of them is privileged."""
        if not isinstance(given, str) or not given or "\0" in given:
            raise Refusal("bad_arguments", f"path {given!r} should be a non-empty string")
        real = os.path.realpath(os.path.join(self.workdir, given))
        if self.confined and real != self.workdir and not real.startswith(self.workdir + os.sep):
            raise Refusal("forbidden", f"{given} is outside of the workspace")
        if real.split(os.sep)[1] in ("proc", "sys", "dev") and not real.startswith("/dev/shm/"):
            raise Refusal("forbidden", f"{given} is not a file of this machine's disk")
        return real

    def _open(self, given: str, flags: int, mode: int = 0o644) -> int:
        """Open a regular file without ever waiting (a FIFO would) and without following a last-moment link."""
        fd = os.open(self.path(given), flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Refusal("failed", f"{given} is a directory" if os.path.isdir(self.path(given)) else f"{given} is not a regular file")
        return fd

    def _read(self, given: str, cap: int) -> bytes:
        try:
            fd = self._open(given, os.O_RDONLY)
        except FileNotFoundError:
            raise Refusal("failed", f"no such file: {given}") from None
        with open(fd, "rb") as file:
            data = file.read(cap + 1)
        if len(data) > cap:
            raise Refusal("failed", f"{given} is larger than {cap} bytes; read a range of lines, or use a command")
        return data

    def _text(self, given: str) -> str:
        try:
            return self._read(given, MAX_TEXT).decode()
        except UnicodeDecodeError:
            raise Refusal("failed", f"{given} is not UTF-8 text") from None

    def _write(self, given: str, data: bytes, mode: int | None = None, *, new: bool = False) -> None:
        real = self.path(given)
        try:
            os.makedirs(os.path.dirname(real), exist_ok=True)
            fd = self._open(given, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else 0))
            with open(fd, "wb") as file:
                file.truncate(0)
                file.write(data)
                if mode is not None:
                    os.fchmod(fd, mode & 0o777)
        except FileExistsError:
            raise Refusal("failed", f"{given} exists already" if new else f"a parent of {given} is a file") from None
        except IsADirectoryError:
            raise Refusal("failed", f"{given} is a directory") from None
        except NotADirectoryError:
            raise Refusal("failed", f"a parent of {given} is a file") from None
        except OSError as error:
            raise Refusal("failed", f"cannot write {given}: {error.strerror}") from None

    def op_read(self, arguments: dict[str, Any], reply: Callable) -> None:
        given = arguments.get("path")
        start, end = _line(arguments, "start"), _line(arguments, "end")
        if start is None and end is None:
            reply({"text": self._text(given)})  # type: ignore[arg-type]
            return
        try:
            fd = self._open(given, os.O_RDONLY)  # type: ignore[arg-type]
        except FileNotFoundError:
            raise Refusal("failed", f"no such file: {given}") from None
        start = start or 1
        if end is not None and end < start:
            os.close(fd)
            raise Refusal("bad_arguments", f"end {end} is before start {start}")
        lines, size, count = [], 0, 0
        with open(fd, encoding="utf-8", errors="replace", newline="") as file:
            for count, line in enumerate(file, 1):
                if end is not None and count > end:
                    break
                if count >= start:
                    size += len(line)
                    if size > MAX_TEXT:
                        raise Refusal("failed", f"these lines of {given} are larger than {MAX_TEXT} bytes; ask for fewer")
                    lines.append(line)
        if not lines:
            raise Refusal("failed", f"{given} has {count} lines; there is no line {start}")
        reply({"text": "".join(lines)})

    def op_write(self, arguments: dict[str, Any], reply: Callable) -> None:
        given, text = arguments.get("path"), arguments.get("text")
        if not isinstance(text, str):
            raise Refusal("bad_arguments", "write needs a text")
        self._write(given, text.encode("utf-8", "surrogatepass"))  # type: ignore[arg-type]
        reply({"text": f"wrote {given}"})

    def op_edit(self, arguments: dict[str, Any], reply: Callable) -> None:
        given, old, new = arguments.get("path"), arguments.get("old"), arguments.get("new")
        if not isinstance(old, str) or not isinstance(new, str) or not isinstance(given, str):
            raise Refusal("bad_arguments", "edit needs path, old and new")
        if not old:
            self._write(given, new.encode("utf-8", "surrogatepass"), new=True)
            reply({"text": f"created {given}"})
            return
        text = self._text(given)
        count = text.count(old)
        if count == 0:
            raise Refusal("failed", f"the old text is not in {given}")
        if count > 1:
            raise Refusal("failed", f"the old text is {count} times in {given}; include more lines around it")
        if old == new:
            raise Refusal("failed", "old and new are the same")
        self._write(given, text.replace(old, new, 1).encode("utf-8", "surrogatepass"))
        reply({"text": f"edited {given}"})

    def op_read_bytes(self, arguments: dict[str, Any], reply: Callable) -> None:
        reply({"data": self._read(arguments["path"], MAX_BLOB)})

    def op_write_bytes(self, arguments: dict[str, Any], reply: Callable) -> None:
        self._write(arguments["path"], arguments.get("blob", b""), int(arguments.get("mode", 0o644)))
        reply({})

    def _entries(self, given: str) -> list[tuple[str, os.stat_result]]:
        real = self.path(given)
        try:
            names = sorted(os.listdir(real))
        except FileNotFoundError:
            raise Refusal("failed", f"no such directory: {given}") from None
        except NotADirectoryError:
            raise Refusal("failed", f"{given} is not a directory") from None
        return [(name, os.lstat(os.path.join(real, name))) for name in names]

    def op_list(self, arguments: dict[str, Any], reply: Callable) -> None:
        entries = self._entries(arguments.get("path") or ".")
        names = [name + "/" if stat.S_ISDIR(info.st_mode) else name for name, info in entries if name not in SKIPPED_DIRS]
        more = f"\n({len(names) - MAX_MATCHES} more)" if len(names) > MAX_MATCHES else ""
        reply({"text": "\n".join(names[:MAX_MATCHES]) + more or "(empty)"})

    def op_list_stat(self, arguments: dict[str, Any], reply: Callable) -> None:
        given = arguments.get("path") or "."
        prefix = "" if given in (".", "./") else given.rstrip("/") + "/"
        reply({"entries": [_describe(prefix + name, info) for name, info in self._entries(given)]})

    def op_stat(self, arguments: dict[str, Any], reply: Callable) -> None:
        given = arguments["path"]
        parent, name = os.path.split(os.path.join(self.workdir, given).rstrip("/"))
        target = os.path.join(self.path(parent), name) if name not in ("", ".", "..") else self.path(given)
        try:
            reply({"entry": _describe(given, os.lstat(target))})
        except (FileNotFoundError, NotADirectoryError):
            reply({"entry": None})

    def _walk(self, top: str) -> Iterator[str]:
        """Files below `top`, sorted, relative to the workspace where they are in it. Links are not followed, and no depth is too much."""
        count, folders = 0, [top]
        while folders:
            folder, inner = folders.pop(), []
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:  # gone, not readable, or its name is too long to open
                continue
            for entry in entries:
                if entry.is_dir():
                    if not entry.is_symlink() and entry.name not in SKIPPED_DIRS:
                        inner.append(entry.path)
                    continue
                count += 1
                if count > MAX_WALK:
                    return
                yield os.path.relpath(entry.path, self.workdir) if entry.path.startswith(self.workdir + os.sep) else entry.path
            folders += reversed(inner)

    def op_glob(self, arguments: dict[str, Any], reply: Callable) -> Run | None:
        """Several stars in one name can backtrack for long; such a pattern is matched by a child."""
        pattern = arguments.get("pattern")
        if not isinstance(pattern, str) or not pattern:
            raise Refusal("bad_arguments", "glob needs a pattern, such as **/*.py")
        if len(pattern) > 1000:
            raise Refusal("bad_arguments", "the pattern is longer than 1000 characters")
        matches = glob_matcher(pattern.removeprefix("./"))

        def listing() -> str:
            found = [path for path in self._walk(self.workdir) if matches(path)]
            more = f"\n({len(found) - MAX_MATCHES} more)" if len(found) > MAX_MATCHES else ""
            return "\n".join(found[:MAX_MATCHES]) + more

        if max(name.count("*") for name in pattern.split("/")) > 2:
            return self._search(listing, reply, arguments, pattern, "no files match")
        reply({"text": listing() or "no files match"})
        return None

    def op_grep(self, arguments: dict[str, Any], reply: Callable) -> Run | None:
        """A pattern of the caller's may backtrack for ever: unless it cannot, and there is little to read, the search is a child's."""
        pattern, given, glob = arguments.get("pattern"), arguments.get("path") or ".", arguments.get("glob") or ""
        if not isinstance(pattern, str) or not pattern:
            raise Refusal("bad_arguments", "grep needs a pattern")
        try:
            compiled = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise Refusal("bad_arguments", f"the pattern is not a regular expression: {error}") from None
        top = self.path(given)
        if not os.path.exists(top):
            raise Refusal("failed", f"no such path: {given}")
        matches = glob_matcher(glob.removeprefix("./")) if glob else None
        paths = [path for path in (self._walk(top) if os.path.isdir(top) else [given]) if matches is None or matches(path)]
        if "(" not in pattern and len(REPETITION.findall(pattern)) <= 1 and self._total_size(paths) <= INLINE_BYTES:
            with contextlib.suppress(OverflowError):
                reply({"text": "\n".join(search(compiled, paths, self.workdir, longest=INLINE_LINE)) or "no matches"})
                return None

        return self._search(lambda: "\n".join(search(compiled, paths, self.workdir)), reply, arguments, pattern, "no matches")

    def _search(self, find: Callable[[], str], reply: Callable, arguments: dict[str, Any], pattern: str, nothing: str) -> Run:
        """Answer with what `find` says in a child, which may be stopped."""

        def body(_results: int) -> None:
            with open(1, "wb", closefd=False) as out:
                out.write(find().encode("utf-8", "replace"))

        def ended(run: Run) -> None:
            if run.limit:
                reply({"error": "timeout", "text": f"the search for {pattern!r} took too long; use a simpler pattern or a smaller path"})
            elif run.code != 0:
                reply({"error": "failed", "text": f"the search ended with status {run.code}"})
            else:
                reply({"text": run.capture.bytes().decode("utf-8", "replace") or nothing})

        return self._fork(body, ended, _seconds(arguments, 10.0))

    def _total_size(self, paths: list[str]) -> int:
        total = 0
        for path in paths:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(self.workdir, path)).st_size
            if total > INLINE_BYTES:
                break
        return total

    def op_apply(self, arguments: dict[str, Any], reply: Callable) -> None:
        """Make the workspace hold these files: [[path, size, mode], ...] with their contents in the blob; size -1 is a deletion."""
        blob, at, changes = arguments.get("blob", b""), 0, arguments.get("changes") or []
        for path, size, _ in changes:
            if size < 0:
                self._remove(path)
        for path, size, mode in changes:
            if size >= 0:
                self._clear_way(path)
                self._write(path, blob[at : at + size], int(mode))
                at += size
        reply({})

    def _named(self, given: str) -> str:
        """The real folder of what the caller named, and its own name in it: the name itself may be a link."""
        parent, name = os.path.split(os.path.join(self.workdir, given).rstrip("/"))
        if name in ("", ".", ".."):
            raise Refusal("bad_arguments", f"path {given!r} should name a file")
        return os.path.join(self.path(parent), name)

    def _remove(self, given: str) -> None:
        target = self._named(given)
        try:
            if os.path.isdir(target) and not os.path.islink(target):
                shutil.rmtree(target)
            else:
                os.unlink(target)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise Refusal("failed", f"cannot remove {given}: {error.strerror}") from None

    def _clear_way(self, given: str) -> None:
        """Remove what stands where a file or one of its folders must be: a link, a folder, a file."""
        parts = given.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            if folder and os.path.lexists(self._named(folder)) and not os.path.isdir(self._named(folder)):
                self._remove(folder)
                break
        target = self._named(given)
        if os.path.islink(target) or os.path.isdir(target):
            self._remove(given)

    # -- operations: commands

    def _place(self, arguments: dict[str, Any]) -> tuple[str, dict[str, str]]:
        cwd = self.path(arguments.get("cwd") or ".")
        if not os.path.isdir(cwd):
            raise Refusal("failed", f"no such directory: {arguments.get('cwd')}")
        extra = arguments.get("env") or {}
        return cwd, {**self.environment, **{str(k): str(v) for k, v in extra.items()}}

    def op_exec(self, arguments: dict[str, Any], reply: Callable) -> Run | None:
        argv, command = arguments.get("argv"), arguments.get("command")
        if not argv and not command:
            raise Refusal("bad_arguments", "exec needs an argv or a command")
        cwd, environment = self._place(arguments)
        stdin = arguments.get("blob", b"")
        timeout_s = _seconds(arguments, 60.0)
        words = [str(word) for word in argv] if argv else plain_words(str(command))
        test_run = pytest_words(words) if words and not stdin else None
        ended = self._answer(reply)
        line = [str(word) for word in argv] if argv else [SHELL, "-c", str(command)]
        try:
            if test_run is not None and not _changes_python(arguments.get("env")):
                return self._test_run(test_run[1], test_run[0], cwd, environment, timeout_s, ended, results=False)
            return self._spawn(line, cwd, environment, stdin, ended, timeout_s)
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            reply(_result(code, f"{line[0]}: {error.strerror}\n".encode()))
        except (BlockingIOError, MemoryError, OSError) as error:
            limit = {errno.EAGAIN: "pids", errno.ENOMEM: "memory"}.get(getattr(error, "errno", 0), "")
            if not limit and not isinstance(error, MemoryError):
                raise
            reply(_result(126, f"cannot start a process: {error}\n".encode(), limit=limit or "memory"))
        return None

    def _answer(self, reply: Callable) -> Callable[[Run], None]:
        def ended(run: Run) -> None:
            reply(_run_result(run))

        return ended

    def op_job_start(self, arguments: dict[str, Any], reply: Callable) -> None:
        command = arguments.get("command")
        if not isinstance(command, str) or not command:
            raise Refusal("bad_arguments", "job_start needs a command")
        cwd, environment = self._place(arguments)
        name = str(len(self._commands) + 1)
        self._jobs[name] = self._spawn([SHELL, "-c", command], cwd, environment, b"", lambda run: None, float("inf"))
        self._commands[name] = command
        reply({"job": name})

    def _job(self, arguments: dict[str, Any]) -> Run:
        name = str(arguments.get("job"))
        if name in self._commands and name not in self._jobs:
            where = "ran where this sandbox was forked from, and does not run here; start it again if it is needed"
            raise Refusal("failed", f"job {name} ({self._commands[name]}) {where}")
        if name not in self._jobs:
            raise Refusal("bad_arguments", f"no job {name!r}; there are {', '.join(self._jobs) or 'none'}")
        return self._jobs[name]

    def op_job_poll(self, arguments: dict[str, Any], reply: Callable) -> None:
        run = self._job(arguments)
        for fd in list(run.pipes):
            self._drain(run, fd)
        reply({"running": run.code is None, **_run_result(run)})

    def op_job_kill(self, arguments: dict[str, Any], reply: Callable) -> None:
        run = self._job(arguments)
        if run.code is not None:
            reply({"running": False, **_run_result(run)})
            return
        run.ended = lambda run: reply({"running": False, **_run_result(run)})
        run.limit = "killed"
        self._kill_group(run.pid)

    # -- operations: sessions

    def op_session_open(self, arguments: dict[str, Any], reply: Callable) -> None:
        name = str(arguments.get("session") or "")
        if name and name in self._sessions:
            reply({"session": name})
            return
        if not SHELL.endswith("bash"):
            raise Refusal("failed", f"a session needs /bin/bash, and here is only {SHELL}")
        if len(name) > 64 or any(not (character.isalnum() or character in "-_") for character in name):
            raise Refusal("bad_arguments", f"session name {name[:80]!r} should be up to 64 letters, digits, - and _")
        cwd, environment = self._place(arguments)
        name = name or next(str(n) for n in range(1, len(self._sessions) + 2) if str(n) not in self._sessions)
        self._sessions[name] = Session(cwd, environment)
        reply({"session": name})

    def _session(self, arguments: dict[str, Any]) -> Session:
        name = str(arguments.get("session"))
        if name not in self._sessions:
            raise Refusal("bad_arguments", f"no session {name!r}; there are {', '.join(self._sessions) or 'none'}")
        return self._sessions[name]

    def op_session_close(self, arguments: dict[str, Any], reply: Callable) -> None:
        session = self._session(arguments)
        if session.run is not None:
            self._stop_run(session.run, "cancelled")
        del self._sessions[str(arguments.get("session"))]
        reply({})

    def op_session_run(self, arguments: dict[str, Any], reply: Callable) -> Run:
        """The answer of a command, and `kept`: whether the next command will see what this one changed of the session."""
        session, command = self._session(arguments), arguments.get("command")
        if not isinstance(command, str) or "\0" in command:
            raise Refusal("bad_arguments", "session_run needs a command")
        if session.run is not None:
            raise Refusal("failed", f"session {arguments.get('session')} is busy; wait for its command, or open another session")
        timeout_s = _seconds(arguments, 60.0)
        fd, out = tempfile.mkstemp(prefix=".session-", dir=self.environment.get("TMPDIR"))
        os.close(fd)

        def ended(run: Run) -> None:
            session.run = None
            state = self._left_behind(out)
            kept = bool(state) and not run.limit
            if kept:
                session.state = state
            reply({**_run_result(run), "kept": kept})

        line = [SHELL, "--noprofile", "--norc", "-c", SESSION_SHELL, "bash", command, out, SESSION_SAVE]
        cwd = session.cwd if not session.state and os.path.isdir(session.cwd) else self.workdir
        try:
            session.run = self._spawn(line, cwd, {} if session.state else session.environment, session.state, ended, timeout_s)
        except BaseException:
            os.unlink(out)
            raise
        return session.run

    def _left_behind(self, path: str) -> bytes:
        """What a command of a session wrote down; b"" when it did not come to that, or when it wrote too much."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return b""
        with open(fd, "rb") as file:
            state = file.read(MAX_SESSION + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        with contextlib.suppress(OSError):
            os.unlink(path)
        return state if len(state) <= MAX_SESSION and state.startswith(b"cd -- ") else b""

    def op_session_state(self, _arguments: dict[str, Any], reply: Callable) -> None:
        """All that a snapshot of level L1 carries beyond the files."""
        sessions = {
            name: [session.cwd, session.environment, session.state.decode("utf-8", "surrogateescape")]
            for name, session in self._sessions.items()
        }
        reply({"state": {"workdir": self.workdir, "sessions": sessions, "jobs": self._commands}})

    def op_session_restore(self, arguments: dict[str, Any], reply: Callable) -> None:
        """Take up such a state. A server that has one already keeps it: its client was adopted, not restored.

        Where every sandbox has a folder of its own (no mount namespace), that folder's name is replaced wherever it stands.
        """
        state = arguments["state"]
        there, here = (os.path.dirname(path) for path in (state["workdir"], self.workdir))

        def moved(text: str) -> str:
            return text if there == here else text.replace(there, here)

        if not self._sessions and not self._commands:
            for name, (cwd, environment, text) in state["sessions"].items():
                variables = {key: moved(value) for key, value in environment.items()}
                self._sessions[name] = Session(moved(cwd), variables, moved(text).encode("utf-8", "surrogateescape"))
            self._commands.update(state["jobs"])
        reply({})

    # -- operations: tests

    def op_pytest(self, arguments: dict[str, Any], reply: Callable) -> Run | None:
        words = arguments.get("args") or []
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise Refusal("bad_arguments", "pytest takes args: a list of strings")
        cwd, environment = self._place(arguments)
        wanted = bool(arguments.get("report"))

        def ended(run: Run) -> None:
            result = _run_result(run)
            if wanted:
                result |= read_results(bytes(run.results), _ending(run))
            reply(result)

        try:
            return self._test_run(words, "module", cwd, environment, _seconds(arguments, 60.0), ended, results=wanted)
        except OSError as error:
            limit = {errno.EAGAIN: "pids", errno.ENOMEM: "memory"}.get(error.errno or 0)
            if limit is None:
                raise
            empty = {"tests": [], "complete": False} if wanted else {}
            reply({**_result(126, f"cannot start a process: {error}\n".encode(), limit=limit), **empty})
        return None

    def _test_run(
        self,
        words: list[str],
        entry: str,
        cwd: str,
        environment: dict[str, str],
        timeout_s: float,
        ended: Callable[[Run], None],
        *,
        results: bool,
    ) -> Run:
        def body(results_fd: int) -> None:
            os._exit(run_pytest(words, entry, cwd, environment, self._base_path, self._bin_dir, results_fd))

        run = self._fork(body, ended, timeout_s, results=results)
        run.exclusive = True
        return run


# ---------------------------------------------------------------------------------------------------
# Answers


def _result(code: int, output: bytes, *, limit: str = "") -> dict[str, Any]:
    return {"code": code, "output": output, "timed_out": False, "limit": limit, "dropped_bytes": 0, "seconds": 0.0}


def _run_result(run: Run) -> dict[str, Any]:
    return {
        "code": run.code,
        "output": run.capture.bytes(),
        "timed_out": run.timed_out,
        "limit": run.limit,
        "dropped_bytes": run.capture.dropped,
        "seconds": round(run.seconds, 4),
    }


def _ending(run: Run) -> str:
    if run.limit:
        return f"the run was stopped by its {run.limit} limit"
    if run.code is not None and run.code < 0:
        return f"the test process was killed by signal {-run.code}"
    return f"the test process ended early with status {run.code}"


def _line(arguments: dict[str, Any], name: str) -> int | None:
    value = arguments.get(name)
    if value is None or value == "":
        return None
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise Refusal("bad_arguments", f"{name} should be a line number, got {value!r}") from None
    if number < 1:
        raise Refusal("bad_arguments", f"{name} should be at least 1, got {number}")
    return number


def _seconds(arguments: dict[str, Any], default: float) -> float:
    value = float(arguments.get("timeout_s", default))
    if not 0.0 < value < 1e9:
        raise Refusal("bad_arguments", f"timeout_s should be a number of seconds above 0, got {value}")
    return value


def _describe(path: str, info: os.stat_result) -> list[Any]:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
    return [path, info.st_size, stat.S_IMODE(info.st_mode), kinds.get(stat.S_IFMT(info.st_mode), "other")]


# ---------------------------------------------------------------------------------------------------
# Searching


def glob_matcher(pattern: str) -> Callable[[str], bool]:
    """Match relative paths; `**` crosses folders; a pattern without a slash matches names in every folder."""
    if "/" not in pattern:
        pattern = "**/" + pattern
    out, i = [], 0
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out.append("(?:[^/]+/)*")
            i += 3
        elif pattern.startswith("**", i):
            out.append(".*")
            i += 2
        elif pattern[i] == "*":
            out.append("[^/]*")
            i += 1
        elif pattern[i] == "?":
            out.append("[^/]")
            i += 1
        elif pattern[i] == "[" and "]" in pattern[i + 2 :]:
            end = pattern.index("]", i + 2) + 1
            out.append(fnmatch.translate(pattern[i:end]).removeprefix("(?s:").removesuffix(r")\Z"))
            i = end
        else:
            out.append(re.escape(pattern[i]))
            i += 1
    compiled = re.compile("".join(out))
    return lambda path: compiled.fullmatch(path) is not None


def search(pattern: re.Pattern[str], paths: list[str], workdir: str, *, longest: int = 1 << 30) -> list[str]:
    """`path:line:text` of matching lines; binary and large files are passed over. OverflowError at a line over `longest`."""
    lines: list[str] = []
    for path in paths:
        full = os.path.join(workdir, path)
        try:
            fd = os.open(full, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            continue
        with open(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size > 4 * MAX_TEXT:
                continue
            data = file.read()
        if b"\0" in data[:8192]:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if len(line) > longest:
                raise OverflowError(path)
            if pattern.search(line):
                lines.append(f"{path}:{number}:{line[:500]}")
                if len(lines) > MAX_MATCHES:
                    lines[-1] = f"(more than {MAX_MATCHES} matches; narrow the search)"
                    return lines
    return lines


# ---------------------------------------------------------------------------------------------------
# Processes


def process_ids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def descendants(top: int) -> set[int]:
    """Processes below `top`, by the kernel's own lists of children."""
    found: set[int] = set()
    waiting = [top]
    while waiting:
        pid = waiting.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                    children = {int(child) for child in file.read().split()} - found
                found |= children
                waiting += children
        except OSError:  # it ended while it was looked at
            continue
    return found


def process_table(pids: set[int]) -> dict[int, tuple[int, int, str]]:
    """pid -> (parent, session, state)."""
    table = {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        table[pid] = (int(fields[1]), int(fields[3]), fields[0].decode())
    return table


def resident_bytes(pids: set[int]) -> int:
    """Memory that processes hold for themselves; files in memory are bounded by the disk limit."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                fields = file.read().split()
        except OSError:
            continue
        total += (int(fields[1]) - int(fields[2])) * page
    return total


def set_limit(pid: int, kind: int, pair: tuple[int, int]) -> None:
    """A limit on a child that was just started (Linux); elsewhere the child keeps the server's."""
    if hasattr(resource, "prlimit"):
        resource.prlimit(pid, kind, pair)


# ---------------------------------------------------------------------------------------------------
# pytest


def plain_words(command: str) -> list[str]:
    """The words of a command line that needs no shell, else []."""
    if not PLAIN_COMMAND.match(command) or "\n" in command.strip():
        return []
    try:
        words = shlex.split(command)
    except ValueError:
        return []
    return [] if not words or "=" in words[0] else words


def pytest_words(words: list[str]) -> tuple[str, list[str]] | None:
    """("script" | "module", arguments) when the words are a plain pytest command line. Unquoted brackets are left to the shell."""
    if words[0] in ("pytest", "py.test"):
        return "script", words[1:]
    if len(words) >= 3 and PYTHON.match(words[0]) and words[1:3] == ["-m", "pytest"]:
        return "module", words[3:]
    return None


def _changes_python(extra: Any) -> bool:
    """An environment that only a new interpreter would honour."""
    return any(str(name).startswith(("PYTHON", "LD_")) and name != "PYTHONPATH" for name in (extra or {}))


def warm_up(*, rehearse: bool = True) -> None:
    """Import what a test run will import, and fill the caches that only hold the standard library and pytest.

    One throw-away run over a file of our own fills regular expressions, argument parsers and source caches: it takes
    about a sixth of the processor time off every run that is forked later.
    """
    import importlib

    from _pytest.config import default_plugins

    for name in (*(f"_pytest.{plugin}" for plugin in default_plugins), "_pytest._argcomplete", "readline", "faulthandler", "pdb"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if rehearse:
        _rehearse()
    gc.collect()
    gc.freeze()


def _rehearse() -> None:
    """Run two tests of our own here, and undo what that leaves in this interpreter."""
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        name = "test_warm_up_of_the_fork_server"
        with open(os.path.join(folder, name + ".py"), "w") as file:
            file.write("def test_fails():\n    x = [1]\n    assert x == [2]\n\n\ndef test_passes(tmp_path):\n    assert tmp_path\n")
        before_path, before_modules, before_hooks = list(sys.path), set(sys.modules), list(sys.meta_path)
        saved = os.dup(1)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        try:
            pytest.main(["-p", "no:cacheprovider", "--rootdir", folder, "--basetemp", os.path.join(folder, "t"), folder])
            sys.stdout.flush()
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            os.close(null)
        sys.path[:], sys.meta_path[:] = before_path, before_hooks
        for added in set(sys.modules) - before_modules:
            if added.startswith("test_"):
                del sys.modules[added]
        for cached in [path for path in sys.path_importer_cache if path.startswith(folder)]:
            del sys.path_importer_cache[cached]


class Reporter:
    """A pytest plugin that writes one JSON line per event to a descriptor that is not stdout, numbered, and an end mark."""

    def __init__(self, fd: int) -> None:
        self._fd, self._count = fd, 0
        self._parts: dict[str, dict[str, Any]] = {}

    def _write(self, **fields: Any) -> None:
        self._count += 1
        data = json.dumps({"n": self._count, **fields}).encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._parts[nodeid] = {"outcome": "passed", "seconds": 0.0, "message": ""}
        self._write(start=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        entry = self._parts.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0, "message": ""})
        entry["seconds"] += getattr(report, "duration", 0.0)
        expected = hasattr(report, "wasxfail")
        if report.outcome == "failed":
            entry["outcome"] = "failed" if report.when == "call" else "error"
            entry["message"] = self._message(report)
        elif report.outcome == "skipped":
            entry["outcome"] = "xfailed" if expected else "skipped"
            entry["message"] = self._message(report)
        elif expected and report.when == "call":
            entry["outcome"] = "xpassed"
        if report.when == "teardown":
            entry = self._parts.pop(report.nodeid)
            self._write(test=report.nodeid, outcome=entry["outcome"], seconds=round(entry["seconds"], 6), message=entry["message"])

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self._write(test=report.nodeid, outcome="error", seconds=0.0, message=self._message(report))

    def pytest_sessionfinish(self, exitstatus: Any) -> None:
        self._write(end=int(exitstatus))

    @staticmethod
    def _message(report: Any) -> str:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else str(report.longrepr or "")
        return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + f"[... {len(text) - MAX_MESSAGE} characters dropped ...]"


def read_results(data: bytes, ending: str) -> dict[str, Any]:
    """The tests of a results channel. A test that began and did not end counts as failed, with how the run ended as its message."""
    tests: dict[str, dict[str, Any]] = {}
    finished: set[str] = set()
    complete = False
    for raw in data.splitlines():
        try:
            event = json.loads(raw)
            if "start" in event:
                name = str(event["start"])
                tests.setdefault(name, {"id": name, "outcome": "failed", "seconds": 0.0, "message": ending})
            elif "test" in event:
                name, seconds, message = str(event["test"]), float(event["seconds"]), str(event["message"])
                if name not in finished or tests[name]["outcome"] == "passed":  # reported twice: the worse outcome counts
                    tests[name] = {"id": name, "outcome": str(event["outcome"]), "seconds": seconds, "message": message}
                finished.add(name)
            elif "end" in event:
                complete = True
        except (ValueError, KeyError, TypeError):
            continue
    return {"tests": list(tests.values()), "complete": complete}


def run_pytest(
    words: list[str], entry: str, cwd: str, environment: dict[str, str], base_path: list[str], bin_dir: str, results_fd: int
) -> int:
    """In a forked child: what a new interpreter would have set up, then pytest, then what it would do at its end."""
    import pytest

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for name in [name for name in sys.modules if name == "etude" or name.startswith("etude.")]:
        del sys.modules[name]
    first = cwd if entry == "module" else bin_dir or os.path.dirname(sys.executable)
    extra = [os.path.abspath(part) for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [first, *extra, *base_path]
    program = os.path.join(os.path.dirname(pytest.__file__), "__main__.py") if entry == "module" else os.path.join(first, "pytest")
    sys.argv[:] = [program, *words]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    random.seed()
    gc.set_threshold(20_000, 20, 20)  # a run lives for a moment; collecting as often as by default is 5 % of it
    plugins = [Reporter(results_fd)] if results_fd >= 0 else []
    code = 1
    try:
        code = int(pytest.main(words, plugins=plugins))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        try:
            last()
        except BaseException:
            traceback.print_exc()
    return code & 0xFF


# ---------------------------------------------------------------------------------------------------
# As an ordinary subprocess (the plain backend)


def main() -> None:
    """`toolserver.py FD SETTINGS`: serve the socket FD until its other end closes. SETTINGS is JSON."""
    fd, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]
    sys.dont_write_bytecode = True
    os.environ.clear()
    os.environ.update(settings["environment"])
    warm_up(rehearse=False)  # it serves one sandbox: the rehearsal would cost more than it saves
    server = Server(
        workdir=settings["workdir"],
        limits=settings["limits"],
        environment=settings["environment"],
        confined=True,
        bin_dir=os.path.dirname(sys.executable),
    )
    server.exit_without_clients = True
    server.connect(socket.socket(fileno=fd))
    server.serve()


if __name__ == "__main__":
    main()
