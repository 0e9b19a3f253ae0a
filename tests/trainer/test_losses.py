"""Gradients of packed rows through a tiny model (facts M5, M6, M7, M28, M29).

Tolerance where rows differ: float32 sums in another order, 1e-5 of the gradient's size.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from etude.errors import EtudeError
from etude.inference import naive, sampler
from etude.model.config import RouteFilter
from etude.records import StopReason
from etude.trainer.config import RLConfig
from etude.trainer.losses import (
    Divergence,
    HeadCrossEntropy,
    TargetLogProb,
    ce_loss,
    load_entropy,
    log_probs,
    require_finite,
    rl_loss,
    run_row,
    score,
    targets,
)
from etude.trainer.pack import Normalisers, Sample, document_sample, pack, samples_from_groups

PLAIN = RLConfig(kl=0.0)


def gradients(model, rows, config=PLAIN, *, reference=None, replay=None):
    """Flat gradient of the rl stream over all rows."""
    model.zero_grad(set_to_none=True)
    for row in rows:
        where_M = targets(row)
        reference_M = None
        if reference is not None:
            with torch.no_grad():
                reference_M = score(reference, row, where_M).logp_M
        loss, _ = rl_loss(score(model, row, where_M, replay=replay), row, where_M, reference_M, config)
        loss.backward()
    parts = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()]
    return torch.cat(parts)


def rows_of(make, model, rewards=(1.0, 0.0, 0.5, 0.0), config=PLAIN, *, row_tokens=4096, seed=0, **group):
    one = make.rescored(make.group(rewards, seed=seed, **group), model)
    samples, normalisers = samples_from_groups([one], make.base, config)
    return pack(samples, row_tokens, float, normalisers)


def close(a, b, rel=1e-5):
    assert float((a - b).norm()) <= rel * float(b.norm()), float((a - b).norm() / b.norm())


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_gradient_does_not_depend_on_packing_or_row_order(make, kind):
    model = make.tiny(kind)
    rewards = (1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 0.0, 0.75)
    wide = gradients(model, rows_of(make, model, rewards))
    rows = rows_of(make, model, rewards, row_tokens=48)
    assert len(rows) > 2
    assert float(wide.norm()) > 0
    close(gradients(model, rows), wide)
    close(gradients(model, rows[::-1]), wide)


def test_gradient_does_not_depend_on_padding(make):
    """Tokens nobody sampled after the last sampled one, and the blank rows of invariant numerics, change nothing."""
    model = make.tiny()
    (row,) = rows_of(make, model)
    expected = gradients(model, [row])

    samples, normalisers = samples_from_groups([make.rescored(make.group((1.0, 0.0, 0.5, 0.0)), model)], make.base, PLAIN)
    padded = [padded_by(s, 7) for s in samples]
    close(gradients(model, pack(padded, 4096, float, normalisers)), expected)

    invariant = make.tiny(numerics="invariant")
    close(gradients(invariant, [row]), expected)


def padded_by(sample, n):
    zeros = np.zeros(n, dtype=np.float32)
    return Sample(
        ids_T=np.concatenate([sample.ids_T, np.arange(n, dtype=np.int32)]),
        rl_T=np.concatenate([sample.rl_T, zeros]),
        hint_T=np.concatenate([sample.hint_T, zeros]),
        ce_T=np.concatenate([sample.ce_T, zeros]),
        advantage=sample.advantage,
        old_logprob_T=np.concatenate([sample.old_logprob_T, zeros]),
        version_T=np.concatenate([sample.version_T, np.full(n, -1, dtype=np.int32)]),
    )


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_give_an_exactly_zero_gradient(make, kind, reward):
    model = make.tiny(kind)
    config = RLConfig(kl=0.0, skip_silent=False)
    rows = rows_of(make, model, [reward] * 3, config)
    assert sum(len(targets(r)) for r in rows) > 0, "the tokens are in the forward, their gradient is zero"
    assert gradients(model, rows, config).count_nonzero() == 0


def test_a_constant_added_to_all_rewards_changes_nothing(make):
    model = make.tiny()
    base = gradients(model, rows_of(make, model, (1.0, 0.0, 0.25, 0.0)))
    shifted = gradients(model, rows_of(make, model, (4.0, 3.0, 3.25, 3.0)))
    assert torch.equal(base, shifted), "these values are exact in binary"
    close(gradients(model, rows_of(make, model, (1.1, 0.1, 0.35, 0.1))), base)


def test_a_style_bonus_gives_a_gradient_of_its_own_size(make):
    """+-0.01 in an all-correct group against 1 and 0: a hundredth of the gradient, not a gradient of the same size."""
    model = make.tiny()
    style = gradients(model, rows_of(make, model, (1.01, 0.99)))
    outcome = gradients(model, rows_of(make, model, (1.0, -1.0)))
    assert float(style.norm() / outcome.norm()) == pytest.approx(0.01, rel=1e-3)


def test_per_token_weight_does_not_depend_on_the_sequences_own_length(make):
    """The gradient of a rollout's first turn is the same whether the rollout ends there or goes on, when what goes on is unweighted."""
    model = make.tiny()
    samples, normalisers = samples_from_groups([make.rescored(make.group((1.0, 0.0)), model)], make.base, PLAIN)
    short = gradients(model, pack(samples, 4096, float, normalisers))
    longer = [padded_by(s, 40) for s in samples]
    close(gradients(model, pack(longer, 4096, float, normalisers)), short)


