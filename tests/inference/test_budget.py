"""The cache's memory: from the config, or from what the device has free; and engines that cannot have it."""

import asyncio

import pytest
import torch

from etude.errors import ConfigError, EngineError
from etude.inference import budget
from etude.inference.config import EngineConfig

CPU = torch.device("cpu")


@pytest.fixture
def free(monkeypatch):
    """The machine has ten thousand bytes free."""
    monkeypatch.setattr(budget, "free_memory", lambda device: 10_000)


def make(**config):
    return budget.make_budget(EngineConfig(**config), block_bytes=10, window=160, device=CPU)


def test_what_the_config_says_is_taken(free):
    assert make(num_blocks=7).num_blocks == 7
    assert make(cache_bytes=79).num_blocks == 7


def test_a_share_of_the_free_memory_unless_less_is_enough(free):
    shared = make(memory_share=0.2)
    assert (shared.num_blocks, shared.cache_bytes, shared.tokens) == (200, 2000, 199 * 16)
    assert "20% of it" in str(shared)
    enough = make(memory_share=0.2, max_running=8)
    assert enough.num_blocks == 8 * 10 + 1  # a window of 160 tokens is ten blocks, and one is reserved
    assert "8 sequences of 160 tokens" in str(enough)
    assert make().num_blocks == 100


@pytest.mark.parametrize("config", [{"memory_share": 0.001}, {"cache_bytes": 19}, {"num_blocks": 1}])
def test_too_little_for_two_blocks_is_an_error_that_says_what_there_is(free, config):
    with pytest.raises(ConfigError, match=r"room for [01] blocks of 10 bytes"):
        make(**config)


@pytest.mark.parametrize("config", [{"memory_share": 1.5}, {"memory_share": -0.1}, {"max_waiting": -1}, {"cache_bytes": -1}])
def test_bad_shares_are_refused(config):
    with pytest.raises(ConfigError, match=next(iter(config))):
        EngineConfig(**config)


def test_free_memory_is_the_least_of_system_and_control_group(tmp_path, monkeypatch):
    info, group = tmp_path / "meminfo", tmp_path / "group"
    info.write_text("MemTotal: 900 kB\nMemAvailable:     500 kB\n")
    group.mkdir()
    assert budget._meminfo(info) == 500 * 1024
    assert budget._meminfo(tmp_path / "nowhere") is None
    assert budget._group_left(group) is None
    (group / "memory.current").write_text("1000\n")
    for limit, left in (("max\n", None), ("4096\n", 3096), ("10\n", 0)):
        (group / "memory.max").write_text(limit)
        assert budget._group_left(group) == left
    monkeypatch.setattr(budget, "_meminfo", lambda path: 500)
    for left, want in ((None, 500), (300, 300), (700, 500)):
        monkeypatch.setattr(budget, "_group_left", lambda folder, left=left: left)
        assert budget.free_memory(CPU) == want
    monkeypatch.setattr(budget, "_meminfo", lambda path: None)
    monkeypatch.setattr(budget, "_group_left", lambda folder: None)
    assert budget.free_memory(CPU) == budget.UNKNOWN


def test_the_engine_states_its_budget_and_serves_from_it(lab, caplog):
    with caplog.at_level("INFO", logger="etude.inference.engine"):
        engine = lab.engine(num_blocks=0, max_running=2, memory_share=0.01)
    assert engine.budget.num_blocks == 2 * 96 // 4 + 1
    assert str(engine.budget) in caplog.text
    stats = asyncio.run(engine.stats())
    assert stats["cache_bytes"] == engine.budget.cache_bytes
    assert 0 < stats["cache_bytes"] < stats["free_bytes_at_start"]


def test_a_cache_that_cannot_be_had_is_an_engine_error(lab):
    with pytest.raises(EngineError, match=r"no memory for the engine's cache .* lower engine\.cache_bytes"):
        lab.engine(num_blocks=0, cache_bytes=2**60)
