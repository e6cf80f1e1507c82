"""Read `config.json` and `generation_config.json` as Hugging Face models carry them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from gptfast.config import GenerationDefaults, ModelConfig, RopeScaling, SamplingConfig
from gptfast.errors import CheckpointError

logger = logging.getLogger(__name__)

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""The values of `model_type` that the model file computes."""


def parse_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Turn a Hugging Face config into ours; `source` names it in errors.

    Keys that are absent have the defaults of transformers. Raises CheckpointError for a key that is needed and
    missing, and for a setting that the model cannot honour.
    """
    architecture = raw.get("model_type")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{source} describes a model of type {architecture!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(raw, source)
    n_heads = _require(raw, "num_attention_heads", source)
    dim = _require(raw, "hidden_size", source)
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        dim=dim,
        n_layers=_require(raw, "num_hidden_layers", source),
        n_heads=n_heads,
        n_kv_heads=raw.get("num_key_value_heads") or n_heads,
        head_dim=raw.get("head_dim") or dim // n_heads,
        ffn_dim=_require(raw, "intermediate_size", source),
        vocab_size=_require(raw, "vocab_size", source),
        max_seq_len=raw.get("max_position_embeddings") or 2048,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=_parse_rope_theta(raw),
        rope_scaling=_parse_rope_scaling(raw, source),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        qk_norm=architecture == "qwen3",
        sliding_window=_parse_sliding_window(raw, architecture, source),
    )


def parse_generation_defaults(
    config: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int
) -> GenerationDefaults:
    """Join what both files say of ending and sampling text; every end-of-sequence id of either counts.

    Sampling settings count where the model's makers asked for sampling (`do_sample`); else it is greedy.
    """
    eos_ids: list[int] = []
    for declared in (generation.get("eos_token_id"), config.get("eos_token_id")):
        eos_ids += declared if isinstance(declared, list) else [] if declared is None else [declared]
    bos_id = generation.get("bos_token_id", config.get("bos_token_id"))
    for token_id in sorted({i for i in eos_ids if not 0 <= i < vocab_size}):
        logger.warning("end-of-sequence id %d lies outside the vocabulary of %d; it is ignored", token_id, vocab_size)
    sampling = SamplingConfig()
    if generation.get("do_sample"):
        sampling = SamplingConfig(
            temperature=_get_number(generation, "temperature", 1.0),
            top_k=generation.get("top_k"),
            top_p=_get_number(generation, "top_p", 1.0),
            min_p=_get_number(generation, "min_p", 0.0),
            repetition_penalty=_get_number(generation, "repetition_penalty", 1.0),
        )
    return GenerationDefaults(
        eos_ids=tuple(dict.fromkeys(i for i in eos_ids if 0 <= i < vocab_size)), bos_id=bos_id, sampling=sampling
    )


def _require(raw: Mapping[str, Any], key: str, source: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int):
        raise CheckpointError(f"{source} has {key} = {value!r} where a whole number is needed; download it again")
    return value


def _get_number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key)
    return default if value is None else float(value)


def _refuse_unsupported(raw: Mapping[str, Any], source: str) -> None:
    required = {
        "hidden_act": ("silu", "swish", None),
        "mlp_bias": (False, None),
        "partial_rotary_factor": (1, None),
        "quantization_config": (None,),
    }
    for key, supported in required.items():
        value = raw.get(key)
        if value not in supported:
            if isinstance(value, dict):
                value = value.get("quant_method", value)
            raise CheckpointError(
                f"{source} asks for {key} = {value!r}, which is not supported; use another checkpoint"
            )


def _get_rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings: transformers 5 keeps all in `rope_parameters`, 4 the scaling in `rope_scaling`."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _parse_rope_theta(raw: Mapping[str, Any]) -> float:
    return float(_get_rope_parameters(raw).get("rope_theta") or raw.get("rope_theta") or 10_000.0)


def _parse_rope_scaling(raw: Mapping[str, Any], source: str) -> RopeScaling | None:
    parameters = _get_rope_parameters(raw)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    try:
        if kind in ("default", None):
            return None
        if kind == "linear":
            return RopeScaling("linear", factor=float(parameters["factor"]))
        if kind == "llama3":
            return RopeScaling(
                "llama3",
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_max_seq_len=int(parameters["original_max_position_embeddings"]),
            )
        if kind == "factors":  # only in the metadata that we keep of a GGUF file
            return RopeScaling("factors", factors=tuple(parameters["factors"]))
    except KeyError as error:
        raise CheckpointError(f"{source} asks for {kind} rotary scaling without saying its {error}") from error
    raise CheckpointError(f"{source} asks for {kind!r} rotary scaling; supported are default, linear and llama3")


def _parse_sliding_window(raw: Mapping[str, Any], architecture: str, source: str) -> int | None:
    window = raw.get("sliding_window")
    if window is None or architecture == "llama" or not raw.get("use_sliding_window", architecture == "mistral"):
        return None
    n_layers = raw["num_hidden_layers"]
    first = raw.get("max_window_layers", 0)
    default_types = ["full_attention"] * min(first, n_layers) + ["sliding_attention"] * (n_layers - first)
    kinds = set(raw.get("layer_types") or default_types)
    if kinds == {"full_attention"}:
        return None
    if kinds == {"sliding_attention"}:
        return int(window)
    raise CheckpointError(
        f"{source} mixes layers with and without a sliding window, which is not supported; use another checkpoint"
    )
