"""The leak prover finds a planted leak in every channel, names the path, refuses bombs, and is silent on clean packages."""

from __future__ import annotations

import gzip
import importlib.metadata
import importlib.util
import io
import json
import pickle
import random
import sqlite3
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
from tests.tasks import channels

from etude.tasks import gitobjects, marshalled
from etude.tasks.deletion import Refusal, delete, functions
from etude.tasks.leaks import Evidence, Prover, find_copies
from etude.tasks.unwrap import Budget, unwrap

CLEAN = ("pytest", "pluggy", "iniconfig", "packaging", "hypothesis", "jsonschema", "referencing", "attrs", "jinja2", "markupsafe")
CLEAN += ("rich", "markdown-it-py", "mdurl", "filelock", "fsspec", "mpmath", "tqdm", "pyyaml", "requests", "urllib3", "idna", "httpx")
CLEAN += ("charset-normalizer", "safetensors", "click", "typer", "anyio", "h11", "httpcore", "huggingface-hub", "mypy-extensions")
MOST_BYTES = 300_000
"""Of one package that is looked at: what is no source first, then the smaller files."""


@pytest.fixture(scope="module")
def leaks_by_channel(tmp_path_factory):
    cut = delete(channels.FILES, "depot/parcels.py", "route_parcels", "definition")
    prover = Prover()
    found = {}
    for name, (path, data) in channels.planted(tmp_path_factory.mktemp("channels")).items():
        found[name] = (path, prover.find({**cut.files, path: data}, [cut.fingerprint], modules=("parcels",)))
    return found


def test_every_channel_is_found_with_its_path(leaks_by_channel):
    assert len(leaks_by_channel) >= 60
    missed = [name for name, (path, leaks) in leaks_by_channel.items() if not any(leak.path.startswith(path) for leak in leaks)]
    assert missed == []
    elsewhere = [(name, leak.path) for name, (path, leaks) in leaks_by_channel.items() for leak in leaks if not leak.path.startswith(path)]
    assert elsewhere == []


@pytest.mark.parametrize(
    "name, way, evidence",
    [
        ("zip in gzip in zip", "zip > gzip > zip > ", Evidence.SAME_CODE),
        ("git pack with deltas", "git pack > ", Evidence.SAME_CODE),
        ("git object", "zlib > git object > ", Evidence.SAME_CODE),
        ("egg with bytecode", "zip > bytecode > ", Evidence.BYTECODE),
        ("bytecode, renamed", "bytecode > ", Evidence.BYTECODE),
        ("sqlite, compressed blob", "sqlite > zlib > ", Evidence.SAME_CODE),
        ("type checker, json", "json > ", Evidence.SIGNATURE),
        ("pickled names", "pickle > ", Evidence.SIGNATURE),
        ("base64 in json", "base64 > gzip > ", Evidence.SAME_CODE),
        ("docstring in a document", "", Evidence.DOCSTRING),
        ("message catalogue", "", Evidence.CONSTANT),
        ("extension module", "", Evidence.NAME),
    ],
)
def test_a_finding_names_the_containers_and_the_evidence(leaks_by_channel, name, way, evidence):
    assert f"{way}{evidence}" in [leak.channel for leak in leaks_by_channel[name][1]], leaks_by_channel[name]


def test_tests_may_call_what_was_deleted_and_the_instruction_may_say_its_signature():
    cut = delete(channels.FILES, "depot/parcels.py", "route_parcels", "definition")
    told = "Add `route_parcels(parcels, depot_code, max_grams=31500)`: split parcels over the vans of one depot."
    files = {**cut.files, "docs/api.rst": "route_parcels(parcels, depot_code, max_grams)", "tests/test_more.py": channels.TEST}
    assert [leak.path for leak in Prover().find(files, [cut.fingerprint])] == ["docs/api.rst"]
    assert Prover().find(files, [cut.fingerprint], given=told) == []
    copied = {**cut.files, "tests/test_more.py": channels.WHOLE}
    assert [leak.evidence for leak in Prover().find(copied, [cut.fingerprint])] == [Evidence.SAME_CODE]


def test_what_stays_in_the_source_is_no_leak():
    cut = delete(channels.FILES, "depot/parcels.py", "route_parcels", "definition")
    files = {**cut.files, "depot/names.py": 'DESK = "freight-desk-north"\n', "depot/desks.txt": "freight-desk-north\n"}
    assert Prover().find(files, [cut.fingerprint]) == []


