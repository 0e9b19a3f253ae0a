"""Choosing implementations: an engine computes with the weights its version names, from its first token on."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import torch

from etude.inference.config import EngineConfig
from etude.loop import LoopConfig
from etude.model.config import ModelConfig
from etude.model.transformer import Decoder
from etude.model.weights import save_model
from etude.optim.schedules import ScheduleConfig
from etude.parts import RunConfig, make_engine, trainer_of
from etude.trainer.config import RLConfig

CONFIG = ModelConfig(family="llama", vocab_size=64, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=48)


def logprobs(folder: Path, published: str) -> list[float]:
    async def scored() -> list[float]:
        engine = make_engine(
            folder=str(folder), engine=EngineConfig(cache_bytes=2**22), numerics="invariant", version=None, published=published
        )
        try:
            return (await engine.score([3, 9, 27, 17, 51])).logprob_T.tolist()
        finally:
            await engine.close()

    return asyncio.run(scored())


def test_a_float32_folder_is_served_as_it_will_be_published(tmp_path: Path) -> None:
    model = Decoder(CONFIG)
    model.init_weights(1)
    save_model(model, tmp_path / "exact", dtype=torch.float32)
    save_model(model, tmp_path / "rounded", dtype=torch.bfloat16)
    served = logprobs(tmp_path / "exact", "bfloat16")
    assert served == logprobs(tmp_path / "rounded", "bfloat16")
    assert served != logprobs(tmp_path / "exact", "float32"), "rounding changed nothing, so nothing was compared"


def test_a_schedule_that_ends_ends_with_the_run() -> None:
    cosine = RunConfig(loop=LoopConfig(steps=12), trainer=RLConfig(schedule=ScheduleConfig(kind="cosine", warmup=0.25)))
    assert trainer_of(cosine).schedule_steps == 12
    assert trainer_of(dataclasses.replace(cosine, trainer=dataclasses.replace(cosine.trainer, schedule_steps=30))).schedule_steps == 30
    assert trainer_of(RunConfig(loop=LoopConfig(steps=12))).schedule_steps == 0
