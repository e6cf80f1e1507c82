from __future__ import annotations

import dataclasses

import pytest

from gptfast.checkpoint.presets import PRESETS, compute_ffn_dim, get_preset
from gptfast.config import RopeScaling
from gptfast.errors import CheckpointError
from gptfast.inspection import count_parameters

# The totals that the publishers' checkpoints have, tied output layers counted once.
PUBLISHED_TOTALS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


def test_every_preset_has_a_published_total() -> None:
    assert set(PUBLISHED_TOTALS) == set(PRESETS)


@pytest.mark.parametrize("name", PUBLISHED_TOTALS)
def test_total_parameters_are_the_published_ones(name: str) -> None:
    assert count_parameters(get_preset(name)).total == PUBLISHED_TOTALS[name]


@pytest.mark.parametrize(
    ("dim", "multiple_of", "multiplier", "expected"),
    [
        (4096, 256, None, 11_008),  # Llama 2 7B
        (5120, 256, None, 13_824),  # Llama 2 13B
        (8192, 4096, 1.3, 28_672),  # Llama 2 and 3 70B
        (4096, 1024, 1.3, 14_336),  # Llama 3 8B
        (2048, 256, 1.5, 8192),  # Llama 3.2 1B
        (3072, 256, 1.0, 8192),  # Llama 3.2 3B
    ],
)
def test_ffn_dim_of_published_params(dim: int, multiple_of: int, multiplier: float | None, expected: int) -> None:
    assert compute_ffn_dim(dim, multiple_of, multiplier) == expected


def test_llama_3_1_differs_from_3_in_rope_and_context_only() -> None:
    old, new = PRESETS["llama-3-8b"], PRESETS["llama-3.1-8b"]
    assert (old.rope_theta, old.rope_scaling, old.max_seq_len) == (500_000.0, None, 8192)
    assert new.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert dataclasses.replace(new, rope_scaling=None, max_seq_len=8192) == old


def test_llama_3_2_is_tied_and_scaled_by_32() -> None:
    for name in ("llama-3.2-1b", "llama-3.2-3b"):
        config = PRESETS[name]
        assert config.tie_word_embeddings
        assert config.rope_scaling is not None
        assert config.rope_scaling.factor == 32.0


def test_architecture_features_are_the_families_own() -> None:
    nemo = PRESETS["mistral-nemo-12b"]
    assert nemo.head_dim == 128 != nemo.dim // nemo.n_heads
    assert {name for name, config in PRESETS.items() if config.qkv_bias} == {"qwen2.5-0.5b", "qwen2.5-7b"}
    assert {name for name, config in PRESETS.items() if config.qk_norm} == {"qwen3-0.6b", "qwen3-8b"}
    assert {config.architecture for config in PRESETS.values()} == {"llama", "mistral", "qwen2", "qwen3"}
    assert all(config.sliding_window is None for config in PRESETS.values())


def test_unknown_name_lists_the_presets_and_the_nearest() -> None:
    with pytest.raises(CheckpointError, match=r"'llama3-8b' .*did you mean llama-3-8b.*smollm2-135m"):
        get_preset("llama3-8b")


def test_presets_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRESETS["mine"] = PRESETS["llama-3-8b"]  # type: ignore[index]
