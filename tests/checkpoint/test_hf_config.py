"""config.json and generation_config.json: every spelling is understood, nothing asked for is passed over."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfast.checkpoint import open_checkpoint
from gptfast.config import RopeScaling
from gptfast.errors import UserError
from gptfast.loading import load_model
from tests.reference.checkpoints import edit_json, hf_config, write_hf, write_json
from tests.reference.families import FAMILIES, random_weights
from tests.reference.product import assert_refused

CONFIG = FAMILIES["llama-8-2"]
WEIGHTS = random_weights(CONFIG)
WRONG_KINDS: list[Any] = [None, "x", [1], ["x"], {"a": 1}, -1, 0]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "model", WEIGHTS, CONFIG)


# Rotary scaling


@pytest.mark.parametrize("location", ["rope_scaling", "rope_parameters"])
def test_null_means_no_rotary_scaling(location: str, directory: Path) -> None:
    edit_json(directory / "config.json", **{location: None})
    assert open_checkpoint(directory).config == CONFIG


@pytest.mark.parametrize("kind", ["default", None])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_default_means_no_rotary_scaling(kind: str | None, spelling: str, directory: Path) -> None:
    edit_json(directory / "config.json", rope_scaling={spelling: kind})
    assert open_checkpoint(directory).config == CONFIG


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic", "su", "mrope"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("location", ["rope_scaling", "rope_parameters"])
def test_rotary_scaling_that_is_not_computed_is_refused(
    kind: str, spelling: str, location: str, directory: Path
) -> None:
    edit_json(directory / "config.json", **{location: {spelling: kind, "factor": 4.0, "rope_theta": 1e4}})
    assert_refused(directory, kind, "rotary scaling", "supported")


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_rotary_scaling_without_its_factor_is_refused(kind: str, directory: Path) -> None:
    edit_json(directory / "config.json", rope_scaling={"rope_type": kind})
    assert_refused(directory, kind, "factor")


def test_both_spellings_at_once_are_one_setting(directory: Path) -> None:
    edit_json(directory / "config.json", rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2.0})
    scaling = RopeScaling("linear", factor=2.0)
    assert open_checkpoint(directory).config == replace(CONFIG, rope_scaling=scaling)


# What the config may ask for


@pytest.mark.parametrize("model_type", ["mixtral", "gemma", "gemma3_text", "gpt2", "phi3", "qwen3_moe", None])
def test_other_architectures_are_refused_by_name(model_type: str | None, directory: Path) -> None:
    edit_json(directory / "config.json", model_type=model_type)
    renamed = directory.rename(directory.parent / "llama-8b")
    assert_refused(renamed, repr(model_type), "llama", "qwen3")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "awq"}),
    ],
)
def test_settings_that_are_not_computed_are_refused_by_name(setting: str, value: Any, directory: Path) -> None:
    edit_json(directory / "config.json", **{setting: value})
    assert_refused(directory, setting, "awq" if isinstance(value, dict) else repr(value))


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_a_config_without_a_size_is_refused(key: str, directory: Path) -> None:
    edit_json(directory / "config.json", remove=[key])
    assert_refused(directory, key, "config.json")


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 0), ("num_key_value_heads", 3), ("head_dim", 7)])
def test_impossible_sizes_are_refused(key: str, value: int, directory: Path) -> None:
    edit_json(directory / "config.json", **{key: value})
    assert_refused(directory, str(value))


def open_or_refuse(path: Path) -> None:
    """A value may mean a default or be refused, but nothing else may come of it."""
    with contextlib.suppress(UserError):
        load_model(open_checkpoint(path), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("key", [*hf_config(CONFIG), "head_dim", "rope_parameters", "quantization_config"])
def test_a_setting_of_the_wrong_kind_is_refused_or_ignored(key: str, directory: Path) -> None:
    for value in WRONG_KINDS:
        edit_json(directory / "config.json", **{key: value})
        open_or_refuse(directory)


@pytest.mark.parametrize(
    "key",
    ["rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
)
def test_a_rotary_setting_of_the_wrong_kind_is_refused(key: str, tmp_path: Path) -> None:
    config = FAMILIES["llama3-rope"]
    path = write_hf(tmp_path / "model", random_weights(config), config)
    scaling = hf_config(config)["rope_scaling"]
    for value in WRONG_KINDS:
        edit_json(path / "config.json", rope_scaling=scaling | {key: value})
        open_or_refuse(path)


@pytest.mark.parametrize("value", WRONG_KINDS)
def test_a_window_of_the_wrong_kind_is_refused(value: Any, tmp_path: Path) -> None:
    config = FAMILIES["mistral"]
    overrides = {"sliding_window": value}
    open_or_refuse(write_hf(tmp_path / "model", random_weights(config), config, overrides=overrides))


@pytest.mark.parametrize(
    "key",
    ["eos_token_id", "bos_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample"],
)
def test_a_generation_setting_of_the_wrong_kind_is_refused_or_ignored(key: str, directory: Path) -> None:
    for value in WRONG_KINDS:
        write_json(directory / "generation_config.json", {"do_sample": True} | {key: value})
        open_or_refuse(directory)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_eps_is_the_configs(eps: float, directory: Path) -> None:
    edit_json(directory / "config.json", rms_norm_eps=eps)
    assert open_checkpoint(directory).config.norm_eps == eps


def test_a_qwen_window_that_is_switched_on_is_honoured_or_refused(tmp_path: Path) -> None:
    config = FAMILIES["qwen2"]
    switched_on = {"use_sliding_window": True, "sliding_window": 16}
    everywhere = write_hf(
        tmp_path / "all", random_weights(config), config, overrides=switched_on | {"max_window_layers": 0}
    )
    assert open_checkpoint(everywhere).config == replace(config, sliding_window=16)
    mixed = write_hf(
        tmp_path / "mixed", random_weights(config), config, overrides=switched_on | {"max_window_layers": 1}
    )
    assert_refused(mixed, "sliding window")


# Ends of text


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, {2}),
        ([2, 5, 9], None, {2, 5, 9}),
        (None, 7, {7}),
        (2, [2, 5, 9], {2, 5, 9}),
        (None, None, set()),
        (2, 400_000, {2}),
    ],
    ids=["int", "list", "only in generation_config", "longer list there", "absent", "outside the vocabulary"],
)
def test_every_end_of_text_is_known(in_config: Any, in_generation: Any, expected: set[int], tmp_path: Path) -> None:
    generation = None if in_generation is None else {"eos_token_id": in_generation}
    overrides = {"eos_token_id": in_config}
    path = write_hf(tmp_path / "model", WEIGHTS, CONFIG, overrides=overrides, generation=generation)
    assert set(open_checkpoint(path).generation.eos_ids) == expected


def test_absent_ends_of_text_are_no_error(directory: Path) -> None:
    edit_json(directory / "config.json", remove=["eos_token_id", "bos_token_id"])
    generation = open_checkpoint(directory).generation
    assert generation.eos_ids == ()
    assert generation.bos_id is None


def test_bos_is_read(directory: Path) -> None:
    assert open_checkpoint(directory).generation.bos_id == 1


# Files that are damaged


@pytest.mark.parametrize("content", ["<!DOCTYPE html><html></html>", "", '{"model_type": ', "[]", "\x00\xff"])
def test_a_config_that_is_no_json_object_is_refused(content: str, directory: Path) -> None:
    (directory / "config.json").write_text(content, encoding="latin-1")
    assert_refused(directory, "config.json")


def test_a_damaged_generation_config_is_refused(directory: Path) -> None:
    (directory / "generation_config.json").write_text("{")
    assert_refused(directory, "generation_config.json")
