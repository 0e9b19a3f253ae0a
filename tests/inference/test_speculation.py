"""Guessing changes how many steps a text takes, and nothing else: tokens, log-probs, versions, routes and memory stay as they were."""

import asyncio
import collections
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.inference import naive
from etude.inference.config import EngineConfig
from etude.inference.engine import NativeEngine
from etude.inference.sequence import Sequence, join
from etude.inference.speculation import NGram
from etude.model.config import ModelConfig
from etude.model.transformer import Decoder
from etude.records import Finish, Sampling

NGRAM = {"speculation": "ngram"}


def guessing(lab, model=None, **config):
    model = model or lab.ToyDecoder()
    model.strict = False
    return lab.engine(model, **NGRAM, **config)


class Repeating:
    """A toy whose logits favour the token after the last one, modulo a small number: its texts repeat, so guesses come true."""

    def __new__(cls, lab, vocab=61, sharp=6.0, period=5):
        class Model(lab.ToyDecoder):
            def _answer(self, hash_N, plan, cache):
                out = super()._answer(hash_N, plan, cache)
                self.last_N = self.fed_N
                return type(out)(**{**vars(out), "hidden_ND": torch.stack([out.hidden_ND[:, 0], self.fed_N.float()], 1)})

            def forward(self, ids_N, plan, cache):
                self.fed_N = ids_N
                return super().forward(ids_N, plan, cache)

            def logits(self, hidden_MD):
                logits = super().logits(hidden_MD)
                favoured = (hidden_MD[:, 1].long() + 1) % period
                return logits + sharp * torch.nn.functional.one_hot(favoured, self.config.vocab_size)

        return Model(vocab=vocab)


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),
        st.integers(1, 25),
        st.sampled_from([0.0, 0.7, 1.0]),
        st.sampled_from([(), (4,), (2, 9)]),
        st.integers(0, 12),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=40)
@given(
    requests=REQUESTS,
    draft_max=st.integers(1, 9),
    draft_rows=st.integers(0, 20),
    block_size=st.sampled_from([1, 4, 16]),
    prefix_cache=st.booleans(),
    spare=st.integers(0, 12),
    token_budget=st.integers(4, 30),
    streaming=st.booleans(),
)
def test_the_same_tokens_log_probs_and_routes_as_without_guesses(lab, requests, draft_max, draft_rows, streaming, spare, **mode):
    async def main():
        mode["num_blocks"] = 2 + 60 // mode["block_size"] + spare
        engine = guessing(lab, Repeating(lab), draft_max=draft_max, draft_rows=draft_rows, max_running=4, **mode)

        async def one(i, asked, after):
            await lab.ticks(after)
            if streaming:
                return join([piece async for piece in engine.generate_stream(asked)])
            return await engine.generate(asked)

        got = await asyncio.gather(*(one(i, asked, r[4]) for i, (asked, r) in enumerate(zip(asks, requests, strict=True))))
        assert lab.idle_clean(engine)
        stats = await engine.stats()
        assert stats["sampled_tokens"] == sum(len(g.ids) for g in got)
        return got

    asks = [
        lab.request(f"r{i}", [j % 5 for j in range(n)], max_tokens=most, temperature=t, stop_ids=stops, seed=i, priority=p)
        for i, (n, most, t, stops, _, p) in enumerate(requests)
    ]
    for asked, got in zip(asks, asyncio.run(main()), strict=True):
        twin = Repeating(lab)
        assert lab.same(got, naive.generate(twin, asked, lab.version(0), block_size=4))


def test_guesses_come_true_and_save_steps(lab):
    async def main(**config):
        model = Repeating(lab, sharp=20.0)
        model.strict = False
        engine = lab.engine(model, **config)
        got = await engine.generate(lab.request("r", [0, 1, 2, 3, 4, 0, 1, 2], max_tokens=60))
        return got, await engine.stats(), len(model.calls)

    plain, _, steps = asyncio.run(main())
    quick, stats, fewer = asyncio.run(main(**NGRAM))
    assert lab.same(quick, plain)
    assert steps == 60
    assert fewer < 20
    assert stats["accepted_tokens"] > 40
    assert stats["acceptance"] > 0.8


