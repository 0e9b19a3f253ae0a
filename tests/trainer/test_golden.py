"""Ten steps of each trainer on tiny fixed models, against numbers kept in tests/golden/loss_tiny_cpu.txt.

Reinforcement twice: `rl` replays every recorded route, `filtered` those that the default filter finds plausible.
Within one process the numbers are equal in every digit when run twice. Against the file they are close (1e-4 relative): it was written
with the torch version and processor named in it, and other matrix kernels add in another order.

Writing the file again is a change of its own, with a reason: python tests/trainer/test_golden.py
"""

from __future__ import annotations

import asyncio
import importlib.util
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.model.weights import save_model
from etude.trainer.config import PhaseConfig, PretrainConfig, RLConfig
from etude.trainer.documents import write_documents
from etude.trainer.pretrain import pretrain
from etude.trainer.rl import RLTrainer

FILE = Path(__file__).parent.parent / "golden" / "loss_tiny_cpu.txt"
STEPS = 10


def rl_losses(make, folder, **changes):
    """Groups sampled (in effect) by the start weights, so that later steps are off-policy and the weights matter."""
    save_model(make.tiny("moe"), folder)
    start = make.tiny("moe")

    async def go():
        trainer = RLTrainer(RLConfig(lr=3e-3, kl=1e-2, row_tokens=64, **changes), folder)
        for step in range(STEPS):
            groups = [make.rescored(make.group((1.0, 0.0, 0.5, 0.0), admission=2 * step + a), start, routes=True) for a in range(2)]
            report = await trainer.step(groups)
            yield report.metrics["loss"], report.metrics["grad_norm"]

    async def collect():
        return [pair async for pair in go()]

    return asyncio.run(collect())


def pretrain_losses(make, folder):
    rng = np.random.default_rng(0)
    write_documents(folder / "d.npz", [(rng.integers(0, 48, int(rng.integers(8, 64))), None) for _ in range(60)])
    phase = PhaseConfig(name="bulk", data=str(folder / "d.npz"), tokens=STEPS * 256, batch_tokens=256, length=32)
    lines = []
    pretrain(PretrainConfig(phases=(phase,), model=make.shapes["moe"], row_tokens=128), folder / "out", progress=lines.append)
    return [(line["loss"], line["grad_norm"]) for line in lines]


def measure(make, folder):
    for name in ("rl", "filtered", "pretrain"):
        (folder / name).mkdir()
    series = {
        "rl": rl_losses(make, folder / "rl", route_filter="none"),
        "filtered": rl_losses(make, folder / "filtered"),
        "pretrain": pretrain_losses(make, folder / "pretrain"),
    }
    return [f"{name} {step} {loss!r} {norm!r}" for name, pairs in series.items() for step, (loss, norm) in enumerate(pairs, 1)]


def machine():
    return f"torch {torch.__version__.split('+')[0]}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def parse(lines):
    return {tuple(line.split()[:2]): [float(x) for x in line.split()[2:]] for line in lines if line and not line.startswith("#")}


def test_losses_are_the_golden_ones(make, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = measure(make, tmp_path / "a"), measure(make, tmp_path / "b")
    assert first == second, "equal input gives equal digits"
    golden = parse(FILE.read_text().splitlines())
    assert len(golden) == 3 * STEPS
    for key, numbers in parse(first).items():
        assert numbers == pytest.approx(golden[key], rel=1e-4, abs=1e-8), key


def _write():
    spec = importlib.util.spec_from_file_location("helpers", Path(__file__).parent / "conftest.py")
    helpers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helpers)
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(helpers.HELPERS, Path(folder))
    head = f"# {machine()}, one thread. Series, step, loss, gradient norm; see tests/trainer/test_golden.py.\n"
    FILE.write_text(head + "\n".join(lines) + "\n")
    sys.stdout.write(FILE.read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    _write()
