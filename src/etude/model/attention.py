"""Attention that reads keys and values through block tables: the part every family shares, and grouped-query attention.

    N  tokens of this forward       H  query heads       K  key/value heads     G  query heads per key/value head
    S  sequences in a group         D  head dimension    T  keys (context)      R  query rows of one key/value head
    P  slots in a cache block

One forward may mix prefill from scratch, prefill that goes on after earlier context, and decode. `Layout` sorts the
sequences once per forward, for all layers:

  * sequences with at most SHORT new tokens are batched: groups of equally many new tokens (decode is one) and like
    context length, contexts padded to the longest, as many as stay in the processor's cache;
  * longer ones go one by one: fused attention in fast mode, tiles of TILE tokens in invariant mode. On a GPU in fast mode those from
    scratch go together instead, padded to the longest: a launch costs more there than the padding.

Invariant mode: the bits of a query row depend on its own context only. Query rows are padded to a multiple of 16 and
keys to a multiple of KEYS, which fixes how a score is summed (see linear.py). Softmax works row by row in vector
lanes, so appended keys of weight exactly 0 change nothing (measured: 16 to 4,096 keys, 1 and 2 threads). The sum over
values is taken per KEYS keys and the partial sums are added in order, so a longer neighbour only adds zeros at the end.
All of it is float32, whatever the dtype of the model; short groups are float32 in fast mode too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.errors import ConfigError
from etude.model.cache import PagedCache, Plan
from etude.model.config import ModelConfig
from etude.model.linear import ROWS, Linear, Packed, RMSNorm, pack, pad_rows, round_up, together
from etude.model.rope import Turn

SHORT = 16
"""Most new tokens of a sequence that is batched with others."""
TILE = 256
"""Query tokens of a long sequence attended at once in invariant mode: bounds the score matrix."""
GROUP_KEYS = 1 << 18
"""Most numbers in the gathered keys of a group: 1 MiB of float32, half a second-level cache. Measured on decode of 32
sequences with 400 tokens: groups of 8 took half to a third of the time of one group of 32 (bfloat16, invariant)."""
KEYS = 64
"""Keys per partial sum in invariant mode; a multiple of the cache's block size."""
FAST_ROWS = 4
"""Query rows are padded to a multiple of this in fast mode: MKL multiplies 4 rows in 0.8 of the time of 3."""
MASKED = -1e30
"""Score of a key that may not be seen: finite, so that a row that sees nothing (padding) is not NaN."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Sequences with equally many new tokens, attended in one batched matmul."""

    rows: Tensor | None
    """Their tokens among the N, sequence by sequence; None when these are all tokens in order."""
    count: int
    tokens: int
    """New tokens of each."""
    index: Tensor
    """Blocks of their contexts in the flat [K * num_blocks] list, for every sequence and key/value head."""
    mask: Tensor
    """float32 [S, 1, R or 1, T], added to the scores."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
    """Long sequences from scratch as one batch of equal lengths. Causality hides the padding: it stands behind every real token."""

    count: int
    queries: Tensor
    """Row of the long tokens for each place [S * T] of the batch; padding reads row 0."""
    keys: Tensor
    """Slot of the gathered contexts for each place."""
    places: Tensor
    """Place of each long token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Long:
    """Sequences attended one by one."""

    rows: Tensor | None
    tokens_S: list[int]
    lengths_S: list[int]
    index: Tensor
    """Blocks of all their contexts, for every key/value head; one gather serves all."""
    slots_S: list[int]
    """Slots of each context within the gather."""
    masks_S: list[list[Tensor | None]]
    """Per sequence its tiles' masks; None is plain causal."""
    padded: Padded | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """How this forward's tokens are attended; the same for all layers."""

    groups: list[Group]
    long: Long | None
    back: Tensor | None
    """Where each of the N tokens lies in the concatenation of all parts; None when in order."""
    count: int

    @staticmethod
    def of(plan: Plan, cache: PagedCache, config: ModelConfig, *, invariant: bool, together: bool | None = None) -> Layout:
        """`together` pads long sequences from scratch into one batch; by default on a GPU."""
        if invariant and KEYS % cache.block_size:
            raise ConfigError(f"invariant attention sums {KEYS} keys at a time; a block size of {cache.block_size} does not divide that")
        on_gpu = plan.positions_N.is_cuda
        builder = _Builder(plan, cache, config, invariant, together=(on_gpu if together is None else together) and not invariant)
        by_tokens: dict[int, list[int]] = {}
        for s in range(len(plan.lengths_S)):
            tokens = plan.starts_S1[s + 1] - plan.starts_S1[s]
            by_tokens.setdefault(tokens if tokens <= SHORT else SHORT + 1, []).append(s)
        long_S = by_tokens.pop(SHORT + 1, [])
        groups = [(group, tokens) for tokens, members in by_tokens.items() for group in builder.cut(members)]
        order = [s for group, _ in groups for s in group] + long_S
        return Layout(
            groups=[builder.group(members, tokens) for members, tokens in groups],
            long=builder.long(long_S) if long_S else None,
            back=builder.back(order),
            count=plan.starts_S1[-1],
        )


