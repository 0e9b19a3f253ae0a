"""Heads that predict further tokens: against their slow twin, through the cache, on disk, and without a hand in the model itself."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from etude.errors import CheckpointError, ConfigError, UserError
from etude.model.cache import PagedCache, Plan, blocks_for
from etude.model.reference import predicted_logits
from etude.model.transformer import KEPT
from etude.model.weights import check_folder, load_model, save_model
from etude.sync.chain import weights_hash

CLOSE = {"rtol": 0, "atol": 2e-5}
"""As for the model's own logits (test_transformer.py)."""
HEADS = 2


@pytest.fixture
def headed(config):
    return dataclasses.replace(config, mtp_layers=HEADS)


def tokens(*lengths, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (n,), generator=generator) for n in lengths]


def shifted(seqs, by):
    """The token `by` places later, and any id where there is none."""
    return torch.cat([torch.cat((ids[by:], ids.new_full((min(by, len(ids)),), 7))) for ids in seqs])


def drafts(model, seqs, **options):
    """Logits of each head for each sequence, as the trainer computes them."""
    lengths = [len(s) for s in seqs]
    plan = Plan.packed(lengths)
    cache = PagedCache(model.config, blocks_for(lengths), dtype=model.dtype, functional=True, heads=True)
    stream, out = model(torch.cat(seqs), plan, cache).hidden_ND.detach(), []
    for head in range(model.config.mtp_layers):
        draft = model.predict(stream, shifted(seqs, head + 1), plan, cache, head=head)
        stream = draft.stream_ND
        out.append(model.logits(draft.hidden_ND, **options).split(lengths))
    return out


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_drafts_equal_the_reference(headed, make_model, numerics):
    model = make_model(headed, numerics)
    seqs = tokens(3, 16, 17, 40, 150)
    got = drafts(model, seqs)
    for s, ids in enumerate(seqs):
        for head, expected in enumerate(predicted_logits(model, ids)):
            torch.testing.assert_close(got[head][s][: len(ids) - 1 - head], expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafting_token_by_token_gives_the_bits_of_the_whole(headed, make_model, dtype):
    """What an engine does: one lasting cache for model and heads, one plan a step, two sequences at once."""
    model = make_model(headed, "invariant", dtype)
    seqs = tokens(21, 21)
    whole = drafts(model, seqs)
    cache = PagedCache(headed, 4, 64, dtype, heads=True)
    with torch.inference_mode():
        for t in range(20):
            plan = Plan(
                positions_N=torch.tensor([t, t]),
                slots_N=torch.tensor([64 + t, 3 * 64 + t]),
                tables_SB=torch.tensor([[1], [3]]),
                starts_S1=[0, 1, 2],
                lengths_S=[t + 1, t + 1],
            )
            out = model(torch.stack([ids[t] for ids in seqs]), plan, cache)
            draft = model.predict(out.hidden_ND, torch.stack([ids[t + 1] for ids in seqs]), plan, cache)
            logits = model.logits(draft.hidden_ND)
            for s in (0, 1):
                assert torch.equal(logits[s], whole[0][s][t])


def test_heads_change_nothing_of_the_model_and_give_it_no_gradient(headed, make_model):
    model = make_model(headed)
    seqs = tokens(30, 12)
    sum(torch.cat(logits).logsumexp(-1).sum() for logits in drafts(model, seqs, frozen=True)).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert (parameter.grad is not None) == name.startswith("mtp."), name
            assert not name.startswith("mtp.") or parameter.grad.any(), name


def test_heads_added_to_a_model_leave_it_alone(config, make_model):
    model = make_model(config, dtype=torch.bfloat16)
    before = weights_hash(dict(model.named_parameters()))
    model.add_heads(HEADS, seed=1)
    after = dict(model.named_parameters())
    assert weights_hash({n: p for n, p in after.items() if not n.startswith("mtp.")}) == before
    assert model.config == dataclasses.replace(config, mtp_layers=HEADS)
    assert {p.dtype for n, p in after.items() if n.startswith("mtp.") and not n.endswith(KEPT)} == {torch.bfloat16}
    drafts(model, tokens(9))
    with pytest.raises(UserError, match="has 2 heads already"):
        model.add_heads(1, seed=1)


def test_a_model_without_heads_says_so(config, make_model):
    model, plan = make_model(config), Plan.packed([4])
    with pytest.raises(UserError, match="head 0 was asked for, this model has 0"):
        model.predict(torch.zeros(4, config.hidden), torch.zeros(4, dtype=torch.int64), plan, PagedCache(config, 1))
    with pytest.raises(ConfigError, match="mtp_layers is -1"):
        dataclasses.replace(config, mtp_layers=-1)


# --- on disk


def test_round_trip_is_byte_identical_and_layers_lie_behind_the_last(headed, make_model, tmp_path):
    model = make_model(headed, dtype=torch.bfloat16)
    save_model(model, tmp_path / "a")
    again = load_model(tmp_path / "a", dtype=torch.bfloat16)
    assert again.config == headed
    assert weights_hash(dict(again.named_parameters())) == weights_hash(dict(model.named_parameters()))
    save_model(again, tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    names = set(load_file(tmp_path / "a" / "model.safetensors"))
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "input_layernorm.weight"}
    for layer in (2, 3):
        assert {f"model.layers.{layer}.{name}" for name in own} <= names
    assert not any("mtp" in name for name in names)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["num_nextn_predict_layers"] == HEADS


def test_transformers_reads_the_model_and_leaves_the_heads(transformers, headed, make_model, tmp_path):
    model = make_model(headed)
    save_model(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = tokens(50)[0]
    out = model(ids, Plan.packed([50]), PagedCache(headed, blocks_for([50]), functional=True))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(out.hidden_ND), theirs(ids[None]).logits[0], **CLOSE)


def test_heads_that_are_counted_but_absent_are_left_out_and_half_a_head_is_named(headed, make_model, tmp_path):
    save_model(make_model(headed), tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    stripped = {n: t for n, t in whole.items() if not n.startswith(("model.layers.2.", "model.layers.3."))}
    save_file(stripped, tmp_path / "model.safetensors")
    assert load_model(tmp_path).config.mtp_layers == 0
    assert check_folder(tmp_path).mtp_layers == 0
    save_file({n: t for n, t in whole.items() if n != "model.layers.3.hnorm.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lack tensor 'model.layers.3.hnorm.weight' of shape \[64\]"):
        load_model(tmp_path)


def test_copies_of_embedding_and_head_must_be_copies(headed, make_model, tmp_path):
    save_model(make_model(headed), tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    embedding = whole["model.embed_tokens.weight"]
    head = embedding if headed.tie_embeddings else whole["lm_head.weight"]
    copies = {"model.layers.2.embed_tokens.weight": embedding.clone(), "model.layers.2.shared_head.head.weight": head.clone()}
    save_file({**whole, **copies}, tmp_path / "model.safetensors")
    assert load_model(tmp_path).config.mtp_layers == HEADS
    copies["model.layers.2.shared_head.head.weight"][0, 0] += 1
    save_file({**whole, **copies}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model.layers.2.shared_head.head.weight' differs from"):
        load_model(tmp_path)
