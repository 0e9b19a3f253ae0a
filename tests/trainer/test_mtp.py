"""Training of the heads that predict further tokens: losses by hand, and a model that does not notice."""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest
import torch

from etude.errors import ConfigError, UserError
from etude.model.reference import predicted_logits, reference_logits
from etude.model.weights import from_config, load_model, save_model
from etude.optim.config import OptimConfig
from etude.records import Batch
from etude.sync.chain import weights_hash
from etude.trainer.config import PhaseConfig, PretrainConfig, RLConfig
from etude.trainer.documents import Documents, rows_of, write_documents
from etude.trainer.losses import run_row
from etude.trainer.mtp import acceptance, head_loss
from etude.trainer.pretrain import pretrain
from etude.trainer.rl import RLTrainer

HEADS = 2


@pytest.fixture(params=["dense", "moe", "latent"])
def model(request, make):
    made = make.tiny(request.param)
    made.add_heads(HEADS, seed=1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.startswith("mtp.") and parameter.ndim >= 2:
                parameter.mul_(4.0)
    return made


@pytest.fixture
def row():
    """Sequences too short for the second head, too short for any, and longer ones; a third of the tokens is not to be predicted."""
    rng = np.random.default_rng(0)
    lengths = [1, 2, 3, 4, 20, 9]
    ends = np.cumsum([0, *lengths]).tolist()
    total = ends[-1]
    weight_N = (rng.random(total) < 0.66).astype(np.float32) * rng.random(total).astype(np.float32)
    weight_N[ends[:-1]] = 0.0
    zeros_N = np.zeros(total, np.float32)
    return Batch(
        ids_N=rng.integers(0, 48, total).astype(np.int32),
        positions_N=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        bounds=tuple(itertools.pairwise(ends)),
        rl_weight_N=zeros_N,
        hint_weight_N=zeros_N,
        ce_weight_N=weight_N,
        advantage_N=zeros_N,
        old_logprob_N=zeros_N,
        version_N=np.full(total, -1, np.int32),
    )


def predictions(model, row):
    """(head, weight, token, log p of the model, log q of the head) of every token a head predicts, sequence by sequence."""
    for start, end in row.bounds:
        ids_T, weight_T = torch.tensor(row.ids_N[start:end].astype(np.int64)), row.ce_weight_N[start:end]
        logp_TV = reference_logits(model, ids_T).log_softmax(-1)
        if end - start <= 2:
            continue
        for k, logits in enumerate(predicted_logits(model, ids_T)):
            for t in range(end - start - 2 - k):
                yield k, float(weight_T[t + k + 2]), int(ids_T[t + k + 2]), logp_TV[t + k + 1], logits[t].log_softmax(-1)


@pytest.mark.parametrize("at_once", [2**26, 48 * 5])
def test_losses_are_those_of_the_equations(model, row, at_once):
    distil, labels = 0.0, 0.0
    for _, weight, token, logp_V, logq_V in predictions(model, row):
        distil += weight * (logp_V.exp() * (logp_V - logq_V)).sum().item() / HEADS
        labels += -weight * logq_V[token].item() / HEADS
    ran = run_row(model, row, heads=True)
    assert head_loss(model, ran, row, "distil", at_once=at_once).item() == pytest.approx(distil, rel=1e-5)
    assert head_loss(model, ran, row, "labels", at_once=at_once).item() == pytest.approx(labels, rel=1e-5)
    assert distil > 0


def test_acceptance_is_that_of_the_equations(model, row):
    sampled, greedy, count = np.zeros(HEADS), np.zeros(HEADS), np.zeros(HEADS)
    for k, weight, _, logp_V, logq_V in predictions(model, row):
        if weight:
            sampled[k] += torch.minimum(logp_V.exp(), logq_V.exp()).sum().item()
            greedy[k] += logp_V.argmax() == logq_V.argmax()
            count[k] += 1
    for k, found in enumerate(acceptance(model, [row], at_once=48 * 5)):
        assert (found.tokens, found.greedy) == (count[k], pytest.approx(greedy[k] / count[k]))
        assert found.sampled == pytest.approx(sampled[k] / count[k], rel=1e-4)


@pytest.mark.parametrize("kind", ["distil", "labels"])
def test_the_gradient_is_that_of_the_equations_and_reaches_only_heads(model, row, kind):
    head_loss(model, run_row(model, row, heads=True), row, kind).backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert ours
    assert all(name.startswith("mtp.") for name in ours)
    model.zero_grad()
    total = torch.zeros(())
    for _, weight, token, logp_V, logq_V in predictions(model, row):
        p_V = logp_V.detach().exp()
        total = total + weight / HEADS * ((p_V * (logp_V.detach() - logq_V)).sum() if kind == "distil" else -logq_V[token])
    total.backward()
    for name, grad in ours.items():
        twin = model.get_parameter(name).grad
        assert (grad - twin).norm() <= 1e-4 * twin.norm() + 1e-7, name


# --- in pretraining


@pytest.fixture
def data(tmp_path):
    """Sequences of a rule with one random choice in three tokens, so that something can be learnt and something cannot."""
    rng = np.random.default_rng(0)

    def document():
        ids = [int(rng.integers(48))]
        for i in range(int(rng.integers(20, 60))):
            ids.append(int(rng.integers(48)) if i % 3 == 0 else (3 * ids[-1] + 1) % 48)
        return ids, None

    write_documents(tmp_path / "train.npz", [document() for _ in range(200)])
    write_documents(tmp_path / "held.npz", [document() for _ in range(20)])
    return tmp_path


def phase(data, name, trains, tokens=3 * 512, **changes):
    values = {"batch_tokens": 512, "length": 64, "lr": 1e-2, **changes}
    return PhaseConfig(name=name, data=str(data / "train.npz"), tokens=tokens, trains=trains, **values)


def config_of(make, data, *phases, heads=1, kind="moe", **changes):
    shape = dataclasses.replace(make.shapes[kind], mtp_layers=heads)
    values = {"model": shape, "held_out": str(data / "held.npz"), "row_tokens": 256, "eval_every": 100, "save_dtype": "float32"}
    return PretrainConfig(phases=phases, **{**values, **changes})


def parts(folder):
    """(hash of the model, hash of the heads)."""
    params = dict(load_model(folder).named_parameters())
    heads = {n: p for n, p in params.items() if n.startswith("mtp.")}
    return weights_hash({n: p for n, p in params.items() if n not in heads}), weights_hash(heads)


def test_a_model_trained_beside_its_heads_is_the_one_trained_without(make, data, tmp_path):
    clipped = OptimConfig(kind="muon", weight_decay=0.1, clip_norm=0.1)
    alone = pretrain(config_of(make, data, phase(data, "bulk", "model", optim=clipped)), tmp_path / "a")
    beside = pretrain(config_of(make, data, phase(data, "bulk", "all", optim=clipped)), tmp_path / "b")
    start = from_config(dataclasses.replace(make.shapes["moe"], mtp_layers=1), seed=0)
    (model_a, heads_a), (model_b, heads_b) = parts(alone.model), parts(beside.model)
    assert model_a == model_b
    assert heads_a != heads_b
    assert [p.loss for p in alone.curve] == [p.loss for p in beside.curve]
    assert alone.curve[-1].accept == ()
    assert len(beside.curve[-1].accept) == start.config.mtp_layers
    assert beside.flops > alone.flops


def test_heads_on_top_of_a_finished_model_leave_it_alone_and_learn(make, data, tmp_path):
    base = pretrain(config_of(make, data, phase(data, "bulk", "model", tokens=10 * 512), heads=0, kind="dense"), tmp_path / "base")
    lines = []
    config = config_of(
        make, data, phase(data, "heads", "heads", tokens=10 * 512), model=None, base=str(base.model), add_heads=1, eval_every=3
    )
    result = pretrain(config, tmp_path / "heads", progress=lines.append)
    assert parts(result.model)[0] == weights_hash(dict(load_model(base.model).named_parameters()))
    assert result.curve[-1].loss == base.curve[-1].loss
    assert lines[-1]["head_loss"] < 0.8 * lines[0]["head_loss"]
    assert result.curve[-1].accept[0] > result.curve[0].accept[0]
    found = acceptance(load_model(result.model), rows_of(Documents(data / "held.npz"), Documents(data / "held.npz").pieces(64), 256))
    assert found[0].sampled == pytest.approx(result.curve[-1].accept[0], abs=1e-6)


class Killed(Exception):
    pass


def test_resume_with_heads_equals_uninterrupted_bit_for_bit(make, data, tmp_path):
    phases = tuple(phase(data, trains, trains, tokens=2 * 512) for trains in ("model", "heads", "all"))
    config = config_of(make, data, *phases, kind="dense", save_every=2, held_out="")
    whole = pretrain(config, tmp_path / "whole")

    for killed_at in (3, 6):

        def watch(line, killed_at=killed_at):
            if line["step"] == killed_at:
                raise Killed

        with pytest.raises(Killed):
            pretrain(config, tmp_path / "cut", progress=watch)
    assert pretrain(config, tmp_path / "cut").weights == whole.weights


def test_heads_that_are_not_there_cannot_be_trained(make, data, tmp_path):
    with pytest.raises(UserError, match="trains heads and the model has none"):
        pretrain(config_of(make, data, phase(data, "heads", "heads"), heads=0), tmp_path / "out")
    with pytest.raises(ConfigError, match="adds heads to a base"):
        config_of(make, data, phase(data, "heads", "heads"), add_heads=1)


def test_reinforcement_leaves_heads_as_they_are(make, tmp_path):
    start = make.tiny("moe")
    start.add_heads(1, seed=0)
    save_model(start, tmp_path / "model", dtype=torch.float32)

    async def go():
        config = RLConfig(lr=1e-2, row_tokens=64, kl=0.0, publish_dtype="float32", optim=OptimConfig(weight_decay=0.5))
        trainer = RLTrainer(config, tmp_path / "model")
        await trainer.step([make.rescored(make.group((1.0, 0.0, 0.5, 0.0)), start, routes=True)])
        await trainer.save(tmp_path / "out")
        await trainer.close()

    asyncio.run(go())
    before, after = parts(tmp_path / "model"), parts(tmp_path / "out" / "model")
    assert before[1] == after[1]
    assert before[0] != after[0]
