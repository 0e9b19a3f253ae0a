"""Data-parallel processes on one machine: each takes a share of a step's rows, and gradients are summed.

On two CPU cores two processes of one thread do the work of a step in about half the time of one; two threads of one process do not,
since a small model's matrices are too small to share.

Every process builds the same run from the same config, takes the same rows, keeps its share of them, and steps the same optimizer
on the same sum, so weights never travel: `agree` proves that they are equal. Rank 0 is the caller's process and the only one
that writes. A rank that dies breaks the others' next sum, and the error names it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from etude.errors import InfraError, IntegrityError
from etude.records import Batch

WAIT = timedelta(minutes=10)
"""Longest wait for another rank: rank 0 writes checkpoints and evaluates while the others wait."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of its run."""

    rank: int = 0
    count: int = 1

    def share(self, rows: Sequence[Batch]) -> list[Batch]:
        """This rank's rows: largest first, each to the rank with the fewest tokens so far."""
        if self.count == 1:
            return list(rows)
        tokens = [0] * self.count
        mine = []
        for row in sorted(rows, key=lambda row: -len(row.ids_N)):
            to = tokens.index(min(tokens))
            tokens[to] += len(row.ids_N)
            if to == self.rank:
                mine.append(row)
        return mine

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, in one exchange."""
        if self.count == 1:
            return
        tensors = list(tensors)
        flat = torch.cat([t.reshape(-1).float() for t in tensors])
        try:
            dist.all_reduce(flat)
        except RuntimeError as error:
            raise InfraError(
                f"rank {self.rank} of {self.count} lost another rank: {error}; resume the run from its last checkpoint"
            ) from error
        for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))

    def agree(self, content: str) -> None:
        """Stop unless all ranks hold the same content (a hash of their weights)."""
        if self.count == 1:
            return
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, content)
        if len(set(found)) > 1:
            raise IntegrityError(f"the ranks of a run differ in their weights: {found}; nothing was written")


@contextlib.contextmanager
def crew(count: int, follow: Callable[..., None], *args: Any) -> Iterator[Ranks]:
    """Ranks of a run: this process is rank 0, `follow(ranks, *args)` runs in the others until it returns or this block ends."""
    if count == 1:
        yield Ranks()
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        context = torch.multiprocessing.get_context("spawn")
        others = [
            context.Process(target=_other, args=(rank, count, meeting, torch.get_num_threads(), follow, args)) for rank in range(1, count)
        ]
        for process in others:
            process.daemon = True
            process.start()
        try:
            _join(0, count, meeting)
            yield Ranks(rank=0, count=count)
            for process in others:
                process.join(WAIT.total_seconds())
        finally:
            for process in others:
                if process.is_alive():
                    process.kill()
                process.join()
            if dist.is_initialized():
                dist.destroy_process_group()


def _join(rank: int, count: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=WAIT)


def _other(rank: int, count: int, meeting: str, threads: int, follow: Callable[..., None], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to handle; it ends the others
    torch.set_num_threads(threads)
    _join(rank, count, meeting)
    follow(Ranks(rank=rank, count=count), *args)
    dist.destroy_process_group()
