"""What the families' config.json have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from etude.errors import CheckpointError
from etude.model.config import ModelConfig, RopeScaling

_INERT = """
architectures auto_map dtype torch_dtype transformers_version transformers.js_config attn_implementation torchscript unsloth_fixed
unsloth_version use_cache use_bfloat16 tf_legacy_loss return_dict use_return_dict output_attentions output_hidden_states
output_router_logits output_scores return_dict_in_generate initializer_range attention_dropout hidden_dropout is_llama_config
bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
begin_suppress_tokens suppress_tokens bad_words_ids tokenizer_class prefix task_specific_params finetuning_task problem_type
num_labels id2label label2id pruned_heads chunk_size_feed_forward cross_attention_hidden_size add_cross_attention is_decoder
is_encoder_decoder tie_encoder_decoder pretraining_tp ep_size seq_aux max_window_layers sliding_window do_sample temperature top_k
top_p typical_p min_length max_length num_beams num_beam_groups num_return_sequences early_stopping diversity_penalty
repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size exponential_decay_length_penalty
remove_invalid_values
"""
INERT = frozenset(_INERT.split())
"""Fields of config.json that change nothing of what a decoder computes: dropouts, which etude has none of, training, sampling, and
the window of an attention that every family refuses to make sliding. So do all whose name begins with an underscore."""

SCALINGS: dict[str, dict[str, str]] = {
    "linear": {},
    "llama3": {
        "original_max_position_embeddings": "original_positions",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "original_max_position_embeddings": "original_positions",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
}
"""Kind of rotary scaling -> its name of each field -> ours."""


class Fields(Mapping[str, Any]):
    """A parsed config.json that knows which of its fields nobody looked at."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self._unread = set(data)

    def __getitem__(self, key: str) -> Any:
        self._unread.discard(key)
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def refuse_unread(self) -> None:
        """Stop at a field that might change the computation in a way nobody here knows of. null says nothing, so it may stay."""
        for key in sorted(self._unread - INERT):
            if self._data[key] is not None and not key.startswith("_"):
                raise CheckpointError(
                    f"config.json has {key} = {self._data[key]!r}, which etude does not know in a {self._data.get('model_type')!r} model; "
                    f"remove the field if it does not change what the model computes, else etude cannot run this model"
                )


def required(data: Mapping[str, Any], key: str, *others: str) -> Any:
    """The first of these fields that says something."""
    found = [data[name] for name in (key, *others) if data.get(name) is not None]
    if not found:
        raise CheckpointError(f"config.json has no {key!r}; it is needed to build a {data.get('model_type')!r} model")
    return found[0]


def refuse(data: Mapping[str, Any], key: str, *allowed: Any) -> None:
    """Stop at a field whose value would change the computation in a way that is not implemented."""
    if data.get(key) not in (None, *allowed):
        raise CheckpointError(
            f"config.json has {key} = {data[key]!r}, which is not implemented; etude runs {allowed[0]!r}, so use a model with that"
        )


def rope_from_hf(data: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    """Base and scaling of the rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    old, new = data.get("rope_scaling"), data.get("rope_parameters")
    parameters = dict(new or old or {})
    whole, theta = (parameters.pop(key, None) or data.get(key) for key in ("partial_rotary_factor", "rope_theta"))
    if whole not in (None, 1, 1.0):
        raise CheckpointError(
            f"config.json has partial_rotary_factor = {whole!r}, which is not implemented; etude turns whole heads, so give another model"
        )
    kinds = [parameters.pop(key, None) for key in ("rope_type", "type")]
    kind = kinds[0] or kinds[1] or "default"
    parameters = {key: value for key, value in parameters.items() if value is not None}
    if kind != "default" and kind not in SCALINGS:
        raise CheckpointError(
            f"config.json asks for rotary scaling {kind!r}, which is not implemented; etude runs 'default' and {', '.join(SCALINGS)}: "
            "give another model"
        )
    base = {"rope_theta": float(theta or 10_000.0)}
    return base if kind == "default" and not parameters else {**base, "rope_scaling": _scaling(kind, parameters, data, max_positions)}


def _scaling(kind: str, parameters: dict[str, Any], data: Mapping[str, Any], max_positions: int) -> RopeScaling:
    ours = {"factor": "factor", **SCALINGS[kind]} if kind in SCALINGS else {}
    for key, value in sorted(parameters.items()):
        if key not in ours:
            raise CheckpointError(
                f"config.json has {key} = {value!r} in its rotary scaling, which etude does not know for the kind {kind!r}; "
                "remove the field if it does not change what the model computes"
            )
    fields = {name: parameters[key] for key, name in ours.items() if key in parameters}
    if "original_positions" in ours.values():
        fields["original_positions"] = data.get("original_max_position_embeddings") or fields.get("original_positions") or max_positions
    if "factor" not in fields:
        if kind != "yarn":
            raise CheckpointError(f"config.json has no 'factor' in its rotary scaling; {kind!r} needs it")
        fields["factor"] = max_positions / fields["original_positions"]
    return RopeScaling(kind=kind, **fields)  # type: ignore[arg-type]


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """In the words of transformers 4, which 5 reads too."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_theta": config.rope_theta}
    fields = {key: getattr(scaling, name) for key, name in SCALINGS[scaling.kind].items()}
    said = {key: value for key, value in fields.items() if value is not None}
    return {"rope_theta": config.rope_theta, "rope_scaling": {"rope_type": scaling.kind, "factor": scaling.factor, **said}}


def no_unused(names: Iterable[str], config: ModelConfig) -> set[str]:
    """Every tensor of a checkpoint has a place in the decoder."""
    return set()


def common_from_hf(data: Mapping[str, Any]) -> dict[str, Any]:
    """ModelConfig fields that every family names alike."""
    refuse(data, "hidden_act", "silu")
    quantised = data.get("quantization_config")
    if quantised is not None:
        kind = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise CheckpointError(
            f"config.json has quantization_config = {kind!r}, which is not implemented; etude reads plain weights, so convert the folder "
            "to bfloat16 first"
        )
    sliding = [kind for kind in data.get("layer_types") or [] if kind != "full_attention"]
    if sliding:
        raise CheckpointError(
            f"config.json has {sliding[0]!r} in layer_types, which is not implemented; use a model whose layers all have 'full_attention'"
        )
    heads = required(data, "num_attention_heads")
    hidden = required(data, "hidden_size")
    max_positions = int(data.get("max_position_embeddings", 2048))
    return {
        "vocab_size": required(data, "vocab_size"),
        "hidden": hidden,
        "layers": required(data, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": data.get("num_key_value_heads") or heads,
        "head_dim": data.get("head_dim") or hidden // heads,
        **rope_from_hf(data, max_positions),
        "norm_eps": float(data.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(data.get("tie_word_embeddings", False)),
        "max_positions": max_positions,
        "mtp_layers": int(data.get("num_nextn_predict_layers") or 0),
    }


def common_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        **rope_to_hf(config),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "attention_dropout": 0.0,
        **({"num_nextn_predict_layers": config.mtp_layers} if config.mtp_layers else {}),
    }


def plain_name(name: str) -> str:
    """Checkpoint name of a parameter that is stored as it is."""
    return name if name.startswith("lm_head.") else f"model.{name}"
