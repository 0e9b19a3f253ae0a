"""Every family against `transformers`: logits, decoding, bytes on disk, gradients, and what is said about folders that do not fit."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from etude.errors import CheckpointError, ConfigError
from etude.model.cache import PagedCache, Plan, blocks_for
from etude.model.config import Latent, ModelConfig, RopeScaling
from etude.model.families import FAMILIES, config_from_hf, family
from etude.model.rope import frequencies
from etude.model.transformer import KEPT
from etude.model.weights import from_config, load_model, read_config, save_model

CLOSE = 1e-4
"""Largest difference of float32 logits as a share of the largest logit; the worst seen is 6e-6."""
VOCAB = 96
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 2000.0, "factor": 4.0}
DEEPSEEK_YARN = {**YARN, "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
DENSE = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 72, "max_position_embeddings": 512}
SPARSE = {**DENSE, "moe_intermediate_size": 20}
LATENT = {**SPARSE, "num_hidden_layers": 3, "first_k_dense_replace": 1, "rms_norm_eps": 1e-3}


def heads(query, cached, width, **more):
    return {"num_attention_heads": query, "num_key_value_heads": cached, "head_dim": width, **more}


def latent(count, q_rank, kv_rank, nope, rope, value, **more):
    shape = {"q_lora_rank": q_rank, "kv_lora_rank": kv_rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
    return {"num_attention_heads": count, "num_key_value_heads": count, **shape, **more}


def scaled(base, original):
    return {"rope_parameters": {**base, "original_max_position_embeddings": original}}


CASES = {
    "llama-llama3": ("Llama", {**DENSE, **heads(4, 2, 16), **scaled(LLAMA3, 64)}),
    "llama-linear": ("Llama", {**DENSE, **heads(3, 1, 24), "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0}}),
    "llama-yarn": ("Llama", {**DENSE, **heads(2, 2, 32, tie_word_embeddings=True), **scaled({**YARN, "truncate": False}, 32)}),
    "qwen2_moe-plain": ("Qwen2Moe", {**SPARSE, **heads(4, 4, 12), "num_experts": 5, "shared_expert_intermediate_size": 28}),
    "qwen2_moe-one": (
        "Qwen2Moe",
        {**SPARSE, **heads(6, 2, 8, tie_word_embeddings=True), "num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": False,
         "shared_expert_intermediate_size": 36},
    ),
    "qwen2_moe-yarn": (
        "Qwen2Moe",
        {**SPARSE, **heads(2, 1, 24), **scaled({**YARN, "attention_factor": 1.3}, 64), "num_experts": 8, "num_experts_per_tok": 3,
         "shared_expert_intermediate_size": 12, "qkv_bias": False},
    ),
    "qwen3-tied": ("Qwen3", {**DENSE, **heads(4, 2, 16, tie_word_embeddings=True)}),
    "qwen3-wide": (
        "Qwen3",
        {**DENSE, **heads(3, 3, 32), "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3-yarn": ("Qwen3", {**DENSE, **heads(6, 1, 8), **scaled(YARN, 64)}),
    "qwen3_moe-plain": ("Qwen3Moe", {**SPARSE, **heads(4, 2, 16), "num_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe-normed": (
        "Qwen3Moe",
        {**SPARSE, **heads(2, 2, 24, tie_word_embeddings=True), "num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen3_moe-yarn": ("Qwen3Moe", {**SPARSE, **heads(6, 3, 8), **scaled(YARN, 32), "num_experts": 4, "num_experts_per_tok": 1}),
    "deepseek_v3-groups": (
        "DeepseekV3",
        {**LATENT, **latent(4, 24, 32, 16, 8, 12), **scaled(DEEPSEEK_YARN, 16), "n_routed_experts": 8, "num_experts_per_tok": 3,
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 1},
    ),
    "deepseek_v3-kimi": (
        "DeepseekV3",
        {**LATENT, **latent(2, 20, 16, 12, 16, 24), **scaled({**DEEPSEEK_YARN, "factor": 32.0, "beta_fast": 1.0}, 64), "n_group": 1,
         "topk_group": 1, "n_routed_experts": 12, "num_experts_per_tok": 4, "routed_scaling_factor": 2.827, "n_shared_experts": 2},
    ),
    "deepseek_v3-small": (
        "DeepseekV3",
        {**LATENT, **latent(3, None, 20, 8, 8, 8), "rope_interleave": False, "tie_word_embeddings": True, "first_k_dense_replace": 0,
         "n_group": 2, "topk_group": 1, "n_routed_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False,
         "routed_scaling_factor": 1.0, "n_shared_experts": 1},
    ),
}  # fmt: skip


@pytest.fixture(scope="session", params=CASES)
def theirs(request, transformers):
    """A random model of theirs whose norms, biases and experts all matter."""
    kind, fields = CASES[request.param]
    torch.manual_seed(sorted(CASES).index(request.param))
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**fields)).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not name.endswith("inv_freq"):
                tensor.add_(0.15 * torch.randn_like(tensor))
    return model


@pytest.fixture(scope="session")
def folder(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(path)
    return path


def tokens(n, seed=0):
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


def packed(model, seqs):
    """Logits of all sequences, as the trainer computes them."""
    lengths = [len(s) for s in seqs]
    out = model(torch.cat(seqs), Plan.packed(lengths), PagedCache(model.config, blocks_for(lengths), dtype=model.dtype, functional=True))
    return model.logits(out.hidden_ND)


def apart(ours, expected):
    return ((ours - expected).abs().max() / expected.abs().max()).item()


def test_all_families_are_held_against_theirs():
    families = [name.split("-")[0] for name in CASES]
    assert set(families) == set(FAMILIES)
    assert all(families.count(name) >= 3 for name in FAMILIES)


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_logits_are_theirs(theirs, folder, numerics):
    ours = load_model(folder, numerics=numerics)
    seqs = [tokens(n, seed=n) for n in (1, 9, 150)]
    with torch.no_grad():
        expected = torch.cat([theirs(ids[None]).logits[0] for ids in seqs])
        logits = packed(ours, seqs)
    assert expected.abs().max() > 0.5
    assert apart(logits, expected) <= CLOSE


def test_decoding_step_by_step_equals_the_whole(folder, driver):
    ours = load_model(folder)
    seqs = [tokens(40, seed=1), tokens(25, seed=2)]
    run = driver(ours, seqs)
    with torch.inference_mode():
        run.feed([(0, 20), (1, 5)])
        for _ in range(20):
            run.feed([(0, 1), (1, 1)])
        whole = packed(ours, seqs).split([40, 25])
        for s in (0, 1):
            assert apart(run.logits(s), whole[s]) <= 1e-5


def bytes_on_disk(path):
    tensors = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118  a safetensors handle is not a mapping
                tensor = handle.get_tensor(name)
                tensors[name] = (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_their_tensors_come_back_byte_identical(folder, tmp_path, dtype):
    """As published: everything in one type but the router's bias, which stays float32."""
    source = tmp_path / "theirs"
    source.mkdir()
    tensors = {name: t if name.endswith(KEPT) else t.to(dtype) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text((folder / "config.json").read_text())
    model = load_model(source, dtype=dtype)
    for name, shard_bytes in (("whole", 1 << 30), ("shards", 9_000)):
        save_model(model, tmp_path / name, shard_bytes=shard_bytes)
        assert bytes_on_disk(tmp_path / name) == bytes_on_disk(source)
        assert read_config(tmp_path / name) == model.config
        again = load_model(tmp_path / name, dtype=dtype)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in bytes_on_disk(source).values())


