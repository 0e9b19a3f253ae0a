"""The RL trainer as the loop sees it: step, publish, commit, save, load."""

from __future__ import annotations

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch

from etude.errors import CheckpointError, IntegrityError, UserError
from etude.events import METRICS
from etude.model.weights import load_model
from etude.optim.config import OptimConfig
from etude.protocols import Trainer
from etude.records import Manifest, Version
from etude.sync.chain import weights_hash
from etude.trainer.config import RLConfig
from etude.trainer.losses import Divergence
from etude.trainer.rl import RLTrainer


def config(**changes):
    return RLConfig(**{"lr": 1e-2, "kl": 0.0, "row_tokens": 64, "publish_dtype": "float32", **changes})


def groups_for(make, step, kind="dense", count=2):
    routed = make.tiny(kind)
    return [make.rescored(make.group((1.0, 0.0, 0.5, 0.0), admission=10 * step + a), routed, routes=kind == "moe") for a in range(count)]


def weights(trainer):
    return {n: t.detach().clone() for n, t in trainer.policy.master.items()}


def same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


def run(make, folder, steps, *, kind="dense", first=1, trainer=None, **changes):
    """(trainer, reports) after some steps."""

    async def go():
        it = trainer or RLTrainer(config(**changes), folder)
        return it, [await it.step(groups_for(make, first + i, kind)) for i in range(steps)]

    return asyncio.run(go())


def test_a_step_changes_the_weights_and_raises_the_version(make, folders):
    trainer, (report,) = run(make, folders["dense"], 1)
    assert isinstance(trainer, Trainer)
    assert (report.step, report.version.ordinal, report.version.lineage) == (1, 1, 0)
    assert report.version.hash == weights_hash(trainer.policy.published())
    assert not same(weights(trainer), weights(RLTrainer(config(), folders["dense"])))
    wanted = "loss grad_norm lr tokens kl ess weight_mean weight_std clip_share dlogp_mean dlogp_p99 dlogp_max entropy f2 engine_dlogp_max"
    assert set(wanted.split()) <= set(report.metrics)
    assert all(np.isfinite(v) for v in report.metrics.values())
    assert set(report.metrics) <= set(METRICS), "every number of a step event is described in its schema"
    assert report.metrics["rollouts"] == 8
    assert report.metrics["signal_rollouts"] == 8
    assert set(report.seconds) == {"pack", "reference", "forward", "backward", "optimizer", "report"}


def test_the_gain_moves_every_logit_alike_and_down_the_slope_of_the_loss(make, folders):
    """Without an optimizer step only the final norm changes, by one factor; its derivative is that of the loss."""

    def loss_at(scale):
        trainer = RLTrainer(config(lr=0.0, objective="none"), folders["dense"])
        with torch.no_grad():
            trainer.policy.master["norm.weight"].mul_(scale)
        return run(make, folders["dense"], 1, trainer=trainer)[1][0].metrics

    before = weights(RLTrainer(config(), folders["dense"]))
    trainer, (report,) = run(make, folders["dense"], 1, lr=0.0, gain_lr=0.5, objective="none")
    slope, step = report.metrics["gain_slope"], report.metrics["gain_step"]
    assert step == pytest.approx(-0.5 * slope)
    assert slope != 0.0
    h = 1e-3
    assert slope == pytest.approx((loss_at(1 + h)["loss"] - loss_at(1 - h)["loss"]) / (2 * h), rel=0.02)
    after = weights(trainer)
    assert {n for n in after if not torch.equal(after[n], before[n])} == {"norm.weight"}
    torch.testing.assert_close(after["norm.weight"], before["norm.weight"] * float(np.exp(step)))
    assert run(make, folders["dense"], 1, lr=0.0, gain_lr=1e6)[1][0].metrics["gain_step"] == pytest.approx(np.sign(-slope) * 0.15)
    assert loss_at(1.0)["gain_step"] == 0.0


