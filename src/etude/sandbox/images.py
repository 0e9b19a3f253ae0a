"""File trees of sandboxes on the host: content-addressed images, snapshots as chains of layers, and what changed.

    ROOT/layers/<hash>/          an immutable tree; lower layer of overlay mounts, shared by all sandboxes that use it
    ROOT/snapshots/<id>.json     {"layers": [top, ..., bottom], "base": image}, at level L1 also "session" and "files" (the same at L0);
                                 an image without an entry is its own single layer

A layer is written under a temporary name and committed by rename, so nothing half-written is ever mounted. The id of a
snapshot is a hash over its parent's id and what its top layer holds: it names exactly what is graded. Chains of more
than MAX_CHAIN layers are merged into one tree, under the same id.

What a sandbox wrote is read here, on the host, through a descriptor of its upper layer, never by a program of the
sandbox. The reader opens everything relative to that descriptor without following links, and takes only regular files
of bounded size: links, devices, sockets, odd names and files that are too large are refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from etude.errors import SandboxError, UserError
from etude.protocols import Change

MAX_CHAIN = 16
MAX_DEPTH = 64
MAX_FILE_BYTES = 64 * 2**20
MAX_TOTAL_BYTES = 256 * 2**20
OPAQUE = "user.overlay.opaque"


def remove_tree(root: Path) -> None:
    """Remove a folder however deep it is; what cannot be removed stays. `shutil.rmtree` recurses, and ends with an error, at a thousand
    levels; here every folder below a child is first moved up to the root, so that no path grows long."""
    moved = 0
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            inside = list(os.scandir(folder))
        except OSError:
            continue
        for entry in inside:
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                elif folder == root:
                    pending.append(Path(entry.path))
                else:
                    moved += 1
                    target = root / f".removed-{moved}"
                    os.rename(entry.path, target)
                    pending.append(target)
        if folder != root:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    shutil.rmtree(root, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Diff:
    """What a workspace's layer changed, and what of it is not let out."""

    changes: tuple[Change, ...]
    refused: tuple[tuple[str, str], ...]
    """(path, reason). A refused path that stood in the image counts as deleted."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a sandbox can start from."""

    layers: list[str]
    """Top first."""
    base: str
    """The image that its history began with."""
    files: str
    """Id of the same files without anything else: level L0."""
    session: dict[str, Any] | None = None
    """State of sessions, in a snapshot of level L1."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name of an upper layer. `data` only for regular files that may be read."""

    path: str
    kind: str
    """file | dir | opaque | whiteout | refused"""
    mode: int = 0
    data: bytes = b""
    reason: str = ""


def read_upper(upper: int) -> Iterator[Entry]:
    """Walk an upper layer by descriptor, parents before children."""
    total = 0
    stack = [("", os.dup(upper))]
    try:
        while stack:
            prefix, fd = stack.pop()
            try:
                for name in sorted(os.listdir(fd)):
                    path = prefix + name
                    entry, child = _look(fd, name, path, MAX_TOTAL_BYTES - total)
                    total += len(entry.data)
                    if child >= 0:
                        stack.append((path + "/", child))
                    yield entry
            finally:
                os.close(fd)
    finally:
        for _, fd in stack:
            os.close(fd)


def _look(folder: int, name: str, path: str, room: int) -> tuple[Entry, int]:
    """The entry, and a descriptor of it when it is a folder to be walked."""
    try:
        path.encode()
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            return Entry(path=path, kind="whiteout"), -1
        if stat.S_ISDIR(info.st_mode):
            if path.count("/") >= MAX_DEPTH:
                return Entry(path=path, kind="refused", reason=f"deeper than {MAX_DEPTH} folders"), -1
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            return Entry(path=path, kind="opaque" if _is_opaque(fd) else "dir", mode=stat.S_IMODE(info.st_mode) & 0o777), fd
        if not stat.S_ISREG(info.st_mode):
            return Entry(path=path, kind="refused", reason="a link" if stat.S_ISLNK(info.st_mode) else "not a regular file"), -1
        return _read_file(folder, name, path, room), -1
    except UnicodeEncodeError:
        return Entry(path=path.encode("utf-8", "replace").decode(), kind="refused", reason="its name is not UTF-8"), -1
    except OSError as error:
        return Entry(path=path, kind="refused", reason=f"cannot be read: {error.strerror}"), -1


