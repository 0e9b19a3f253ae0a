"""Pretraining: phases, resume, early stop, the loss curve, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from etude.config import load
from etude.errors import CheckpointError, ConfigError, UserError
from etude.model.config import RopeScaling
from etude.model.weights import from_config, load_model, read_config, save_model
from etude.optim.config import OptimConfig
from etude.optim.schedules import ScheduleConfig
from etude.trainer.config import PhaseConfig, PretrainConfig
from etude.trainer.documents import write_documents
from etude.trainer.losses import Divergence
from etude.trainer.pretrain import Point, fit_log_compute, latest_checkpoint, pretrain


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents with a simple law (next = 3 * last + 1 mod 48), so that a tiny model learns something in a few steps."""
    folder = tmp_path_factory.mktemp("documents")
    rng = np.random.default_rng(0)

    def document():
        ids = [int(rng.integers(48))]
        for _ in range(int(rng.integers(10, 60))):
            ids.append((3 * ids[-1] + 1) % 48)
        return ids, None

    write_documents(folder / "train.npz", [document() for _ in range(200)])
    write_documents(folder / "held.npz", [document() for _ in range(20)])
    return folder


def config_of(make, data, kind="moe", **changes):
    shared = {"data": str(data / "train.npz"), "batch_tokens": 512, "lr": 1e-2}
    phases = (
        PhaseConfig(name="bulk", tokens=6 * 512, length=32, schedule=ScheduleConfig(kind="cosine", warmup=0.1), **shared),
        PhaseConfig(name="long", tokens=3 * 512, length=64, optim=OptimConfig(kind="muon"), **shared),
        PhaseConfig(name="sft", tokens=2 * 512, length=64, optim=OptimConfig(kind="adamw"), **shared),
    )
    values = {"phases": phases, "model": make.shapes[kind], "held_out": str(data / "held.npz"), "row_tokens": 256, "eval_every": 4}
    return PretrainConfig(**{**values, "save_every": 5, **changes})


def parameters(folder):
    return dict(load_model(folder).named_parameters())


@pytest.mark.parametrize("kind", ["dense", "moe", "latent"])
def test_three_phases_lower_the_held_out_loss(make, data, tmp_path, kind):
    lines = []
    result = pretrain(config_of(make, data, kind), tmp_path, progress=lines.append)
    assert [p for p, _ in zip(dict.fromkeys(line["phase"] for line in lines), range(9))] == ["bulk", "long", "sft"]
    assert result.curve[-1].loss < result.curve[0].loss < np.log(48) + 0.1
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert read_config(result.model) == make.shapes[kind]
    assert 11 * 512 <= result.tokens < 11 * 512 * 1.1
    assert result.steps == 11
    assert sum(line["seconds"] >= 0 for line in lines) == result.steps
    if kind == "moe":
        assert all(0 < line["load_entropy"] <= 1 for line in lines)
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert len(curve["points"]) == len(result.curve)
    assert curve["fit"]["b"] < 0, "loss falls with log compute"
    origin = json.loads((result.model / "provenance.json").read_text())
    assert origin["share_ours"] == 1.0
    assert origin["stages"][0]["flops"] == result.flops > 0


def test_the_bias_of_sigmoid_routers_evens_out_the_load(make, data, tmp_path):
    """A start at which one expert of each group gets nearly everything; without the bias it stays so, since nothing else pays for it."""
    shape = dataclasses.replace(make.shapes["latent"], balance_weight=0.0, route_groups=1, route_groups_kept=1, experts_per_token=1)
    start = from_config(shape, seed=0)
    start.get_parameter("layers.1.mlp.gate.e_score_correction_bias").data.copy_(torch.tensor([0.3, 0.1, 0.1, 0.0]))
    save_model(start, tmp_path / "start", dtype=torch.float32)

    def loads(speed):
        lines = []
        phase = PhaseConfig(name="bulk", data=str(data / "train.npz"), tokens=14 * 512, length=64, batch_tokens=512, lr=1e-4)
        config = PretrainConfig(phases=(phase,), base=str(tmp_path / "start"), row_tokens=256, router_bias_speed=speed)
        pretrain(config, tmp_path / f"{speed}", progress=lines.append)
        return [line["load_entropy"] for line in lines]

    still, moved = loads(0.0), loads(0.03)
    assert max(still) < 0.3
    assert moved[0] == still[0]
    assert max(moved) > 0.6