def test_the_distribution_is_unchanged_by_chi_square(lab):
    """Three tokens of a vocabulary of four after a prompt in which pairs repeat: 64 outcomes, their probabilities, 6,000 samples."""
    vocab, prompt, samples = 4, [0, 1, 2, 3, 0, 2, 1, 3, 3, 1, 0, 0, 1], 6000
    model = Repeating(lab, vocab=vocab, sharp=0.5, period=4)

    def log_prob(ids):
        return float(naive.score(model, ids, lab.version(0), block_size=4).logprob_T[len(prompt) :].sum())

    exact = {ids: math.exp(log_prob([*prompt, *ids])) for ids in itertools.product(range(vocab), repeat=3)}
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-5)

    async def main():
        engine = guessing(lab, Repeating(lab, vocab=vocab, sharp=0.5, period=4), max_running=8, draft_rows=64, token_budget=64)
        seen = collections.Counter()
        for first in range(0, samples, 500):
            asked = [lab.request(f"{i}", prompt, max_tokens=3, seed=i, routes=False) for i in range(first, first + 500)]
            seen.update(g.ids for g in await asyncio.gather(*(engine.generate(a) for a in asked)))
        return seen, await engine.stats()

    seen, stats = asyncio.run(main())
    assert stats["accepted_tokens"] > samples / 10
    assert stats["drafted_tokens"] > 2 * stats["accepted_tokens"]
    likely = [ids for ids, p in exact.items() if p * samples >= 5]
    chi2 = sum((seen[ids] - exact[ids] * samples) ** 2 / (exact[ids] * samples) for ids in likely)
    freedom = len(likely) - 1
    assert freedom > 20
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)  # a chance of about one in ten thousand, with fixed seeds


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_swaps_cancellations_and_preemptions_meet_guesses(lab, policy):
    async def main():
        model = Repeating(lab)
        engine = guessing(lab, model, num_blocks=24, max_running=4, token_budget=24, draft_rows=20, cache_policy=policy)
        asks = [lab.request(f"r{i}", [j % 5 for j in range(3 + i)], max_tokens=40, seed=i) for i in range(10)]
        tasks = [asyncio.create_task(engine.generate(a)) for a in asks]
        for ordinal in range(1, 6):
            await lab.ticks(7)
            await engine.load(lab.manifest(ordinal), "")
            await engine.cancel(f"r{ordinal}")
            engine._pool.check()
        got = await asyncio.gather(*tasks)
        stats = await engine.stats()
        assert lab.idle_clean(engine)
        assert stats["preemptions"] > 0
        assert stats["accepted_tokens"] > 0
        return asks, got

    asks, got = asyncio.run(main())
    for asked, g in zip(asks, got, strict=True):
        assert len(g.ids) == len(g.version_T) == len(g.kept_T) == len(g.logprob_T)
        assert len(g.routes_PTLK) == len(asked.ids) + len(g.ids)
        assert g.finish is Finish.CANCELLED or len(g.ids) == 40
        if policy == "recompute":
            ids = list(asked.ids)
            for t, token in enumerate(g.ids):
                salted = Repeating(lab)
                salted.salt.data.fill_(g.versions[g.version_T[t]].ordinal)
                again = lab.request("x", ids, max_tokens=1, seed=asked.sampling.seed)
                assert naive.generate(salted, again, g.versions[0], block_size=4).ids == (token,)
                ids.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_invariant_mode_the_bits_are_those_of_the_engine_that_does_not_guess(lab, dtype, temperature):
    shape = ModelConfig(vocab_size=23, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=48, max_positions=256)
    model = Decoder(shape, numerics="invariant")
    model.init_weights(1)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(6)
    model = model.to(dtype).eval()

    async def main(**config):
        engine = NativeEngine(model, version=lab.version(0), config=EngineConfig(num_blocks=64, max_running=4, draft_rows=24, **config))
        asks = [lab.request(f"r{i}", [1 + j % 4 for j in range(9 + i)], max_tokens=50, seed=i, temperature=temperature) for i in range(6)]
        return await asyncio.gather(*(engine.generate(a) for a in asks)), await engine.stats()

    plain, _ = asyncio.run(main())
    quick, stats = asyncio.run(main(**NGRAM))
    assert stats["accepted_tokens"] > 0
    assert all(lab.same(a, b) for a, b in zip(plain, quick, strict=True))
    scored = naive.score(model, [*[1 + j % 4 for j in range(9)], *quick[0].ids], lab.version(0)).logprob_T
    assert np.array_equal(scored[9:], quick[0].logprob_t1_T)


def sequence(ids):
    return Sequence(id="s", ids=list(ids), sampling=Sampling(), limit=1000)


def test_a_guess_is_what_followed_the_latest_longest_match():
    drafter = NGram(longest=8)
    seq = sequence([1, 2, 3, 4, 9, 9, 1, 2, 3, 5, 7, 8, 2, 3])
    assert drafter.propose(seq, 8) == [5, 7, 8, 2]  # 2, 3 was last followed by 5
    seq.ids += [4]
    assert drafter.propose(seq, 8) == [9, 9, 1, 2]  # 2, 3, 4 stands at the beginning
    assert drafter.propose(seq, 2) == [9, 9]
    assert drafter.propose(seq, 0) == []
    assert NGram(longest=8).propose(sequence([1, 2, 3]), 8) == []
    assert NGram(longest=8).propose(sequence([1]), 8) == []


def test_the_length_follows_the_luck_and_bad_luck_pauses():
    drafter = NGram(longest=8)
    seq = sequence([1, 2] * 30)
    assert len(drafter.propose(seq, 8)) == 2  # no more is known behind the match
    seq = sequence([*range(40), 5, 6])
    lengths = []
    for accepted in ("all", "all", 3, 0):
        proposed = len(drafter.propose(seq, 20))
        lengths.append(proposed)
        drafter.learn(seq, proposed, proposed if accepted == "all" else accepted)
    assert lengths == [4, 8, 8, 4]
    assert len(drafter.propose(seq, 20)) == 2
    drafter.learn(seq, 2, 0)
    assert drafter.propose(seq, 20) == []  # twice wrong from the start: a pause
    seq.ids += [50, 51, 5, 6]
    assert drafter.propose(seq, 20) == [50]


@pytest.mark.parametrize("bad", [{"speculation": "mtp"}, {"draft_max": 0}, {"draft_rows": -1}])
def test_bad_settings_are_refused(bad):
    from etude.config import build

    with pytest.raises(ConfigError, match=next(iter(bad))):
        build(EngineConfig, bad)