class _Builder:
    """The index arithmetic behind `Layout.of`."""

    def __init__(self, plan: Plan, cache: PagedCache, config: ModelConfig, invariant: bool, *, together: bool) -> None:
        self.plan = plan
        self.invariant, self.together = invariant, together
        self.group_size = config.group
        self.block_size = cache.block_size
        self.device = plan.positions_N.device
        self.block_numbers = config.cache_heads * cache.block_size * config.cache_width
        self.heads_K1 = torch.arange(config.cache_heads, device=self.device).unsqueeze(1) * cache.num_blocks

    def blocks(self, length: int) -> int:
        """Blocks to read for a context of this length."""
        return round_up(length, KEYS if self.invariant else self.block_size) // self.block_size

    def cut(self, sequences: list[int]) -> list[list[int]]:
        """Sequences of like context length together, no more than GROUP_KEYS numbers in the padded keys of a group."""
        lengths = self.plan.lengths_S
        if len(set(lengths)) > 1:
            sequences = sorted(sequences, key=lambda s: -lengths[s])
        groups, size = [], 0
        for s in sequences:
            if size == 0:
                groups.append([s])
                size = max(1, GROUP_KEYS // (self.blocks(lengths[s]) * self.block_numbers)) - 1
            else:
                groups[-1].append(s)
                size -= 1
        return groups

    def table(self, sequences: list[int], blocks: int) -> Tensor:
        """Their block tables, cut or filled with block 0 to this width."""
        tables = self.plan.tables_SB
        chosen = tables[:, :blocks] if sequences == list(range(tables.shape[0])) else tables[sequences, :blocks]
        return chosen if chosen.shape[1] == blocks else F.pad(chosen, (0, blocks - chosen.shape[1]))

    def rows(self, sequences: list[int]) -> Tensor | None:
        starts = self.plan.starts_S1
        if sequences == list(range(len(starts) - 1)):
            return None
        parts = [torch.arange(starts[s], starts[s + 1]) for s in sequences]
        return torch.cat(parts).to(self.device)

    def back(self, order: list[int]) -> Tensor | None:
        rows = self.rows(order)
        return None if rows is None else torch.empty_like(rows).scatter_(0, rows, torch.arange(len(rows), device=self.device))

    def group(self, sequences: list[int], tokens: int) -> Group:
        rows = self.rows(sequences)
        blocks = self.blocks(max(self.plan.lengths_S[s] for s in sequences))
        positions = self.plan.positions_N if rows is None else self.plan.positions_N[rows]
        return Group(
            rows=rows,
            count=len(sequences),
            tokens=tokens,
            index=(self.table(sequences, blocks).unsqueeze(1) + self.heads_K1).reshape(-1),
            mask=self.mask(positions.view(len(sequences), tokens), blocks * self.block_size),
        )

    def mask(self, positions: Tensor, keys: int) -> Tensor:
        """[S, tokens] positions -> [S, 1, R, T]; one row when there is one token, since all its rows see the same keys."""
        if positions.shape[1] > 1:
            positions = positions.repeat_interleave(self.group_size, 1)
            rows = positions.shape[1]
            positions = F.pad(positions, (0, round_up(rows, ROWS if self.invariant else FAST_ROWS) - rows))
        hidden = torch.arange(keys, device=self.device) > positions.unsqueeze(-1)
        return torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, MASKED).unsqueeze(1)

    def long(self, sequences: list[int]) -> Long:
        starts, lengths_S = self.plan.starts_S1, [self.plan.lengths_S[s] for s in sequences]
        blocks_S = [self.blocks(length) for length in lengths_S]
        used_SB = torch.arange(max(blocks_S)) < torch.tensor(blocks_S)[:, None]
        table = self.table(sequences, max(blocks_S))[used_SB.to(self.device)]
        tokens_S = [starts[s + 1] - starts[s] for s in sequences]
        return Long(
            rows=self.rows(sequences),
            tokens_S=tokens_S,
            lengths_S=lengths_S,
            index=(table + self.heads_K1).reshape(-1),
            slots_S=[blocks * self.block_size for blocks in blocks_S],
            masks_S=[self.tile_masks(n, length) for n, length in zip(tokens_S, lengths_S, strict=True)],
            padded=self.padded(tokens_S, [b * self.block_size for b in blocks_S]) if self.together and tokens_S == lengths_S else None,
        )

    def padded(self, tokens_S: list[int], slots_S: list[int]) -> Padded:
        tokens, slots = torch.tensor(tokens_S), torch.tensor(slots_S)
        at_ST = torch.arange(max(tokens_S)).expand(len(tokens_S), -1)
        real_ST = at_ST < tokens[:, None]
        queries_ST = torch.where(real_ST, at_ST + (tokens.cumsum(0) - tokens)[:, None], 0)
        keys_ST = torch.where(real_ST, at_ST + (slots.cumsum(0) - slots)[:, None], 0)
        return Padded(
            count=len(tokens_S),
            queries=queries_ST.flatten().to(self.device),
            keys=keys_ST.flatten().to(self.device),
            places=real_ST.flatten().nonzero().flatten().to(self.device),
        )

    def tile_masks(self, tokens: int, length: int) -> list[Tensor | None]:
        first = length - tokens
        if self.invariant:
            return [self.mask(self.span(first + a, first + b), round_up(first + b, KEYS)) for a, b in tiles(tokens)]
        if first == 0:
            return [None]
        return [torch.arange(length, device=self.device) <= self.span(first, length).view(-1, 1)]

    def span(self, first: int, end: int) -> Tensor:
        return torch.arange(first, end, device=self.device).unsqueeze(0)


