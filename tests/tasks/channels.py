"""One planted leak for every channel by which deleted code comes back: name of the channel -> (path, bytes).

`WHOLE` is a module as it was; `route_parcels` is deleted from it with its whole definition. Where a tool writes such
files, the tool writes them here (git, the compiler, pickle, sqlite3); what a tool that is not installed would write is
written by hand in its format.
"""

from __future__ import annotations

import ast
import base64
import bz2
import cProfile
import dbm.dumb
import gzip
import io
import json
import lzma
import marshal
import os
import pickle
import py_compile
import shelve
import shutil
import sqlite3
import subprocess
import tarfile
import textwrap
import zipfile
import zlib
from pathlib import Path

WHOLE = '''\
"""Parcels of a depot."""

import math

__all__ = ["route_parcels", "weigh"]


def weigh(parcel):
    """Weight of one parcel in grams."""
    return math.ceil(parcel["grams"])


def route_parcels(parcels, depot_code, max_grams=31500):
    """Split parcels over the vans of one depot.

    Parcels heavier than a van may carry go to the freight desk instead.
    """
    vans, freight = [[]], []
    for parcel in sorted(parcels, key=weigh, reverse=True):
        if weigh(parcel) > max_grams:
            freight.append(("freight-desk-north", depot_code, parcel))
            continue
        if sum(map(weigh, vans[-1])) + weigh(parcel) > max_grams:
            vans.append([])
        vans[-1].append(parcel)
    return vans, freight
'''
TEST = (
    "from depot import parcels\n\n\n"
    'def test_route():\n    assert parcels.route_parcels([{"grams": 5}], depot_code="N1") == ([[{"grams": 5}]], [])\n'
)
FILES = {
    "depot/__init__.py": "",
    "depot/parcels.py": WHOLE,
    "tests/test_parcels.py": TEST,
    "README.md": "# depot\n\nRoutes parcels to vans.\n",
}
NODE = next(n for n in ast.parse(WHOLE).body if isinstance(n, ast.FunctionDef) and n.name == "route_parcels")
BODY = "".join(WHOLE.splitlines(True)[NODE.lineno - 1 : NODE.end_lineno])
RENAMED = (
    BODY.replace("route_parcels", "old").replace("parcels", "a").replace("depot_code", "b").replace("max_grams", "c").replace("vans", "d")
)
RAW = WHOLE.encode()


def zipped(name="old/parcels.py", data=RAW, head=b""):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return head + out.getvalue()


def tarred(mode="w"):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        info = tarfile.TarInfo("depot-1.0/depot/parcels.py")
        info.size = len(RAW)
        archive.addfile(info, io.BytesIO(RAW))
    return out.getvalue()


def database(folder: Path, statement="create table t (name text, data blob)", row=("depot.parcels", RAW)):
    path = folder / "cache.db"
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.execute("insert into t values (?, ?)", row)
    connection.commit()
    connection.close()
    return path.read_bytes()


def deleted_row(folder: Path):
    """A row that was deleted and whose page was not overwritten."""
    path = folder / "gone.db"
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("pragma secure_delete = off")
    connection.execute("create table t (data text)")
    connection.execute("insert into t values (?)", (BODY,))
    connection.commit()
    connection.execute("delete from t")
    connection.commit()
    connection.close()
    return path.read_bytes()


def compiled(folder: Path, text=WHOLE):
    (folder / "parcels.py").write_text(text)
    return Path(py_compile.compile(str(folder / "parcels.py"), cfile=str(folder / "out.pyc"), doraise=True)).read_bytes()


def git(folder: Path, *words: str):
    environment = {
        **os.environ,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, env=environment)


def repository(folder: Path) -> Path:
    """A repository whose only commit was amended after the deletion: the blob is left behind."""
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "parcels.py").write_text(WHOLE)
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    (folder / "parcels.py").write_text(WHOLE.replace(BODY, ""))
    git(folder, "commit", "-qam", "one", "--amend")
    return folder


def loose(folder: Path):
    objects = repository(folder / "loose") / ".git" / "objects"
    files = [p for p in objects.rglob("*") if p.is_file() and zlib.decompress(p.read_bytes()).startswith(b"blob")]
    return max(files, key=lambda p: len(zlib.decompress(p.read_bytes()))).read_bytes()


def packed(folder: Path):
    root = repository(folder / "packed")
    git(root, "repack", "-adkq", "--keep-unreachable")
    return next((root / ".git" / "objects" / "pack").glob("*.pack")).read_bytes()


def deltas(folder: Path):
    """The blob kept as a delta against a longer version of the file."""
    root = folder / "deltas"
    root.mkdir()
    git(root, "init", "-q")
    for text in (WHOLE, WHOLE + "\n\ndef last():\n    return 'the last one of the parcels'\n", WHOLE.replace(BODY, "")):
        (root / "parcels.py").write_text(text)
        git(root, "add", ".")
        git(root, "commit", "-qm", "step")
    git(root, "repack", "-adfq", "--depth=50", "--window=50")
    return next((root / ".git" / "objects" / "pack").glob("*.pack")).read_bytes()


