"""Whole runs with the real engine, trainer and sandboxes on a tiny random policy: lockstep is the same bits, however it is run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from etude.config import build
from etude.debug import find
from etude.errors import CheckpointError, UserError
from etude.events import read_events
from etude.launch import train
from etude.rollout.check import check_run
from etude.sandbox.probe import probe

pytestmark = pytest.mark.skipif(not probe().works, reason="needs user namespaces; see `etude doctor`")

SMALL = {
    "recipe": "tiny",
    "max_running": 8,
    "loop": {"steps": 4, "groups_per_step": 2, "group_size": 3, "max_staleness": 1, "checkpoint_every": 1},
    "agent": {"prompt": "none", "instructions": False, "max_turns": 3, "max_tokens": 96, "max_turn_tokens": 48, "window": 2048},
    "engine": {"cache_bytes": 2**24},
    "trainer": {"lr": 1e-2, "kl": 0.0, "loss_constant": 16.0},
    "rewards": {"tool_error": 0.5, "tool_error_most": 5.0, "length": 0.0},
    "eval": {"heldout": 0, "unseen": 0},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random mixture of experts. Its tokenizer has whole calls as tokens, so it makes some, good and bad, and rewards differ."""
    from etude.model.config import ModelConfig
    from etude.model.transformer import Decoder
    from etude.model.weights import save_model
    from etude.text.calls import format_call
    from etude.text.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("policy")
    train_tokenizer([format_call("read_file", {"path": "ops.py"})] * 9, 320).save(folder)
    config = ModelConfig(
        vocab_size=320,
        hidden=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        experts=4,
        experts_per_token=2,
        expert_intermediate=16,
        shared_intermediate=16,
        norm_topk=True,
        family="qwen2_moe",
    )
    model = Decoder(config)
    model.init_weights(0)
    save_model(model, folder)
    return folder


def write_recipe(folder: Path, policy: Path, **loop: Any) -> Path:
    from etude.parts import RunConfig

    data = SMALL | {"model": str(policy), "loop": {**SMALL["loop"], **loop}}  # type: ignore[dict-item]
    build(RunConfig, data)
    lines = [f"{k} = {json.dumps(v)}" for k, v in data.items() if not isinstance(v, dict)]
    for name, table in data.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    path = folder / "run.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "etude.cli", *words]


