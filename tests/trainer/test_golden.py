"""Ten steps of each trainer, against numbers kept in tests/golden/: tiny fixed models, and the shipped nano policy.

Tiny: reinforcement twice (`rl` replays every recorded route, `filtered` those that the default filter finds plausible) and pretraining
from random weights; loss and gradient norm. Nano: reinforcement and further pretraining of the shipped weights; the loss.

Equality where it can be had: in one process a second run gives the same digits, and so does another process where the torch version,
the processor's maker, instruction set and the number of threads are those in the file's first line. Elsewhere other matrix kernels add
in another order: within 1e-5 of nano's losses (relative; those of reinforcement are differences, so relative to the largest), and
within 1e-4 of the tiny models', whose weights move further in a step.

Writing a file again is a change of its own, with a reason: python tests/trainer/test_golden.py
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

from etude.model.shelf import PACKAGED
from etude.model.weights import load_model, save_model
from etude.trainer.config import PhaseConfig, PretrainConfig, RLConfig
from etude.trainer.documents import write_documents
from etude.trainer.pretrain import pretrain
from etude.trainer.rl import RLTrainer

GOLDEN = Path(__file__).parent.parent / "golden"
STEPS = 10


def rl_losses(groups_of, folder, steps=STEPS, **config):
    """(loss, gradient norm) of each step; `groups_of` gives the step's groups."""

    async def go():
        trainer = RLTrainer(RLConfig(**config), folder)
        reports = [await trainer.step(groups_of(step)) for step in range(steps)]
        await trainer.close()
        return [(r.metrics["loss"], r.metrics["grad_norm"]) for r in reports]

    return asyncio.run(go())


def tiny_rl(make, folder, **changes):
    """Groups sampled (in effect) by the start weights, so that later steps are off-policy and the weights matter."""
    save_model(make.tiny("moe"), folder)
    start = make.tiny("moe")

    def groups(step):
        return [make.rescored(make.group((1.0, 0.0, 0.5, 0.0), admission=2 * step + a), start, routes=True) for a in range(2)]

    return rl_losses(groups, folder, lr=3e-3, kl=1e-2, row_tokens=64, **changes)


def tiny_pretrain(make, folder):
    rng = np.random.default_rng(0)
    write_documents(folder / "d.npz", [(rng.integers(0, 48, int(rng.integers(8, 64))), None) for _ in range(60)])
    phase = PhaseConfig(name="bulk", data=str(folder / "d.npz"), tokens=STEPS * 256, batch_tokens=256, length=32)
    return pretrained(PretrainConfig(phases=(phase,), model=make.shapes["moe"], row_tokens=128), folder / "out")


def pretrained(config, out):
    lines = []
    pretrain(config, out, progress=lines.append)
    return [(line["loss"], line["grad_norm"]) for line in lines]


def tiny(make, folder):
    for name in ("rl", "filtered", "pretrain"):
        (folder / name).mkdir()
    series = {
        "rl": tiny_rl(make, folder / "rl", route_filter="none"),
        "filtered": tiny_rl(make, folder / "filtered"),
        "pretrain": tiny_pretrain(make, folder / "pretrain"),
    }
    return [f"{name} {step} {loss!r} {norm!r}" for name, pairs in series.items() for step, (loss, norm) in enumerate(pairs, 1)]


def nano(make, folder):
    """Random tokens of nano's vocabulary: no corpus has to be made, and what is golden is the arithmetic."""
    start = load_model(PACKAGED["nano"])
    vocab = start.config.vocab_size

    def segments(rng, member):
        return [make.segment(rng, prompt=int(rng.integers(10, 30)), turns=((12, 4), (8, 0)), vocab=vocab)]

    def groups(step):
        return [make.rescored(make.group((1.0, 0.0, 0.5), admission=step, segments=segments), start, routes=True)]

    rng = np.random.default_rng(0)
    write_documents(folder / "d.npz", [(rng.integers(0, vocab, int(rng.integers(20, 120))), None) for _ in range(60)])
    phase = PhaseConfig(name="more", data=str(folder / "d.npz"), tokens=STEPS * 256, batch_tokens=256, length=120, lr=1e-3)
    series = {
        "rl": rl_losses(groups, PACKAGED["nano"], lr=1e-4, kl=1e-2, loss_constant=64.0),
        "pretrain": pretrained(PretrainConfig(phases=(phase,), base="nano", row_tokens=256), folder / "out"),
    }
    return [f"{name} {step} {loss!r}" for name, pairs in series.items() for step, (loss, _) in enumerate(pairs, 1)]


FILES = {"loss_tiny_cpu.txt": (tiny, 1e-4), "loss_nano_cpu.txt": (nano, 1e-5)}


def machine():
    """What the digits depend on."""
    return ", ".join(
        (
            f"torch {torch.__version__.split('+')[0]}",
            f"{platform.machine()} {_vendor()}".strip(),
            torch.backends.cpu.get_cpu_capability(),
            "amx" if torch.cpu._is_amx_tile_supported() else "no amx",
            f"{torch.get_num_threads()} thread",
        )
    )


def _vendor():
    """Matrix libraries choose kernels by the processor's maker too."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def parse(lines):
    return {tuple(line.split()[:2]): [float(x) for x in line.split()[2:]] for line in lines if line and not line.startswith("#")}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compare(measured, name, close):
    """Every digit on a machine like the one that wrote the file, `close` elsewhere."""
    head, *lines = (GOLDEN / name).read_text().splitlines()
    found, golden = parse(measured), parse(lines)
    assert found.keys() == golden.keys()
    if f"# {machine()};" in head:
        assert found == golden
    largest = {series: max(abs(numbers[0]) for key, numbers in golden.items() if key[0] == series) for series, _ in golden}
    for key, numbers in found.items():
        slack = close * largest[key[0]] if name == "loss_nano_cpu.txt" and key[0] == "rl" else 1e-8
        assert numbers == pytest.approx(golden[key], rel=close, abs=slack), key


def test_losses_of_tiny_models_are_the_golden_ones(make, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = tiny(make, tmp_path / "a"), tiny(make, tmp_path / "b")
    assert first == second, "equal input gives equal digits"
    compare(first, "loss_tiny_cpu.txt", 1e-4)


def test_losses_of_nano_are_the_golden_ones(make, tmp_path):
    compare(nano(make, tmp_path), "loss_nano_cpu.txt", 1e-5)


def test_a_changed_digit_and_a_lost_step_are_seen(tmp_path):
    """The comparison itself can fail: on this machine in the last digit, elsewhere beyond the tolerance."""
    name = "loss_nano_cpu.txt"
    lines = (GOLDEN / name).read_text().splitlines()[1:]
    compare(lines, name, 1e-5)
    key, step, loss = lines[-1].split()
    with pytest.raises(AssertionError):
        compare([*lines[:-1], f"{key} {step} {float(loss) * (1 + 3e-5)!r}"], name, 1e-5)
    with pytest.raises(AssertionError):
        compare(lines[:-1], name, 1e-5)


def _write():
    spec = importlib.util.spec_from_file_location("helpers", Path(__file__).parent / "conftest.py")
    helpers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helpers)
    for name, (measure, _) in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            lines = measure(helpers.HELPERS, Path(folder))
        columns = "series, step, loss, gradient norm" if name.startswith("loss_tiny") else "series, step, loss"
        head = f"# {machine()}; {columns}; see tests/trainer/test_golden.py\n"
        (GOLDEN / name).write_text(head + "\n".join(lines) + "\n")
        sys.stdout.write((GOLDEN / name).read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    _write()