def _read_file(folder: int, name: str, path: str, room: int) -> Entry:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return Entry(path=path, kind="refused", reason="not a regular file")
        limit = min(MAX_FILE_BYTES, room)
        data = file.read(limit + 1) if info.st_size <= limit else b""
        if info.st_size > limit or len(data) > limit:
            return Entry(path=path, kind="refused", reason=f"{info.st_size} bytes, more than the {limit} that may leave")
        return Entry(path=path, kind="file", mode=stat.S_IMODE(info.st_mode) & 0o777, data=data)


def _is_opaque(fd: int) -> bool:
    try:
        return os.getxattr(fd, OPAQUE) == b"y"
    except OSError:
        return False


class ImageStore:
    """Images, snapshots and diffs below one root. Methods block on the disk: call them in a thread."""

    def __init__(self, root: Path, owner: tuple[int, int] | None = None) -> None:
        self._layers, self._snapshots = root / "layers", root / "snapshots"
        self._owner = owner
        """Whom the files of layers belong to, when that is not this process's user."""
        self.files = functools.lru_cache(maxsize=64)(self._files)

    # -- images

    def add(self, files: Mapping[str, bytes]) -> str:
        """Store a tree and return its content hash."""
        tree = {_clean(path): bytes(data) for path, data in files.items()}
        digest = hashlib.sha256(b"etude image 1\0")
        for path, data in sorted(tree.items()):
            digest.update(f"{len(path.encode())} {path} ".encode() + hashlib.sha256(data).digest())
        image = digest.hexdigest()
        if not (self._layers / image).is_dir():
            self._commit(image, [Entry(path=path, kind="file", mode=0o644, data=data) for path, data in sorted(tree.items())])
        return image

    def add_tree(self, tree: int, image: str) -> str:
        """Store the files below a descriptor, with their modes, as a snapshot of one layer whose history began with that of `image`."""
        entries = sorted((entry for entry in read_upper(tree) if entry.kind == "file"), key=lambda entry: entry.path)
        lines = [json.dumps([entry.path, entry.mode, hashlib.sha256(entry.data).hexdigest()]) for entry in entries]
        layer = hashlib.sha256(("etude tree 1\0" + "\n".join(lines)).encode()).hexdigest()
        if not (self._layers / layer).is_dir():
            self._commit(layer, entries)
        base = self.describe(image).base
        snapshot = hashlib.sha256(f"etude tree snapshot 1\0{base}\0{layer}".encode()).hexdigest()
        if not (self._snapshots / f"{snapshot}.json").exists():
            self._write_snapshot(snapshot, {"layers": [layer], "base": base})
        return snapshot

    def add_session(self, files: str, state: Mapping[str, Any]) -> str:
        """A snapshot of level L1: the files of an image or snapshot, and the state of its sessions."""
        text = json.dumps(state, sort_keys=True)
        snapshot = hashlib.sha256(f"etude session 1\0{files}\0{text}".encode()).hexdigest()
        if not (self._snapshots / f"{snapshot}.json").exists():
            known = self.describe(files)
            self._write_snapshot(snapshot, {"layers": known.layers, "base": known.base, "files": files, "session": state})
        return snapshot

    def layers(self, image: str) -> list[str]:
        """Names of the layers of an image or a snapshot, top first."""
        return self.describe(image).layers

    def describe(self, image: str) -> Origin:
        """What is known of an image or a snapshot."""
        if len(image) == 64 and set(image) <= set("0123456789abcdef"):
            with contextlib.suppress(FileNotFoundError):
                return Origin(**{"files": image, **json.loads((self._snapshots / f"{image}.json").read_text())})
            if (self._layers / image).is_dir():
                return Origin(layers=[image], base=image, files=image)
        raise UserError(f"no image or snapshot {image!r}; add_image returns the hash to pass here")

    def _commit(self, name: str, entries: list[Entry]) -> None:
        """Write a layer under a temporary name and rename it into place. Another writer of the same layer may win."""
        temporary = self._layers / f".tmp-{uuid.uuid4().hex}"
        try:
            temporary.mkdir()
            self._own(temporary)
            for entry in entries:
                self._put(temporary, entry)
            try:
                temporary.rename(self._layers / name)
            except OSError:
                if not (self._layers / name).is_dir():
                    raise
        except OSError as error:
            raise SandboxError(f"cannot write the layer {name[:12]} below {self._layers}: {error}; is the disk full?") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _put(self, top: Path, entry: Entry) -> None:
        target = top / entry.path
        for parent in reversed(target.relative_to(top).parents[:-1]):
            folder = top / parent
            if not folder.is_dir():
                try:
                    folder.mkdir(mode=0o755)
                except FileExistsError:
                    raise UserError(f"{parent} is a file and a folder in the same image") from None
                self._own(folder)
        if entry.kind == "whiteout":
            os.mknod(target, stat.S_IFCHR, os.makedev(0, 0))
        elif entry.kind in ("dir", "opaque"):
            target.mkdir(exist_ok=True)
            target.chmod(entry.mode | 0o500)
            if entry.kind == "opaque":
                os.setxattr(target, OPAQUE, b"y")
            self._own(target)
        else:
            if target.is_dir():
                raise UserError(f"{entry.path} is a file and a folder in the same image")
            target.write_bytes(entry.data)
            target.chmod(entry.mode | 0o400)  # the host reads it again for diffs
            self._own(target)

    def _own(self, path: Path) -> None:
        if self._owner is not None:
            os.chown(path, *self._owner, follow_symlinks=False)

    # -- views

    def _files(self, image: str) -> dict[str, tuple[Path, int]]:
        """path -> (file on the host, mode) as a sandbox that starts from `image` sees them. Cached; images never change."""
        view: dict[str, tuple[Path, int]] = {}
        for layer in reversed(self.layers(image)):
            top = self._layers / layer
            for folder, dirs, names in os.walk(top):
                inside = "" if folder == str(top) else os.path.relpath(folder, top) + "/"
                if inside and os.path.isdir(folder) and _opaque_path(folder):
                    _drop(view, inside.rstrip("/"))
                dirs.sort()
                for name in names:
                    info = os.lstat(os.path.join(folder, name))
                    _drop(view, inside + name)
                    if stat.S_ISREG(info.st_mode):
                        view[inside + name] = (Path(folder, name), stat.S_IMODE(info.st_mode))
        return view

    def diff(self, upper: int, image: str) -> Diff:
        """What the upper layer changes over `image`. Files that were touched and are the same do not count."""
        view = self.files(image)
        changes: dict[str, Change] = {}
        refused: list[tuple[str, str]] = []
        gone: set[str] = set()
        for entry in read_upper(upper):
            below = _below(view, entry.path)
            if entry.kind == "file":
                old = view.get(entry.path)
                if old is None or old[1] != entry.mode or old[0].read_bytes() != entry.data:
                    changes[entry.path] = Change(path=entry.path, data=entry.data, mode=entry.mode)
                gone.discard(entry.path)
                gone.update(path for path in below if path != entry.path)
            elif entry.kind in ("whiteout", "opaque"):
                gone.update(below)
            elif entry.kind == "dir":
                gone.update({entry.path} & view.keys())
            else:
                refused.append((entry.path, entry.reason))
                gone.update(below)
        for path in gone - changes.keys():
            changes[path] = Change(path=path, data=None)
        return Diff(changes=tuple(changes[path] for path in sorted(changes)), refused=tuple(refused))

    def diff_tree(self, tree: int, image: str) -> Diff:
        """The same for a workspace that is no layer but a copy: every file is compared."""
        view = self.files(image)
        entries = list(read_upper(tree))
        now = {entry.path: entry for entry in entries if entry.kind == "file"}
        changes = [Change(path=path, data=None) for path in view if path not in now]
        for path, entry in now.items():
            old = view.get(path)
            if old is None or old[1] != entry.mode or old[0].read_bytes() != entry.data:
                changes.append(Change(path=path, data=entry.data, mode=entry.mode))
        refused = tuple((entry.path, entry.reason) for entry in entries if entry.kind == "refused")
        return Diff(changes=tuple(sorted(changes, key=lambda change: change.path)), refused=refused)

    # -- snapshots

    def seal(self, upper: int, image: str) -> str:
        """Keep a copy of the upper layer as an immutable layer over `image`. Returns the id of the new snapshot."""
        entries = [entry for entry in read_upper(upper) if entry.kind != "refused"]
        if not entries:
            return image
        digest = hashlib.sha256(b"etude layer 1\0")
        for entry in sorted(entries, key=lambda entry: entry.path):
            line = [entry.path, entry.kind, entry.mode, hashlib.sha256(entry.data).hexdigest()]
            digest.update(json.dumps(line).encode())
        layer = digest.hexdigest()
        snapshot = hashlib.sha256(f"etude snapshot 1\0{image}\0{layer}".encode()).hexdigest()
        if (self._snapshots / f"{snapshot}.json").exists():
            return snapshot
        chain = self.layers(image)
        merged = len(chain) >= MAX_CHAIN
        if not merged:
            try:
                if not (self._layers / layer).is_dir():
                    self._commit(layer, entries)
            except SandboxError as error:
                if not isinstance(error.__cause__, PermissionError | NotImplementedError) and "not supported" not in str(error):
                    raise
                merged = True  # this file system keeps no whiteouts; a merged tree needs none
        if merged:
            layer = hashlib.sha256(f"etude merged 1\0{snapshot}".encode()).hexdigest()
            self._commit(layer, self._merge(entries, image))
            chain = []
        self._write_snapshot(snapshot, {"layers": [layer, *chain], "base": self.describe(image).base})
        return snapshot

    def _merge(self, entries: list[Entry], image: str) -> list[Entry]:
        """All files of `image` with the upper layer's entries applied."""
        view = {path: Entry(path=path, kind="file", mode=mode, data=file.read_bytes()) for path, (file, mode) in self.files(image).items()}
        for entry in entries:
            if entry.kind != "dir":
                for path in _below(view, entry.path):
                    del view[path]
            if entry.kind in ("file", "dir", "opaque"):
                view.pop(entry.path, None)
                view[entry.path] = Entry(path=entry.path, kind="file" if entry.kind == "file" else "dir", mode=entry.mode, data=entry.data)
        return sorted(view.values(), key=lambda entry: entry.path)

    def _write_snapshot(self, snapshot: str, fields: Mapping[str, Any]) -> None:
        temporary = self._snapshots / f".tmp-{uuid.uuid4().hex}"
        try:
            temporary.write_text(json.dumps(fields) + "\n")
            temporary.rename(self._snapshots / f"{snapshot}.json")
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise SandboxError(f"cannot write the snapshot {snapshot[:12]} below {self._snapshots}: {error}; is the disk full?") from error


def _clean(path: str) -> str:
    """A relative path inside of the workspace, or an error."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise UserError(f"image path {path!r} should be relative to the workspace, without '..'")
    return "/".join(parts)


def _opaque_path(folder: str) -> bool:
    try:
        return os.getxattr(folder, OPAQUE) == b"y"
    except OSError:
        return False


def _below(view: Mapping[str, object], path: str) -> list[str]:
    """`path` itself and everything under it, of those the view has."""
    prefix = path + "/"
    return [other for other in view if other == path or other.startswith(prefix)]


def _drop(view: dict[str, tuple[Path, int]], path: str) -> None:
    for other in _below(view, path):
        del view[other]