def bundle(folder: Path):
    root = folder / "bundle"
    root.mkdir()
    git(root, "init", "-q")
    (root / "parcels.py").write_text(WHOLE)
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    git(root, "bundle", "create", "-q", "all.bundle", "HEAD")
    return (root / "all.bundle").read_bytes()


def shelf(folder: Path):
    with shelve.Shelf(dbm.dumb.open(str(folder / "shelf"), "n")) as store:
        store["x"] = 1
        store["parcels"] = {"source": WHOLE}
    return (folder / "shelf.dat").read_bytes()


def profile(folder: Path):
    scope: dict[str, object] = {}
    exec(compile(WHOLE, "parcels.py", "exec"), scope)
    watch = cProfile.Profile()
    watch.runcall(scope["route_parcels"], [{"grams": 1}], "N1")
    watch.dump_stats(folder / "out.prof")
    return (folder / "out.prof").read_bytes()


def library(folder: Path):
    """An extension module that Cython would make: names and docstring as C strings."""
    source = folder / "parcels.c"
    source.write_text(
        'static const char doc[] = "Parcels heavier than a van may carry go to the freight desk instead.";\n'
        "const char *__pyx_pw_5depot_7parcels_3route_parcels(void) { return doc; }\n"
    )
    out = folder / "parcels.so"
    if shutil.which("gcc"):
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(out), str(source)], check=True, capture_output=True)
        return out.read_bytes()
    return b"\x7fELF\2\1\1" + b"\0" * 64 + b"\0__pyx_pw_5depot_7parcels_3route_parcels\0" + b"\0" * 64


def notebook():
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": BODY.splitlines(True)}
    return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1).encode()


def archive_member():
    head = b"%-16s%-12d%-6d%-6d%-8s%-10d`\n" % (b"data.txt/", 0, 0, 0, b"100644", len(RAW))
    return b"!<arch>\n" + head + RAW


def document():
    stream = zlib.compress(BODY.encode())
    return b"%PDF-1.4\n1 0 obj\n<< /Length " + str(len(stream)).encode() + b" >>\nstream\n" + stream + b"\nendstream\nendobj\n%%EOF\n"


def inventory():
    lines = zlib.compress(b"depot.parcels.route_parcels(parcels, depot_code, max_grams=31500) py:function 1 api.html#$ -\n")
    return b"# Sphinx inventory version 2\n# Project: depot\n# Version: 1\n# The remainder of this file is compressed using zlib.\n" + lines


def zstd():
    import zstandard

    return zstandard.ZstdCompressor().compress(RAW)