def test_our_folder_gives_the_same_logits_there(transformers, theirs, folder, tmp_path):
    save_model(load_model(folder), tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = tokens(30)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, theirs(ids).logits)


def test_a_missing_or_misshapen_tensor_is_named(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if ".layers.1." in n and (n.count(".") < 7 or ".experts.1." in n)]:
        save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"lack tensor '{re.escape(name)}' of shape {re.escape(str(list(tensors[name].shape)))}"):
            load_model(tmp_path)
        wrong = torch.zeros(*tensors[name].shape[:-1], tensors[name].shape[-1] + 1)
        save_file({**tensors, name: wrong}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"tensor '{re.escape(name)}' has the shape {re.escape(str(list(wrong.shape)))}, but"):
            load_model(tmp_path)


def test_gradients_reach_every_parameter(folder):
    """Every expert and every head of a projection too; only the router's bias has none."""
    ours = load_model(folder)
    seqs = [tokens(90, seed=3), tokens(60, seed=4)]
    packed(ours, seqs).log_softmax(-1).gather(1, torch.cat(seqs).unsqueeze(1)).sum().backward()
    for name, parameter in ours.named_parameters():
        if name.endswith(KEPT):
            assert parameter.grad is None
            continue
        parts = parameter.grad if parameter.ndim == 3 else parameter.grad.unsqueeze(0)
        assert (parts.flatten(1).abs().amax(1) > 0).all(), name