def test_the_step_of_a_bias_is_a_sign(make):
    model = make.tiny("latent")
    bias_E = model.get_parameter("layers.1.mlp.gate.e_score_correction_bias")
    before = bias_E.detach().clone()
    model.even_out(torch.tensor([[10, 2, 4, 0]]), 0.5)
    assert torch.equal(bias_E, before + torch.tensor([-0.5, 0.5, 0.0, 0.5]))
    with pytest.raises(ConfigError, match="router_bias_speed is 2"):
        PretrainConfig(phases=(PhaseConfig(name="a", data="x", tokens=1, length=2),), base="nano", router_bias_speed=2)


def test_the_seed_decides_everything(make, data, tmp_path):
    a = pretrain(config_of(make, data), tmp_path / "a")
    b = pretrain(config_of(make, data), tmp_path / "b")
    c = pretrain(config_of(make, data, seed=1), tmp_path / "c")
    assert a.weights == b.weights != c.weights
    assert a.curve == b.curve


@pytest.mark.parametrize("killed_at", [3, 7, 11])
def test_resume_equals_uninterrupted_bit_for_bit(make, data, tmp_path, killed_at):
    """Killed in the bulk before any checkpoint, in the bulk after one, and in a later phase."""
    whole = pretrain(config_of(make, data), tmp_path / "whole")

    class Killed(Exception):
        pass

    def kill(line):
        if line["step"] == killed_at:
            raise Killed

    with pytest.raises(Killed):
        pretrain(config_of(make, data), tmp_path / "cut", progress=kill)
    last = latest_checkpoint(tmp_path / "cut")
    assert (last.name if last else None) == {3: None, 7: "step-5", 11: "step-10"}[killed_at]
    (tmp_path / "cut" / "checkpoints" / "step-999.tmp").mkdir(parents=True)
    lines = []
    resumed = pretrain(config_of(make, data), tmp_path / "cut", progress=lines.append)
    assert lines[0]["step"] == {3: 1, 7: 6, 11: 11}[killed_at]
    assert resumed.weights == whole.weights
    assert resumed.curve == whole.curve
    assert resumed.flops == whole.flops
    assert not list((tmp_path / "cut" / "checkpoints").glob("*.tmp"))


def test_documents_may_move_but_not_change_before_a_resume(make, data, tmp_path):
    def moved(name, documents):
        phase = PhaseConfig(name="bulk", data=str(tmp_path / name), tokens=1500, length=32, batch_tokens=512, optim=OptimConfig())
        write_documents(tmp_path / name, documents)
        return config_of(make, data, "dense", phases=(phase,), stop_tokens=600)

    documents = [(list(range(i, i + 20)), None) for i in range(28)] * 3
    pretrain(moved("here.npz", documents), tmp_path / "out")
    pretrain(moved("there.npz", documents), tmp_path / "out")
    with pytest.raises(CheckpointError, match="another config or on other documents"):
        pretrain(moved("here.npz", documents[1:]), tmp_path / "out")


def test_phases_that_have_not_begun_may_change_at_a_resume_and_others_may_not(make, data, tmp_path):
    whole = config_of(make, data)
    pretrain(dataclasses.replace(whole, stop_tokens=600), tmp_path / "out")
    first, *rest = whole.phases
    changed = dataclasses.replace(whole, phases=(first, dataclasses.replace(rest[0], lr=rest[0].lr / 2)))
    assert pretrain(changed, tmp_path / "out").tokens > 600
    pretrain(dataclasses.replace(whole, stop_tokens=600), tmp_path / "other")
    with pytest.raises(CheckpointError, match="another config or on other documents"):
        pretrain(dataclasses.replace(whole, phases=(dataclasses.replace(first, lr=first.lr / 2), *rest)), tmp_path / "other")