def test_rewarded_tokens_become_likelier(make, folders):
    """Ten steps on the same groups raise the rewarded rollouts' log-probs over the others'."""
    groups = groups_for(make, 0)

    async def go():
        trainer = RLTrainer(config(lr=3e-3), folders["dense"])
        for _ in range(10):
            await trainer.step(groups)
        return trainer

    trainer = asyncio.run(go())
    before, after = make.tiny("dense"), trainer.policy.model
    gain = {True: [], False: []}
    for group in groups:
        old, new = make.rescored(group, before), make.rescored(group, after)
        for a, b in zip(old.members, new.members, strict=True):
            delta = b.trajectory.segments[0].logprob_t1_T.sum() - a.trajectory.segments[0].logprob_t1_T.sum()
            gain[a.reward == 1.0].append(delta)
    assert min(gain[True]) > max(0.0, np.mean(gain[False]))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_equal_input_gives_equal_bits(make, folders, kind):
    one, first = run(make, folders[kind], 3, kind=kind)
    two, second = run(make, folders[kind], 3, kind=kind)
    assert same(weights(one), weights(two))
    assert [r.metrics for r in first] == [r.metrics for r in second]
    assert [r.version.key for r in first] == [r.version.key for r in second]


def test_groups_without_signal_change_nothing_and_still_count(make, folders):
    silent = [make.group((1.0, 1.0, 1.0)), make.group((0.0, 1.0), dropped=[0])]

    async def go(**changes):
        trainer = RLTrainer(config(**changes), folders["dense"])
        await trainer.step(groups_for(make, 0))
        before = weights(trainer)
        report = await trainer.step(silent)
        empty = await trainer.step([])
        return same(before, weights(trainer)), report, empty

    for skip in (True, False):
        unchanged, report, empty = asyncio.run(go(skip_silent=skip))
        assert unchanged, "not even momentum moves weights on no evidence"
        assert report.metrics["grad_norm"] == 0.0
        assert (report.step, empty.step, empty.version.ordinal) == (2, 3, 3)


def test_skipping_silent_groups_changes_no_bit_of_the_update_size(make, folders):
    """Leaving them out of the forward gives the same gradient (another row layout, so up to rounding)."""
    groups = [*groups_for(make, 0), make.group((1.0, 1.0, 1.0), admission=77)]

    async def go(skip):
        trainer = RLTrainer(config(skip_silent=skip, row_tokens=4096), folders["dense"])
        report = await trainer.step(groups)
        return report.metrics

    with_them, without = asyncio.run(go(False)), asyncio.run(go(True))
    assert with_them["tokens"] > without["tokens"]
    assert with_them["grad_norm"] == pytest.approx(without["grad_norm"], rel=1e-5)
    assert with_them["loss"] == pytest.approx(without["loss"], rel=1e-4, abs=1e-7)


def test_dropped_silent_groups_are_no_part_of_the_step(make, folders):
    """DAPO's filter: the step with a silent group is bit for bit the step without it, KL or not; counted, it halves the gradient."""
    mixed, equal = make.group((1.0, 0.0)), make.group((1.0, 1.0), admission=7)

    def metrics(groups, **changes):
        trainer = RLTrainer(config(row_tokens=4096, **changes), folders["dense"])
        report = asyncio.run(trainer.step([make.rescored(g, make.tiny()) for g in groups]))
        return report.metrics, report.version.hash

    for kl in (0.0, 1e-2):
        alone, hash_alone = metrics([mixed], kl=kl)
        dropped, hash_dropped = metrics([mixed, equal], kl=kl, silent="drop")
        assert hash_dropped == hash_alone
        assert dropped["grad_norm"] == alone["grad_norm"]
        assert (dropped["silent_groups"], dropped["groups"], dropped["rollouts"]) == (1, 2, 4)
    alone, counted = metrics([mixed])[0], metrics([mixed, equal])[0]
    assert counted["silent_groups"] == 1
    assert counted["grad_norm"] == pytest.approx(alone["grad_norm"] / 2, rel=1e-5)
    everything = metrics([equal], silent="drop")[0]
    assert (everything["grad_norm"], everything["rows"], everything["silent_groups"]) == (0.0, 0.0, 1)


def test_staleness_is_told_from_engine_discrepancy(make, folders):
    """Groups sampled by the start weights: fresh at step 1, one version old at step 2."""

    async def go():
        trainer = RLTrainer(config(lr=3e-2, numerics="invariant"), folders["dense"])
        start = await trainer.version()
        model = make.tiny(numerics="invariant")
        groups = [make.rescored(make.group((1.0, 0.0)), model, start)]
        return await trainer.step(groups), await trainer.step(groups)

    first, second = asyncio.run(go())
    assert (first.metrics["fresh_share"], first.metrics["lag_max"]) == (1.0, 0.0)
    assert first.metrics["engine_dlogp_max"] == 0.0, "equal code, equal weights, invariant numerics"
    assert (second.metrics["fresh_share"], second.metrics["lag_max"]) == (0.0, 1.0)
    assert second.metrics["stale_dlogp_mean"] > 1e-3


