"""From a package to tasks: in real sandboxes for a small project, and every way of giving nothing has its reason."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from etude.errors import ConfigError, UserError
from etude.protocols import Change
from etude.tasks.deletion import DeleteLevel, Refusal
from etude.tasks.environment import is_test, make_environment, pytest_ini, requirements, scrub, test_folders
from etude.tasks.features import Feature, Unit, cut_feature, propose, with_bodies
from etude.tasks.fetch import NoSource, Origin, Source, read_source, unpack
from etude.tasks.formats import read_task
from etude.tasks.grade import grade
from etude.tasks.packages import MakeConfig, Skip, _installed_roots, make_from_package, merged, names_feature
from etude.tasks.prompt import TERSE, feature_prompt
from etude.tasks.validate import validate_task

PARCELS = '''"""Parcels."""

import math

from depot.money import price

__all__ = ["label", "route", "weigh"]


def weigh(parcel):
    """Weight of one parcel in grams."""
    return math.ceil(parcel["grams"])


def route(parcels, most=1000):
    """Split parcels over vans that carry at most `most` grams each."""
    vans = [[]]
    for parcel in sorted(parcels, key=weigh, reverse=True):
        if sum(map(weigh, vans[-1])) + weigh(parcel) > most:
            vans.append([])
        vans[-1].append(parcel)
    return vans


def label(parcel, sender):
    """Text of a label."""
    lines = [sender.upper(), parcel["to"], price(weigh(parcel))]
    width = max(map(len, lines))
    return "\\n".join(line.ljust(width) for line in lines)
'''
MONEY = '''"""Prices."""


def price(grams):
    """Price as text."""
    cents = 150 + grams // 100 * 20
    if cents >= 1000:
        return f"{cents // 100} EUR"
    return f"{cents / 100:.2f} EUR"


def tax(cents, percent=19):
    """Tax in cents, rounded half up."""
    whole, rest = divmod(cents * percent, 100)
    if rest >= 50:
        whole += 1
    return whole
'''
TESTS = """import pytest

from depot import money, parcels


@pytest.mark.parametrize("grams, vans", [([10], 1), ([600, 600], 2), ([900, 90], 1)])
def test_route(grams, vans):
    assert len(parcels.route([{"grams": g} for g in grams])) == vans


def test_route_order():
    assert parcels.route([{"grams": 1}, {"grams": 2}]) == [[{"grams": 2}, {"grams": 1}]]


class TestLabel:
    def test_sender(self):
        assert parcels.label({"grams": 1, "to": "Ann"}, "bob").splitlines()[0].strip() == "BOB"

    def test_to(self):
        assert parcels.label({"grams": 1, "to": "Ann"}, "bob").splitlines()[1].strip() == "Ann"


def test_weigh():
    assert parcels.weigh({"grams": 1.5}) == 2


def test_tax():
    assert money.tax(100) == 19


def test_tax_rounds():
    assert money.tax(250, 1) == 3


def test_prices():
    assert (money.price(100), money.price(9999)) == ("1.70 EUR", "21 EUR")


def test_cheap():
    assert money.price(0) == "1.50 EUR"


def test_nothing():
    assert True


def test_name():
    assert parcels.__name__ == "depot.parcels"
