"""Router replay and its plausibility filter (facts M29), against the same rules written one token at a time."""

import dataclasses

import pytest
import torch

from etude.errors import ConfigError, UserError
from etude.model.cache import PagedCache, Plan, blocks_for
from etude.model.config import Latent, ModelConfig, RouteFilter
from etude.model.moe import Replay, Router
from etude.model.reference import reference_logits
from etude.model.transformer import Decoder

SHAPE = {"vocab_size": 96, "hidden": 32, "layers": 2, "heads": 4, "experts": 12, "experts_per_token": 4, "expert_intermediate": 16}
SOFTMAX = ModelConfig(**SHAPE, kv_heads=2, head_dim=8, shared_intermediate=16, family="qwen2_moe")
NORMED = ModelConfig(**SHAPE, kv_heads=2, head_dim=8, norm_topk=True, family="qwen3_moe")
SIGMOID = ModelConfig(
    **SHAPE, kv_heads=4, head_dim=16, shared_intermediate=16, norm_topk=True, route_groups=4, route_groups_kept=2, route_scale=1.5,
    latent=Latent(kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8), family="deepseek_v3",
)  # fmt: skip
ROUTERS = {"softmax": SOFTMAX, "normed": NORMED, "sigmoid": SIGMOID}
FILTERS = [
    RouteFilter(),
    RouteFilter(rule="ratio"),
    RouteFilter(rule="ratio", alpha=1.0),
    RouteFilter(rule="margin"),
    RouteFilter(rule="margin", margin=0.0),
    RouteFilter(rule="rank"),
    RouteFilter(rule="rank", slack=0),
    RouteFilter(rule="rank", slack=99),
]


@pytest.fixture(params=ROUTERS)
def shape(request):
    return ROUTERS[request.param]


