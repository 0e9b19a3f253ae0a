"""How much memory the engine's cache gets, and a sentence that says so.

Given `num_blocks` or `cache_bytes`, that. Otherwise a share of what the device has free when the engine starts (the weights are there
by then), but no more than `max_running` sequences of a whole window could fill. Free memory of a CPU is the least of what the kernel
calls available and what the control group leaves; of a GPU, what the driver says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from etude.errors import ConfigError
from etude.inference.config import EngineConfig

SHARE_CPU, SHARE_GPU = 0.1, 0.8
UNKNOWN = 2**30
"""Taken for free memory where the system does not say."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Of the cache: keys, values and routes. One block is reserved, so tokens fit `num_blocks - 1` blocks."""

    num_blocks: int
    block_bytes: int
    block_size: int
    free_bytes: int
    """Of the device, before the cache was made."""
    why: str

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    def __str__(self) -> str:
        size, free = self.cache_bytes / 2**20, self.free_bytes / 2**20
        return f"cache of {self.tokens:,} tokens in {self.num_blocks:,} blocks, {size:,.1f} MiB of {free:,.0f} MiB free ({self.why})"


def make_budget(config: EngineConfig, *, block_bytes: int, window: int, device: torch.device) -> Budget:
    """What `config` means on this device for a model with this window."""
    free = free_memory(device)
    if config.num_blocks:
        blocks, why = config.num_blocks, "engine.num_blocks"
    elif config.cache_bytes:
        blocks, why = config.cache_bytes // block_bytes, "engine.cache_bytes"
    else:
        share = config.memory_share or (SHARE_GPU if device.type == "cuda" else SHARE_CPU)
        wanted = config.max_running * -(-window // config.block_size) + 1
        fitting = int(free * share) // block_bytes
        blocks = min(wanted, fitting)
        why = f"{share:.0%} of it" if fitting < wanted else f"all that {config.max_running} sequences of {window:,} tokens need"
    if blocks < 2:
        raise ConfigError(
            f"the cache has room for {blocks} blocks of {block_bytes:,} bytes, and one is reserved; raise engine.cache_bytes "
            f"or engine.memory_share ({free / 2**20:,.0f} MiB are free)"
        )
    return Budget(num_blocks=blocks, block_bytes=block_bytes, block_size=config.block_size, free_bytes=free, why=why)


def free_memory(device: torch.device) -> int:
    """Bytes that could be had on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    system, group = _meminfo(Path("/proc/meminfo")), _group_left(Path("/sys/fs/cgroup"))
    known = [n for n in (system, group) if n is not None]
    return min(known) if known else UNKNOWN


def _meminfo(path: Path) -> int | None:
    """MemAvailable in bytes; None where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _group_left(folder: Path) -> int | None:
    """What the control group (version 2) at `folder` may still take; None without a limit."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(int(limit) - int(used), 0)
