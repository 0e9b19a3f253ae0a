"""One contract over every store: atomic puts, validated keys, clear errors."""

import asyncio
import os
import stat

import pytest

from etude.errors import InfraError, UserError
from etude.protocols import Store
from etude.sync.store import FolderStore, MemoryStore, MissingObject, blocking, check_key


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    return FolderStore(tmp_path / "objects") if request.param == "folder" else MemoryStore()


def test_contract(store):
    async def use(store: Store):
        assert await store.list() == []
        await store.put("a/b.bin", b"one")
        await store.put("a/c.bin", b"")
        await store.put("top", b"t")
        await store.put("a/b.bin", b"two")
        assert await store.get("a/b.bin") == b"two"
        assert await store.get("a/c.bin") == b""
        assert await store.list() == ["a/b.bin", "a/c.bin", "top"]
        assert await store.list("a/b") == ["a/b.bin"]
        assert await store.list("a/") == ["a/b.bin", "a/c.bin"]
        assert await store.list("nothing/") == []
        assert await store.exists("top")
        assert not await store.exists("a")
        await store.delete("top")
        await store.delete("top")
        assert not await store.exists("top")
        with pytest.raises(MissingObject, match="'top'"):
            await store.get("top")

    asyncio.run(use(store))


@pytest.mark.parametrize("key", ["", "/abs", "../up", "a/../b", "a//b", "a/", ".hidden", "a/.tmp", "a\\b", "a b", "a\n", "x" * 513])
def test_keys_cannot_leave_the_store(store, key):
    with pytest.raises(UserError, match="store key"):
        store.write(key, b"")
    with pytest.raises(UserError):
        store.read(key)


def test_check_key_returns_the_key():
    assert check_key("payloads/000000-000000001-ab.bin") == "payloads/000000-000000001-ab.bin"


def test_a_folder_put_replaces_whole_files_and_leaves_no_temporaries(tmp_path):
    store = FolderStore(tmp_path)
    store.write("k", b"old")
    before = os.stat(tmp_path / "k").st_ino
    store.write("k", b"new")
    assert os.stat(tmp_path / "k").st_ino != before
    assert os.listdir(tmp_path) == ["k"]


def test_a_temporary_left_by_a_killed_writer_is_not_an_object(tmp_path):
    store = FolderStore(tmp_path)
    store.write("a/k", b"1")
    (tmp_path / "a" / ".k.123.tmp").write_bytes(b"half")
    assert store.names() == ["a/k"]


def test_a_failing_disk_is_an_infra_error_and_leaves_the_old_object(tmp_path):
    store = FolderStore(tmp_path)
    store.write("d/k", b"old")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InfraError, match="cannot write"):
        store.write("file/k", b"x")
    if os.geteuid() != 0:
        folder = tmp_path / "d"
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(InfraError, match="cannot write"):
            store.write("d/k", b"new")
        folder.chmod(stat.S_IRWXU)
    assert store.read("d/k") == b"old"


def test_any_async_store_can_be_used_from_plain_code(tmp_path):
    class Remote:
        """Only the protocol's five methods, and it really suspends."""

        def __init__(self):
            self.inner = MemoryStore()

        async def put(self, key, data):
            await asyncio.sleep(0)
            self.inner.write(key, data)

        async def get(self, key):
            await asyncio.sleep(0)
            return self.inner.read(key)

        async def exists(self, key):
            return self.inner.has(key)

        async def list(self, prefix=""):
            return self.inner.names(prefix)

        async def delete(self, key):
            self.inner.remove(key)

    objects = blocking(Remote())
    objects.write("a/b", b"x")
    assert objects.read("a/b") == b"x"
    assert objects.names("a") == ["a/b"]
    objects.remove("a/b")
    assert not objects.has("a/b")
    with pytest.raises(MissingObject):
        objects.read("a/b")
    assert isinstance(blocking(str(tmp_path)), FolderStore)