def router_of(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    router = Router(config)
    with torch.no_grad():
        router.weight.copy_(0.4 * torch.randn(router.weight.shape, generator=generator))
        if router.sigmoid:
            router.e_score_correction_bias.copy_(0.2 * torch.randn(config.experts, generator=generator) - 0.3)  # scores below 0 too
    return router


def inputs(tokens=200, seed=1):
    return torch.randn(tokens, SHAPE["hidden"], generator=torch.Generator().manual_seed(seed))


def random_routes(tokens=200, seed=2):
    order = torch.rand(tokens, SHAPE["experts"], generator=torch.Generator().manual_seed(seed)).argsort(1)
    return order[:, : SHAPE["experts_per_token"]]


def in_words(router, x, recorded, rule):
    """(experts, replaced places) of one token."""
    logits = x @ router.weight.T
    gates = (logits.sigmoid() if router.sigmoid else logits.softmax(-1)).tolist()
    scores = [g + b for g, b in zip(gates, router.e_score_correction_bias.tolist(), strict=True)] if router.sigmoid else gates
    groups = [range(i, i + len(scores) // router.groups) for i in range(0, len(scores), len(scores) // router.groups)]
    groups.sort(key=lambda g: -sum(sorted(scores[e] for e in g)[-2:]))
    open_to_all = [e for g in groups[: router.groups_kept] for e in g]
    candidates = sorted(open_to_all, key=lambda e: -scores[e])
    own = candidates[: router.per_token]
    others = [scores[e] for e in range(len(scores)) if e not in own]

    def fine(e):
        return {
            "none": lambda: True,
            "ratio": lambda: gates[e] >= rule.alpha * min(gates[i] for i in own),
            "margin": lambda: scores[e] >= min(scores[i] for i in own) - rule.margin,
            "rank": lambda: e in own or sum(s > scores[e] for s in others) < rule.slack,
        }[rule.rule]()

    kept = [e for e in recorded if fine(e)]
    spare = iter([e for e in candidates if e not in kept])
    return [e if e in kept else next(spare) for e in recorded], len(recorded) - len(kept)


@pytest.mark.parametrize("rule", FILTERS, ids=lambda f: f"{f.rule}-{f.alpha}-{f.margin}-{f.slack}")
def test_the_filter_is_what_its_words_say(shape, rule):
    router, x_NI, recorded_NK = router_of(shape), inputs(), random_routes()
    routing = router(x_NI, Replay(experts_NK=recorded_NK, filter=rule))
    with torch.no_grad():
        twin = [in_words(router, x, recorded, rule) for x, recorded in zip(x_NI, recorded_NK.tolist(), strict=True)]
    assert routing.experts_NK.tolist() == [experts for experts, _ in twin]
    recorded, changed, refused = routing.replay_3.tolist()
    assert (recorded, refused) == (recorded_NK.numel(), sum(n for _, n in twin))
    assert refused <= changed, "what the router would choose itself is never refused"
    assert 0 < changed < recorded
    expected = {"none": refused == 0, "rank": (refused == changed) == (rule.slack == 0) and (refused == 0) == (rule.slack == 99)}
    assert expected.get(rule.rule, 0 < refused < recorded)
    assert all(len(set(row)) == len(row) for row in routing.experts_NK.tolist())


def test_gates_are_those_of_the_final_set_without_replay(shape):
    """What the filter left is what gates are made of: forced through a router of the same weights as its whole choice, they are equal."""
    router, x_NI = router_of(shape), inputs()
    routing = router(x_NI, Replay(experts_NK=random_routes(), filter=RouteFilter(rule="ratio")))
    logits_NE = x_NI @ router.weight.T
    gates_NE = logits_NE.sigmoid() if router.sigmoid else logits_NE.softmax(-1)
    expected_NK = gates_NE.gather(1, routing.experts_NK)
    if shape.norm_topk:
        expected_NK = expected_NK / expected_NK.sum(1, keepdim=True)
        torch.testing.assert_close(routing.gates_NK.sum(1), torch.full((len(x_NI),), shape.route_scale))
    torch.testing.assert_close(routing.gates_NK, shape.route_scale * expected_NK)
    routing.gates_NK[:, 0].sum().backward()
    assert router.weight.grad.abs().max() > 1e-3


@pytest.mark.parametrize("rule", FILTERS, ids=lambda f: f"{f.rule}-{f.alpha}-{f.margin}-{f.slack}")
def test_the_routers_own_choice_passes_every_filter(shape, rule):
    router, x_NI = router_of(shape), inputs()
    own = router(x_NI, None)
    again = router(x_NI, Replay(experts_NK=own.experts_NK, filter=rule))
    assert torch.equal(own.experts_NK, again.experts_NK)
    assert torch.equal(own.gates_NK, again.gates_NK)
    assert again.replay_3.tolist() == [own.experts_NK.numel(), 0, 0]
    assert own.replay_3 is None


@pytest.mark.parametrize("rule", FILTERS[:2], ids=lambda f: f.rule)
def test_rows_without_a_record_are_routed_freely(shape, rule):
    router, x_NI, recorded_NK = router_of(shape), inputs(), random_routes()
    own = router(x_NI, None)
    recorded_NK[::3] = -1
    mixed = router(x_NI, Replay(experts_NK=recorded_NK, filter=rule))
    assert torch.equal(mixed.experts_NK[::3], own.experts_NK[::3])
    assert torch.equal(mixed.gates_NK[::3], own.gates_NK[::3])
    assert mixed.replay_3[0] == (recorded_NK >= 0).sum()


@pytest.mark.parametrize("experts", [1, 2, 254, 255, 256, 257, 65_534])
def test_the_mark_of_an_absent_row_is_no_expert(experts):
    """The type routes are recorded in is the smallest that holds every expert and a value beside them."""
    config = dataclasses.replace(SOFTMAX, experts=experts, experts_per_token=1)
    recorded_in = torch.uint8 if config.absent_route == 255 else torch.uint16
    assert config.absent_route == torch.iinfo(recorded_in).max
    assert experts - 1 < config.absent_route
    assert (recorded_in == torch.uint8) == (experts <= 255)


def forward(model, ids, routes=None, rule=RouteFilter()):
    cache = PagedCache(model.config, blocks_for([len(ids)]), dtype=model.dtype, functional=True)
    return model(ids, Plan.packed([len(ids)]), cache, routes_NLK=routes, route_filter=rule)


@pytest.fixture(scope="module")
def wide():
    """300 experts: their routes are uint16, and 255 is one of them."""
    model = Decoder(dataclasses.replace(SOFTMAX, experts=300, layers=1), numerics="invariant")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5.0)
    return model


def test_padding_is_never_an_expert(wide):
    ids = torch.arange(20)
    own = forward(wide, ids)
    routes = own.routes_NLK.to(torch.int64)
    routes[3, 0, 0] = 255 if 255 not in routes[3] else 254
    routes = routes.to(torch.uint16)
    replayed = forward(wide, ids, routes)
    assert torch.equal(replayed.routes_NLK, routes), "an expert of that number is replayed"
    absent = torch.full((20, 1, 4), 65535).to(torch.uint16)
    for rule in FILTERS:
        free = forward(wide, ids, absent, rule)
        assert torch.equal(free.routes_NLK, own.routes_NLK)
        assert torch.equal(free.hidden_ND, own.hidden_ND)
        assert free.replay_L3.tolist() == [[0, 0, 0]]
    with pytest.raises(UserError, match="uint8, where 255 means absent"):
        forward(wide, ids, torch.full((20, 1, 4), 255, dtype=torch.uint8))
    narrow = Decoder(dataclasses.replace(SOFTMAX, layers=1))
    with pytest.raises(UserError, match="names expert 65535; this model has 12"):
        forward(narrow, ids, absent)
    with pytest.raises(UserError, match="twice"):
        forward(narrow, ids, torch.zeros(20, 1, 4, dtype=torch.uint8))


def test_what_is_left_of_a_filtered_route_is_computed_by_the_reference(shape):
    """Every family: logits under the filter are those of the slow twin with the final set of experts."""
    model = Decoder(shape)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(6.0)
    ids = torch.arange(40)
    recorded = torch.stack([random_routes(40, seed=s) for s in range(shape.moe_layers)], 1).to(torch.uint8)
    out = forward(model, ids, recorded, RouteFilter(rule="ratio", alpha=1.0))
    assert 0 < int(out.replay_L3[:, 2].sum()) < recorded.numel()
    torch.testing.assert_close(model.logits(out.hidden_ND), reference_logits(model, ids, out.routes_NLK), rtol=1e-4, atol=1e-4)
    model.logits(out.hidden_ND).logsumexp(-1).sum().backward()
    for block in model.layers[shape.dense_layers :]:
        assert block.mlp.gate.weight.grad.abs().max() > 1e-5


@pytest.mark.parametrize("wrong", [{"alpha": 1.5}, {"alpha": -0.1}, {"margin": -1.0}, {"slack": -1}, {"alpha": float("nan")}])
def test_filters_that_would_refuse_the_routers_own_choice_are_refused(wrong):
    with pytest.raises(ConfigError, match="route filter"):
        RouteFilter(rule="ratio", **wrong)
