"""Folders that `transformers` reads and writes, byte-identical round trips, and what is said about broken ones."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from etude.errors import CheckpointError
from etude.model.cache import PagedCache, Plan, blocks_for
from etude.model.weights import load_model, read_config, save_model

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
ATOL = 2e-5
"""float32 logits of size 1 to 10 against transformers' own kernels; the worst seen is 4e-6."""


def our_logits(model, ids):
    with torch.inference_mode():
        out = model(ids, Plan.packed([len(ids)]), PagedCache(model.config, blocks_for([len(ids)])))
        return model.logits(out.hidden_ND)


def hf_config(transformers, family, tied):
    common = {
        "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "tie_word_embeddings": tied, "max_position_embeddings": 256,
    }  # fmt: skip
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 30_000.0}}
    if family == "llama":
        return transformers.LlamaConfig(**{**common, "num_attention_heads": 4, "head_dim": 32}, **rope, rms_norm_eps=1e-5)
    return transformers.Qwen2MoeConfig(
        **common, **rope, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48,
        decoder_sparse_step=1, norm_topk_prob=not tied,
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_their_folder_gives_their_logits(transformers, tmp_path, family, tied, numerics):
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(hf_config(transformers, family, tied)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, numerics=numerics)
    assert ours.config.tie_embeddings is tied
    assert ours.config.rope_theta == 30_000
    for n in (1, 40, 200):
        ids = torch.randint(0, 96, (n,))
        with torch.no_grad():
            expected = theirs(ids[None]).logits[0]
        torch.testing.assert_close(our_logits(ours, ids), expected, rtol=0, atol=ATOL)


def test_our_folder_loads_there(transformers, tmp_path, config, make_model):
    model = make_model(config)
    save_model(model, tmp_path, extra={"eos_token_id": 7})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == CLASSES[config.family]
    assert (theirs.config.eos_token_id, theirs.config.bos_token_id) == (7, None)
    ids = torch.arange(60)
    with torch.no_grad():
        torch.testing.assert_close(our_logits(model, ids), theirs(ids[None]).logits[0], rtol=0, atol=ATOL)
    assert read_config(tmp_path) == config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_is_byte_identical(tmp_path, config, make_model, dtype):
    save_model(make_model(config), tmp_path / "a", dtype=dtype)
    model = load_model(tmp_path / "a", dtype=dtype)
    save_model(model, tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    wide = load_model(tmp_path / "a")
    assert wide.dtype == torch.float32
    assert all(torch.equal(p, q.float()) for p, q in zip(wide.parameters(), model.parameters(), strict=True))


def test_their_tensors_come_back_byte_identical(transformers, tmp_path):
    theirs = transformers.AutoModelForCausalLM.from_config(hf_config(transformers, "qwen2_moe", True))
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "a")
    save_model(load_model(tmp_path / "a", dtype=torch.bfloat16), tmp_path / "b")
    a, b = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name].view(torch.int16), b[name].view(torch.int16)) for name in a)


def test_shards(transformers, tmp_path, moe_config, make_model):
    model = make_model(moe_config)
    save_model(model, tmp_path, shard_bytes=100_000)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) > 2
    assert all((tmp_path / name).stat().st_size < 110_000 for name in names)
    again = load_model(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.get_input_embeddings().weight, model.embed_tokens.weight)
    save_model(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"], "the old shards are gone"
    load_model(tmp_path)


def broken(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_wrong_tensors_are_named(tmp_path, moe_config, make_model):
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_model(make_model(moe_config), tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    broken(tmp_path, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=rf"lack tensor '{name}' of shape \[32, 64\]"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole)
    broken(tmp_path, lambda t: t.update({name: torch.zeros(32, 65)}))
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' has the shape \[32, 65\], but config.json asks for \[32, 64\]"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole)
    broken(tmp_path, lambda t: t.update({"model.layers.2.extra": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.2.extra' of shape \[3\] has no place"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks the weights file"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"model_type": "qwen2_mow"}, "did you mean 'qwen2_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', which is not implemented"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, "rotary scaling 'dynamic'"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"num_experts": None}, "no 'num_experts'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"num_key_value_heads": 4}, "not a multiple"),
    ],
)
def test_unusable_config_json_is_named(tmp_path, moe_config, make_model, change, match):
    save_model(make_model(moe_config), tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**data, **change}))
    with pytest.raises(ValueError, match=match):
        load_model(tmp_path)


def test_folder_without_a_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_model(tmp_path)