def test_gradient_is_minus_advantage_times_score_over_the_constant(make):
    """L = -(1 / (C R)) sum_i sum_t A_i log pi, written out with a plain forward per sequence."""
    model = make.tiny()
    group = make.rescored(make.group((1.0, 0.0, 0.5, 0.0)), model)
    rows = pack(*_packable(make, group))
    got = gradients(model, rows)
    model.zero_grad(set_to_none=True)
    total = 0.0
    for member, advantage in zip(group.members, (0.625, -0.375, 0.125, -0.375), strict=True):
        (seg,) = member.trajectory.segments
        where_M = np.flatnonzero(seg.sampled_T)
        total = total - advantage * score(model, make.batch(seg), where_M).logp_M.sum() / (1024 * 4)
    total.backward()
    close(got, torch.cat([p.grad.flatten() for p in model.parameters()]))


def _packable(make, group):
    samples, normalisers = samples_from_groups([group], make.base, PLAIN)
    return samples, 4096, float, normalisers


def test_overlong_rollouts_contribute_unless_masked(make):
    model = make.tiny()
    stops = [StopReason.DONE, StopReason.OUT_OF_TOKENS]
    kept = gradients(model, rows_of(make, model, (1.0, 0.0), stops=stops))
    masked = gradients(model, rows_of(make, model, (1.0, 0.0), RLConfig(kl=0.0, overlong="mask"), stops=stops))
    plain = gradients(model, rows_of(make, model, (1.0, 0.0)))
    assert torch.equal(kept, plain), "an over-long rollout is trained on like any other"
    assert float((kept - masked).norm()) > 0.1 * float(kept.norm())


def test_all_segments_of_a_chain_are_trained(make):
    model = make.tiny()
    rng = np.random.default_rng(5)
    first, second = make.segment(rng), make.segment(rng, parent=0)

    def gradient_of(chain):
        def segments(rng, member):
            return chain if member == 0 else [first]

        return gradients(model, rows_of(make, model, (1.0, 0.0), segments=segments))

    both = gradient_of([first, second])
    close(both, gradient_of([first]) + gradient_of([second]) - gradient_of([]), rel=1e-4)
    assert float((both - gradient_of([first])).norm()) > 0.1 * float(both.norm())


def test_kl_against_the_policy_itself_is_zero_and_against_another_is_not(make):
    model, other = make.tiny(), make.tiny(seed=4)
    config = RLConfig(kl=0.1)
    rows = rows_of(make, model, (1.0, 1.0), config)
    assert gradients(model, rows, config, reference=model).count_nonzero() == 0
    assert float(gradients(model, rows, config, reference=other).norm()) > 0


