"""The leak scan finds planted copies through every channel it claims, and nothing in clean trees."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import marshal
import sqlite3
import zipfile
import zlib

import pytest

from etude.tasks.deletion import delete
from etude.tasks.katas import make_package
from etude.tasks.leaks import find_copies

BODY = "    if not values:\n        return 7\n    result = math.floor(sum(values) / len(values))\n    return result\n"
RENAMED = "def other(zs):\n    if not zs:\n        return 7\n    out = math.floor(sum(zs) / len(zs))\n    return out\n"


def zipped(text):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("old/stats.py", text)
    return out.getvalue()


def database(tmp_path):
    path = tmp_path / "cache.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table t (name text, data blob)")
        connection.execute("insert into t values (?, ?)", ("shop.stats.mean", b"\0\1values"))
    connection.close()
    return path.read_bytes()


def planted(shop, tmp_path):
    whole = shop["shop/stats.py"]
    return {
        "same file elsewhere": ("old/stats_backup.py", whole),
        "renamed": ("shop/extra.py", RENAMED),
        "notes": ("NOTES.md", "Earlier it was:\n\n" + BODY),
        "patch": ("fix.patch", "".join("-" + line + "\n" for line in BODY.splitlines())),
        "editor backup": ("shop/stats.py~", whole),
        "zip": ("dist/shop.zip", zipped(whole)),
        "gzip": ("log.gz", gzip.compress(whole.encode())),
        "bzip2": ("a.bz2", bz2.compress(whole.encode())),
        "xz": ("a.xz", lzma.compress(whole.encode())),
        "git object": ("objects/aa", zlib.compress(b"blob 99\0" + whole.encode())),
        "zip in gzip": ("b.gz", gzip.compress(zipped(whole))),
        "bytecode": ("shop/__pycache__/stats.cpython-311.pyc", b"\0" * 16 + marshal.dumps(compile(whole, "stats.py", "exec"))),
        "renamed bytecode": ("x.bin", b"\0" * 16 + marshal.dumps(compile(whole, "stats.py", "exec"))),
        "database": (".mypy_cache/3.11/cache.db", database(tmp_path)),
    }


def test_every_planted_copy_is_found(shop, tmp_path):
    cut = delete(shop, "shop/stats.py", "mean")
    for name, (path, data) in planted(shop, tmp_path).items():
        leaks = find_copies({**cut.files, path: data}, cut.fingerprint, module="stats")
        assert leaks, name
        assert leaks[0].path.startswith(path), name


@pytest.mark.parametrize("level", ["body", "definition"])
def test_clean_trees_have_no_findings(shop, level):
    for name in ("mean", "total", "words"):
        cut = delete(shop, "shop/stats.py", name)
        assert find_copies(cut.files, cut.fingerprint, module="stats") == []
    for seed in range(10):
        package = make_package(seed)
        for kata in package.functions:
            if level == "definition" and package.callers(kata):
                continue
            cut = delete(package.files, kata.path, kata.qualname, level)
            assert find_copies(cut.files, cut.fingerprint, module=kata.module) == [], (seed, kata.qualname)


def test_broken_archives_are_looked_at_and_do_no_harm(shop):
    cut = delete(shop, "shop/stats.py", "mean")
    broken = {"a.gz": b"\x1f\x8b\x08broken", "b.zip": b"PK\x03\x04broken", "c.xz": b"\xfd7zXZ\x00broken", "d.z": b"\x78\x9cbroken"}
    assert find_copies({**cut.files, **broken}, cut.fingerprint, module="stats") == []
