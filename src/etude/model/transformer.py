"""The decoder: one definition for trainer and engine.

    N  tokens of this forward, all sequences in one flat list     I  hidden width     V  vocabulary
    L  layers with experts     K  experts per token     E  experts             M  rows whose logits are wanted

    plan  = Plan.packed([len(a), len(b)])
    cache = PagedCache(model.config, blocks_for([len(a), len(b)]), functional=True)
    out   = model(torch.cat([a, b]), plan, cache)
    logprobs_NV = model.logits(out.hidden_ND).log_softmax(-1)

The trainer packs whole sequences into a transient functional cache; the engine feeds chunks and single tokens into a
lasting one. Both run the code below, and `numerics` (see config.py) says what may change a bit. In invariant mode the
token list is padded once to a multiple of 16 rows, so everything tokenwise is invariant by construction; attention and
experts take care of themselves. Norms, softmaxes, gates and logits are float32 in any dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.errors import UserError
from etude.model.attention import Attention, CachedAttention, Layout
from etude.model.block import Block
from etude.model.cache import PagedCache, Plan
from etude.model.config import ModelConfig, Numerics, RopeScaling, RouteFilter
from etude.model.families import PREFIX
from etude.model.linear import MLP, Linear, Packed, RMSNorm, matmul, packable, pad_rows, padded_rows
from etude.model.moe import Replay, Routing, balance
from etude.model.mtp import Draft, Head
from etude.model.rope import Rope
from etude.records import ABSENT_ROUTE, seed_for

INIT_STD = 0.02
KEPT = ("e_score_correction_bias",)
"""Ends of names of parameters that keep the type they have on disk, in memory, on the wire and when saved: rounding this one
to bfloat16 would move experts past each other (its spread is a few per cent of its size). They get no gradient either."""


def rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in this type, unless its name says that it keeps its own."""
    return tensor if name.endswith(KEPT) else tensor.to(dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Output:
    hidden_ND: Tensor
    """After the final norm; `Decoder.logits` turns rows of it into logits."""
    routes_NLK: Tensor | None
    """Experts used, best first, uint8 (uint16 above 255 experts); None in a dense model."""
    balance: Tensor
    """Load-balancing loss, mean over layers, 1 when balanced, not multiplied by config.balance_weight; 0 in a dense model."""
    load_LE: Tensor | None
    """int64 tokens each expert got; None in a dense model."""
    replay_L3: Tensor | None = None
    """`Routing.replay_3` of each layer with experts; None without recorded routes."""


class Decoder(nn.Module):
    """A decoder of any family. Parameter names are those of the checkpoint, less its `model.` prefix; the experts of a
    layer are stacked in one tensor per projection, and the shared ones are one expert."""

    def __init__(self, config: ModelConfig, *, numerics: Numerics = "fast") -> None:
        super().__init__()
        self.config = config
        self.numerics = numerics
        invariant = numerics == "invariant"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden, _weight=torch.empty(config.vocab_size, config.hidden))
        self.layers = nn.ModuleList(Block(config, layer, invariant=invariant) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden, config.vocab_size, invariant=invariant)
        self.mtp = nn.ModuleList(Head(config, config.layers + k, invariant=invariant) for k in range(config.mtp_layers))
        """Heads that predict further tokens; `forward` does not use them."""
        self._rope = Rope(config.rope_dim, config.rope_theta, config.rope_scaling)
        self._packed: list[Packed] = []
        self._packed_head: Packed | None = None
        if not self.norm.weight.is_meta:
            self.init_weights(0)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def forward(
        self, ids_N: Tensor, plan: Plan, cache: PagedCache, *, routes_NLK: Tensor | None = None, route_filter: RouteFilter = RouteFilter()
    ) -> Output:
        """Hidden states of the new tokens; their keys and values go into the cache. Recorded routes that pass the filter are used."""
        self._check(ids_N, plan)
        n = ids_N.shape[0]
        rows = padded_rows(n, invariant=self.numerics == "invariant", device=ids_N.device)
        layout = Layout.of(plan, cache, self.config, invariant=self.numerics == "invariant")
        turn = self._rope.at(pad_rows(plan.positions_N, rows), max(plan.lengths_S))
        recorded_LNK = self._recorded(routes_NLK, n, rows)
        x_NI = self.embed_tokens(pad_rows(ids_N, rows))
        routings = []
        for layer, block in enumerate(self.layers):
            at = layer - self.config.dense_layers
            replay = None if recorded_LNK is None or at < 0 else Replay(experts_NK=recorded_LNK[at], filter=route_filter)
            x_NI, routing = block(x_NI, turn, plan, layout, cache, replay)
            if routing is not None:
                routings.append(routing)
        hidden_ND = self.norm(x_NI)[:n]
        if not self.config.moe:
            return Output(hidden_ND=hidden_ND, routes_NLK=None, balance=hidden_ND.new_zeros((), dtype=torch.float32), load_LE=None)
        return self._output(hidden_ND, routings, n)

    def pack(self) -> None:
        """For an engine: lay out weights for inference (linear.Packed). Nothing unless `numerics` is fast: the others promise that
        trainer and engine compute alike."""
        if self.numerics != "fast" or self._packed:
            return
        for module in self.modules():
            if isinstance(module, (Attention, MLP)):
                self._packed += [part for part in module.pack() if part is not None]
        head = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if packable(head):
            self._packed_head = Packed([head], [None])
            self._packed.append(self._packed_head)

    def weights_changed(self) -> None:
        """Weights were changed in place: what was laid out from them is laid out again."""
        for part in self._packed:
            part.lay_out()

    def predict(self, hidden_ND: Tensor, next_N: Tensor, plan: Plan, cache: PagedCache, *, head: int = 0) -> Draft:
        """What head number `head` says after hidden states of the plan's tokens and the tokens that follow each of them. A head after
        the first reads the stream of the one before, and `next_N` is one token further. Nothing here moves the model (see mtp.py).

        At the end of a sequence whose next token is not known any id will do: no other position sees what comes of it.
        """
        self._check(next_N, plan)
        if head >= len(self.mtp):
            raise UserError(f"head {head} was asked for, this model has {len(self.mtp)}; train some with PretrainConfig.mtp_layers")
        n, invariant = next_N.shape[0], self.numerics == "invariant"
        rows = padded_rows(n, invariant=invariant, device=next_N.device)
        layout = Layout.of(plan, cache, self.config, invariant=invariant)
        turn = self._rope.at(pad_rows(plan.positions_N, rows), max(plan.lengths_S))
        embedded_NI = F.embedding(pad_rows(next_N, rows), self.embed_tokens.weight.detach())
        behind = cast(Head, self.mtp[head])
        draft = behind.draft(pad_rows(hidden_ND, rows), embedded_NI, turn, plan, layout, cache)
        return Draft(stream_ND=draft.stream_ND[:n], hidden_ND=draft.hidden_ND[:n])

    def logits(self, hidden_MD: Tensor, *, frozen: bool = False) -> Tensor:
        """float32 [M, V]. `frozen` gives the output head no gradient."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        weight = weight.detach() if frozen else weight
        m, invariant = hidden_MD.shape[0], self.numerics == "invariant"
        if self._packed_head is not None and not torch.is_grad_enabled():
            return self._packed_head(hidden_MD)[0].float()
        rows = padded_rows(m, invariant=invariant, device=hidden_MD.device)
        return matmul(pad_rows(hidden_MD, rows), weight, invariant=invariant)[:m].float()

    @torch.no_grad()
    def even_out(self, load_LE: Tensor, speed: float) -> None:
        """Move the bias that a sigmoid router chooses with: down by `speed` where an expert got more tokens than the mean, up where it
        got fewer (arXiv 2408.15664). No gradient does that, so it disturbs none; the heads' routers keep theirs."""
        for load_E, block in zip(load_LE, list(self.layers)[self.config.dense_layers :], strict=True):
            bias_E = block.get_parameter("mlp.gate.e_score_correction_bias")
            load_E = load_E.to(bias_E.dtype)
            bias_E.add_(torch.sign(load_E.mean() - load_E), alpha=speed)

    def _check(self, ids_N: Tensor, plan: Plan) -> None:
        assert ids_N.shape == plan.positions_N.shape, "one id per planned token"
        longest = max(plan.lengths_S)
        if longest > self.config.max_positions:
            raise UserError(f"a context of {longest} tokens exceeds max_positions = {self.config.max_positions} of this model; shorten it")

    def _recorded(self, routes_NLK: Tensor | None, n: int, rows: int) -> Tensor | None:
        """Recorded routes as int64 [L, N, K], -1 in every row that was not recorded. What marks such a row is no expert of any model
        that records in this type, so a mark that is not understood is refused, never replayed."""
        if routes_NLK is None or not self.config.moe:
            return None
        expected = (n, self.config.moe_layers, self.config.experts_per_token)
        if tuple(routes_NLK.shape) != expected:
            raise UserError(f"recorded routes have the shape {tuple(routes_NLK.shape)}; this model and these tokens need {expected}")
        if routes_NLK.dtype == torch.uint8 and self.config.absent_route > ABSENT_ROUTE:
            raise UserError(f"recorded routes are uint8, where {ABSENT_ROUTE} means absent; {self.config.experts} experts need uint16")
        routes = routes_NLK.to(torch.int64)
        absent = (routes == self.config.absent_route).any(-1, keepdim=True)
        routes = routes.masked_fill(absent, -1)
        if int(routes.max()) >= self.config.experts or int(routes.min()) < -1:
            raise UserError(f"a recorded route names expert {int(routes.max())}; this model has {self.config.experts}")
        if bool(((routes.sort(-1).values.diff(dim=-1) == 0) & ~absent).any()):
            raise UserError("a recorded route names an expert twice; routes of another model, or damaged ones")
        padding = routes.new_full((rows - n, *expected[1:]), -1)
        return torch.cat((routes, padding)).transpose(0, 1)

    def _output(self, hidden_ND: Tensor, routings: list[Routing], n: int) -> Output:
        experts_LNK = torch.stack([r.experts_NK[:n] for r in routings])
        loss, load_LE = balance(torch.stack([r.probs_NE[:n] for r in routings]), experts_LNK)
        narrow = torch.uint8 if self.config.experts <= 255 else torch.uint16
        counts = [r.replay_3 for r in routings if r.replay_3 is not None]
        return Output(
            hidden_ND=hidden_ND,
            routes_NLK=experts_LNK.transpose(0, 1).to(narrow),
            balance=loss,
            load_LE=load_LE,
            replay_L3=torch.stack(counts) if counts else None,
        )

    def init_weights(self, seed: int) -> None:
        """Fill every parameter from a seed; each tensor depends on the seed and its own name only.

        Normal with std 0.02, the two projections that write into the stream scaled down by sqrt(2 * layers) (GPT-2),
        norms 1, biases 0. numpy's generator, whose stream is the same on every machine.
        """
        self._init(self.named_parameters(), seed)

    def rescale(self, *, rope_theta: float = 0.0, rope_scaling: RopeScaling | None = None, max_positions: int = 0) -> None:
        """Turn queries and keys by other angles from now on, and allow longer contexts; what is not given stays."""
        self.config = dataclasses.replace(
            self.config,
            rope_theta=rope_theta or self.config.rope_theta,
            rope_scaling=rope_scaling or self.config.rope_scaling,
            max_positions=max_positions or self.config.max_positions,
        )
        self._rope = Rope(self.config.rope_dim, self.config.rope_theta, self.config.rope_scaling)
        for module in self.modules():
            if isinstance(module, CachedAttention):
                module.scale = self.config.attention_scale

    def add_heads(self, count: int, seed: int) -> None:
        """Give a model without heads `count` of them, with weights from the seed, in its type and on its device."""
        if self.config.mtp_layers:
            raise UserError(f"this model has {self.config.mtp_layers} heads already; heads are added to a model that has none")
        self.config = dataclasses.replace(self.config, mtp_layers=count)
        with torch.device("meta"):
            heads = nn.ModuleList(Head(self.config, self.config.layers + k, invariant=self.numerics == "invariant") for k in range(count))
        self.mtp = heads.to_empty(device=self.device).to(self.dtype)
        self._init(((name, p) for name, p in self.named_parameters() if name.startswith(PREFIX)), seed)

    @torch.no_grad()
    def _init(self, parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
        for name, parameter in parameters:
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                std = INIT_STD / (2 * self.config.layers) ** 0.5 if into_stream else INIT_STD
                values = np.random.default_rng(seed_for("init", seed, name)).standard_normal(tuple(parameter.shape), dtype=np.float32)
                parameter.copy_(torch.from_numpy(values).mul_(std))