def planted(folder: Path) -> dict[str, tuple[str, bytes]]:
    html = "<html><body><pre>" + BODY.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") + "</pre></body></html>"
    mypy_row = ("depot/parcels.data.ff", b"\x01\x14depot.parcels.route_parcels\x00\x03\x07parcels\x0adepot_code\x09max_grams\x02\x00\xff")
    mypy_json = {"names": {"route_parcels": {"type": {"arg_names": ["parcels", "depot_code", "max_grams"], ".class": "CallableType"}}}}
    escaped = 'char *source = "' + BODY.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '";\n'
    patch = "--- a/depot/parcels.py\n+++ b/depot/parcels.py\n@@ -15,16 +0,0 @@\n" + "".join("-" + line for line in BODY.splitlines(True))
    signature = "def route_parcels(parcels: list, depot_code: str, max_grams: int = ...) -> tuple: ...\n"
    doc = "Notes\n=====\n\nParcels heavier than a van may carry go to\nthe freight desk instead.\n"
    return {
        "copy of the file": ("backup/parcels.py", RAW),
        "editor backup": ("depot/parcels.py~", RAW),
        "swap file": ("depot/.parcels.py.swp", b"b0VIM 8.2\0\0" + b"\0" * 64 + RAW + b"\0" * 16),
        "renamed function": ("depot/extra.py", RENAMED.encode()),
        "build folder": ("build/lib/depot/parcels.py", RAW),
        "site-packages copy": (".venv/lib/python3.11/site-packages/depot/parcels.py", RAW),
        "commented out": ("depot/old.py", ("x = 1\n" + "".join(f"# {line}" for line in BODY.splitlines(True))).encode()),
        "commented out in C": ("ext/old.c", "".join(f"// {line}" for line in BODY.splitlines(True)).encode()),
        "patch": ("fix.patch", patch.encode()),
        "indented in a document": ("docs/how.rst", ("How it works::\n\n" + textwrap.indent(BODY, "    ")).encode()),
        "markdown": ("NOTES.md", ("Earlier it was\n\n```python\n" + BODY + "```\n").encode()),
        "html": ("docs/_build/parcels.html", html.encode()),
        "docstring in a document": ("docs/notes.rst", doc.encode()),
        "signature in a document": ("docs/api.rst", b".. function:: route_parcels(parcels, depot_code, max_grams=31500)\n"),
        "type stub": ("stubs/depot/parcels.pyi", signature.encode()),
        "tags": ("tags", b'route_parcels\tdepot/parcels.py\t/^def route_parcels(parcels, depot_code, max_grams=31500):$/;"\tf\n'),
        "sphinx inventory": ("docs/objects.inv", inventory()),
        "message catalogue": ("depot/locale/messages.pot", b'#: depot/parcels.py:24\nmsgid "freight-desk-north"\nmsgstr ""\n'),
        "egg-info": ("depot.egg-info/PKG-INFO", ("Metadata-Version: 2.1\nName: depot\n\n" + doc).encode()),
        "string in source": ("depot/template.py", ("SOURCE = " + repr(BODY) + "\n").encode()),
        "string in C": ("ext/parcels.c", escaped.encode()),
        "notebook": (".ipynb_checkpoints/parcels.ipynb", notebook()),
        "json": ("cache.json", json.dumps({"files": {"parcels.py": WHOLE}}).encode()),
        "json lines": ("log.jsonl", (json.dumps({"a": 1}) + "\n" + json.dumps({"text": BODY}) + "\n").encode()),
        "type checker, json": (".mypy_cache/3.11/depot/parcels.data.json", json.dumps(mypy_json).encode()),
        "type checker, sqlite": (".mypy_cache/3.11/cache.db", database(folder, "create table t (path text, data blob)", mypy_row)),
        "sqlite text": ("history.sqlite", database(folder)),
        "sqlite, compressed blob": ("index.db", database(folder, row=("x", zlib.compress(RAW)))),
        "sqlite, deleted row": ("old.db", deleted_row(folder)),
        "bytecode": ("depot/__pycache__/parcels.cpython-311.pyc", compiled(folder)),
        "bytecode under another name": ("data/blob.bin", compiled(folder)),
        "bytecode, renamed": ("data/other.pyc", compiled(folder, RENAMED)),
        "bare marshal": ("data/code.marshal", marshal.dumps(compile(WHOLE, "x.py", "exec"))),
        "profile": ("prof/out.prof", profile(folder)),
        "pickle": ("cache.pickle", pickle.dumps({"source": WHOLE})),
        "pickle, protocol 0": ("cache0.pickle", pickle.dumps({"source": WHOLE}, protocol=0)),
        "pickled names": ("names.pickle", pickle.dumps(("route_parcels", ["parcels", "depot_code", "max_grams"]))),
        "shelve": ("shelf.dat", shelf(folder)),
        "zip": ("dist/depot.zip", zipped()),
        "wheel": ("dist/depot-1.0-py3-none-any.whl", zipped("depot/parcels.py")),
        "egg with bytecode": ("dist/depot-1.0-py3.11.egg", zipped("depot/parcels.pyc", compiled(folder))),
        "zipapp": ("dist/depot.pyz", zipped(head=b"#!/usr/bin/env python3\n")),
        "jar": ("lib/depot.jar", zipped("META-INF/parcels.txt", BODY.encode())),
        "tar": ("dist/depot.tar", tarred()),
        "tar.gz": ("dist/depot-1.0.tar.gz", tarred("w:gz")),
        "tar.bz2": ("dist/depot-1.0.tar.bz2", tarred("w:bz2")),
        "tar.xz": ("dist/depot-1.0.tar.xz", tarred("w:xz")),
        "gzip": ("log.gz", gzip.compress(RAW)),
        "bzip2": ("log.bz2", bz2.compress(RAW)),
        "xz": ("log.xz", lzma.compress(RAW)),
        "lzma": ("log.lzma", lzma.compress(RAW, format=lzma.FORMAT_ALONE)),
        "zlib": ("blob.z", zlib.compress(RAW)),
        "zip in gzip in zip": ("deep.zip", zipped("a.gz", gzip.compress(zipped()))),
        "static library": ("lib/libdepot.a", archive_member()),
        "pdf": ("docs/manual.pdf", document()),
        "git object": (".git/objects/aa/bb", loose(folder)),
        "git pack": (".git/objects/pack/pack-1.pack", packed(folder)),
        "git pack with deltas": (".git/objects/pack/pack-2.pack", deltas(folder)),
        "git bundle": ("all.bundle", bundle(folder)),
        "extension module": ("depot/parcels.cpython-311-x86_64-linux-gnu.so", library(folder)),
        "utf-16 with a mark": ("notes.txt", BODY.encode("utf-16")),
        "utf-16 in a binary": ("app.exe", b"MZ\0\0" + BODY.encode("utf-16-le") + b"\0\0"),
        "base64": ("data.b64", base64.encodebytes(RAW)),
        "base64 in json": ("lock.json", json.dumps({"payload": base64.b64encode(gzip.compress(RAW)).decode()}).encode()),
        "hex": ("data.hex", RAW.hex().encode()),
        "in a test file": ("tests/helpers.py", RAW),
    }
