"""The native engine samples, the trainer trains, the engine swaps: in invariant numerics the two agree to the last bit every time."""

from __future__ import annotations

import asyncio

import pytest
import torch

from etude.trainer.config import RLConfig
from etude.trainer.rl import RLTrainer


@pytest.mark.parametrize(
    ("kind", "replay", "dtype"),
    [
        ("moe", True, "float32"),
        ("moe", False, "float32"),
        ("moe", True, "bfloat16"),
        ("latent", True, "float32"),
        ("latent", False, "bfloat16"),
    ],
)
def test_mismatch_is_exactly_zero_over_steps_and_swaps(make, folders, tmp_path, kind, replay, dtype):
    async def go():
        engine = make.engine(folders[kind], getattr(torch, dtype))
        config = RLConfig(lr=1e-2, kl=1e-2, numerics="invariant", router_replay=replay, row_tokens=64, compute_dtype=dtype)
        trainer = RLTrainer(config, folders[kind], store=tmp_path)
        reports, late = [], None
        for step in range(3):
            groups = [await make.sampled_group(engine, 10 * step + a, (1.0, 0.0, 0.5)) for a in range(2)]
            late = late or groups[0]
            reports.append(await trainer.step(groups))
            manifest, store = await trainer.publish()
            served = await engine.load(manifest, store)
            await trainer.commit(served)
        stale = await trainer.step([late])
        await engine.close()
        await trainer.close()
        return reports, stale

    reports, stale = asyncio.run(go())
    assert len({r.version.hash for r in reports}) == 3, "the weights moved each time"
    for report in reports:
        assert report.metrics["fresh_share"] == 1.0
        assert report.metrics["dlogp_max"] == 0.0
        assert report.metrics["sampled_tokens"] == 2 * 3 * 2 * 6
    assert (stale.metrics["fresh_share"], stale.metrics["lag_max"]) == (0.0, 3.0)
    assert stale.metrics["stale_dlogp_mean"] > 1e-4
