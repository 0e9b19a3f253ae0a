"""Layers on disk: hashes, chains, merging, and the reader of upper layers, without any sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from etude.errors import SandboxError, UserError
from etude.sandbox.images import MAX_CHAIN, OPAQUE, ImageStore, read_upper

FILES = {"a.txt": b"a", "pkg/b.py": b"b", "pkg/deep/c.py": b"c"}


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    for name in ("layers", "snapshots"):
        (tmp_path / name).mkdir()
    return ImageStore(tmp_path)


class Upper:
    """A folder that stands for the upper layer of an overlay."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.fd = os.open(path, os.O_RDONLY)

    def whiteout(self, name: str) -> None:
        try:
            os.mknod(self.path / name, 0o020000, os.makedev(0, 0))
        except PermissionError:
            pytest.skip("this kernel does not let this user make whiteouts")

    def opaque(self, name: str) -> None:
        (self.path / name).mkdir()
        try:
            os.setxattr(self.path / name, OPAQUE, b"y")
        except OSError:
            pytest.skip("this file system has no user attributes")

    def close(self) -> None:
        os.close(self.fd)


@pytest.fixture
def upper(tmp_path: Path):
    made = Upper(tmp_path / "upper")
    yield made
    made.close()


def test_a_hash_names_paths_and_contents_and_nothing_else(store: ImageStore) -> None:
    image = store.add(FILES)
    assert len(image) == 64
    assert store.add({"./a.txt": b"a", "pkg/deep/c.py": b"c", "pkg/b.py": b"b"}) == image
    assert store.add({**FILES, "a.txt": b"A"}) != image
    assert store.add({**{k: v for k, v in FILES.items() if k != "a.txt"}, "A.txt": b"a"}) != image
    assert store.add({"x": b"ab", "y": b""}) != store.add({"x": b"a", "y": b"b"})
    assert store.layers(image) == [image]
    assert {path: file.read_bytes() for path, (file, _) in store.files(image).items()} == FILES


def test_nothing_half_written_is_an_image(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        store.add({"a": b"", "a/b": b""})
    assert list((tmp_path / "layers").iterdir()) == []
    if os.geteuid() != 0:
        (tmp_path / "layers").chmod(0o500)
        with pytest.raises(SandboxError, match="is the disk full"):
            store.add(FILES)


def test_whiteouts_and_opaque_folders_are_deletions(store: ImageStore, upper: Upper) -> None:
    image = store.add({**FILES, "old/x": b"x", "old/y": b"y", "gone/z": b"z"})
    upper.whiteout("a.txt")
    upper.whiteout("gone")
    upper.whiteout("never_was")
    upper.opaque("old")
    (upper.path / "old" / "y").write_bytes(b"y")
    (upper.path / "pkg").mkdir()
    (upper.path / "pkg" / "b.py").write_bytes(b"B")
    diff = store.diff(upper.fd, image)
    assert [(c.path, c.data) for c in diff.changes] == [("a.txt", None), ("gone/z", None), ("old/x", None), ("pkg/b.py", b"B")]
    snapshot = store.seal(upper.fd, image)
    assert store.seal(upper.fd, image) == snapshot
    assert len(store.layers(snapshot)) == 2
    assert {path: file.read_bytes() for path, (file, _) in store.files(snapshot).items()} == {
        "old/y": b"y",
        "pkg/b.py": b"B",
        "pkg/deep/c.py": b"c",
    }


def test_an_untouched_layer_is_its_image(store: ImageStore, upper: Upper) -> None:
    image = store.add(FILES)
    assert store.seal(upper.fd, image) == image


def test_long_chains_are_merged_under_the_same_meaning(store: ImageStore, tmp_path: Path) -> None:
    current, expected = store.add(FILES), dict(FILES)
    seen = {current}
    for i in range(MAX_CHAIN + 4):
        step = Upper(tmp_path / f"upper{i}")
        (step.path / f"n{i}").write_bytes(b"%d" % i)
        expected[f"n{i}"] = b"%d" % i
        if i == 5:
            step.whiteout("a.txt")
            del expected["a.txt"]
        current = store.seal(step.fd, current)
        step.close()
        assert current not in seen
        seen.add(current)
        assert len(store.layers(current)) <= MAX_CHAIN
    assert {path: file.read_bytes() for path, (file, _) in store.files(current).items()} == expected


def test_the_reader_follows_nothing_and_waits_for_nothing(store: ImageStore, upper: Upper, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"host secret")
    os.symlink(tmp_path / "secret", upper.path / "link")
    os.symlink(tmp_path, upper.path / "folder")
    os.mkfifo(upper.path / "fifo")
    with open(upper.path / "sparse", "wb") as file:
        file.truncate(10 * 2**30)
    (upper.path / "fine").write_bytes(b"fine")
    entries = {entry.path: entry for entry in read_upper(upper.fd)}
    assert {path for path, entry in entries.items() if entry.kind == "refused"} == {"link", "folder", "fifo", "sparse"}
    assert entries["fine"].data == b"fine"
    assert not [entry for entry in entries.values() if b"secret" in entry.data]
    image = store.add({"link": b"was a file", "folder/inner": b"x"})
    diff = store.diff(upper.fd, image)
    assert [(c.path, c.data) for c in diff.changes] == [("fine", b"fine"), ("folder/inner", None), ("link", None)]


def test_modes_travel(store: ImageStore, upper: Upper) -> None:
    image = store.add(FILES)
    (upper.path / "a.txt").write_bytes(b"a")
    (upper.path / "a.txt").chmod(0o755)
    (change,) = store.diff(upper.fd, image).changes
    assert (change.path, change.mode) == ("a.txt", 0o755)
    snapshot = store.seal(upper.fd, image)
    assert store.files(snapshot)["a.txt"][1] == 0o755
