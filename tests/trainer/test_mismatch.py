"""The mismatch report, the staleness bookkeeping, and the alarms over both (facts M8, M28, number 41)."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest
import torch

from etude.config import apply_overrides, build
from etude.errors import ConfigError
from etude.model.config import RouteFilter
from etude.records import Version
from etude.trainer.alarms import RULES, alarms
from etude.trainer.config import AlarmConfig, RLConfig
from etude.trainer.losses import TokenStats, rl_loss, score, targets
from etude.trainer.mismatch import report
from etude.trainer.objectives import OBJECTIVES, TokenInputs
from etude.trainer.pack import pack, samples_from_groups
from etude.trainer.rl import RLTrainer


def stats(delta, version, clipped=None, weight=None, k1=None):
    delta = np.asarray(delta, dtype=np.float32)
    zeros = np.zeros(len(delta), dtype=np.float32)
    return TokenStats(
        logp_M=delta - 1,
        old_M=zeros - 1,
        entropy_M=zeros + 0.5,
        k1_M=zeros if k1 is None else np.asarray(k1, dtype=np.float32),
        weight_M=zeros + 1 if weight is None else np.asarray(weight, dtype=np.float32),
        clipped_M=zeros.astype(bool) if clipped is None else np.array(clipped),
        version_M=np.asarray(version, dtype=np.int32),
    )


def test_numbers_by_hand():
    out = report([stats([0.0, 0.1], [3, 3]), stats([-0.2, 1.0], [2, 1], [False, True])], ordinal=3)
    ratio = np.exp([0.0, 0.1, -0.2, 1.0])
    assert out["dlogp_mean"] == pytest.approx(1.3 / 4)
    assert out["dlogp_max"] == pytest.approx(1.0)
    assert out["dlogp_p99"] == pytest.approx(np.quantile([0, 0.1, 0.2, 1.0], 0.99))
    assert out["mismatch_kl"] == pytest.approx(-0.9 / 4)
    assert out["f2"] == 0.25, "one ratio above 2"
    assert out["ess"] == pytest.approx(ratio.sum() ** 2 / (4 * (ratio**2).sum()))
    assert out["weight_mean"] == pytest.approx(ratio.mean())
    assert out["weight_std"] == pytest.approx(ratio.std())
    assert out["weight_max"] == pytest.approx(np.e)
    assert out["mismatch_k3"] == pytest.approx(np.mean(ratio - 1 - np.log(ratio)))
    assert out["clip_share"] == 0.25
    assert out["entropy"] == 0.5


def test_equal_weights_and_staleness_are_told_apart():
    out = report([stats([0.0, 0.01, 0.5, -1.0], [7, 7, 6, 4])], ordinal=7)
    assert out["engine_dlogp_max"] == pytest.approx(0.01)
    assert out["engine_f2"] == 0.0
    assert out["stale_dlogp_mean"] == pytest.approx(0.75)
    assert out["stale_f2"] == 0.5
    assert out["fresh_share"] == 0.5
    assert (out["lag_mean"], out["lag_max"]) == (1.0, 3.0)


def test_a_step_without_tokens_reports_numbers_all_the_same():
    out = report([], ordinal=0)
    assert all(np.isfinite(v) for v in out.values())
    assert (out["ess"], out["dlogp_max"], out["sampled_tokens"]) == (1.0, 0.0, 0.0)


def test_weights_that_the_correction_applied_by_hand():
    out = report([stats([0.0] * 4, [0] * 4, [False, True, True, True], [1.0, 2.0, 0.0, 0.0], k1=[0.0, 1.0, -1.0, 0.0])], ordinal=0)
    assert (out["applied_mean"], out["applied_max"]) == (0.75, 2.0)
    assert out["applied_ess"] == pytest.approx(9 / (4 * 5))
    assert out["applied_std"] == pytest.approx(np.std([1.0, 2.0, 0.0, 0.0]))
    assert (out["clip_share"], out["mask_share"]) == (0.75, 0.5)
    assert (out["ess"], out["weight_max"]) == (1.0, 1.0), "before the correction"
    assert out["kl"] == 0.0
    assert out["kl_k3"] == pytest.approx((np.exp(-1) + np.exp(1) - 2) / 4)
    assert report([stats([0.0], [0], [True], [0.0])], ordinal=0)["applied_ess"] == 0.0, "nothing got through"


# ---------------------------------------------------------------------------------------------------
# Alarms


HEALTHY = {"ess": 1.0, "weight_mean": 1.0, "weight_std": 0.0, "mismatch_kl": 0.0, "f2": 0.0, "engine_dlogp_mean": 0.0, "dlogp_mean": 0.0}


@pytest.mark.parametrize(
    ("metric", "healthy", "value", "threshold"),
    [
        ("ess", 0.3, 0.29, 0.3),
        ("weight_mean", 0.5, 0.49, 0.5),
        ("weight_mean", 2.0, 2.01, 2.0),
        ("weight_std", 1.0, 1.01, 1.0),
        ("mismatch_kl", 0.1, 0.11, 0.1),
        ("mismatch_kl", -0.1, -0.11, 0.1),
        ("f2", 0.1, 0.11, 0.1),
        ("engine_dlogp_mean", 0.01, 0.011, 0.01),
    ],
)
def test_an_alarm_names_the_number_the_threshold_and_what_to_do(metric, healthy, value, threshold):
    assert alarms({**HEALTHY, metric: healthy}, AlarmConfig()) == ()
    (alarm,) = alarms({**HEALTHY, metric: value}, AlarmConfig())
    assert (alarm.metric, alarm.value, alarm.threshold) == (metric, value, threshold)
    assert alarm.advice
    assert alarms({}, AlarmConfig()) == (), "a trainer that does not measure it has no alarm"


def test_every_threshold_can_be_moved_and_switched_off():
    assert {rule.threshold for rule in RULES} == {f.name for f in dataclasses.fields(AlarmConfig)}
    assert alarms({"ess": 0.2}, AlarmConfig(ess_min=0.1)) == alarms({"ess": 0.2}, AlarmConfig(ess_min=None)) == ()
    assert [a.threshold for a in alarms({"dlogp_mean": 0.3}, AlarmConfig(dlogp_mean_max=0.2))] == [0.2]
    parsed = build(RLConfig, apply_overrides({}, ["alarms.ess_min=0.1", "alarms.f2_max=none"]))
    assert parsed.alarms == AlarmConfig(ess_min=0.1, f2_max=None)
    for bad in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"alarms.f2_max is"):
            AlarmConfig(f2_max=bad)


def noisy(size, *, tokens=40_000, lag=0):
    """Metrics of a step whose behaviour log-probs carry Gaussian noise of deviation `size`, as an engine with other kernels gives.

    delta has mean -size^2 / 2, so that E[r] = 1 and the k1 estimate of KL(mu || pi) is size^2 / 2.
    """
    delta = np.random.default_rng(0).normal(-(size**2) / 2, size, tokens)
    return report([stats(delta, np.zeros(tokens, dtype=int))], ordinal=lag)


def names(found):
    return {a.metric for a in found}


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0.0, set()),
        (0.011, set()),
        (0.014, {"engine_dlogp_mean"}),
        (0.161, {"engine_dlogp_mean"}),
        (0.5, {"engine_dlogp_mean", "mismatch_kl", "f2"}),
        (1.2, {"engine_dlogp_mean", "mismatch_kl", "f2", "weight_std", "ess"}),
    ],
)
def test_noise_of_known_size_raises_the_alarms_its_closed_forms_say(size, expected):
    """Lognormal ratios: mean |delta| = size sqrt(2 / pi), KL = size^2 / 2, std = sqrt(e^(size^2) - 1), ESS = e^(-size^2).
    0.161 is a KL of 0.013, where a run was reported to collapse (number 41): only the comparison on equal weights sees it."""
    out = noisy(size)
    assert out["mismatch_kl"] == pytest.approx(size**2 / 2, abs=0.01)
    assert out["ess"] == pytest.approx(np.exp(-(size**2)), abs=0.05)
    assert names(alarms(out, AlarmConfig())) == expected


def test_stale_tokens_alone_do_not_accuse_the_engine():
    assert names(alarms(noisy(0.161, lag=1), AlarmConfig())) == set()
    assert names(alarms(noisy(0.161, lag=1), AlarmConfig(dlogp_mean_max=0.01))) == {"dlogp_mean"}


def shares(objective, size, *, tokens=20_000, length=20):
    """(clip share, mask share) of a correction under noise of this size; advantages of both signs."""
    rng = np.random.default_rng(0)
    logp_M = torch.full((tokens,), -1.0, dtype=torch.float64)
    tokens_in = TokenInputs(
        logp_M=logp_M,
        old_M=logp_M - torch.from_numpy(rng.normal(-(size**2) / 2, size, tokens)),
        advantage_M=torch.from_numpy(rng.choice([-1.0, 1.0], tokens)),
        sample_M=torch.arange(tokens) // length,
        mask_M=torch.ones(tokens, dtype=torch.bool),
    )
    out = OBJECTIVES[objective](tokens_in, RLConfig(objective=objective))
    return float(out.cut_M.double().mean()), float((out.weight_M == 0).double().mean())


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n != "none"])
def test_what_a_correction_clips_grows_with_the_noise(name):
    """The curve of number 41: clip share against KL(mu || pi), from nothing at KL 0 upwards. Noise that is independent from token to
    token averages out in a geometric mean of 20."""
    curve = [shares(name, np.sqrt(2 * kl))[0] for kl in (0.0, 1e-3, 5e-3, 0.013, 0.05, 0.2)]
    assert curve[0] == 0.0
    assert all(a <= b + 0.01 for a, b in itertools.pairwise(curve))
    assert curve[-1] == 0.0 if name == "masked_geometric" else curve[-1] > 0.05


def test_how_much_is_clipped_where_a_collapse_was_reported():
    """At KL 0.013 the share depends on the bounds: ppo_clip and the rest stay far from the 45 % of the report, GSPO's narrow range
    clips about half of all tokens, as many as have the sign its minimum cares about."""
    size = np.sqrt(2 * 0.013)
    assert 0.05 < shares("ppo_clip", size)[0] < 0.1
    assert 0.45 < shares("gspo", size)[0] < 0.55
    assert shares("truncated", size) == (pytest.approx(0.0, abs=1e-3), 0.0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_alarms_in_a_step_of_the_trainer(make, folders, name):
    """Noise of 0.2 in the behaviour log-probs of fresh tokens raises the engine's alarm, whatever the correction; without it, silence."""

    async def go(size):
        trainer = RLTrainer(RLConfig(objective=name, kl=0.0, publish_dtype="float32", numerics="invariant"), folders["dense"])
        now = await trainer.version()
        clean = make.rescored(make.group((1.0, 0.0, 0.5, 0.0)), make.tiny(numerics="invariant"), now)
        rng = np.random.default_rng(0)

        def with_noise(segment):
            noise_T = rng.normal(0, size, len(segment.ids_T)).astype(np.float32)
            return segment.replace(logprob_t1_T=segment.logprob_t1_T + np.where(segment.sampled_T, noise_T, 0).astype(np.float32))

        members = tuple(
            g.replace(trajectory=g.trajectory.replace(segments=tuple(with_noise(s) for s in g.trajectory.segments))) for g in clean.members
        )
        return await trainer.step([clean.replace(members=members)])

    quiet, loud = asyncio.run(go(0.0)), asyncio.run(go(0.2))
    assert quiet.alarms == ()
    assert (quiet.metrics["engine_dlogp_max"], quiet.metrics["applied_ess"], quiet.metrics["clip_share"]) == (0.0, 1.0, 0.0)
    assert "engine_dlogp_mean" in names(loud.alarms)
    assert loud.metrics["engine_dlogp_mean"] == pytest.approx(0.2 * np.sqrt(2 / np.pi), rel=0.4)


