"""`etude debug mismatch` on whole small runs: silence where nothing differs, and the name of what was planted where something does."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from etude import cli, debug
from etude.config import build, write_resolved
from etude.errors import UserError
from etude.events import EventLog
from etude.inference.engine import EngineConfig
from etude.model.config import ModelConfig
from etude.model.transformer import Decoder
from etude.model.weights import load_model, save_model
from etude.parts import RunConfig, make_engine, make_trainer
from etude.protocols import GenerateRequest
from etude.records import Graded, Group, Sampling, Segment, StopReason, Trajectory, Version, seed_for
from etude.rollout.recorder import Recorder
from etude.rollout.shards import ShardReader, ShardWriter

SCHEMA = Path(__file__).resolve().parents[1] / "docs" / "schemas" / "mismatch.json"
SHAPE = ModelConfig(
    vocab_size=48, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, experts=8, experts_per_token=2, expert_intermediate=24,
    shared_intermediate=16, qkv_bias=True, norm_topk=True, max_positions=256, family="qwen2_moe",
)  # fmt: skip
STEPS = 3


async def segment_of(engine: Any, admission: int, member: int) -> Segment:
    prompt = np.random.default_rng([admission]).integers(0, 48, 9).tolist()
    sampling = Sampling(max_tokens=24, seed=seed_for(admission, member))
    out = await engine.generate(GenerateRequest(id=f"{admission}-{member}", ids=tuple(prompt), sampling=sampling))
    sampled = [False] * 9 + [True] * len(out.ids)
    logprob = np.array([0.0] * 9 + out.logprob_t1_T.tolist(), dtype=np.float32)
    return Segment(
        ids_T=np.array([*prompt, *out.ids], dtype=np.int32),
        sampled_T=np.array(sampled),
        logprob_T=logprob,
        logprob_t1_T=logprob,
        version_T=np.array([-1] * 9 + out.version_T.tolist(), dtype=np.int16),
        message_T=np.zeros(len(sampled), dtype=np.int32),
        thinking_T=np.zeros(len(sampled), dtype=bool),
        versions=out.versions,
        routes_TLK=out.routes_PTLK,
        sampling=sampling,
    )


async def learn(config: RunConfig, run: Path) -> None:
    """The loop without sandboxes: real engine, trainer, weight chain, recorder and checkpoints; groups are one step old from step 1 on,
    and the engine's tokens are of two versions where a swap came in between."""
    engine = make_engine(folder=config.model, engine=config.engine, numerics=config.numerics, version=None)
    trainer = make_trainer(folder=config.model, trainer=config.trainer, store=str(run / "weights"))
    recorder = Recorder(run)

    async def roll(step: int) -> list[Group]:
        groups = []
        for admission in (2 * step, 2 * step + 1):
            segments = await asyncio.gather(*(segment_of(engine, admission, member) for member in range(3)))
            members = []
            for member, segment in enumerate(segments):
                trajectory = Trajectory(
                    id=f"0-{admission}-{member}", task_id="t", task_hash="h", group=admission, member=member, seed=0,
                    segments=(segment,), messages=(), stop=StopReason.DONE,
                )  # fmt: skip
                members.append(Graded(trajectory=trajectory, parts={"tests": float(member == 0)}))
                recorder.rollout_ended(admission, member, members[-1])
            now: Version = await engine.version()
            groups.append(Group(admission=admission, task_id="t", admitted_at=now, members=tuple(members)))
        return groups

    rolling = asyncio.create_task(roll(0))
    for step in range(STEPS):
        groups = await rolling
        rolling = asyncio.create_task(roll(step + 1))
        for _ in range(8):
            await asyncio.sleep(0)
        report = await trainer.step(groups)
        manifest, store = await trainer.publish()
        served = await engine.load(manifest, store)
        await trainer.commit(served)
        await trainer.save(run / "checkpoints" / f"step-{step + 1}")
        recorder.step(step, report, manifest, served, groups)
    await rolling
    await engine.close()
    await trainer.close()
    recorder.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("debug")
    model = Decoder(SHAPE)
    model.init_weights(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    save_model(model, folder / "model")
    trainer = {"lr": 3e-3, "kl": 0.0, "numerics": "invariant", "row_tokens": 96, "loss_constant": 16.0}
    config = build(RunConfig, {"model": str(folder / "model"), "numerics": "invariant", "trainer": trainer})
    write_resolved(config, folder / "config.json")
    assert config.engine == EngineConfig()
    torch.set_num_threads(1)
    asyncio.run(learn(config, folder))
    return folder


def found(run: Path, step: int, *overrides: str) -> dict[str, Any]:
    answer = debug.find(run, step, overrides)
    jsonschema.validate(json.loads(json.dumps(answer)), json.loads(SCHEMA.read_text()))
    return answer


@pytest.mark.parametrize("step", range(STEPS))
def test_nothing_differs_where_nothing_should(run, step):
    """Invariant numerics, with stale groups: each token is compared under the weights that sampled it."""
    answer = found(run, step)
    assert (answer["first"], answer["first_layer"], answer["weights_differ"]) == (None, None, 0)
    assert [layer["max_delta_hidden"] for layer in answer["layers"]] == [0.0] * 3
    assert answer["dlogp"]["between"]["max"] == 0.0
    assert answer["dlogp"]["engine"]["max"] == answer["dlogp"]["trainer"]["max"] == answer["routes_differ"] == 0.0
    assert answer["tokens"] + answer["left_out"] == 2 * 3 * 24
    assert answer["positions"] + answer["left_out"] == 2 * 3 * 32, "all but the last token of each segment"
    assert (answer["left_out"] > 0) == (len(answer["versions"]) > 1) == (step > 0)
    assert answer["reported"].keys() >= {"dlogp_p99", "route_replaced"}


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_planted_expert_is_named(run, tmp_path, layer, capsys):
    """One expert of the checkpoint is not what was published: its layer and number are named, and where routes first part."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for step in (1, 2):
        folder = copy / "checkpoints" / f"step-{step}" / "model"
        model = load_model(folder)
        with torch.no_grad():
            model.layers[layer].mlp.experts.down_proj[5].mul_(1.5)
        save_model(model, folder)
    answer = found(copy, 2)
    assert answer["first_layer"] == layer
    assert [row["max_delta_hidden"] for row in answer["layers"][:layer]] == [0.0] * layer
    assert all(row["max_delta_hidden"] > 0 for row in answer["layers"][layer:])
    assert {(w["tensor"], w["expert"]) for w in answer["weights"]} == {(f"layers.{layer}.mlp.experts.down_proj", 5)}
    assert answer["dlogp"]["between"]["max"] > 1e-3
    if layer < 2:
        assert answer["first"] is not None
        assert answer["first"]["layer"] > layer
        assert answer["first"]["recorded"] != answer["first"]["recomputed"]
        assert answer["routes_differ"] > 0
    assert cli.main(["debug", "mismatch", str(copy), "2"]) == 0
    out = capsys.readouterr().out
    assert f"layers.{layer}.mlp.experts.down_proj expert 5" in out
    assert "<- first beyond rounding" in out


def test_other_numerics_can_be_asked_for(run, capsys):
    """A bfloat16 trainer beside a float32 engine: every layer differs, none by more than rounding; the engine still agrees with itself."""
    answer = found(run, 0, "trainer.compute_dtype=bfloat16")
    assert all(layer["max_delta_hidden"] > 0 for layer in answer["layers"])
    assert answer["first_layer"] is None
    assert answer["dlogp"]["engine"]["max"] == 0.0
    assert 1e-3 < answer["dlogp"]["trainer"]["max"] == answer["dlogp"]["between"]["max"]
    assert cli.main(["debug", "mismatch", str(run), "0", "--json", "numerics=fast"]) == 0
    fast = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert fast["dlogp"]["between"]["max"] < 1e-4


def test_routes_that_were_recorded_wrong_are_found_where_they_are(run, tmp_path):
    """A record that names other experts at one position and layer; the newest record of an id counts."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    graded = ShardReader(copy / "trajectories").get("0-1-2")
    (segment,) = graded.trajectory.segments
    routes = segment.routes_TLK.copy()
    routes[17, 1] = (routes[17, 1] + 1) % 8
    with ShardWriter(copy / "trajectories") as writer:
        writer.add(graded.replace(trajectory=graded.trajectory.replace(segments=(segment.replace(routes_TLK=routes),))))
    answer = found(copy, 0)
    first = answer["first"]
    assert (first["trajectory"], first["segment"], first["position"], first["layer"]) == ("0-1-2", 0, 17, 1)
    assert first["recorded"] == sorted(routes[17, 1].tolist())
    assert answer["routes_differ"] == pytest.approx(1 / answer["positions"])


def test_steps_and_runs_that_are_not_there(run, tmp_path):
    with pytest.raises(UserError, match="has not taken step 7"):
        debug.find(run, 7)
    with pytest.raises(UserError, match="no run folder"):
        debug.find(tmp_path, 0)
    shutil.copy(run / "config.json", tmp_path)
    (tmp_path / "trajectories").mkdir()
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("step", step=0, version="v", metrics={}, seconds=0.0)
    with pytest.raises(UserError, match="nothing was sampled"):
        debug.find(tmp_path, 0)
