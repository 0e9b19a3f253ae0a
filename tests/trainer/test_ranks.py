"""Several processes share a step: the same run as one process, every row taken by exactly one, and a dead rank is an error."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from etude.errors import ConfigError, InfraError
from etude.trainer.config import PhaseConfig, PretrainConfig
from etude.trainer.documents import Documents, Rows, write_documents
from etude.trainer.pretrain import pretrain
from etude.trainer.ranks import Ranks, crew


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    path = tmp_path_factory.mktemp("documents") / "train.npz"
    rng = np.random.default_rng(0)
    write_documents(path, [((np.arange(rng.integers(8, 40)) * 3 + start) % 47, None) for start in range(60)])
    return path


@pytest.mark.parametrize("count", [2, 3, 7])
def test_every_row_is_taken_by_exactly_one_rank(documents, count):
    rows = Rows(Documents(documents), length=40, row_tokens=64, seed=0).take(500)
    shares = [Ranks(rank=rank, count=count).share(rows) for rank in range(count)]
    assert sorted(id(row) for share in shares for row in share) == sorted(id(row) for row in rows)
    tokens = [sum(len(row.ids_N) for row in share) for share in shares]
    assert max(tokens) - min(tokens) <= 64


def config_of(make, documents, **changes):
    phase = PhaseConfig(name="bulk", data=str(documents), tokens=3000, length=40, batch_tokens=256, lr=1e-3)
    shape = make.tiny("moe").config
    return PretrainConfig(
        **{"phases": (phase,), "model": shape, "row_tokens": 64, "held_out": str(documents), "eval_every": 4, "save_every": 5, **changes}
    )


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_resume_bit_for_bit(make, documents, tmp_path):
    """Gradients are the same sums in another order, so float32 weights agree to rounding; two runs of two agree exactly."""
    torch.set_num_threads(1)
    one = pretrain(config_of(make, documents), tmp_path / "one")
    two = pretrain(config_of(make, documents, processes=2), tmp_path / "two")
    part = pretrain(config_of(make, documents, processes=2, stop_tokens=1500), tmp_path / "part")
    assert part.tokens < two.tokens
    resumed = pretrain(config_of(make, documents, processes=2), tmp_path / "part")
    assert resumed.weights == two.weights
    assert [p.step for p in one.curve] == [p.step for p in two.curve]
    assert [p.loss for p in two.curve] == pytest.approx([p.loss for p in one.curve], abs=2e-4)


def die_in_the_first_sum(ranks: Ranks) -> None:
    os._exit(3)


@pytest.mark.slow
def test_a_rank_that_died_is_named_and_nothing_waits_forever():
    with pytest.raises(InfraError, match="lost another rank"), crew(2, die_in_the_first_sum) as ranks:
        ranks.sum_([torch.ones(3)])


def test_several_processes_are_for_the_cpu():
    phase = PhaseConfig(name="bulk", data="x", tokens=1, length=2)
    with pytest.raises(ConfigError, match="on CPU only"):
        PretrainConfig(phases=(phase,), base="x", processes=2, device="cuda")
