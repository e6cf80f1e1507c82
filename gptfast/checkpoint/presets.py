"""Architectures by name, for random weights and for sizing where no checkpoint is at hand.

The values are those of the publishers' own configs (Meta's params.json, the hub's config.json).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from gptfast.config import ModelConfig, RopeScaling
from gptfast.errors import CheckpointError


def compute_ffn_dim(dim: int, multiple_of: int, ffn_dim_multiplier: float | None = None) -> int:
    """The hidden size of the feed-forward layers that Meta's params.json implies, in elements.

    Two thirds of `4 * dim` (the SwiGLU has three matrices where a plain layer has two), times
    `ffn_dim_multiplier`, rounded up to `multiple_of`. Source: `FeedForward` in Meta's reference
    implementation of Llama 3.
    """
    ffn_dim = int(2 * 4 * dim / 3)
    if ffn_dim_multiplier is not None:
        ffn_dim = int(ffn_dim_multiplier * ffn_dim)
    return multiple_of * ((ffn_dim + multiple_of - 1) // multiple_of)


def get_preset(name: str) -> ModelConfig:
    """The architecture called `name`; raises CheckpointError with the known names."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1)
    guess = f" (did you mean {near[0]}?)" if near else ""
    raise CheckpointError(f"{name!r} is not a preset{guess}; the presets are {', '.join(PRESETS)}")


_LLAMA_2_7B = ModelConfig(
    architecture="llama",
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    head_dim=128,
    ffn_dim=compute_ffn_dim(4096, multiple_of=256),
    vocab_size=32_000,
    max_seq_len=4096,
    norm_eps=1e-5,
    rope_theta=10_000.0,
)
_LLAMA_3_8B = replace(
    _LLAMA_2_7B,
    n_kv_heads=8,
    ffn_dim=compute_ffn_dim(4096, multiple_of=1024, ffn_dim_multiplier=1.3),
    vocab_size=128_256,
    max_seq_len=8192,
    rope_theta=500_000.0,
)
_LLAMA_3_70B = replace(
    _LLAMA_3_8B,
    dim=8192,
    n_layers=80,
    n_heads=64,
    ffn_dim=compute_ffn_dim(8192, multiple_of=4096, ffn_dim_multiplier=1.3),
)
_LLAMA_3_1_ROPE = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
)
_LLAMA_3_2_1B = replace(
    _LLAMA_3_8B,
    dim=2048,
    n_layers=16,
    head_dim=64,
    ffn_dim=compute_ffn_dim(2048, multiple_of=256, ffn_dim_multiplier=1.5),
    max_seq_len=131_072,
    rope_scaling=replace(_LLAMA_3_1_ROPE, factor=32.0),
    tie_word_embeddings=True,
)
_MISTRAL_7B_V0_3 = replace(
    _LLAMA_3_8B, architecture="mistral", vocab_size=32_768, max_seq_len=32_768, rope_theta=1_000_000.0
)
_QWEN2_5_7B = ModelConfig(
    architecture="qwen2",
    dim=3584,
    n_layers=28,
    n_heads=28,
    n_kv_heads=4,
    head_dim=128,
    ffn_dim=18_944,
    vocab_size=152_064,
    max_seq_len=131_072,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qkv_bias=True,
)
_QWEN3_8B = ModelConfig(
    architecture="qwen3",
    dim=4096,
    n_layers=36,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    ffn_dim=12_288,
    vocab_size=151_936,
    max_seq_len=40_960,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qk_norm=True,
)
_SMOLLM2_135M = ModelConfig(
    architecture="llama",
    dim=576,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    ffn_dim=1536,
    vocab_size=49_152,
    max_seq_len=8192,
    norm_eps=1e-5,
    rope_theta=100_000.0,
    tie_word_embeddings=True,
)

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama-2-7b": _LLAMA_2_7B,
        "llama-3-8b": _LLAMA_3_8B,
        "llama-3-70b": _LLAMA_3_70B,
        "llama-3.1-8b": replace(_LLAMA_3_8B, max_seq_len=131_072, rope_scaling=_LLAMA_3_1_ROPE),
        "llama-3.1-70b": replace(_LLAMA_3_70B, max_seq_len=131_072, rope_scaling=_LLAMA_3_1_ROPE),
        "llama-3.2-1b": _LLAMA_3_2_1B,
        "llama-3.2-3b": replace(
            _LLAMA_3_2_1B,
            dim=3072,
            n_layers=28,
            n_heads=24,
            head_dim=128,
            ffn_dim=compute_ffn_dim(3072, multiple_of=256, ffn_dim_multiplier=1.0),
        ),
        "mistral-7b": _MISTRAL_7B_V0_3,
        "mistral-nemo-12b": replace(_MISTRAL_7B_V0_3, dim=5120, n_layers=40, vocab_size=131_072, max_seq_len=131_072),
        "qwen2.5-0.5b": replace(
            _QWEN2_5_7B,
            dim=896,
            n_layers=24,
            n_heads=14,
            n_kv_heads=2,
            head_dim=64,
            ffn_dim=4864,
            vocab_size=151_936,
            max_seq_len=32_768,
            tie_word_embeddings=True,
        ),
        "qwen2.5-7b": _QWEN2_5_7B,
        "qwen3-0.6b": replace(
            _QWEN3_8B,
            dim=1024,
            n_layers=28,
            n_heads=16,
            ffn_dim=3072,
            tie_word_embeddings=True,
        ),
        "qwen3-8b": _QWEN3_8B,
        "smollm2-135m": _SMOLLM2_135M,
        "smollm2-360m": replace(_SMOLLM2_135M, dim=960, n_layers=32, n_heads=15, n_kv_heads=5, ffn_dim=2560),
        "smollm2-1.7b": replace(
            _SMOLLM2_135M,
            dim=2048,
            n_layers=24,
            n_heads=32,
            n_kv_heads=32,
            ffn_dim=8192,
            rope_theta=130_000.0,
        ),
    }
)
