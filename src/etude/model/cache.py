"""Which token is where: the plan of one forward, and the paged cache of keys and values, or of latents.

    N  new tokens of this forward, all sequences in one flat list     S  sequences in this forward
    B  blocks in the longest block table                              P  token slots in a block
    H  key/value heads                                                D  head dimension

A sequence's context lies in blocks of P slots: the token at position p of sequence s is in slot
`tables_SB[s, p // P] * P + p % P`. Blocks may lie anywhere and may be shared by sequences with a common prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.errors import UserError
from etude.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How the N tokens of one forward map to sequences. Built by the scheduler or the trainer."""

    positions_N: Tensor
    """int64 position of each token in its sequence."""
    slots_N: Tensor
    """int64 flat cache slot where the token's key and value go."""
    tables_SB: Tensor
    """int64 block table of each sequence, padded with block 0."""
    starts_S1: list[int]
    """S + 1 offsets: new tokens of sequence s are ids_N[starts[s]:starts[s + 1]], ascending in position, without gaps."""
    lengths_S: list[int]
    """Context length of each sequence, its new tokens included."""

    def __post_init__(self) -> None:
        assert len(self.starts_S1) == len(self.lengths_S) + 1 == self.tables_SB.shape[0] + 1, "one block table a sequence"
        assert self.starts_S1[-1] == self.positions_N.shape[0] == self.slots_N.shape[0], "one position and one slot a token"

    @staticmethod
    def packed(lengths: Sequence[int], block_size: int = 16, device: torch.device | str = "cpu") -> Plan:
        """Whole sequences from scratch in fresh blocks 0, 1, ...; the transient cache needs `blocks_for(lengths, block_size)`.

        Example:
            Plan.packed([20, 3]).tables_SB   # [[0, 1], [2, 0]] and slots 0..19, 32..34
        """
        blocks_S = [-(-n // block_size) for n in lengths]
        tables_SB = torch.zeros(len(lengths), max(blocks_S), dtype=torch.int64)
        positions, slots, starts, block = [], [], [0], 0
        for s, (length, blocks) in enumerate(zip(lengths, blocks_S, strict=True)):
            tables_SB[s, :blocks] = torch.arange(block, block + blocks)
            positions.append(torch.arange(length))
            slots.append(positions[-1] + block * block_size)
            starts.append(starts[-1] + length)
            block += blocks
        return Plan(
            positions_N=torch.cat(positions).to(device),
            slots_N=torch.cat(slots).to(device),
            tables_SB=tables_SB.to(device),
            starts_S1=starts,
            lengths_S=list(lengths),
        )


def blocks_for(lengths: Sequence[int], block_size: int = 16) -> int:
    """Blocks that hold these sequences at once: the size of the transient cache under `Plan.packed`."""
    return sum(-(-n // block_size) for n in lengths)


class PagedCache:
    """Keys and values of all layers in blocks. In place for the engine; `functional=True` for the trainer.

    Latent attention keeps one tensor a layer, in keys_L, that its queries read as both; values_L is empty then.

    keys_L[l] and values_L[l] are [H, num_blocks, P, D]: a head's block is contiguous, so a gather by block table lands
    in the [S, H, B * P, D] that a batched matmul wants, without a second copy. Functional: `write` replaces the tensor
    of its layer instead of changing it, so gradients flow to every key and value, through several forwards too.
    `heads=True` has layers for the heads of mtp.py as well, behind the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        functional: bool = False,
        heads: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.functional = functional
        shape = (config.cache_heads, num_blocks, block_size, config.cache_width)
        # Zeros, not empty: a masked slot has weight 0, and 0 times an uninitialised NaN would still be NaN.
        layers = config.layers + (config.mtp_layers if heads else 0)
        self.keys_L = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        own_values = layers if config.cache_tensors == 2 else 0
        self.values_L = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(own_values)]
        self._scratch: dict[str, Tensor] = {}

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.keys_L + self.values_L)

    def write(self, layer: int, k_NHD: Tensor, v_NHD: Tensor | None, slots_N: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values, and return all blocks of the layer with them in. In place unless functional.

        Without values the keys are latents, and returned as both.
        """
        self._write(self.keys_L, layer, k_NHD, slots_N)
        if v_NHD is None:
            return self.keys_L[layer], self.keys_L[layer]
        self._write(self.values_L, layer, v_NHD, slots_N)
        return self.keys_L[layer], self.values_L[layer]

    def _write(self, store_L: list[Tensor], layer: int, new_NHD: Tensor, slots_N: Tensor) -> None:
        blocks = store_L[layer]
        flat = blocks.view(blocks.shape[0], -1, blocks.shape[3])
        new_HND = new_NHD.transpose(0, 1).to(blocks.dtype)
        if self.functional:
            store_L[layer] = flat.index_copy(1, slots_N, new_HND).view_as(blocks)
        elif new_HND.requires_grad and torch.is_grad_enabled():
            raise UserError("an in-place cache would keep every forward's graph alive; use functional=True, or torch.inference_mode()")
        else:
            flat.index_copy_(1, slots_N, new_HND)

    def gather(self, blocks: Tensor, index: Tensor, count: int, use: str) -> Tensor:
        """Contexts of `count` sequences, [count, H, T, D], from the blocks of one layer.

        `index` names blocks in the flat [H * num_blocks] list, for every sequence and head. Without autograd the result
        lies in a buffer that the next gather for the same `use` overwrites: allocating megabytes anew for every layer
        cost several times the copy itself in page faults (32 sequences of 400 tokens, glibc).
        """
        flat = blocks.view(-1, blocks.shape[2] * blocks.shape[3])
        if torch.is_grad_enabled() or self.functional:
            out = flat.index_select(0, index)
        else:
            out = torch.index_select(flat, 0, index, out=self._buffer(use, flat, len(index)))
        return out.view(count, blocks.shape[0], -1, blocks.shape[3])

    def _buffer(self, use: str, like: Tensor, rows: int) -> Tensor:
        buffer = self._scratch.get(use)
        if buffer is None or buffer.shape[0] < rows:
            buffer = self._scratch[use] = torch.empty(rows + rows // 4, like.shape[1], dtype=like.dtype, device=like.device)
        return buffer[:rows]