def test_kl_pulls_towards_the_start(make, folders):
    """From moved weights, silent groups with KL alone bring the policy back: k1 against the reference falls."""

    async def go():
        trainer = RLTrainer(config(kl=1.0, lr=1e-2), folders["dense"])
        first = await trainer.step(groups_for(make, 0))
        with torch.no_grad():
            for t in trainer.policy.master.values():
                t.add_(0.03 * torch.randn(t.shape, generator=torch.Generator().manual_seed(0)))
        trainer.optimizer = type(trainer.optimizer)(trainer.policy.master, {"heads": 4, "kv_heads": 2}, trainer.config.optim)
        kls = []
        for _ in range(15):
            fresh = [make.rescored(g, trainer.policy.model) for g in (make.group((1.0, 1.0), admission=a) for a in range(4))]
            kls.append((await trainer.step(fresh)).metrics["kl"])
        return first.metrics["kl"], kls

    at_start, kls = asyncio.run(go())
    assert at_start == 0.0
    assert abs(kls[-1]) < abs(kls[0])


def test_kl_zero_loads_no_reference(make, folders):
    trainer, _ = run(make, folders["dense"], 1)
    assert trainer._reference is None
    trainer, _ = run(make, folders["dense"], 1, kl=1e-3)
    assert trainer._reference is not None


def test_published_weights_are_the_ones_trained_with(make, folders):
    """bfloat16 publishing: the model holds rounded values, the masters keep what rounding would lose."""
    trainer, (report,) = run(make, folders["dense"], 1, publish_dtype="bfloat16", lr=1e-5)
    for name, param in trainer.policy.params.items():
        assert param.dtype == torch.float32
        assert torch.equal(param, param.to(torch.bfloat16).float())
        assert trainer.policy.published()[name].dtype == torch.bfloat16
    start = {n: p.detach() for n, p in make.tiny().named_parameters()}
    moved = sum(int((t != start[n]).sum()) for n, t in trainer.policy.master.items())
    assert moved > 0.9 * sum(t.numel() for n, t in start.items() if n != "embed_tokens.weight"), "small steps accumulate in the masters"
    assert report.version.hash == weights_hash(trainer.policy.published())


def test_bfloat16_compute_trains_float32_masters(make, folders):
    trainer, (report,) = run(make, folders["moe"], 1, kind="moe", compute_dtype="bfloat16", publish_dtype="bfloat16")
    assert next(trainer.policy.model.parameters()).dtype == torch.bfloat16
    assert all(t.dtype == torch.float32 for t in trainer.policy.master.values())
    assert report.metrics["dlogp_mean"] < 0.2


def test_mixture_of_experts_reports_its_load(make, folders):
    _, (report,) = run(make, folders["moe"], 1, kind="moe", balance=0.01)
    assert set(report.metrics) <= set(METRICS)
    assert 0.0 < report.metrics["load_entropy"] <= 1.0
    assert report.metrics["balance"] > 0.5
    assert report.metrics["dlogp_max"] < 1e-4, "replayed routes and equal weights"


@pytest.mark.parametrize(("poison", "what"), [(np.nan, "the loss is nan"), (-np.inf, "delta log-prob. is inf")])
def test_numbers_that_are_not_finite_stop_before_the_update(make, folders, poison, what):
    bad = groups_for(make, 1)
    member = bad[0].members[0]
    (seg,) = member.trajectory.segments
    poisoned = seg.replace(logprob_t1_T=np.where(seg.sampled_T, poison, 0).astype(np.float32))
    member = member.replace(trajectory=member.trajectory.replace(segments=(poisoned,)))
    bad[0] = bad[0].replace(members=(member, *bad[0].members[1:]))

    async def go():
        trainer = RLTrainer(config(), folders["dense"])
        before, version = weights(trainer), await trainer.version()
        with pytest.raises(Divergence, match=rf"step 1.*{what}.*weights were not changed"):
            await trainer.step(bad)
        assert same(before, weights(trainer))
        assert (await trainer.version()).key == version.key
        report = await trainer.step(groups_for(make, 1))
        return report

    report = asyncio.run(go())
    _, (clean,) = run(make, folders["dense"], 1)
    assert report.metrics == clean.metrics, "no gradient of the failed step is left"