def test_truncation_bounds_what_an_unlikely_token_can_do(make):
    """An engine that gave a token log-prob -20 would weigh it by e^15; the cap makes that 2."""
    model = make.tiny()
    (row,) = rows_of(make, model, (1.0, 0.0))
    crazy = row.replace(old_logprob_N=row.old_logprob_N - 15.0 * (row.rl_weight_N > 0))
    close(gradients(model, [crazy]), 2 * gradients(model, [row]))


# ---------------------------------------------------------------------------------------------------
# Forward details


def test_log_probs_in_chunks_equal_those_at_once(make):
    model = make.tiny()
    hidden = torch.randn(37, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.arange(37)
    whole, entropy = log_probs(model, hidden, ids)
    parts, entropy_parts = log_probs(model, hidden, ids, at_once=48 * 10)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(entropy_parts, entropy)
    (a,) = torch.autograd.grad(whole.sum(), hidden)
    (b,) = torch.autograd.grad(parts.sum(), hidden)
    torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(log_probs(model, hidden, ids, at_once=1)[0], whole)


def test_target_log_probs_and_their_gradient():
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(9, 17, generator=generator)).requires_grad_()
    ids, weights = torch.randint(0, 17, (9,), generator=generator), torch.randn(9, generator=generator)
    logp, entropy = TargetLogProb.apply(logits, ids)
    plain = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(logp.double(), plain.gather(1, ids[:, None])[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy.double(), -(plain.exp() * plain).sum(-1), rtol=0, atol=1e-6)
    assert not entropy.requires_grad
    (got,) = torch.autograd.grad((weights * logp).sum(), logits)
    (expected,) = torch.autograd.grad((weights * plain.gather(1, ids[:, None])[:, 0]).sum(), logits)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_target_log_probs_have_the_engines_bits():
    logits = 8 * torch.randn(200, 777, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(200)
    assert torch.equal(TargetLogProb.apply(logits, ids)[0], sampler.logprobs(logits, ids))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_engine_and_trainer_agree_to_the_last_bit_in_invariant_numerics(make, kind):
    """The engine's own scoring of one sequence against a packed row of the trainer's."""
    model = make.tiny(kind, numerics="invariant")
    samples, normalisers = samples_from_groups([make.group((1.0, 0.0, 0.5))], make.base, PLAIN)
    (row,) = pack(samples, 4096, float, normalisers)
    where_M = targets(row)
    with torch.no_grad():
        ours = score(model, row, where_M).logp_M.numpy()
    theirs = [naive.score(model, row.ids_N[a:b].tolist(), make.base).logprob_T for a, b in row.bounds]
    assert np.array_equal(np.concatenate(theirs)[where_M], ours)


def test_entropy_is_that_of_the_distribution(make):
    model = make.tiny()
    hidden = torch.zeros(2, 32)
    assert log_probs(model, hidden, torch.tensor([0, 1]))[1].tolist() == pytest.approx([np.log(48)] * 2)


def test_replayed_routes_are_used_and_give_the_router_gradient(make):
    model = make.tiny("moe")
    group = make.rescored(make.group((1.0, 0.0)), model, routes=True)
    samples, normalisers = samples_from_groups([group], make.base, PLAIN)
    (row,) = pack(samples, 4096, float, normalisers)
    where_M = targets(row)
    with torch.no_grad():
        own, replayed = score(model, row, where_M), score(model, row, where_M, replay=RouteFilter())
        assert torch.equal(own.logp_M, replayed.logp_M)
        assert torch.equal(torch.tensor(row.routes_NLK), replayed.routes_NLK)
        flipped = row.replace(routes_NLK=((row.routes_NLK.astype(int) + 2) % 4).astype(np.uint8))
        assert not torch.allclose(score(model, flipped, where_M, replay=RouteFilter()).logp_M, own.logp_M)
        assert torch.equal(score(model, flipped, where_M).logp_M, own.logp_M), "without replay the router decides"
    gradients(model, [flipped], replay=RouteFilter())
    routers = [p.grad for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    assert all(float(g.abs().sum()) > 0 for g in routers)


def test_ce_is_the_mean_over_masked_tokens(make):
    model = make.tiny()
    ids, mask = np.array([5, 6, 7, 8, 9]), np.array([1, 1, 0, 1, 1])
    (row,) = pack([document_sample(ids, mask)], 64, float, Normalisers(ce=3.0))
    where_M = targets(row)
    assert where_M.tolist() == [1, 3, 4]
    scores = score(model, row, where_M)
    assert ce_loss(model, run_row(model, row), row).item() == pytest.approx(-scores.logp_M.mean().item(), rel=1e-6)


@pytest.mark.parametrize("at_once", [48 * 7, 2**25])
@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_cross_entropy_and_its_gradients_are_those_of_log_softmax(make, kind, at_once):
    """Tied and untied heads, and 300 targets: the padded rows of the quick kernels, with a last chunk that is not full."""
    model = make.tiny(kind)
    rng = np.random.default_rng(0)
    mask = rng.random(400) < 0.75
    (row,) = pack([document_sample(rng.integers(0, 48, 400), mask)], 512, float, Normalisers(ce=float(rng.random())))

    def gradients_of(loss):
        model.zero_grad()
        (3 * loss).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    loss = ce_loss(model, run_row(model, row), row, at_once=at_once)
    where_M = targets(row)
    plain = -(torch.tensor(row.ce_weight_N[where_M]) * score(model, row, where_M).logp_M).sum()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    ours, twin = gradients_of(loss), gradients_of(plain)
    assert ours.keys() == twin.keys()
    for name, grad in twin.items():
        assert (ours[name] - grad).norm() <= 2e-6 * grad.norm() + 1e-7, name
    with torch.no_grad():
        assert ce_loss(model, run_row(model, row), row, at_once=at_once).item() == pytest.approx(plain.item(), rel=1e-6)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_cross_entropy_never_holds_all_logits():
    """2,000 targets in a vocabulary of 50,000 are 100 million logits."""
    head, hidden = torch.zeros(50_000, 8, requires_grad=True), torch.zeros(2000, 8, requires_grad=True)
    ids, weight = torch.zeros(2000, dtype=torch.int64), torch.full((2000,), 1 / 2000)
    for at_once, limit in ((2**22, 2**23), (2**27, 2**27)):
        with Largest() as largest:
            loss = HeadCrossEntropy.apply(hidden, head, ids, weight, at_once)
            loss.backward()
        assert loss.item() == pytest.approx(np.log(50_000), rel=1e-5)
        assert largest.elements <= limit
    assert largest.elements == 2048 * 50_000, "all at once when told so, padded rows included: the measure measures"


def test_cross_entropy_under_autocast_is_near(make):
    model = make.tiny()
    rng = np.random.default_rng(0)
    (row,) = pack([document_sample(rng.integers(0, 48, 200), np.ones(200))], 512, float, Normalisers(ce=199.0))
    exact = ce_loss(model, run_row(model, row), row)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = ce_loss(model, run_row(model, row), row)
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=0.03)
    head = model.embed_tokens.weight
    (a,), (b,) = (torch.autograd.grad(loss, head) for loss in (exact, rough))
    assert b.dtype == torch.float32
    assert (a - b).norm() < 0.1 * a.norm()


def test_load_entropy_is_one_when_even_and_zero_when_collapsed():
    assert load_entropy(torch.tensor([[5, 5, 5, 5]])) == pytest.approx(1.0)
    assert load_entropy(torch.tensor([[20, 0, 0, 0]])) == 0.0


def test_non_finite_names_where_and_what():
    require_finite("the loss", 1.0, "step 3")
    with pytest.raises(Divergence, match=r"step 3: the loss is nan; weights were not changed"):
        require_finite("the loss", float("nan"), "step 3")
    assert issubclass(Divergence, EtudeError)
