"""The mismatch report and the staleness bookkeeping (facts M8, M28)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.records import Version
from etude.trainer.config import RLConfig
from etude.trainer.losses import TokenStats, rl_loss, score, targets
from etude.trainer.mismatch import alarms, report
from etude.trainer.pack import pack, samples_from_groups


def stats(delta, version, clipped=None):
    delta = np.asarray(delta, dtype=np.float32)
    zeros = np.zeros(len(delta), dtype=np.float32)
    return TokenStats(
        logp_M=delta - 1,
        old_M=zeros - 1,
        entropy_M=zeros + 0.5,
        k1_M=zeros,
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


def test_alarms_name_what_left_its_range():
    assert alarms(report([stats([0.0, 0.001], [0, 0])], ordinal=0)) == []
    assert any("dlogp_mean" in a for a in alarms(report([stats([0.5, -0.5], [0, 0])], ordinal=0)))


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
        gathered.append(rl_loss(score(model, row, where_M, replay=kind == "moe"), row, where_M, None, config)[1])
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