def test_a_twin_of_a_small_helper_counts_alone_and_not_beside_others():
    helper = "def clip(value, low):\n    if value < low:\n        return low + 1\n    return value\n"
    files = {**channels.FILES, "depot/tools.py": helper, "depot/more.py": helper.replace("clip", "floor")}
    small = delete(files, "depot/tools.py", "clip")
    large = delete(small.files, "depot/parcels.py", "route_parcels")
    assert [leak.path for leak in Prover().find(large.files, [small.fingerprint])] == ["depot/more.py"]
    assert Prover().find(large.files, [small.fingerprint, large.fingerprint]) == []
    copied = {**large.files, "depot/copy.py": channels.WHOLE}
    assert [leak.path for leak in Prover().find(copied, [small.fingerprint, large.fingerprint])] == ["depot/copy.py"]


# ---------------------------------------------------------------------------------------------------
# Hostile files


def bomb(levels, size=20 * 2**20):
    data = b"\0" * size
    for _ in range(levels):
        data = gzip.compress(data)
    return data


def lying_zip(size=4 * 2**20):
    """A directory that says the member has ten bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"\0" * size)
    return out.getvalue().replace(size.to_bytes(4, "little"), (10).to_bytes(4, "little"))


def test_bombs_are_refused_and_cost_little_memory():
    cut = delete(channels.FILES, "depot/parcels.py", "route_parcels")
    leaks = find_copies({**cut.files, "a.gz": bomb(2)}, cut.fingerprint)
    assert [(leak.path, leak.evidence) for leak in leaks] == [("a.gz!content", Evidence.UNREADABLE)]
    assert "more than" in leaks[0].what
    hostile = [bomb(1, 8 * 2**20), lying_zip()]
    tracemalloc.start()
    for data in hostile:
        pieces = list(unwrap("x", data, Budget(most=2**20)))
        assert all(len(piece.raw) <= 2**20 for piece in pieces)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_too_many_bytes_members_or_levels_end_the_scan_with_a_finding():
    deep = b"x" * 100
    for _ in range(12):
        deep = zlib.compress(deep)
    assert any("levels deep" in piece.refused for piece in unwrap("deep", deep, Budget()))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(60):
            archive.writestr(str(number), b"y" * 100)
    assert any("more members" in piece.refused for piece in unwrap("many.zip", out.getvalue(), Budget(members_left=20)))
    assert any("more bytes" in piece.refused for piece in unwrap("big.zip", out.getvalue(), Budget(bytes_left=500)))


def test_sealed_archives_are_findings():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("secret.py", channels.WHOLE)
    locked = bytearray(out.getvalue())
    for magic, flag in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[locked.index(magic) + flag] |= 1
    for data in (bytes(locked), b"7z\xbc\xaf\x27\x1c" + b"\0" * 50, b"Rar!\x1a\x07\x01\x00"):
        assert [piece for piece in unwrap("a.bin", data, Budget()) if piece.refused], data[:8]


class Boom:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_nothing_is_executed(tmp_path):
    mark = tmp_path / "written-by-a-pickle"
    data = pickle.dumps(Boom(str(mark)))
    database = tmp_path / "view.db"
    connection = sqlite3.connect(database)
    connection.execute("create table t (a text)")
    connection.execute("insert into t values ('hello there, row of a table')")
    connection.execute("create view v as select a from t")
    connection.execute("create virtual table f using fts5(a)")
    connection.commit()
    connection.close()
    pieces = [*unwrap("a.pickle", data, Budget()), *unwrap("v.db", database.read_bytes(), Budget())]
    assert not mark.exists()
    assert any("open" in piece.strings or "io" in piece.strings for piece in pieces)
    assert any("hello there, row of a table" in piece.strings for piece in pieces)


def test_random_bytes_and_cut_files_do_no_harm(tmp_path):
    cut = delete(channels.FILES, "depot/parcels.py", "route_parcels", "definition")
    dice = random.Random(7)
    for name, (path, data) in channels.planted(tmp_path).items():
        for _ in range(4):
            bad = bytearray(data[: dice.randrange(1, len(data) + 1)])
            for _ in range(3):
                bad[dice.randrange(len(bad))] = dice.randrange(256)
            found = Prover().find({path: bytes(bad)}, [cut.fingerprint])
            assert all(leak.path.startswith(path) for leak in found), name


def test_a_code_reader_agrees_with_the_compiler():
    import marshal

    code = compile(channels.WHOLE, "x.py", "exec")
    (info,) = [c for c in marshalled.read(marshal.dumps(code)).codes if c.name == "route_parcels"]
    (real,) = [c for c in code.co_consts if getattr(c, "co_name", "") == "route_parcels"]
    assert info.variables == (*real.co_varnames, *real.co_cellvars, *real.co_freevars)
    assert info.names == real.co_names
    assert [c for c in real.co_consts if isinstance(c, str)] == list(info.strings)
    assert marshalled.read(b"c" + bytes(40)) is None


def test_a_delta_is_applied_as_git_does(tmp_path):
    pack = channels.deltas(tmp_path)
    blobs = {data for name, data in gitobjects.read_pack(pack, 2**20) if name.startswith("blob")}
    assert channels.RAW in blobs
    assert len(blobs) == 3
    assert list(gitobjects.read_pack(pack[:40], 2**20)) == []


# ---------------------------------------------------------------------------------------------------
# Clean trees


def installed(name):
    """Text and binary files of an installed distribution."""
    files = {}
    for path in importlib.metadata.distribution(name).files or ():
        place = Path(path.locate())
        if place.suffix != ".pyc" and ".." not in path.parts and place.is_file() and place.stat().st_size < 2**19:
            files[str(path)] = place.read_bytes()
    kept, total = {}, 0
    for path in sorted(files, key=lambda p: (p.endswith(".py"), len(files[p]))):
        total += len(files[path])
        if total <= MOST_BYTES:
            kept[path] = files[path]
    return kept


def clean_packages():
    found = []
    for name in CLEAN:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def alarms(name, most):
    """Findings for definition-level deletions in a package that holds no copy."""
    files = installed(name)
    texts = {p: d.decode() for p, d in files.items() if p.endswith(".py") and len(d) < 200_000 and _is_text(d)}
    prover, out, tried = Prover(), [], 0
    for path in sorted(texts, key=lambda p: (len(texts[p]), p), reverse=True)[:12]:
        for qualname, node in functions(texts[path], path):
            if tried >= most or "." in qualname or (node.end_lineno or 0) - node.lineno < 6:
                continue
            try:
                cut = delete(texts, path, qualname, "definition")
            except Refusal:
                continue
            tried += 1
            whole = {**files, **cut.files}
            out += [(name, qualname, leak) for leak in prover.find(whole, [cut.fingerprint], modules=(Path(path).stem,))]
    return tried, out


def _is_text(data):
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_clean_package_raises_no_alarm():
    tried, found = alarms("pluggy", 6)
    assert tried >= 3
    assert found == []


@pytest.mark.slow
def test_clean_packages_raise_no_alarm():
    """A function that its own package holds nearly twice, or in C as well, is a finding and no alarm; everything else would be one."""
    counts = {name: alarms(name, 5) for name in clean_packages()}
    twice = (Evidence.SAME_CODE, Evidence.TEXT)
    wrong = [f for _, found in counts.values() for f in found if f[2].evidence not in twice and not f[2].path.endswith(".so")]
    print(json.dumps({name: [tried, len(found)] for name, (tried, found) in counts.items()}))
    assert len([n for n, (tried, _) in counts.items() if tried]) >= 15
    assert wrong == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_the_cache_that_a_type_checker_writes_today_is_found(tmp_path):
    import subprocess
    import sys

    for path, text in channels.FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    subprocess.run([sys.executable, "-m", "mypy", "depot"], cwd=tmp_path, check=False, capture_output=True)
    cache = {str(p.relative_to(tmp_path)): p.read_bytes() for p in (tmp_path / ".mypy_cache").rglob("*") if p.is_file()}
    assert cache
    cut = delete(channels.FILES, "depot/parcels.py", "route_parcels", "definition")
    leaks = Prover().find({**cut.files, **cache}, [cut.fingerprint], modules=("parcels",))
    assert {leak.path.split("/")[0] for leak in leaks} == {".mypy_cache"}
