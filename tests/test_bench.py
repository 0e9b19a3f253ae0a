"""`etude bench`: finds the script, compares fairly, and ends with an object that the schema describes."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from etude import bench
from etude.bench import Row
from etude.errors import EtudeError, UserError

SCHEMA = json.loads((Path(__file__).resolve().parents[1] / "docs" / "schemas" / "bench.json").read_text())
GOOD = """
from etude.bench import Row
def run(device, quick):
    print("measuring")
    return [
        Row(name="decode", unit="tokens/s", ours=900.0, peer=300.0, peer_name="naive", higher_is_better=True),
        Row(name="start", unit="ms", ours=5.0 if quick else 4.0, peer=2.0, peer_name="fork", higher_is_better=False),
        Row(name="alone", unit="ms", ours=5.0, higher_is_better=False),
    ]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bench_good.py").write_text(GOOD)
    return tmp_path


def test_the_last_line_is_the_object(folder, capsys):
    assert bench.main(name="good", quick=True, folder=folder) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    jsonschema.validate(result, SCHEMA)
    assert (result["bench"], result["device"]) == ("good", "cpu")
    assert [row["ratio"] for row in result["rows"]] == [3.0, 0.4, None]
    assert result["rows"][2]["peer"] is result["rows"][2]["peer_name"] is None
    assert result["versions"]["etude"]
    assert result["machine"]["cores"] >= 1
    assert lines[0] == "measuring"
    assert any("decode" in line and "3.00x" in line and "against naive" in line for line in lines)
    assert not (folder / "results").exists()


def test_a_full_run_is_written(folder, capsys):
    assert bench.main(name="good", write=True, folder=folder) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    written = json.loads((folder / "results" / "good.cpu.json").read_text())
    assert written == printed
    assert written["rows"][1]["ours"] == 4.0
    with pytest.raises(UserError, match="full runs only"):
        bench.main(name="good", quick=True, write=True, folder=folder)


def test_an_unknown_name_is_told_the_nearest(folder):
    with pytest.raises(UserError, match=r"no benchmark 'god' in .*; did you mean 'good'\?"):
        bench.main(name="god", folder=folder)


@pytest.mark.parametrize(
    "text, error, says",
    [
        ("x = 1\n", UserError, "has no function run"),
        ("import no_such_package\n", UserError, "needs something that is not installed: No module named 'no_such_package'"),
        ("def run(device, quick): return []\n", EtudeError, "should return a list of etude.bench.Row"),
        ("def run(device, quick): return [1]\n", EtudeError, "should return a list of etude.bench.Row"),
    ],
)
def test_a_broken_script_is_named(tmp_path, text, error, says):
    (tmp_path / "bench_broken.py").write_text(text)
    with pytest.raises(error, match=says):
        bench.main(name="broken", folder=tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused(value):
    with pytest.raises(UserError, match="'decode' of the benchmark measured"):
        Row(name="decode", unit="s", ours=value, higher_is_better=False)
    with pytest.raises(UserError, match="'decode' of the benchmark measured"):
        Row(name="decode", unit="s", ours=1.0, peer=value, peer_name="x", higher_is_better=False)


def test_a_peer_has_a_name_and_a_zero_gives_no_ratio():
    with pytest.raises(UserError, match="no peer_name"):
        Row(name="decode", unit="s", ours=1.0, peer=2.0, higher_is_better=False)
    assert Row(name="a", unit="s", ours=0.0, peer=2.0, peer_name="x", higher_is_better=False).ratio is None
    assert Row(name="a", unit="s", ours=2.0, peer=0.0, peer_name="x", higher_is_better=True).ratio is None


def test_a_model_is_given_to_benchmarks_that_take_one(tmp_path, capsys):
    (tmp_path / "bench_any.py").write_text(GOOD.replace("def run(device, quick):", "def run(device, quick, model=None):\n    print(model)"))
    assert bench.main(name="any", model="nano", write=True, folder=tmp_path) == 0
    assert "nano" in capsys.readouterr().out.splitlines()
    assert (tmp_path / "results" / "any-nano.cpu.json").is_file()
    (tmp_path / "bench_good.py").write_text(GOOD)
    with pytest.raises(UserError, match="leave --model out"):
        bench.main(name="good", model="nano", folder=tmp_path)


def test_every_benchmark_of_the_repository_can_be_loaded():
    folder = bench.benchmarks_folder()
    names = [p.stem.removeprefix("bench_") for p in folder.glob("bench_*.py")]
    assert "house" in names
    for name in names:
        assert callable(bench.load_benchmark(folder, name))


def test_the_house_benchmark_measures(capsys):
    assert bench.main(name="house", quick=True) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    assert {"import etude", "etude --help"} <= set(rows)
    assert all(row["ours"] > 0 for name, row in rows.items() if name != "launcher overhead")