def test_a_token_budget_stops_early_and_can_be_raised_later(make, data, tmp_path):
    whole = pretrain(config_of(make, data), tmp_path / "whole")
    part = pretrain(config_of(make, data, stop_tokens=2000), tmp_path / "part")
    assert 2000 <= part.tokens < 2000 + 512
    assert part.curve[-1].step == part.steps
    rest = pretrain(config_of(make, data), tmp_path / "part")
    assert rest.weights == whole.weights


def test_going_on_from_a_base_keeps_its_origin(make, data, tmp_path):
    first = pretrain(config_of(make, data, stop_tokens=1000), tmp_path / "a")
    second = pretrain(config_of(make, data, model=None, base=str(first.model), stop_tokens=1000), tmp_path / "b")
    stages = json.loads((second.model / "provenance.json").read_text())["stages"]
    assert [s["kind"] for s in stages] == ["pretrain", "pretrain"]
    assert stages[1]["weights"]
    assert second.curve[0].loss < first.curve[0].loss


def test_a_base_may_be_given_by_name(make, data, tmp_path, monkeypatch):
    monkeypatch.setenv("ETUDE_HOME", str(tmp_path / "home"))
    first = pretrain(config_of(make, data, stop_tokens=1000), tmp_path / "a")
    shutil.copytree(first.model, tmp_path / "home" / "models" / "first")
    (tmp_path / "home" / "models" / "first" / "tokenizer.json").write_text("{}")
    second = pretrain(config_of(make, data, model=None, base="first", stop_tokens=1000), tmp_path / "b")
    assert len(json.loads((second.model / "provenance.json").read_text())["stages"]) == 2
    assert (second.model / "tokenizer.json").exists()
    with pytest.raises(CheckpointError, match="no model 'frist'; did you mean 'first'"):
        pretrain(config_of(make, data, model=None, base="frist"), tmp_path / "c")


def test_old_checkpoints_are_removed(make, data, tmp_path):
    pretrain(config_of(make, data, save_every=2), tmp_path)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_bfloat16_autocast_trains_float32_weights(make, data, tmp_path):
    lines = []
    result = pretrain(config_of(make, data, "dense", precision="bfloat16", save_dtype="float32"), tmp_path, progress=lines.append)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(p.dtype == torch.float32 for p in parameters(result.model).values())


def test_what_cannot_work_is_refused_with_a_remedy(make, data, tmp_path):
    with pytest.raises(ConfigError, match="not both and not neither"):
        config_of(make, data, base="x")
    with pytest.raises(ConfigError, match="row_tokens = 16"):
        config_of(make, data, row_tokens=16)
    write_documents(tmp_path / "foreign.npz", [([1, 60], None)])
    phase = PhaseConfig(name="bulk", tokens=100, length=8, data=str(tmp_path / "foreign.npz"))
    with pytest.raises(UserError, match=r"token id 60.*ends at 47"):
        pretrain(config_of(make, data, phases=(phase,)), tmp_path / "x")
    pretrain(config_of(make, data, stop_tokens=600), tmp_path / "y")
    with pytest.raises(CheckpointError, match="another config"):
        pretrain(config_of(make, data, seed=9), tmp_path / "y")
    with pytest.raises(CheckpointError, match="already holds"):
        pretrain(config_of(make, data), tmp_path / "y", resume=False)


def test_divergence_stops_with_the_step_named(make, data, tmp_path):
    wild = PhaseConfig(name="wild", data=str(data / "train.npz"), tokens=20_000, length=32, batch_tokens=512, lr=1e30, optim=OptimConfig())
    with pytest.raises(Divergence, match=r"phase 'wild', step \d+: .* is (nan|inf)"):
        pretrain(config_of(make, data, "dense", phases=(wild,)), tmp_path)


