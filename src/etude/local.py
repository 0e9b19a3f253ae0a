"""The parts as processes on this machine.

Started in this order: `sandboxd` (standard library, single-threaded, before torch is imported anywhere: forking a
threaded process is unsafe and unsharing a user namespace needs one thread), one engine process, one trainer process,
and the loop, which only awaits. The same boundaries become Ray actors in `cluster.py`.

A part is called over a socket pair with pickled frames (same machine, same user, same code):

    caller -> worker   (id, method, args, kwargs) | (id, "!cancel", (), {})
    worker -> caller   (id, "ok" | "error" | "item" | "end", value)

A worker exits when its caller's end closes, so nothing outlives the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from etude.errors import DeadlineError, InfraError, IntegrityError
from etude.parts import Run, RunConfig, make_engine, make_trainer, model_folder, revisions, trainer_of
from etude.protocols import Engine, Trainer
from etude.rollout import checkpoint
from etude.sandbox.open import open_host

_HEADER = struct.Struct("<Q")
START_S = 120.0
"""A worker imports torch and loads a model; on a cold disk that is tens of seconds."""


async def _read(reader: asyncio.StreamReader) -> Any:
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return pickle.loads(await reader.readexactly(size))


def _frame(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(data)) + data


class Remote:
    """A part in another process: every method of it is an async method here. Made by `start`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._name = name
        self._process = process
        self._reader, self._writer = reader, writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Queue[tuple[str, Any]]] = {}
        self._listener = asyncio.get_running_loop().create_task(self._listen())
        self._gone: str = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _listen(self) -> None:
        try:
            while True:
                id, kind, value = await _read(self._reader)
                if id in self._waiting:
                    self._waiting[id].put_nowait((kind, value))
        except Exception as error:  # whatever it is, nobody must wait for an answer that cannot come
            ended = isinstance(error, (asyncio.IncompleteReadError, ConnectionError))
            what = f"ended with status {self._process.poll()}" if ended else f"sent what cannot be read: {error!r}"
            self._gone = f"the {self._name} process (pid {self.pid}) {what}"
            for queue in self._waiting.values():
                queue.put_nowait(("error", InfraError(self._gone)))

    def _send(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if self._gone:
            raise InfraError(self._gone)
        id = next(self._ids)
        self._waiting[id] = asyncio.Queue()
        self._writer.write(_frame((id, method, args, kwargs)))
        return id

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        id = self._send(method, args, kwargs)
        try:
            kind, value = await self._waiting[id].get()
        except asyncio.CancelledError:
            self._writer.write(_frame((id, "!cancel", (), {})))
            raise
        finally:
            del self._waiting[id]
        if kind == "error":
            raise value
        return value

    async def generate_stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        id = self._send("generate_stream", args, kwargs)
        try:
            while True:
                kind, value = await self._waiting[id].get()
                if kind == "end":
                    return
                if kind == "error":
                    raise value
                yield value
        finally:
            del self._waiting[id]
            self._writer.write(_frame((id, "!cancel", (), {})))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(method, *args, **kwargs)

        return call

    async def close(self) -> None:
        """Let the part close itself, then end the process."""
        if not self._gone:
            with contextlib.suppress(InfraError, asyncio.TimeoutError):
                await asyncio.wait_for(self._call("close"), 10)
        self._writer.close()
        self._listener.cancel()
        try:
            await asyncio.to_thread(self._process.wait, 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


async def start(name: str, factory: str, setup: dict[str, Any], *, threads: int = 1) -> Remote:
    """Start a worker process that builds `factory` ("module:function") with `setup` and serves it."""
    ours, theirs = socket.socketpair()
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "ETUDE_THREADS": str(threads)}
    process = subprocess.Popen(
        [sys.executable, "-m", "etude.local", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the loop's to handle; it closes our socket
    )
    theirs.close()
    ours.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.write(_frame((factory, setup)))
    remote = Remote(name, process, reader, writer)
    try:
        await asyncio.wait_for(remote._call("!ready"), START_S)
    except TimeoutError:
        process.kill()
        raise DeadlineError(f"the {name} process to load its model", START_S) from None
    return remote


async def open_run(
    config: RunConfig,
    folder: Path,
    *,
    resume: Path | None = None,
    watch: Callable[[dict[str, Any]], None] | None = None,
    evaluating: Callable[[str, int, int], None] | None = None,
) -> tuple[Run, Usage]:
    """Start the parts of a run, in order, and wire them. `resume` is a checkpoint folder of this run."""
    since = time.monotonic()
    state = checkpoint.read(resume) if resume else None
    lineage = checkpoint.next_lineage(folder)
    started: list[Any] = [open_host(config.sandbox.backend, unsafe=config.sandbox.unsafe)]
    try:
        trainer, engine = await _start_pair(config, folder, resume, lineage, started)
        if (await engine.version()).key != (await trainer.version()).key:
            raise IntegrityError(f"the engine starts with {await engine.version()}, the trainer with {await trainer.version()}")
        run = Run(
            config,
            folder,
            engine=engine,
            trainer=trainer,
            host=started[0],
            lineage=lineage,
            state=state,
            watch=watch,
            evaluating=evaluating,
            revision=revisions(folder),
            since=since,
        )
    except BaseException:
        await _close(started)
        raise
    return run, Usage([os.getpid(), *(pid for part in started if (pid := getattr(part, "pid", None)))])


async def _start_pair(config: RunConfig, folder: Path, resume: Path | None, lineage: int, started: list[Any]) -> tuple[Trainer, Engine]:
    """Trainer and engine, here or in processes of their own; both at once where the engine needs nothing of the trainer."""
    model = str(model_folder(config.model))
    trainer_config = trainer_of(config)
    data = (f"katas, seed {config.tasks.seed}",)
    train = {"folder": model, "trainer": trainer_config, "store": str(folder / "weights"), "data": data}
    serve = {"folder": str(resume / "model") if resume else model, "engine": config.engine, "numerics": config.numerics, "version": None}
    serve["published"] = config.trainer.publish_dtype

    async def make(name: str, factory: Callable[..., Any], setup: dict[str, Any]) -> Any:
        here = config.processes == "one"
        part = factory(**setup) if here else await start(name, f"etude.parts:{factory.__name__}", setup, threads=config.threads)
        started.append(part)
        return part

    if resume is None:
        trainer, engine = await asyncio.gather(make("trainer", make_trainer, train), make("engine", make_engine, serve))
    else:
        trainer = await make("trainer", make_trainer, train)
        engine = await make("engine", make_engine, serve | {"version": await trainer.load(resume, lineage)})
    return trainer, engine


async def close_run(run: Run) -> None:
    """Close every part, whatever happened to the others."""
    await _close([run.engine, run.trainer, run.host])
    run.recorder.close()


async def _close(parts: list[Any]) -> None:
    for part in reversed(parts):
        with contextlib.suppress(InfraError, asyncio.TimeoutError):
            await part.close()


class Usage:
    """CPU seconds of the processes of a run and all their descendants, ended ones included once somebody waited for them."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._before = self._total()

    def cpu_s(self) -> float:
        return self._total() - self._before

    def _total(self) -> float:
        """Sum over the process trees of utime + stime + cutime + cstime in /proc/<pid>/stat; 0 where there is no /proc."""
        seconds: dict[int, float] = {}
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(path.parent.name)] = int(fields[1])
            seconds[int(path.parent.name)] = sum(int(f) for f in fields[11:15]) / os.sysconf("SC_CLK_TCK")
        return sum(s for pid, s in seconds.items() if self._belongs(pid, parents))

    def _belongs(self, pid: int, parents: dict[int, int]) -> bool:
        while pid > 1:
            if pid in self._pids:
                return True
            pid = parents.get(pid, 0)
        return False


async def _serve(descriptor: int) -> None:
    """The worker's side: build the part, then answer frames until the caller's end closes."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    factory, setup = await _read(reader)
    running: dict[int, asyncio.Task[None]] = {}
    part: Any = None
    failure: Exception | None = None
    try:
        module, function = factory.split(":")
        part = getattr(__import__(module, fromlist=[function]), function)(**setup)
    except Exception as error:  # reported to the caller by "!ready"; the process then ends
        failure = error

    async def answer(id: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if failure is not None:
                raise failure
            value: Any = None if method == "!ready" else getattr(part, method)(*args, **kwargs)
            if isinstance(value, AsyncIterator):
                async for item in value:
                    writer.write(_frame((id, "item", item)))
                writer.write(_frame((id, "end", None)))
                return
            value = await value if inspect.isawaitable(value) else value
            writer.write(_frame((id, "ok", value)))
        except Exception as error:  # crosses the process boundary and is raised in the caller
            writer.write(_frame((id, "error", _portable(error))))
        finally:
            running.pop(id, None)

    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            id, method, args, kwargs = await _read(reader)
            if method == "!cancel":
                if id in running:
                    running[id].cancel()
                continue
            running[id] = asyncio.create_task(answer(id, method, args, kwargs))


def _portable(error: Exception) -> Exception:
    """The error itself when it survives pickling, else an InfraError with its text."""
    import traceback

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = InfraError(f"{type(error).__name__}: {error}")
    error.add_note("in the worker process:\n" + "".join(traceback.format_tb(error.__traceback__)[-4:]))
    return error


def main() -> None:
    asyncio.run(_serve(int(sys.argv[1])))
    os._exit(0)  # skips torch's slow interpreter shutdown; the part was closed by its caller


if __name__ == "__main__":
    main()