# ---------------------------------------------------------------------------------------------------
# Through a model


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_identical_weights_mismatch(make, kind, numerics):
    """Engine log-probs from one sequence at a time, trainer's from packed rows: exactly 0 in invariant numerics, rounding otherwise."""
    model = make.tiny(kind, numerics=numerics)
    now = Version(lineage=0, ordinal=2, hash="a")
    groups = [make.rescored(make.group((1.0, 0.0, 0.5), admission=a), model, now, routes=kind == "moe") for a in range(3)]
    config = RLConfig(kl=0.0)
    samples, normalisers = samples_from_groups(groups, now, config)
    gathered = []
    for row in pack(samples, 100, float, normalisers):
        where_M = targets(row)
        gathered.append(rl_loss(score(model, row, where_M, replay=RouteFilter() if kind == "moe" else None), row, where_M, None, config)[1])
    out = report(gathered, now.ordinal)
    assert out["fresh_share"] == 1.0
    assert out["engine_dlogp_max"] == out["dlogp_max"] < 1e-4
    if numerics == "invariant":
        assert out["dlogp_max"] == 0.0
        assert (out["ess"], out["weight_std"], out["mismatch_kl"]) == (1.0, 0.0, 0.0)


def test_tokens_of_weights_nobody_knows_count_as_stale(make):
    """An engine that started from other bytes under the same ordinal: its tokens are in the report, as one version old."""
    now, foreign = Version(lineage=0, ordinal=0, hash="a"), Version(lineage=0, ordinal=0, hash="b")
    model = make.tiny()
    samples, normalisers = samples_from_groups([make.rescored(make.group((1.0, 0.0)), model, foreign)], now, RLConfig())
    (row,) = pack(samples, 4096, float, normalisers)
    where_M = targets(row)
    out = report([rl_loss(score(model, row, where_M), row, where_M, None, RLConfig())[1]], now.ordinal)
    assert out["sampled_tokens"] == len(where_M)
    assert (out["fresh_share"], out["lag_max"]) == (0.0, 1.0)


def test_moved_weights_show_up(make):
    model = make.tiny()
    group = make.rescored(make.group((1.0, 0.0)), model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    samples, normalisers = samples_from_groups([group], make.base, RLConfig())
    (row,) = pack(samples, 4096, float, normalisers)
    where_M = targets(row)
    out = report([rl_loss(score(model, row, where_M), row, where_M, None, RLConfig())[1]], 0)
    assert out["dlogp_mean"] > 1e-3
    assert out["ess"] < 1.0