def test_config_reads_from_one_toml(make, data, tmp_path):
    path = tmp_path / "pretrain.toml"
    path.write_text(
        f"""
seed = 3
base = "models/nano"
[[phases]]
name = "bulk"
data = "{data / "train.npz"}"
tokens = 1000
length = 32
schedule = {{ kind = "wsd", warmup = 0.02, decay = 0.3 }}
optim = {{ kind = "muon", weight_decay = 0.1 }}
[[phases]]
name = "sft"
data = "{data / "train.npz"}"
tokens = 500
length = 64
optim = {{ kind = "adamw" }}
"""
    )
    config = load(PretrainConfig, path, ["row_tokens=128"])
    assert [p.optim.kind for p in config.phases] == ["muon", "adamw"]
    assert config.row_tokens == 128


def long_phases(data, **changes):
    """The context doubles in the second phase, with slower waves; the model allows no more than the first one needs."""
    shared = {"data": str(data / "train.npz"), "probe": str(data / "held.npz"), "batch_tokens": 512, "lr": 1e-2}
    return (
        PhaseConfig(name="bulk", tokens=3 * 512, length=32, **shared),
        PhaseConfig(name="long", tokens=3 * 512, length=64, **{**shared, "rope_theta": 40_000.0, "max_positions": 64, **changes}),
        PhaseConfig(name="sft", tokens=2 * 512, length=32, **{**shared, "probe": ""}),
    )


@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_a_phase_of_longer_contexts_turns_slower_and_every_probe_is_read_after_every_phase(make, data, tmp_path, kind):
    shape = dataclasses.replace(make.shapes[kind], max_positions=32)
    scaling = RopeScaling(kind="yarn", factor=2.0, original_positions=32, mscale_all_dim=1.0)
    config = config_of(make, data, phases=long_phases(data, rope_scaling=scaling), model=shape, row_tokens=128)
    result = pretrain(config, tmp_path / "whole")
    expected = dataclasses.replace(shape, rope_theta=40_000.0, max_positions=64, rope_scaling=scaling)
    assert read_config(result.model) == expected
    read = [(p.after, p.probe) for p in result.probes]
    assert read == [("", "bulk"), ("bulk", "bulk"), ("long", "bulk"), ("long", "long"), ("sft", "bulk"), ("sft", "long")]
    assert result.probes[-2].loss < result.probes[0].loss
    points = json.loads((tmp_path / "whole" / "curve.json").read_text())
    assert [(p["after"], p["probe"]) for p in points["probes"]] == read

    class Killed(Exception):
        pass

    def watch(line):
        if line["step"] == 5:
            raise Killed

    with pytest.raises(Killed):
        pretrain(dataclasses.replace(config, save_every=2), tmp_path / "cut", progress=watch)
    again = pretrain(dataclasses.replace(config, save_every=2), tmp_path / "cut")
    assert (again.weights, again.probes) == (result.weights, result.probes)


def test_a_phase_beyond_the_models_context_says_what_to_set(make, data, tmp_path):
    shape = dataclasses.replace(make.shapes["dense"], max_positions=32)
    with pytest.raises(UserError, match=r"phase 'long' has length 64, which exceeds the model's max_positions = 32; set the phase's"):
        pretrain(config_of(make, data, phases=long_phases(data, max_positions=0), model=shape), tmp_path)


def test_log_compute_fit_recovers_a_line():
    points = tuple(Point(phase="p", step=i, tokens=i, flops=10.0**i, loss=5 - 0.5 * i) for i in range(1, 5))
    assert fit_log_compute(points) == pytest.approx({"a": 5.0, "b": -0.5, "r2": 1.0})
    assert fit_log_compute(points[:2]) is None