class Shelf:
    """A publisher that keeps what it was given."""

    def __init__(self):
        self.states, self.committed = [], []

    def publish(self, state, version):
        self.states.append({n: t.clone() for n, t in state.items()})
        return Manifest(lineage=version.lineage, base=None, version=version, tensors=())

    def commit(self, version):
        self.committed.append(version)


def test_publish_and_commit_through_an_injected_publisher(make, folders):
    async def go():
        shelf = Shelf()
        trainer = RLTrainer(config(), folders["dense"], publisher=shelf, store="somewhere")
        await trainer.step(groups_for(make, 1))
        manifest, where = await trainer.publish()
        await trainer.commit(manifest.version)
        await trainer.close()
        return shelf, manifest, where

    shelf, manifest, where = asyncio.run(go())
    assert where == "somewhere"
    assert weights_hash(shelf.states[0]) == manifest.version.hash
    assert [v.key for v in shelf.committed] == [manifest.version.key]


def test_publish_through_the_store(make, folders, tmp_path):
    """A receiver that follows the chain ends with the trainer's weights, over two versions."""
    from etude.sync.receive import Receiver

    async def go():
        trainer = RLTrainer(config(publish_dtype="bfloat16"), folders["moe"], store=tmp_path)
        state = {n: t.clone() for n, t in trainer.policy.published().items()}
        receiver = Receiver(state, tmp_path)
        for step in range(2):
            await trainer.step(groups_for(make, step, "moe"))
            manifest, where = await trainer.publish()
            served = receiver.advance(manifest)
            await trainer.commit(served)
        return trainer, state, where

    trainer, state, where = asyncio.run(go())
    assert where == str(tmp_path)
    assert same(trainer.policy.published(), state)


def test_a_resumed_trainer_goes_on_in_the_same_store_in_a_new_lineage(make, folders, tmp_path):
    async def go():
        first = RLTrainer(config(), folders["dense"], store=tmp_path / "weights")
        start, _ = await first.publish()
        await first.commit(start.version)
        await first.step(groups_for(make, 1))
        await first.publish()
        await first.save(tmp_path / "c")
        second = RLTrainer(config(), folders["dense"], store=tmp_path / "weights")
        await second.load(tmp_path / "c", lineage=1)
        manifest, _ = await second.publish()
        return start, manifest, await first.version()

    start, manifest, version = asyncio.run(go())
    assert (start.version.ordinal, start.base) == (0, None), "the start weights can be published too"
    assert (manifest.version.lineage, manifest.version.ordinal, manifest.version.hash) == (1, 1, version.hash)


def test_publish_without_a_store_says_what_to_give(make, folders):
    with pytest.raises(UserError, match="publish needs a store"):
        asyncio.run(RLTrainer(config(), folders["dense"]).publish())


# ---------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dense", {"publish_dtype": "float32"}),
        ("dense", {"publish_dtype": "bfloat16", "kl": 1e-2}),
        ("moe", {"publish_dtype": "bfloat16", "optim": OptimConfig(kind="muon")}),
    ],
)
def test_resume_equals_uninterrupted_bit_for_bit(make, folders, tmp_path, kind, changes):
    """6 steps, against 3 + save + load in a new trainer + 3: same weights, moments and metrics."""
    whole, reports = run(make, folders[kind], 6, kind=kind, **changes)
    half, _ = run(make, folders[kind], 3, kind=kind, **changes)
    asyncio.run(half.save(tmp_path / "step-3"))

    resumed = RLTrainer(config(**changes), folders[kind])
    version = asyncio.run(resumed.load(tmp_path / "step-3", lineage=1))
    assert (version.lineage, version.ordinal, version.hash) == (1, 3, reports[2].version.hash)
    resumed, rest = run(make, folders[kind], 3, kind=kind, first=4, trainer=resumed)
    assert same(weights(whole), weights(resumed))
    a, b = whole.optimizer.state_dict(), resumed.optimizer.state_dict()
    assert same(a, b)
    assert [r.metrics for r in rest] == [r.metrics for r in reports[3:]]
    assert [r.version.hash for r in rest] == [r.version.hash for r in reports[3:]]
    assert whole.flops == resumed.flops


