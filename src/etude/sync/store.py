"""Bytes by key: a folder, or memory. An object store (S3, GCS, Azure) is the same protocol elsewhere.

Keys are relative POSIX paths of plain names. A put is atomic: another process sees the old bytes, the new bytes, or no
object, never a part; in a folder this is a temporary file, fsync, and rename. `protocols.Store` is async; the publisher
and the receiver run in a worker thread and use the plain methods `read`, `write`, `has`, `names`, `remove`, which
`blocking` gives for any store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from etude.disk import flush
from etude.errors import InfraError, IntegrityError, UserError
from etude.protocols import Store

T = TypeVar("T")
Keys = list[str]
"""`list` is also the name of a method here, hence the alias."""
MAX_KEY_CHARS = 512
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]*")


class MissingObject(IntegrityError):
    """Something refers to an object that the store does not have."""


@runtime_checkable
class Objects(Protocol):
    """A store without the awaiting."""

    def read(self, key: str) -> bytes: ...

    def write(self, key: str, data: bytes) -> None: ...

    def has(self, key: str) -> bool: ...

    def names(self, prefix: str = "") -> Keys: ...

    def remove(self, key: str) -> None: ...


def check_key(key: str) -> str:
    """The key itself, or an error: a key can never leave the store or name a temporary file."""
    if not key or len(key) > MAX_KEY_CHARS or not all(_PART.fullmatch(part) for part in key.split("/")):
        raise UserError(
            f"{key[:80]!r} is not a store key; use names of letters, digits and _ . - + = @ joined by /, not starting with a dot"
        )
    return key


class FolderStore:
    """A directory as a store. `durable=False` skips fsync (tests, scratch runs)."""

    def __init__(self, folder: str | Path, *, durable: bool = True) -> None:
        self.folder = Path(folder)
        self._durable = durable

    def __str__(self) -> str:
        return str(self.folder)

    def read(self, key: str) -> bytes:
        path = self.folder / check_key(key)
        try:
            return path.read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise MissingObject(f"no object {key!r} in {self.folder}; it was never written, or was deleted") from None
        except OSError as error:
            raise InfraError(f"cannot read {path}: {error}; look at the disk") from error

    def write(self, key: str, data: bytes) -> None:
        path = self.folder / check_key(key)
        temporary = path.with_name(f".{path.name[:64]}.{uuid.uuid4().hex}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write_file(temporary, data)
            os.replace(temporary, path)
            if self._durable:
                flush(path.parent)
        except OSError as error:
            _discard(temporary)
            raise InfraError(f"cannot write {path} ({len(data)} bytes): {error}; free space or fix permissions, then go on") from error
        except BaseException:
            _discard(temporary)
            raise

    def _write_file(self, path: Path, data: bytes) -> None:
        with path.open("xb") as file:
            file.write(data)
            if self._durable:
                file.flush()
                os.fsync(file.fileno())

    def has(self, key: str) -> bool:
        return (self.folder / check_key(key)).is_file()

    def names(self, prefix: str = "") -> Keys:
        """Keys that start with `prefix`, sorted."""
        start = self.folder / prefix.rpartition("/")[0]
        if not start.is_dir():
            return []
        files = (p for p in start.rglob("*") if p.is_file())
        keys = (p.relative_to(self.folder).as_posix() for p in files)
        return sorted(k for k in keys if k.startswith(prefix) and "/." not in f"/{k}")

    def remove(self, key: str) -> None:
        (self.folder / check_key(key)).unlink(missing_ok=True)

    async def put(self, key: str, data: bytes) -> None:
        await asyncio.to_thread(self.write, key, data)

    async def get(self, key: str) -> bytes:
        return await asyncio.to_thread(self.read, key)

    async def exists(self, key: str) -> bool:
        return await asyncio.to_thread(self.has, key)

    async def list(self, prefix: str = "") -> Keys:
        return await asyncio.to_thread(self.names, prefix)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self.remove, key)


def _discard(path: Path) -> None:
    """Remove a temporary file; the error that led here is the one to report."""
    with contextlib.suppress(OSError):
        path.unlink()


class MemoryStore:
    """A dictionary as a store."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def __str__(self) -> str:
        return "memory"

    def read(self, key: str) -> bytes:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise MissingObject(f"no object {key!r} in memory; it was never written, or was deleted") from None

    def write(self, key: str, data: bytes) -> None:
        self._objects[check_key(key)] = bytes(data)

    def has(self, key: str) -> bool:
        return check_key(key) in self._objects

    def names(self, prefix: str = "") -> Keys:
        return sorted(k for k in self._objects if k.startswith(prefix))

    def remove(self, key: str) -> None:
        self._objects.pop(check_key(key), None)

    async def put(self, key: str, data: bytes) -> None:
        self.write(key, data)

    async def get(self, key: str) -> bytes:
        return self.read(key)

    async def exists(self, key: str) -> bool:
        return self.has(key)

    async def list(self, prefix: str = "") -> Keys:
        return self.names(prefix)

    async def delete(self, key: str) -> None:
        self.remove(key)


class _Awaited:
    """An async store seen without awaiting: its coroutines run on an event loop in a thread of their own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="etude-store", daemon=True).start()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def read(self, key: str) -> bytes:
        return self._wait(self._store.get(check_key(key)))

    def write(self, key: str, data: bytes) -> None:
        self._wait(self._store.put(check_key(key), data))

    def has(self, key: str) -> bool:
        return self._wait(self._store.exists(check_key(key)))

    def names(self, prefix: str = "") -> Keys:
        return sorted(self._wait(self._store.list(prefix)))

    def remove(self, key: str) -> None:
        self._wait(self._store.delete(check_key(key)))


def blocking(source: str | Path | Store | Objects) -> Objects:
    """A store to use from plain code. A string or path is a folder."""
    if isinstance(source, (str, Path)):
        return FolderStore(source)
    if isinstance(source, Objects):
        return source
    return _Awaited(source)
