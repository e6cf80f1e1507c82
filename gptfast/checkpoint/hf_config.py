"""Read `config.json` and `generation_config.json` as Hugging Face models carry them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from gptfast.checkpoint.fields import Fields
from gptfast.config import GenerationDefaults, ModelConfig, RopeScaling, SamplingConfig
from gptfast.errors import CheckpointError, UserError

logger = logging.getLogger(__name__)

ARCHITECTURE_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "max_window_layers": 28},
    "qwen3": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}
"""The values of `model_type` that the model file computes, and what an absent key of each means to transformers."""
UNSUPPORTED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
}
"""Settings that change what a model computes, with the values under which the model file computes it."""


def parse_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Turn a Hugging Face config into ours; `source` names it in errors.

    Raises CheckpointError for a key that is missing or malformed, and for a setting that the model cannot honour.
    """
    architecture = raw.get("model_type")
    if architecture not in list(ARCHITECTURE_DEFAULTS):
        supported = ", ".join(ARCHITECTURE_DEFAULTS)
        raise CheckpointError(f"{source} describes a model of type {architecture!r}; supported are {supported}")
    refuse_unsupported(raw, source)
    fields = Fields(ARCHITECTURE_DEFAULTS[architecture] | dict(raw), source)
    dim, n_heads, n_layers = map(fields.get_size, ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = fields.get_size("head_dim", max(1, dim // n_heads))
    # transformers gives the other architectures no choice: qwen2 has q/k/v biases alone, mistral none.
    has_biases = architecture in ("llama", "qwen3") and fields.get_flag("attention_bias")
    rope = fields.get_fields("rope_parameters") or fields.get_fields("rope_scaling") or Fields({}, source)
    return ModelConfig(
        architecture=architecture,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=fields.get_size("num_key_value_heads", n_heads),
        head_dim=head_dim,
        ffn_dim=fields.get_size("intermediate_size"),
        vocab_size=fields.get_size("vocab_size"),
        max_seq_len=fields.get_size("max_position_embeddings"),
        norm_eps=fields.get_number("rms_norm_eps", 1e-6),
        rope_theta=rope.get_positive("rope_theta", fields.get_positive("rope_theta", 10_000.0)),
        rope_scaling=parse_rope_scaling(rope, head_dim),
        tie_word_embeddings=fields.get_flag("tie_word_embeddings"),
        qkv_bias=has_biases or architecture == "qwen2",
        output_bias=has_biases,
        qk_norm=architecture == "qwen3",
        sliding_window=parse_sliding_window(fields, n_layers, is_default=architecture == "mistral"),
    )


def parse_generation_defaults(config: Fields, generation: Fields, vocab_size: int) -> GenerationDefaults:
    """Join what both files say of ending and sampling text; every end-of-sequence id of either counts.

    Sampling settings count where the model's makers asked for sampling (`do_sample`); else it is greedy.
    """
    eos_ids = list(dict.fromkeys(generation.get_ids("eos_token_id") + config.get_ids("eos_token_id")))
    for token_id in eos_ids:
        if not 0 <= token_id < vocab_size:
            logger.warning("the end-of-sequence id %s is not in the vocabulary of %d; ignored", token_id, vocab_size)
    sampling = parse_sampling(generation) if generation.get_flag("do_sample") else SamplingConfig()
    bos_ids = generation.get_ids("bos_token_id") or config.get_ids("bos_token_id")
    return GenerationDefaults(
        eos_ids=tuple(token_id for token_id in eos_ids if 0 <= token_id < vocab_size),
        bos_id=bos_ids[0] if bos_ids else None,
        sampling=sampling,
    )


def parse_sampling(generation: Fields) -> SamplingConfig:
    """The sampling settings of `generation_config.json`; raises CheckpointError for impossible ones."""
    top_k = generation.raw.get("top_k")
    try:
        return SamplingConfig(
            temperature=generation.get_number("temperature", 1.0),
            top_k=generation.get_size("top_k") if top_k not in (None, 0, -1) else None,
            top_p=generation.get_number("top_p", 1.0),
            min_p=generation.get_number("min_p", 0.0),
            repetition_penalty=generation.get_number("repetition_penalty", 1.0),
        )
    except CheckpointError:
        raise
    except UserError as error:
        raise CheckpointError(f"{generation.source} cannot be used: {error}") from error


def refuse_unsupported(raw: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError for a setting that the model file cannot honour."""
    for key, supported in UNSUPPORTED_SETTINGS.items():
        value = raw.get(key)
        if value not in supported:
            raise CheckpointError(
                f"{source} asks for {key} = {value!r}, which is not supported; use another checkpoint"
            )


def parse_rope_scaling(rope: Fields, head_dim: int) -> RopeScaling | None:
    """The rotary scaling of `rope_parameters` (transformers 5) or `rope_scaling` (4), in either spelling."""
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if any(isinstance(value, dict) for value in rope.raw.values()):
        raise CheckpointError(f"{rope.source} differ between layers, which is not supported; use another checkpoint")
    if rope.raw.get("partial_rotary_factor") not in (None, 1):
        raise CheckpointError(f"{rope.source} rotate a part of every head, which is not supported; use another model")
    if kind in ("default", None):
        return None
    source, rope = rope.source, Fields(rope.raw, f"{kind} {rope.source}")
    if kind == "linear":
        return RopeScaling("linear", factor=rope.get_positive("factor"))
    if kind == "llama3":
        low, high = rope.get_positive("low_freq_factor"), rope.get_positive("high_freq_factor")
        if low >= high:
            raise rope.refuse("low_freq_factor", f"a number below high_freq_factor = {high:g}")
        return RopeScaling(
            "llama3",
            factor=rope.get_positive("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_seq_len=rope.get_size("original_max_position_embeddings"),
        )
    if kind == "factors":  # only in the metadata that is kept of a GGUF file
        factors = tuple(rope.get_numbers("factors"))
        if len(factors) != head_dim // 2:
            raise rope.refuse("factors", f"a list of {head_dim // 2} numbers, half of head_dim,")
        return RopeScaling("factors", factors=factors)
    raise CheckpointError(f"{source} asks for {kind!r} rotary scaling; supported are default, linear and llama3")


def parse_sliding_window(fields: Fields, n_layers: int, *, is_default: bool) -> int | None:
    """The window that all layers share; `is_default` tells whether one counts without being switched on."""
    if fields.raw.get("sliding_window") is None or not fields.get_flag("use_sliding_window", is_default):
        return None
    window = fields.get_size("sliding_window")
    first_windowed = fields.raw.get("max_window_layers")
    n_full = min(n_layers, fields.get_size("max_window_layers")) if first_windowed else 0
    implied = ["full_attention"] * n_full + ["sliding_attention"] * (n_layers - n_full)
    kinds = fields.raw.get("layer_types") or implied
    if not isinstance(kinds, list):
        raise fields.refuse("layer_types", "a list")
    if all(kind == "full_attention" for kind in kinds):
        return None
    if all(kind == "sliding_attention" for kind in kinds):
        return window
    raise CheckpointError(
        f"{fields.source} mixes layers with and without a sliding window, which is not supported; use another model"
    )
