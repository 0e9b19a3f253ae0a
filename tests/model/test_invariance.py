"""numerics = "invariant": the bits of a sequence depend on the sequence alone."""

import random

import pytest
import torch
import torch.nn.functional as F

from etude.errors import ConfigError
from etude.model.cache import PagedCache, Plan, blocks_for
from etude.model.linear import ROWS

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [1, 3, 16, 17, 40, 64, 70, 129, 300]


def whole(model, ids):
    """Logits and routes of one sequence alone, from scratch in one forward, as the engine would run it."""
    with torch.inference_mode():
        out = model(ids, Plan.packed([len(ids)]), PagedCache(model.config, blocks_for([len(ids)]), dtype=model.dtype))
        return model.logits(out.hidden_ND), out.routes_NLK


def sequences(lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_batch_and_any_split_give_the_same_bits(config, make_model, driver, random_pieces, dtype, threads):
    model = make_model(config, "invariant", dtype)
    seqs = sequences(LENGTHS)
    alone = [whole(model, ids) for ids in seqs]
    for trial in range(2):
        run = driver(model, seqs, seed=trial, block_size=(16, 64)[trial])
        with torch.inference_mode():
            for pieces in random_pieces(random.Random(trial), LENGTHS):
                run.feed(pieces)
            for s in range(len(seqs)):
                assert torch.equal(run.logits(s), alone[s][0]), f"sequence of {LENGTHS[s]} tokens, trial {trial}"
                assert not config.moe or torch.equal(torch.cat(run.routes[s]), alone[s][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_by_token_equals_whole(config, make_model, driver, dtype, threads):
    model = make_model(config, "invariant", dtype)
    seqs = sequences([34, 20])
    run = driver(model, seqs)
    with torch.inference_mode():
        for t in range(34):
            run.feed([(s, 1) for s in (0, 1) if t < len(seqs[s])])
        for s in (0, 1):
            assert torch.equal(run.logits(s), whole(model, seqs[s])[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_trainer_and_engine_give_the_same_bits(config, make_model, dtype, threads):
    """A packed batch under autograd with a functional cache, against each sequence alone in inference mode."""
    model = make_model(config, "invariant", dtype)
    seqs = sequences(LENGTHS)
    cache = PagedCache(config, blocks_for(LENGTHS), dtype=dtype, functional=True)
    out = model(torch.cat(seqs), Plan.packed(LENGTHS), cache)
    trained = model.logits(out.hidden_ND).split(LENGTHS)
    assert out.hidden_ND.requires_grad
    for ids, logits in zip(seqs, trained, strict=True):
        assert torch.equal(logits, whole(model, ids)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_threads(config, make_model, dtype):
    model = make_model(config, "invariant", dtype)
    ids = sequences([300])[0]
    before, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(whole(model, ids)[0])
    torch.set_num_threads(before)
    assert torch.equal(*results)


def test_a_longer_neighbour_changes_nothing(moe_config, make_model, threads):
    """Contexts of very different length in one decode batch: padding of keys must not reach the short one."""
    model = make_model(moe_config, "invariant")
    short, long = sequences([20, 900])
    cache = PagedCache(moe_config, 2 + 57, dtype=torch.float32)
    with torch.inference_mode():
        plan = Plan.packed([20, 900])
        model(torch.cat((short, long)), plan, cache)
        token = torch.tensor([5, 6])
        both = Plan(
            positions_N=torch.tensor([20, 900]),
            slots_N=torch.tensor([20, 32 + 900]),
            tables_SB=plan.tables_SB,
            starts_S1=[0, 1, 2],
            lengths_S=[21, 901],
        )
        batched = model.logits(model(token, both, cache).hidden_ND)
    assert torch.equal(batched[0], whole(model, torch.cat((short, token[:1])))[0][-1])
    assert torch.equal(batched[1], whole(model, torch.cat((long, token[1:])))[0][-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs, outputs", [(192, 192), (192, 64), (128, 192), (192, 1024), (576, 1536), (1536, 576), (64, 32), (192, 8)])
def test_matmul_rows_do_not_depend_on_the_number_of_rows(inputs, outputs, dtype, threads):
    """The measurement linear.py stands on: every row of a product with a multiple of 16 rows equals that row among 16."""
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(1040, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    alone = torch.cat([F.linear(part, weight) for part in x.split(ROWS)])
    for rows in (*range(ROWS, 13 * ROWS, ROWS), 512, 1040):
        assert torch.equal(F.linear(x[:rows], weight), alone[:rows]), rows
    stacked = torch.bmm(x[:1024].view(4, 256, inputs), weight.T.expand(4, inputs, outputs))
    assert torch.equal(stacked.flatten(0, 1), alone[:1024])


def test_softmax_ignores_appended_masked_keys(threads):
    """The measurement attention.py stands on, for keys in multiples of 16."""
    generator = torch.Generator().manual_seed(0)
    for keys in (16, 64, 208, 1024):
        scores = torch.randn(48, keys, generator=generator) * 3
        for more in (16, 64, 1024):
            padded = torch.cat((scores, torch.full((48, more), -1e30)), 1).softmax(-1)
            assert torch.equal(padded[:, :keys], scores.softmax(-1))
            assert not padded[:, keys:].any()


def test_a_block_size_that_does_not_divide_the_key_tile_is_refused(moe_config, make_model):
    model = make_model(moe_config, "invariant")
    with pytest.raises(ConfigError, match="block size of 24"):
        model(torch.zeros(5, dtype=torch.int64), Plan.packed([5], 24), PagedCache(moe_config, 1, 24, functional=True))