def test_a_checkpoint_is_a_model_folder_with_its_origin(make, folders, tmp_path):
    trainer, _ = run(make, folders["dense"], 2, publish_dtype="bfloat16")
    trainer.data, trainer.licence = ("katas",), "Apache-2.0"
    asyncio.run(trainer.save(tmp_path))
    again = load_model(tmp_path / "model", dtype=torch.bfloat16)
    assert same({n: p.detach() for n, p in again.named_parameters()}, trainer.policy.published())
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    origin = json.loads((tmp_path / "model" / "provenance.json").read_text())
    assert [s["kind"] for s in origin["stages"]] == ["base", "rl", "rollouts"]
    assert origin["share_ours"] is None, "nobody counted the base's compute"
    assert origin["licence"] == "Apache-2.0"
    assert origin["stages"][1]["flops"] > 0
    assert origin["stages"][1]["data"] == ["katas"]


def test_a_stage_on_top_of_a_stage_keeps_the_chain_of_origin(make, folders, tmp_path):
    trainer, _ = run(make, folders["dense"], 1)
    asyncio.run(trainer.save(tmp_path / "one"))
    second, _ = run(make, tmp_path / "one" / "model", 1)
    asyncio.run(second.save(tmp_path / "two"))
    third = RLTrainer(config(), tmp_path / "one" / "model")
    asyncio.run(third.load(tmp_path / "two", lineage=1))
    asyncio.run(third.save(tmp_path / "three"))
    for name in ("two", "three"):
        stages = json.loads((tmp_path / name / "model" / "provenance.json").read_text())["stages"]
        assert [s["kind"] for s in stages] == ["base", "rl", "rollouts", "rl", "rollouts"]


def test_the_reference_survives_a_resume_and_a_lost_one_is_an_error(make, folders, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(folders["dense"], base)
    trainer, _ = run(make, base, 1, kl=1e-2)
    asyncio.run(trainer.save(tmp_path / "c"))
    resumed = RLTrainer(config(kl=1e-2), tmp_path / "c" / "model")
    asyncio.run(resumed.load(tmp_path / "c", lineage=1))
    assert resumed.reference_hash == trainer.reference_hash
    resumed, _ = run(make, base, 1, kl=1e-2, trainer=resumed)
    shutil.rmtree(base)
    lost = RLTrainer(config(kl=1e-2), tmp_path / "c" / "model")
    asyncio.run(lost.load(tmp_path / "c", lineage=2))
    with pytest.raises(CheckpointError, match="reference policy"):
        asyncio.run(lost.step(groups_for(make, 1)))


def test_damaged_and_foreign_checkpoints_are_refused(make, folders, tmp_path):
    trainer, _ = run(make, folders["dense"], 1)
    asyncio.run(trainer.save(tmp_path / "good"))

    def attempt(name, **changes):
        return asyncio.run(RLTrainer(config(**changes), folders["dense"]).load(tmp_path / name, lineage=1))

    with pytest.raises(CheckpointError, match="no trainer state"):
        attempt("missing")
    with pytest.raises(CheckpointError, match="with optimizer 'adamw'"):
        attempt("good", optim=OptimConfig(kind="muon"))
    with pytest.raises(IntegrityError, match="publish_dtype"):
        attempt("good", publish_dtype="bfloat16")
    shutil.copytree(tmp_path / "good", tmp_path / "flipped")
    (data,) = (tmp_path / "flipped" / "optim").glob("*.distcp")
    stored = trainer.policy.master["embed_tokens.weight"].detach().numpy().tobytes()
    raw = bytearray(data.read_bytes())
    raw[raw.index(stored) + 5] ^= 1
    data.write_bytes(raw)
    with pytest.raises(IntegrityError, match="damaged"):
        attempt("flipped")
    shutil.copytree(tmp_path / "good", tmp_path / "cut")
    (tmp_path / "cut" / "optim" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="half-written"):
        attempt("cut")
    with pytest.raises(CheckpointError, match="cannot be read"):
        asyncio.run(RLTrainer(config(), folders["moe"]).load(tmp_path / "good", lineage=1))


def test_versions_of_a_new_lineage_differ_from_the_old(make, folders, tmp_path):
    trainer, _ = run(make, folders["dense"], 1)
    asyncio.run(trainer.save(tmp_path))
    resumed = RLTrainer(config(), folders["dense"])
    version = asyncio.run(resumed.load(tmp_path, lineage=3))
    assert isinstance(version, Version)
    assert version.lineage == 3
    assert asyncio.run(resumed.version()).key == version.key
