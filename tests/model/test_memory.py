"""What loading costs: a checkpoint in shards is never in memory twice, and a shape of any size costs nothing before it is filled."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch

from etude.model.config import Latent, ModelConfig
from etude.model.weights import Checkpoint, checkpoint_files, fill, meta_model, read_config, save_model

STATUS = Path("/proc/self/status")
pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="reads the process's memory from /proc")

LAYERS = ModelConfig(
    vocab_size=2048, hidden=768, layers=6, heads=8, kv_heads=8, head_dim=96, experts=4, experts_per_token=2, expert_intermediate=768,
    family="qwen3_moe", tie_embeddings=False,
)  # fmt: skip
DEEPSEEK = ModelConfig(
    vocab_size=129_280, hidden=7168, layers=61, heads=128, kv_heads=128, head_dim=192, intermediate=18_432, experts=256,
    experts_per_token=8, expert_intermediate=2048, shared_intermediate=2048, dense_layers=3, route_groups=8, route_groups_kept=4,
    route_scale=2.5, norm_topk=True, mtp_layers=1, tie_embeddings=False, family="deepseek_v3",
    latent=Latent(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, value_dim=128),
)  # fmt: skip


def private_bytes():
    """Memory of this process that is no file's: pages of a mapped checkpoint can go at any time and do not count."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def start():
    """The same, after giving back what earlier tests freed: it is not ours to use unseen."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return private_bytes()


class Watched(Checkpoint):
    """Notes the most memory held whenever a tensor is asked for, after the ones before were copied."""

    most = 0

    def tensor(self, name):
        self.most = max(self.most, private_bytes())
        return super().tensor(name)


class Hoarding(Watched):
    """What loading must not do: everything is read, then copied."""

    def __init__(self, files, *, where):
        super().__init__(files, where=where)
        self.all = {name: Checkpoint.tensor(self, name).clone() for name in self.names()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    model = meta_model(LAYERS).to_empty(device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    save_model(model, path, shard_bytes=16 << 20)
    assert len(list(path.glob("*.safetensors"))) > 5
    return path


@pytest.mark.parametrize(("source", "twice"), [(Watched, False), (Hoarding, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as stored", "widened"])
def test_a_sharded_checkpoint_is_in_memory_once(folder, dtype, source, twice):
    model = meta_model(read_config(folder))
    size = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    on_disk = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    assert on_disk > 90e6
    before = start()
    watched = source(checkpoint_files(folder), where=str(folder))
    fill(model, watched, dtype=dtype, device="cpu")
    most = max(watched.most, private_bytes()) - before
    assert (most > size + 0.6 * on_disk) == twice
    assert twice or most < size + 20e6
    assert next(model.parameters()).dtype == dtype


def test_the_shape_of_a_model_of_671_billion_parameters_costs_nothing():
    before = start()
    model = meta_model(DEEPSEEK)
    count = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("mtp."))
    assert count == pytest.approx(671e9, rel=0.01)
    assert sum(p.numel() for p in model.mtp.parameters()) == pytest.approx(11.5e9, rel=0.02)
    assert private_bytes() - before < 100e6
    assert all(p.is_meta for p in model.parameters())