# ---------------------------------------------------------------------------------------------------
# config.json


PUBLISHED = {
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 131072, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
        "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "transformers_version": "4.48.3", "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip
"""In the form of the published Kimi-K2, Qwen3-30B-A3B and Qwen3-0.6B."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_fields_are_understood(name):
    config = config_from_hf(PUBLISHED[name])
    assert config.family == name
    assert config_from_hf(family(config).to_hf(config)) == config
    assert config.absent_route == (65535 if config.experts > 255 else 255)


@pytest.mark.parametrize(
    "name, change, match",
    [
        ("qwen3", {"attention_bias": True}, "attention_bias = True, which is not implemented; etude runs False"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' in layer_types"),
        ("qwen3", {"head_dim": None}, "no 'head_dim'"),
        ("qwen3", {"logit_softcap": 30.0}, "logit_softcap = 30.0, which etude does not know in a 'qwen3' model; remove the field"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = 'fp8', .*to bfloat16 first"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("qwen3", {"rope_scaling": {"type": "longrope"}}, "rotary scaling 'longrope', .* linear, llama3, yarn"),
        ("qwen3", {"rope_scaling": {"type": "linear"}}, "no 'factor' in its rotary scaling; 'linear' needs it"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mrope_section": [2]}}, r"mrope_section = \[2\] in its rotary scaling"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor is 0.5"),
        ("qwen3", {"rope_scaling": {"factor": 2.0}}, "factor = 2.0 in its rotary scaling, .* kind 'default'"),
        ("qwen3", {"n_routed_experts": 8}, "n_routed_experts = 8, which etude does not know"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers = \[3\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64, which etude does not know"),
        ("qwen3_moe", {"num_experts": None}, "no 'num_experts'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax', .*etude runs 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek_v3", {"index_topk": 2048}, "index_topk = 2048, which etude does not know in a 'deepseek_v3' model"),
        ("deepseek_v3", {"head_dim": 128}, "head_dim = 128, .*etude runs 64"),
        ("deepseek_v3", {"num_key_value_heads": 8}, "kv_heads = 8 must equal model.heads = 64"),
        ("deepseek_v3", {"n_group": 5}, "route_groups = 5 must divide experts = 384"),
        ("deepseek_v3", {"n_group": 64, "topk_group": 1}, "1 of 64 groups of 6 experts"),
        ("deepseek_v3", {"first_k_dense_replace": 61}, "dense_layers = 61 must leave one of 61 layers"),
        ("deepseek_v3", {"kv_lora_rank": None}, "no 'kv_lora_rank'"),
        ("deepseek_v3", {"qk_rope_head_dim": 63, "qk_nope_head_dim": 129}, "rope_dim = 63 must be even"),
        ("deepseek_v4", {}, "did you mean 'deepseek_v3'"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(name, change, match):
    data = {**PUBLISHED.get(name, {"model_type": name}), **change}
    with pytest.raises(ValueError, match=match):
        config_from_hf(data)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"family": "qwen3_moe"}, "family = 'deepseek_v3' needs it"),
        ({"latent": None}, "family = 'deepseek_v3' needs it"),
        ({"head_dim": 64}, r"must be nope_dim \+ rope_dim = 48"),
        ({"shared_intermediate": 40}, "must be a multiple of expert_intermediate"),
        ({"intermediate": 0}, "1 dense layers need at least 1"),
        ({"latent": None, "family": "qwen2_moe"}, "not for model.family = 'qwen2_moe'"),
        ({"latent": None, "family": "qwen3_moe", "dense_layers": 0}, "has no shared expert"),
    ],
)
def test_impossible_shapes_are_refused(change, match):
    shape = {
        "vocab_size": 9, "hidden": 8, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 48, "intermediate": 8, "experts": 4,
        "experts_per_token": 2, "expert_intermediate": 32, "shared_intermediate": 64, "dense_layers": 1, "family": "deepseek_v3",
        "latent": Latent(kv_rank=16, nope_dim=32, rope_dim=16, value_dim=8),
    }  # fmt: skip
    ModelConfig(**shape)
    with pytest.raises(ConfigError, match=match):
        ModelConfig(**{**shape, **change})


def test_layers_that_predict_several_tokens_are_left_out_and_no_others(tmp_path):
    shape = Latent(kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8)
    config = ModelConfig(
        vocab_size=9, hidden=8, layers=2, heads=2, kv_heads=2, head_dim=16, experts=4, experts_per_token=2, expert_intermediate=8,
        shared_intermediate=8, latent=shape, family="deepseek_v3",
    )  # fmt: skip
    save_model(from_config(config), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    behind = {"model.layers.2.input_layernorm.weight": torch.ones(8), "model.layers.2.shared_head.head.weight": torch.ones(9, 8)}
    save_file({**tensors, **behind}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model.layers.2.input_layernorm.weight' of shape \[8\] has no place"):
        load_model(tmp_path)
    save_file({**tensors, **behind, "model.layers.2.eh_proj.weight": torch.ones(8, 16)}, tmp_path / "model.safetensors")
    save_model(load_model(tmp_path), tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()


def test_the_routers_bias_keeps_its_type_wherever_the_model_goes(tmp_path):
    shape = Latent(kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8)
    config = ModelConfig(
        vocab_size=9, hidden=8, layers=1, heads=2, kv_heads=2, head_dim=16, experts=4, experts_per_token=2, expert_intermediate=8,
        shared_intermediate=8, latent=shape, family="deepseek_v3",
    )  # fmt: skip
    model = from_config(config, dtype=torch.bfloat16)
    bias = model.layers[0].mlp.gate.e_score_correction_bias
    assert (bias.dtype, bias.requires_grad, model.dtype) == (torch.float32, False, torch.bfloat16)
    exact = torch.tensor([4.001, 4.002, 4.003, 4.004])
    with torch.no_grad():
        bias.copy_(exact)
    save_model(model, tmp_path)
    again = load_model(tmp_path, dtype=torch.bfloat16).half().bfloat16()
    assert torch.equal(again.layers[0].mlp.gate.e_score_correction_bias, exact)
    assert again.layers[0].mlp.gate.weight.dtype == torch.bfloat16


# ---------------------------------------------------------------------------------------------------
# Cache and rope


def test_a_latent_cache_holds_latents():
    config = config_from_hf(PUBLISHED["deepseek_v3"])
    assert (config.cache_tensors, config.cache_heads, config.cache_width) == (1, 1, 512 + 64)
    small = ModelConfig(
        vocab_size=9, hidden=8, layers=2, heads=4, kv_heads=4, head_dim=16, experts=4, experts_per_token=2, expert_intermediate=8,
        shared_intermediate=8, latent=Latent(kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8), family="deepseek_v3",
    )  # fmt: skip
    assert PagedCache(small, 3, 16).size_bytes == 3 * 16 * 2 * (16 + 8) * 4


def test_scaled_frequencies():
    """Ends of the passage: quick pairs as they were, slow ones divided by the factor; and the factors beside them."""
    plain = frequencies(64, 10_000.0)
    for scaling in (
        RopeScaling(kind="llama3", factor=8.0, original_positions=512),
        RopeScaling(kind="yarn", factor=8.0, original_positions=512),
    ):
        ratio = plain / frequencies(64, 10_000.0, scaling)
        assert ratio[0] == 1
        assert ratio[-1] == pytest.approx(8)
        assert (ratio.diff() >= -1e-6).all()
        assert 2 < sum((ratio > 1.01) & (ratio < 7.99)) < 30
    assert torch.equal(frequencies(8, 100.0, RopeScaling(kind="linear", factor=2.0)), frequencies(8, 100.0) / 2)
    yarn = RopeScaling(kind="yarn", factor=40.0, original_positions=64)
    assert yarn.amplitude == pytest.approx(0.1 * 3.688879 + 1)
    assert (yarn.softmax_factor, yarn.kind) == (1.0, "yarn")
