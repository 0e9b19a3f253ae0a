"""Config: a TOML and dotted overrides become frozen dataclasses, and every mistake is named."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given

from etude import config as cfg
from etude.errors import ConfigError


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@cfg.config
class Optim:
    lr: float = cfg.live(1e-3)
    betas: tuple[float, float] = (0.9, 0.95)
    name: Literal["adamw", "muon"] = "adamw"

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")


@cfg.config
class Run:
    steps: int
    seed: int = 0
    label: str = ""
    fast: bool = False
    limit: int | None = None
    color: Color = Color.RED
    sizes: tuple[int, ...] = ()
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    optim: Optim = dataclasses.field(default_factory=Optim)
    second: Optim | None = None


def load(text: str, overrides=(), *, tmp_path) -> Run:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return cfg.load(Run, path, overrides)


def test_a_toml_is_read_into_the_classes(tmp_path):
    run = load(
        'steps = 3\nlabel = "a"\ncolor = "blue"\nsizes = [1, 2]\n[weights]\na = 1\n[optim]\nlr = 1\nbetas = [0, 1]\n[second]\nlr = 2.0\n',
        tmp_path=tmp_path,
    )
    assert (run.steps, run.label, run.color, run.sizes) == (3, "a", Color.BLUE, (1, 2))
    assert run.weights == {"a": 1.0}
    assert run.optim == Optim(lr=1.0, betas=(0.0, 1.0))
    assert isinstance(run.optim.lr, float)
    assert run.second == Optim(lr=2.0)


def test_overrides_win_and_are_read_as_toml_values(tmp_path):
    words = ["steps=5", "optim.lr=3e-4", "label=nano", "fast=true", "sizes=[4, 5]", "optim.betas=[0.8, 0.9]", "limit=7", "weights.b=2"]
    run = load("steps = 3\n[optim]\nlr = 1.0\n", words, tmp_path=tmp_path)
    assert (run.steps, run.optim.lr, run.label, run.fast, run.sizes) == (5, 3e-4, "nano", True, (4, 5))
    assert run.optim.betas == (0.8, 0.9)
    assert run.weights == {"b": 2.0}
    assert run.limit == 7
    assert load("steps = 3\nlimit = 4\n", ["limit=none"], tmp_path=tmp_path).limit is None
    assert load("steps = 3\n", ['label="7"'], tmp_path=tmp_path).label == "7"
    assert load("steps = 3\n", ["label=a=b"], tmp_path=tmp_path).label == "a=b"


@pytest.mark.parametrize(
    "text, overrides, says",
    [
        ("stesp = 3\n", [], "unknown config key 'stesp'; did you mean 'steps'?"),
        ("steps = 3\n[optim]\nlearning = 1\n", [], "unknown config key 'optim.learning'; known: betas, lr, name"),
        ("steps = 3\n", ["optim.betsa=1"], "unknown config key 'optim.betsa'; did you mean 'betas'?"),
        ("", [], "config needs 'steps' (int)"),
        ("steps = 3.0\n", [], "steps should be int, got 3.0"),
        ("steps = true\n", [], "steps should be int, got True"),
        ('steps = "3"\n', [], "steps should be int, got '3'"),
        ("steps = 3\nfast = 1\n", [], "fast should be bool, got 1"),
        ("steps = 3\nlabel = 7\n", [], "label should be str, got 7"),
        ("steps = 3\nsizes = 4\n", [], "sizes should be a list, got 4"),
        ("steps = 3\nsizes = [1, 'a']\n", [], "sizes[1] should be int, got 'a'"),
        ("steps = 3\noptim = 4\n", [], "optim should be a table, got 4"),
        ("steps = 3\nweights = 4\n", [], "weights should be a table, got 4"),
        ("steps = 3\n[weights]\na = 'x'\n", [], "weights.a should be float, got 'x'"),
        ("steps = 3\n[optim]\nbetas = [0.9]\n", [], "optim.betas should have 2 items, got 1"),
        ("steps = 3\n[optim]\nname = 'adamm'\n", [], "optim.name is 'adamm'; did you mean 'adamw'?"),
        ("steps = 3\ncolor = 'blu'\n", [], "color is 'blu'; did you mean 'blue'?"),
        ("steps = 3\n[optim]\nlr = -1.0\n", [], "optim: lr must be above 0, got -1.0"),
        ("steps = \n", [], "is not TOML"),
        ("steps = 3\n", ["steps"], "override 'steps' should look like trainer.lr=3e-4"),
        ("steps = 3\n", ["=3"], "should look like"),
        ("steps = 3\n", ["steps.a=1"], "'steps' is a value, not a table"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, overrides, says):
    with pytest.raises(ConfigError) as error:
        load(text, overrides, tmp_path=tmp_path)
    assert says in str(error.value)


def test_a_missing_file_and_one_that_is_not_text_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no config file at .*nowhere\.toml"):
        cfg.load(Run, tmp_path / "nowhere.toml")
    path = tmp_path / "binary.toml"
    path.write_bytes(b"a = '\xff\xfe'\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        cfg.load(Run, path)
    with pytest.raises(ConfigError, match="no config file"):
        cfg.load(Run, tmp_path)


OPTIM = st.builds(
    Optim,
    lr=st.floats(1e-9, 1e3),
    betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    name=st.sampled_from(["adamw", "muon"]),
)
RUNS = st.builds(
    Run,
    steps=st.integers(-(2**63), 2**63),
    seed=st.integers(0, 2**63),
    label=st.text(max_size=8),
    fast=st.booleans(),
    limit=st.none() | st.integers(-9, 9),
    color=st.sampled_from(Color),
    sizes=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    weights=st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    optim=OPTIM,
    second=st.none() | OPTIM,
)


@given(run=RUNS)
def test_the_resolved_config_gives_the_same_config_again(run):
    stored = json.loads(json.dumps(cfg.resolved(run)))
    assert cfg.build(Run, stored) == run


@given(run=RUNS, lr=st.floats(1e-9, 1e3), steps=st.integers(-(2**40), 2**40))
def test_an_override_changes_its_field_and_no_other(run, lr, steps):
    data = json.loads(json.dumps(cfg.resolved(run)))
    changed = cfg.build(Run, {**data, "steps": steps, "optim": {**data["optim"], "lr": lr}})
    differing = cfg.changed_fields(run, changed)
    assert set(differing) <= {"steps", "optim.lr"}
    assert ("steps" in differing) == (steps != run.steps)
    assert ("optim.lr" in differing) == (lr != run.optim.lr)


def test_a_change_is_live_only_where_the_field_says_so():
    old = Run(steps=1)
    new = Run(steps=2, optim=Optim(lr=5.0))
    assert cfg.changed_fields(old, new) == {"steps": False, "optim.lr": True}
    assert cfg.changed_fields(old, old) == {}


def test_the_resolved_config_is_written_whole(tmp_path):
    path = tmp_path / "config.json"
    cfg.write_resolved(Run(steps=1, label="env:TOKEN"), path)
    data = json.loads(path.read_text())
    assert set(data) == {f.name for f in dataclasses.fields(Run)}
    assert data["label"] == "env:TOKEN"
    assert data["optim"]["betas"] == [0.9, 0.95]


def test_config_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Run(steps=1).steps = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        Run(1)  # type: ignore[misc]


def test_a_secret_is_a_reference_to_the_environment(monkeypatch):
    monkeypatch.setenv("ETUDE_TEST_TOKEN", "hush")
    assert cfg.secret("env:ETUDE_TEST_TOKEN") == "hush"
    with pytest.raises(ConfigError, match="ETUDE_TEST_OTHER is not set"):
        cfg.secret("env:ETUDE_TEST_OTHER")
    for text in ("hush", "env:", "file:x"):
        with pytest.raises(ConfigError, match="written as env:NAME"):
            cfg.secret(text)
