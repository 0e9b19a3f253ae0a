from __future__ import annotations

import pytest

from etude.trainer.flops import active_params, forward_flops
from etude.trainer.provenance import Provenance, Stage, read


def test_active_parameters_count_the_experts_a_token_passes(make):
    dense, moe = make.tiny("dense"), make.tiny("moe")
    matrices = sum(p.numel() for n, p in dense.named_parameters() if p.ndim == 2)
    assert active_params(dense.config) == matrices, "tied: the embedding is the head"
    unused = sum(p.numel() // 2 for n, p in moe.named_parameters() if p.ndim == 3)
    gates = sum(p.numel() for n, p in moe.named_parameters() if "shared_expert_gate" in n)
    assert active_params(moe.config) == sum(p.numel() for n, p in moe.named_parameters() if p.ndim >= 2) - unused - gates


def test_active_parameters_of_latent_attention_are_those_of_its_matrices(make):
    """Absorbed or not, a token passes each once; of the experts it passes some, and none in a dense layer."""
    model = make.tiny("latent")
    unused = sum(p.numel() // 2 for n, p in model.named_parameters() if p.ndim == 3)
    assert active_params(model.config) == sum(p.numel() for n, p in model.named_parameters() if p.ndim >= 2) - unused
    a, b, c = (forward_flops(model.config, n) for n in (100, 200, 400))
    assert c - 2 * b == pytest.approx(4 * (b - 2 * a)) == pytest.approx(2 * 2 * 4 * (32 + 8) * 2 * 200 * 200)


def test_forward_flops_are_linear_plus_causal_quadratic(make):
    config = make.shapes["dense"]
    a, b, c = (forward_flops(config, n) for n in (100, 200, 400))
    assert c - 2 * b == pytest.approx(4 * (b - 2 * a))
    assert a == pytest.approx(2 * active_params(config) * 100 + 2 * 2 * 4 * 8 * 100 * 100)


def test_share_of_compute_is_counted_and_never_guessed(tmp_path):
    base = Stage(kind="base", name="b", ours=False, flops=3e9, licence="Apache-2.0")
    ours = Stage(kind="rl", name="rl", ours=True, flops=1e9, data=("katas",))
    assert Provenance(stages=(base,)).plus(ours).share_ours == 0.25
    assert read(tmp_path).plus(ours).share_ours is None, "a base nobody counted has no share"
    Provenance(stages=(base, ours)).write(tmp_path)
    assert read(tmp_path) == Provenance(stages=(base, ours))
    assert read(tmp_path).licence == "Apache-2.0"