"""
PYPROJECT = '[project]\nname = "depot"\nversion = "1.2"\nlicense = "MIT"\n\n[tool.pytest.ini_options]\naddopts = "--cov"\n'
DEPOT = {
    "pyproject.toml": PYPROJECT,
    "README.md": "# depot\n\nRoutes parcels.\n",
    "src/depot/__init__.py": "",
    "src/depot/parcels.py": PARCELS,
    "src/depot/money.py": MONEY,
    "tests/test_depot.py": TESTS,
}


def put(folder: Path, files) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.fixture(scope="module")
def made(sandboxes, run, tmp_path_factory):
    """Tasks of the project, made once."""
    root = tmp_path_factory.mktemp("depot")
    project = put(root / "project", DEPOT)
    settings = MakeConfig(count=3, repeats=1)
    lines: list[str] = []
    result = run(make_from_package(str(project), sandboxes, root / "out", root / "cache", settings, say=lines.append))
    return result, root, settings, lines


def test_a_project_gives_tasks_that_pass_the_same_validator(made, sandboxes, run):
    result, root, _, _ = made
    assert (result.name, result.version, result.licence, result.tests, result.flaky) == ("depot", "1.2", "MIT", 13, 0)
    folders = [p for p in sorted((root / "out").iterdir()) if p.name != ".made"]
    assert len(folders) == result.accepted == 3
    for folder in folders:
        task = read_task(folder)
        verdict = run(validate_task(task, sandboxes))
        assert verdict.accepted, verdict
        assert set(task.grader.fail_to_pass).isdisjoint(task.grader.pass_to_pass)
        assert len(task.grader.fail_to_pass) + len(task.grader.pass_to_pass) == 13
        assert task.provenance.family == "depot"


def test_a_made_task_is_solved_by_its_solution_and_by_nothing_less(made, sandboxes, run):
    _, root, _, _ = made
    task = read_task(next(p for p in sorted((root / "out").iterdir()) if p.name != ".made"))
    restored = [Change(path=p, data=t.encode()) for p, t in task.solution]
    assert run(grade(task, restored, sandboxes)).solved
    assert not run(grade(task, [], sandboxes)).solved
    tests = [Change(path=p, data=b"def test_nothing():\n    pass\n") for p, _ in task.grader.hidden or task.files if is_test(p)]
    assert not run(grade(task, tests, sandboxes)).solved


def test_hidden_tests_are_out_of_sight_and_ids_are_the_same(made):
    _, root, _, _ = made
    tasks = [read_task(p) for p in sorted((root / "out").iterdir()) if p.name != ".made"]
    hiding = [t for t in tasks if t.grader.hidden]
    assert hiding
    for task in hiding:
        seen, whole = dict(task.files)["tests/test_depot.py"], dict(task.grader.hidden)["tests/test_depot.py"]
        assert whole == TESTS
        assert len(seen) < len(whole)
        compile(seen, "test_depot.py", "exec")


def test_a_second_run_does_nothing_again(made, sandboxes, run, tmp_path):
    result, root, settings, _ = made
    lines: list[str] = []
    seen: set[str] = set()
    again = run(make_from_package(result.spec, sandboxes, root / "out", root / "cache", settings, say=lines.append, seen=seen))
    assert again == result
    assert lines == []
    assert seen == set(result.keys)
    assert len(seen) == 6


def test_a_killed_run_goes_on_with_the_next_candidate(made, sandboxes, run, tmp_path):
    result, root, settings, _ = made
    (state,) = (root / "out" / ".made").glob("*.json")
    kept = json.loads(state.read_text())
    first = dict(list(kept["verdicts"].items())[:1])
    out = tmp_path / "out"
    target = out / ".made" / state.name
    target.parent.mkdir(parents=True)
    done = sum(reason == "" for reason in first.values())
    target.write_text(json.dumps({**kept, "verdicts": first, "keys": kept["keys"][: 2 * done], "finished": False}))
    lines: list[str] = []
    again = run(make_from_package(result.spec, sandboxes, out, root / "cache", settings, say=lines.append))
    assert again.finished
    assert again.verdicts == result.verdicts
    assert not [line for line in lines if line.startswith(f"  {next(iter(first))} ")]


def test_every_judgement_is_counted(made):
    result, *_ = made
    answer = merged([result], {"duplicate": 1})
    assert answer["packages"][0]["accepted"] == 3
    assert sum(answer["reasons"].values()) == len(result.verdicts) - 3 + 1


# ---------------------------------------------------------------------------------------------------
# Packages that give nothing

NOISE = "import os\n\n\ndef pytest_unconfigure():\n    for _ in range(80):\n        os.write(2, b'x' * 100_000 + b'\\n')\n"
BAD = {
    Skip.NO_TESTS: {"pyproject.toml": PYPROJECT, "depot.py": "x = 1\n"},
    Skip.NOT_PYTHON: {"README.md": "hello\n"},
    Skip.BASELINE_RED: {**DEPOT, "tests/test_depot.py": TESTS.replace("assert", "assert not")},
    Skip.HANGS: {**DEPOT, "tests/test_wait.py": "import time\n\n\ndef test_wait():\n    time.sleep(600)\n"},
    Skip.NOISY: {**DEPOT, "conftest.py": NOISE},
    Skip.FEW_TESTS: {"depot.py": "def f():\n    return 1\n", "test_depot.py": "def test_one():\n    pass\n"},
    Skip.NO_FEATURE: {"depot.py": "def f():\n    return 1\n", "test_depot.py": "\n".join(f"def test_{i}():\n    pass\n" for i in range(9))},
    Skip.SELF_HOSTING: {**DEPOT, "pyproject.toml": PYPROJECT.replace("depot", "pluggy")},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_package_that_gives_nothing_has_a_reason(reason, sandboxes, run, tmp_path):
    project = put(tmp_path / "project", BAD[reason])
    settings = MakeConfig(count=1, suite_limit_s=3.0 if reason is Skip.HANGS else 60.0, noisy_bytes=2**21)
    result = run(make_from_package(str(project), sandboxes, tmp_path / "out", tmp_path / "cache", settings))
    assert (result.skip, result.accepted, result.finished) == (reason.value, 0, True), result.detail
    assert result.detail


def test_flaky_tests_are_excluded_and_counted(sandboxes, run, tmp_path):
    flaky = "import os\n\n\ndef test_seed():\n    assert os.environ['PYTHONHASHSEED'] != '2'\n"
    clock = "\n\ndef test_clock():\n    import time\n\n    assert time.time() < 1.9e9 - 34300800 + 10**8\n"
    project = put(tmp_path / "project", {**DEPOT, "tests/test_flaky.py": flaky + clock})
    result = run(make_from_package(str(project), sandboxes, tmp_path / "out", tmp_path / "cache", MakeConfig(count=1, repeats=1)))
    assert (result.tests, result.flaky) in ((13, 2), (14, 1))
    task = read_task(next(p for p in (tmp_path / "out").iterdir() if p.name != ".made"))
    assert "tests/test_flaky.py::test_seed" not in (*task.grader.fail_to_pass, *task.grader.pass_to_pass)


# ---------------------------------------------------------------------------------------------------
# Sources


def sdist(files, top="depot-1.2/"):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for path, text in files.items():
            info = tarfile.TarInfo(top + path)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def test_an_sdist_is_read_without_running_it(tmp_path):
    head = "Metadata-Version: 2.1\nName: Depot_X\nVersion: 1.2\nLicense: BSD\nRequires-Dist: attrs>=20\n\nlong"
    setup = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (tmp_path / "depot-1.2.tar.gz").write_bytes(sdist({**DEPOT, "PKG-INFO": head, "setup.py": setup}))
    source = read_source(str(tmp_path / "depot-1.2.tar.gz"), tmp_path)
    assert (source.name, source.version, source.licence, source.requires) == ("depot-x", "1.2", "BSD", ("attrs>=20",))
    assert source.origin is Origin.FILE
    assert source.files["src/depot/money.py"] == MONEY.encode()
    assert not (tmp_path / "ran").exists()


def test_requirements_that_an_old_sdist_keeps_beside_its_metadata(tmp_path):
    listed = "six>=1.8\nomdict\n\n[:python_version < '3']\nenum34\n\n[test]\nhypothesis\n"
    files = {**DEPOT, "PKG-INFO": "Metadata-Version: 1.1\nName: depot\nVersion: 1.2\n", "src/depot.egg-info/requires.txt": listed}
    (tmp_path / "depot-1.2.tar.gz").write_bytes(sdist(files))
    source = read_source(str(tmp_path / "depot-1.2.tar.gz"), tmp_path)
    assert source.requires == ("six>=1.8", "omdict", "enum34 ; python_version < '3'", 'hypothesis ; extra == "test"')
    assert requirements(source, []) == ["omdict", "six>=1.8"]


def test_an_index_is_asked_once_and_its_hash_is_checked(tmp_path, monkeypatch):
    import hashlib

    data = sdist(DEPOT)
    page = tmp_path / "simple" / "depot"
    page.mkdir(parents=True)
    (page / "depot-1.2.tar.gz").write_bytes(data)
    (page / "depot-1.3rc1.tar.gz").write_bytes(b"")
    digest = hashlib.sha256(data).hexdigest()
    links = '<a href="depot-1.2.tar.gz#sha256={}">depot-1.2.tar.gz</a> <a href="depot-1.3rc1.tar.gz">x</a>'
    links += ' <a href="depot-9.0.tar.gz" data-requires-python="&gt;=4">x</a> <a href="depot-8.0.tar.gz" data-yanked="bad">x</a>'
    (page / "index.html").write_text(links.format(digest))
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    monkeypatch.setattr("etude.tasks.fetch._get", fetching(tmp_path))
    assert read_source("Depot", tmp_path / "a").version == "1.2"
    (page / "index.html").unlink()
    assert read_source("depot", tmp_path / "a").where.endswith("depot-1.2.tar.gz")
    with pytest.raises(NoSource, match=r"index\.html") as missing:
        read_source("depot", tmp_path / "b")
    assert missing.value.reason == Skip.NOT_FETCHED
    (page / "index.html").write_text(links.format("0" * 64))
    with pytest.raises(NoSource, match="sha256"):
        read_source("depot==1.2", tmp_path / "c")
    with pytest.raises(NoSource) as wrong:
        read_source("depot==7", tmp_path / "d")
    assert wrong.value.reason == Skip.NO_SDIST


def fetching(root):
    """The real reader, with index.html for a folder as a web server has it."""
    from etude.tasks import fetch

    real = fetch._get
    return lambda url, most: real(url + "index.html" if url.endswith("/") else url, most)


@pytest.mark.parametrize("path", ["../out.py", "/etc/x.py", "a/../../b.py"])
def test_archives_that_write_outside_are_refused(path):
    with pytest.raises(NoSource, match="outside"):
        unpack(sdist({path: "x"}, top=""), "bad.tar.gz")


def test_words_that_are_no_source():
    with pytest.raises(UserError, match="no folder, no file and no package name"):
        read_source("no such/thing", Path("x"))
    with pytest.raises(NoSource, match="no archive"):
        unpack(b"hello", "x.tar.gz")
    with pytest.raises(ConfigError):
        MakeConfig(terse=2.0)


# ---------------------------------------------------------------------------------------------------
# Environments


def source_of(files, **more):
    data = {p: t.encode() if isinstance(t, str) else t for p, t in files.items()}
    known = {"name": "depot", "version": "1", "licence": "", "origin": Origin.FOLDER, "where": "x", "digest": "0"}
    return Source(**{**known, "files": data, **more})


def test_an_environment_keeps_sources_and_leaves_out_what_a_checkout_has_not(tmp_path):
    extra = {
        "src/depot.egg-info/PKG-INFO": "x",
        "src/depot/__pycache__/a.pyc": b"\0",
        "build/lib/depot/money.py": MONEY,
        "logo.png": b"\x89PNG\0",
    }
    environment = make_environment(source_of({**DEPOT, **extra}), tmp_path)
    assert not [p for p in environment.files if "egg-info" in p or p.startswith(("build/", "logo"))]
    assert environment.left_out == 1
    assert environment.tests == ("tests/test_depot.py",)
    assert environment.sources == ["src/depot/__init__.py", "src/depot/money.py", "src/depot/parcels.py"]
    assert "Name: depot" in environment.files[".deps/depot-1.dist-info/METADATA"]


def wheel(folder, name, tag, files):
    """A wheel as pip accepts it."""
    import zipfile

    info = f"{name}-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")


def test_dependencies_are_frozen_with_their_hashes_and_need_no_network_again(tmp_path, monkeypatch):
    import sys
    import sysconfig

    house = tmp_path / "house"
    wheel(house, "bolt", "py3-none-any", {"bolt/__init__.py": "size = 8\n", "bolt/data.bin": "x"})
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel(house, "nut", f"{version}-{version}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}", {"nut.py": ""})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(house))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    environment = make_environment(source_of(DEPOT, requires=("bolt>=1",)), tmp_path / "cache")
    assert environment.files[".deps/bolt/__init__.py"] == "size = 8\n"
    ((name, digest),) = environment.frozen
    assert (name, len(digest)) == ("bolt-1.0-py3-none-any.whl", 64)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert make_environment(source_of(DEPOT, requires=("bolt>=1",)), tmp_path / "cache").hash == environment.hash
    with pytest.raises(NoSource, match="no wheels for screw") as missing:
        make_environment(source_of(DEPOT, requires=("screw",)), tmp_path / "cache")
    assert missing.value.reason == Skip.NOT_INSTALLED
    monkeypatch.setenv("PIP_FIND_LINKS", str(house))
    with pytest.raises(NoSource, match="compiled") as binary:
        make_environment(source_of(DEPOT, requires=("nut",)), tmp_path / "cache")
    assert binary.value.reason == Skip.NEEDS_BINARY


def test_the_path_and_the_own_test_settings_are_kept_and_options_are_not():
    ini = '[tool.pytest.ini_options]\naddopts = "--cov -n 4"\nmarkers = ["slow: x", "fast"]\npythonpath = ["lib2"]\n'
    text = pytest_ini({"pyproject.toml": ini.encode()}, ["src/a.py"])
    assert text == "[pytest]\npythonpath = lib2 . src .deps\nmarkers =\n    slow: x\n    fast\n"
    assert "python_files = check_*.py" in pytest_ini({"setup.cfg": b"[tool:pytest]\npython_files = check_*.py\n"}, [])


def test_requirements_of_a_package_and_of_tests_that_import_them():
    files = {
        "requirements-test.txt": "# tools\nhypothesis>=6  # why\nflake8\n-r other.txt\n",
        "setup.cfg": "[options]\ninstall_requires =\n    attrs\n",
    }
    metadata = ("click>=8", "six ; python_version < '3'", "pyyaml ; extra == 'test'", "sphinx ; extra == 'docs'", "pytest")
    source = source_of(files, requires=metadata)
    assert requirements(source, ["import hypothesis\nimport yaml\n"]) == ["click>=8", "hypothesis>=6", "pyyaml"]
    assert requirements(source, ["import attr"]) == ["attrs", "click>=8"]


def test_tests_beside_the_source_do_not_protect_the_source():
    files = ["depot/a.py", "depot/test_a.py", "depot/tests/x.py", "tests/unit/y.py", ".deps/click/tests/z.py"]
    assert test_folders(files) == ["depot/tests", "tests"]
    assert [p for p in files if is_test(p)] == files[1:]


def test_text_in_other_encodings_is_left_out_and_counted():
    kept, left_out = scrub({"a.py": "x = '\u00e9'\n".encode("latin-1"), "b.py": b"x = 1\n", "c.py": b"a\0b", ".git/config": b"x"})
    assert (list(kept), left_out) == (["b.py"], 2)


# ---------------------------------------------------------------------------------------------------
# Features


def units(**tests):
    import ast

    nodes = {n.name: n for text in (PARCELS, MONEY) for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    homes = {"price": "src/depot/money.py", "tax": "src/depot/money.py"}
    return [
        Unit(path=homes.get(n, "src/depot/parcels.py"), qualname=n, node=nodes[n], tests=frozenset(t.split()), on_import=False)
        for n, t in tests.items()
    ]


STABLE = [f"t{i}" for i in range(10)]


def test_features_grow_by_what_no_other_test_calls():
    found = propose(units(label="t1 t2", price="t1 t2", route="t3", weigh="t1 t2 t3 t4 t5 t6"), STABLE)
    names = [{q for _, q in f.units} for f in found]
    assert {"label", "price"} in names
    assert {"price"} in names
    assert {"route"} in names
    assert not [n for n in names if "weigh" in n]
    both = next(f for f in found if {q for _, q in f.units} == {"label", "price"})
    assert both.paths == ["src/depot/money.py", "src/depot/parcels.py"]


def feature(*pairs):
    return Feature(units=tuple(pairs), tests=frozenset({"t"}), lines=9)


def test_a_feature_in_two_files_is_cut_in_the_order_that_works():
    both = feature(("src/depot/money.py", "price"), ("src/depot/parcels.py", "label"))
    cut = cut_feature(DEPOT, both, DeleteLevel.DEFINITION)
    assert "price" not in cut.files["src/depot/parcels.py"]
    assert '__all__ = ["route", "weigh"]' in cut.files["src/depot/parcels.py"]
    assert {p: DEPOT[p] for p in cut.restoring} == dict(cut.restoring)
    assert cut.deleted_lines > 8
    alone = feature(("src/depot/money.py", "price"))
    with pytest.raises(Refusal, match="imports 'price'"):
        cut_feature(DEPOT, alone, DeleteLevel.DEFINITION)
    imports = {**DEPOT, "tests/test_more.py": "from depot.money import tax\n"}
    assert cut_feature(imports, feature(("src/depot/money.py", "tax")), DeleteLevel.DEFINITION, tests=["tests/test_more.py"])


def test_stubs_fill_every_unit():
    both = feature(("src/depot/money.py", "price"), ("src/depot/money.py", "tax"))
    text = with_bodies(cut_feature(DEPOT, both, DeleteLevel.BODY), "return None")["src/depot/money.py"]
    assert text.count("return None") == 2
    assert "divmod" not in text


def test_a_failure_must_name_the_feature():
    cut = cut_feature(DEPOT, feature(("src/depot/money.py", "tax")), DeleteLevel.DEFINITION, tests=())
    assert names_feature("AttributeError: module 'depot.money' has no attribute 'tax'", cut)
    assert not names_feature("ModuleNotFoundError: No module named 'taxes'", cut)


def test_prompts_name_places_and_hold_no_code():
    both = feature(("src/depot/money.py", "price"), ("src/depot/parcels.py", "label"))
    cut = cut_feature(DEPOT, both, DeleteLevel.DEFINITION)
    short = feature_prompt(cut.parts, cut.level, ["tests/test_depot.py"], terse=True)
    full = feature_prompt(cut.parts, cut.level, ["tests/test_depot.py"], terse=False)
    assert len(short) <= TERSE
    for text in (short, full):
        assert "price" in text
        assert "pytest tests/test_depot.py" in text
        assert "ljust" not in text
    assert "`label(parcel, sender)`" in full
    assert "Text of a label." in full


def test_prompts_say_what_a_signature_does_not():
    text = "class Parcel:\n    @property\n    def size(self):\n        if self.big:\n            return 2\n        return 1\n\n    x = 1\n"
    one = Feature(units=(("p.py", "Parcel.size"),), tests=frozenset({"t"}), lines=4)
    cut = cut_feature({"p.py": text}, one, DeleteLevel.DEFINITION)
    for terse in (True, False):
        assert "(@property)" in feature_prompt(cut.parts, cut.level, ["test_p.py"], terse=terse)


def test_no_two_tasks_are_decided_by_the_same_tests(made):
    _, root, _, _ = made
    decided = [frozenset(read_task(p).grader.fail_to_pass) for p in (root / "out").iterdir() if p.name != ".made"]
    assert len(set(decided)) == len(decided)


def test_copies_in_the_standard_library_are_found():
    import inspect
    import textwrap

    from etude.tasks.deletion import delete
    from etude.tasks.leaks import Prover

    text = textwrap.dedent(inspect.getsource(textwrap.shorten)) + "\n"
    cut = delete({"depot/short.py": text}, "depot/short.py", "shorten")
    leaks = Prover().find_installed([p for p in _installed_roots() if p.name == "textwrap.py"], [cut.fingerprint])
    assert [Path(leak.path).name for leak in leaks] == ["textwrap.py"]
    own = delete(DEPOT, "src/depot/parcels.py", "route")
    assert Prover().find_installed([p for p in _installed_roots() if p.suffix == ".py"], [own.fingerprint]) == []


def test_an_older_version_in_installed_code_is_found(tmp_path):
    from etude.tasks.deletion import delete
    from etude.tasks.leaks import Prover

    older = "def both(self, *sets):\n    cls = self.__class__ if self else dict\n    items = self\n    if sets:\n"
    older += "        common = set.intersection(*map(set, sets))\n        items = (each for each in self if each in common)\n"
    older += "    return cls(items)\n"
    newer = older.replace(
        "cls = self.__class__ if self else dict\n", "cls: type = dict\n    if isinstance(self, dict):\n        cls = type(self)\n"
    )
    newer = newer.replace("items = self\n", "items: Iterable[T] = self\n")
    cut = delete({"sets.py": newer}, "sets.py", "both")
    put(
        tmp_path,
        {"lib/sets.py": older, "lib/other.py": "def f(sets):\n    common = set.intersection(*map(set, sets))\n    return common\n"},
    )
    assert [Path(leak.path).name for leak in Prover().find_installed([tmp_path], [cut.fingerprint])] == ["sets.py"]