def tiles(tokens: int) -> list[tuple[int, int]]:
    return [(a, min(a + TILE, tokens)) for a in range(0, tokens, TILE)]


class CachedAttention(nn.Module):
    """Cache write and attention over the cache: what is left when a family has made its queries, keys and values."""

    def __init__(self, config: ModelConfig, layer: int, *, invariant: bool) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = config.heads, config.cache_heads, config.cache_width
        self.scale = config.attention_scale
        self.invariant = invariant

    def attend(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor | None, plan: Plan, layout: Layout, cache: PagedCache) -> Tensor:
        """[N, H * D]. Without values the keys serve as both."""
        keys, values = cache.write(self.layer, k_NKD, v_NKD, plan.slots_N)
        parts = [self._short(q_NHD, cache, keys, values, group) for group in layout.groups]
        if layout.long is not None:
            parts += self._long(q_NHD, cache, keys, values, layout.long)
        out_NI = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out_NI if layout.back is None else out_NI.index_select(0, layout.back)

    def _short(self, q_NHD: Tensor, cache: PagedCache, keys: Tensor, values: Tensor, group: Group) -> Tensor:
        q = q_NHD if group.rows is None else q_NHD.index_select(0, group.rows)
        k_SKTD = cache.gather(keys, group.index, group.count, "keys")
        v_SKTD = k_SKTD if values is keys else cache.gather(values, group.index, group.count, "values")
        return self._attend(q.unflatten(0, (group.count, group.tokens)), k_SKTD, v_SKTD, group.mask)

    def _long(self, q_NHD: Tensor, cache: PagedCache, keys: Tensor, values: Tensor, long: Long) -> list[Tensor]:
        q_NHD = q_NHD if long.rows is None else q_NHD.index_select(0, long.rows)
        k_1KTD = cache.gather(keys, long.index, 1, "keys")
        v_1KTD = k_1KTD if values is keys else cache.gather(values, long.index, 1, "values")
        if long.padded is not None:
            return [self._together(q_NHD, k_1KTD, v_1KTD, long.padded)]
        k_S, v_S = k_1KTD.split(long.slots_S, 2), v_1KTD.split(long.slots_S, 2)
        one = self._tiled if self.invariant else self._fused
        return [
            one(q, k, v, length, masks)
            for q, k, v, length, masks in zip(q_NHD.split(long.tokens_S), k_S, v_S, long.lengths_S, long.masks_S, strict=True)
        ]

    def _fused(self, q_NHD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, length: int, masks: list[Tensor | None]) -> Tensor:
        # on CPU the backward of the fused kernel takes 3.4 times as long in bfloat16 as in float32 at 130 tokens, as long at 500
        dtype = torch.float32 if torch.is_grad_enabled() and q_NHD.device.type == "cpu" else q_NHD.dtype
        q_1HND = q_NHD.transpose(0, 1).unsqueeze(0).to(dtype)
        k, v = (x[:, :, :length].to(dtype) for x in (k_1KTD, v_1KTD))
        with torch.autocast(q_NHD.device.type, enabled=dtype != torch.float32):
            out = F.scaled_dot_product_attention(
                q_1HND, k, v, attn_mask=masks[0], is_causal=masks[0] is None, scale=self.scale, enable_gqa=self.heads != self.kv_heads
            )
        return out[0].transpose(0, 1).flatten(1).to(q_NHD.dtype)

    def _together(self, q_NHD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, padded: Padded) -> Tensor:
        q_SHTD = q_NHD.index_select(0, padded.queries).unflatten(0, (padded.count, -1)).transpose(1, 2)
        k, v = (
            x[0].to(q_NHD.dtype).index_select(1, padded.keys).unflatten(1, (padded.count, -1)).transpose(0, 1) for x in (k_1KTD, v_1KTD)
        )
        out_SHTD = F.scaled_dot_product_attention(q_SHTD, k, v, is_causal=True, scale=self.scale, enable_gqa=self.heads != self.kv_heads)
        return out_SHTD.transpose(1, 2).flatten(0, 1).index_select(0, padded.places).flatten(1)

    def _tiled(self, q_NHD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, length: int, masks: list[Tensor | None]) -> Tensor:
        parts = []
        for (a, b), mask in zip(tiles(q_NHD.shape[0]), masks, strict=True):
            assert mask is not None
            keys = mask.shape[-1]
            parts.append(self._attend(q_NHD[a:b].unsqueeze(0), k_1KTD[:, :, :keys], v_1KTD[:, :, :keys], mask))
        return torch.cat(parts)

    def _attend(self, q: Tensor, k_SKTD: Tensor, v_SKTD: Tensor, mask: Tensor) -> Tensor:
        """Query [S, tokens, H, D] against padded contexts, in float32; [S * tokens, H * D] in the query's dtype."""
        count, tokens = q.shape[:2]
        shape = (count, tokens, self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        q_SKRD = q.float().mul(self.scale).view(shape).transpose(1, 2).flatten(2, 3)
        rows = q_SKRD.shape[2]
        q_SKRD = F.pad(q_SKRD, (0, 0, 0, round_up(rows, ROWS if self.invariant else FAST_ROWS) - rows))
        scores_SKRT = torch.matmul(q_SKRD, k_SKTD.float().transpose(2, 3)).add_(mask)
        weights_SKRT = scores_SKRT.softmax(-1)
        out_SKRD = (weighted_in_order if self.invariant else torch.matmul)(weights_SKRT, v_SKTD.float())
        out = out_SKRD[:, :, :rows].unflatten(2, (tokens, -1)).transpose(1, 2)
        return out.reshape(count * tokens, -1).to(q.dtype)


class Attention(CachedAttention):
    """Grouped-query attention: several query heads read one head of keys and values."""

    def __init__(self, config: ModelConfig, layer: int, *, invariant: bool) -> None:
        super().__init__(config, layer, invariant=invariant)
        self.q_proj = Linear(config.hidden, config.heads * config.head_dim, bias=config.qkv_bias, invariant=invariant)
        self.k_proj = Linear(config.hidden, config.kv_heads * config.head_dim, bias=config.qkv_bias, invariant=invariant)
        self.v_proj = Linear(config.hidden, config.kv_heads * config.head_dim, bias=config.qkv_bias, invariant=invariant)
        self.o_proj = Linear(config.heads * config.head_dim, config.hidden, invariant=invariant)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

        self.packed: list[Packed | None] = [None, None]

    def pack(self) -> list[Packed | None]:
        self.packed = [pack(self.q_proj, self.k_proj, self.v_proj), pack(self.o_proj)]
        return self.packed

    def forward(self, x_NI: Tensor, turn: Turn, plan: Plan, layout: Layout, cache: PagedCache) -> Tensor:
        n = layout.count
        parts = together(self.packed[0], (self.q_proj, self.k_proj, self.v_proj), x_NI)
        q_NHD, k_NKD, v_NKD = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q_NHD, k_NKD = self.q_norm(q_NHD), self.k_norm(k_NKD)
        out_NI = self.attend(turn(q_NHD)[:n], turn(k_NKD)[:n], v_NKD[:n], plan, layout, cache)
        return together(self.packed[1], (self.o_proj,), pad_rows(out_NI, x_NI.shape[0]))[0]


def weighted_in_order(weights_SKRT: Tensor, v_SKTD: Tensor) -> Tensor:
    """weights @ values, summed per KEYS keys, the partial sums added first to last."""
    blocks = weights_SKRT.shape[-1] // KEYS
    weights = weights_SKRT.unflatten(-1, (blocks, KEYS)).transpose(2, 3)
    parts = torch.matmul(weights, v_SKTD.unflatten(2, (blocks, KEYS))).unbind(2)
    total = parts[0] + 0.0  # turns -0 into +0, after which adding a further zero never changes a bit
    for part in parts[1:]:
        total = total + part
    return total