def run_command(cwd: Path, *words: str) -> None:
    done = subprocess.run(command(*words), cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def steps(run: Path) -> dict[int, tuple[dict[str, float], str]]:
    """step -> (metrics, hash of the weights), the last word of the log on each."""
    events = list(read_events(run / "events.jsonl"))
    hashes = {e["step"]: e["hash"] for e in events if e["kind"] == "published"}
    return {e["step"]: (e["metrics"], hashes[e["step"]]) for e in events if e["kind"] == "step"}


def weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step}" / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_killed_and_resumed_in_lockstep_gives_the_same_bits(tmp_path: Path, policy: Path) -> None:
    """Killed twice, at random moments of the whole run: in rollouts, steps, checkpoints, between them, or at the resume itself."""
    recipe = write_recipe(tmp_path, policy, schedule="lockstep", steps=6)
    began = time.monotonic()
    run_command(tmp_path, "train", str(recipe), "--name", "whole")
    took = time.monotonic() - began
    killed = tmp_path / "runs" / "killed"
    for words in (("train", str(recipe), "--name", "killed"), ("train", "--resume", str(killed))):
        process = subprocess.Popen(command(*words), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not any(p.suffix != ".tmp" for p in killed.glob("checkpoints/step-*")):
            assert process.poll() is None, "the run ended before its first checkpoint"
            time.sleep(0.02)
        after = random.Random().random() * took
        print(f"{words}: killed after {after:.2f} s")
        time.sleep(after)
        process.kill()
        process.wait()
    run_command(tmp_path, "train", "--resume", str(killed))
    whole, again = steps(tmp_path / "runs" / "whole"), steps(killed)
    assert set(whole) == set(again) == set(range(6))
    assert len({h for _, h in whole.values()}) > 1, "nothing was learned, so nothing was compared"
    for step in whole:
        assert again[step] == whole[step], f"step {step} differs"
    assert weights(killed, 6) == weights(tmp_path / "runs" / "whole", 6)
    for run in ("whole", "killed"):
        report = check_run(tmp_path / "runs" / run)
        assert report.ok, report.problems


@pytest.mark.slow
def test_a_run_that_was_resumed_can_be_computed_again(tmp_path: Path, policy: Path) -> None:
    """`etude debug mismatch` on a real run: in lockstep every token of every step is found again to the last bit, in a new lineage too."""
    recipe = write_recipe(tmp_path, policy, schedule="lockstep")
    run_command(tmp_path, "train", str(recipe), "--name", "a")
    run = tmp_path / "runs" / "a"
    shutil.rmtree(run / "checkpoints" / "step-4")
    run_command(tmp_path, "train", "--resume", str(run))
    assert any(e["kind"] == "group_trained" and e["lineage"] == 1 for e in read_events(run / "events.jsonl"))
    for step in range(4):
        answer = find(run, step)
        assert answer["tokens"] > 0
        assert answer["tokens"] >= steps(run)[step][0]["sampled_tokens"], "silent groups too"
        assert (answer["first"], answer["first_layer"], answer["weights_differ"], answer["left_out"]) == (None, None, 0, 0)
        assert {d["max"] for d in answer["dlogp"].values()} == {0.0}


@pytest.mark.slow
def test_staleness_zero_equals_a_plain_synchronous_loop(tmp_path: Path, policy: Path) -> None:
    recipe = write_recipe(tmp_path, policy, schedule="lockstep", max_staleness=0, steps=3)
    run_command(tmp_path, "train", str(recipe), "--name", "loop")
    plain = asyncio.run(plain_loop(recipe, tmp_path / "plain"))
    assert [h for _, h in steps(tmp_path / "runs" / "loop").values()] == plain
    assert len(set(plain)) > 1


async def plain_loop(recipe: Path, folder: Path) -> list[str]:
    """Rollouts one after the other, then a step, then new weights in the engine: nothing is concurrent."""
    from etude import local
    from etude.config import load
    from etude.parts import RunConfig
    from etude.records import Group, seed_for

    config = load(RunConfig, recipe, ["processes=one"])
    folder.mkdir()
    run, _ = await local.open_run(config, folder)
    hashes = []
    try:
        rollout, admission = run.rollout("-"), 0
        for _ in range(config.loop.steps):
            groups = []
            for _ in range(config.loop.groups_per_step):
                task = run.tasks.next()
                seeds = [seed_for(config.seed, "rollout", admission, m) for m in range(config.loop.group_size)]
                members = [await rollout(task, group=admission, member=m, seed=s) for m, s in enumerate(seeds)]
                version = await run.engine.version()
                groups.append(Group(admission=admission, task_id=task.id, admitted_at=version, members=tuple(members)))
                admission += 1
            await run.trainer.step(groups)
            manifest, store = await run.trainer.publish()
            await run.trainer.commit(await run.engine.load(manifest, store))
            hashes.append(manifest.version.hash)
            for group in groups:
                run.tasks.feedback(group)
    finally:
        await local.close_run(run)
    return hashes


@pytest.mark.slow
def test_free_mode_killed_and_resumed_loses_nothing(tmp_path: Path, policy: Path) -> None:
    recipe = write_recipe(tmp_path, policy, steps=6)
    process = subprocess.Popen(command("train", str(recipe), "--name", "killed"), cwd=tmp_path, stdout=subprocess.DEVNULL)
    killed = tmp_path / "runs" / "killed"
    while not (killed / "checkpoints" / "step-2").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    run_command(tmp_path, "train", "--resume", str(killed))
    report = check_run(killed)
    assert report.ok, report.problems
    assert report.counts["resumes"] == 1
    saved = json.loads((killed / "report.json").read_text())
    assert abs(sum(saved["time"].values()) - saved["wall_s"]) < 0.01


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path, policy: Path) -> None:
    recipe = write_recipe(tmp_path, policy, steps=50)
    process = subprocess.Popen(
        command("train", str(recipe), "--name", "stopped"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    run = tmp_path / "runs" / "stopped"
    while not (run / "checkpoints" / "step-1").exists():
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    ended = list(read_events(run / "events.jsonl"))[-1]
    assert ended["kind"] == "run_ended"
    assert ended["outcome"] == "interrupted"
    assert "--resume" in ended["detail"]
    assert check_run(run).ok


def test_bad_input_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no recipe 'nosuch'"):
        train(recipe="nosuch")
    with pytest.raises(CheckpointError, match="no model at"):
        train(recipe=str(write_recipe(tmp_path, tmp_path / "nowhere")))
    with pytest.raises(UserError, match="no run folder"):
        train(recipe=None, resume=str(tmp_path / "runs" / "nosuch"))
    (tmp_path / "runs" / "twice").mkdir(parents=True)
    with pytest.raises(UserError, match="exists; give another"):
        train(recipe=str(write_recipe(tmp_path, policy)), name="twice")
