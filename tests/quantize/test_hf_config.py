"""config.json as we write it, read again by our own parser, by transformers and by compressed-tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gptfast.checkpoint import open_checkpoint
from gptfast.checkpoint.hf_config import parse_config
from gptfast.checkpoint.presets import PRESETS
from gptfast.config import RopeScaling
from gptfast.errors import CheckpointError
from gptfast.quantization import FLOAT8, WeightScheme
from quantize.hf_config import make_hf_config, make_quantization_config
from quantize.names import get_hf_module
from quantize.plan import KeepRule, make_plan
from tests.reference.families import FAMILIES
from tests.reference.gguf_files import rope_factor_tensor

FamilyDirectory = Callable[[str], Path]
CONFIGS = FAMILIES | dict(PRESETS)


@pytest.mark.parametrize("name", CONFIGS)
def test_our_parser_reads_back_what_was_written(name: str) -> None:
    assert parse_config(make_hf_config(CONFIGS[name]), "config.json") == CONFIGS[name]


def test_a_window_of_every_layer_survives() -> None:
    config = replace(FAMILIES["qwen2"], sliding_window=48)
    assert parse_config(make_hf_config(config), "config.json") == config


def test_a_llama_with_a_window_is_written_as_the_mistral_that_it_is() -> None:
    config = replace(FAMILIES["llama-8-2"], sliding_window=48)
    assert parse_config(make_hf_config(config), "config.json") == replace(config, architecture="mistral")


def test_a_window_beside_output_biases_is_refused() -> None:
    with pytest.raises(CheckpointError, match="biases"):
        make_hf_config(replace(FAMILIES["llama-bias"], sliding_window=48))


@pytest.mark.parametrize("name", ["llama3-rope", "llama-3.1-8b", "llama-3.2-1b"])
def test_the_factors_of_a_gguf_file_become_the_rule_that_made_them(name: str) -> None:
    config = CONFIGS[name]
    factors = RopeScaling("factors", factors=tuple(rope_factor_tensor(config).tolist()))
    assert parse_config(make_hf_config(replace(config, rope_scaling=factors)), "config.json") == config


@pytest.mark.parametrize(("factor", "expected"), [(1.0, None), (4.0, RopeScaling("linear", factor=4.0))])
def test_equal_factors_are_linear_scaling_or_none(factor: float, expected: RopeScaling | None) -> None:
    config = replace(FAMILIES["llama-8-2"], rope_scaling=RopeScaling("factors", factors=(factor,) * 4))
    assert parse_config(make_hf_config(config), "config.json").rope_scaling == expected


def test_factors_of_no_rule_are_refused() -> None:
    config = replace(FAMILIES["llama-8-2"], rope_scaling=RopeScaling("factors", factors=(1.0, 1.5, 7.0, 8.0)))
    with pytest.raises(CheckpointError, match="no rule"):
        make_hf_config(config)


def is_match(target: str, module: str) -> bool:
    """Whether a target of compressed-tensors is for a module of that name."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


@pytest.mark.parametrize(
    ("scheme", "rules", "targets", "ignore"),
    [
        (WeightScheme(4, 32), [], [["Linear"]], []),
        (WeightScheme(4, 32), [KeepRule("lm_head", "bf16")], [["Linear"]], ["lm_head"]),
        (WeightScheme(4, 32), [KeepRule("lm_head", "int8")], [[r"re:.*layers\..*"], ["lm_head"]], []),
        (FLOAT8, [KeepRule("lm_head", "int8")], [[r"re:.*layers\..*"], ["lm_head"]], []),
        (FLOAT8, [KeepRule("lm_head", "fp8")], [["Linear"]], []),
    ],
)
def test_groups_name_their_layers(
    scheme: WeightScheme,
    rules: list[KeepRule],
    targets: list[list[str]],
    ignore: list[str],
    family_directory: FamilyDirectory,
) -> None:
    plan = make_plan(open_checkpoint(family_directory("llama-8-2")), scheme, rules)
    config = make_quantization_config(plan)
    assert [group["targets"] for group in config["config_groups"].values()] == targets
    assert config["ignore"] == ignore


def test_every_layer_is_matched_by_its_own_group_alone(family_directory: FamilyDirectory) -> None:
    rules = [KeepRule("layers.1.attention.wq", "int8"), KeepRule("lm_head", "int8"), KeepRule("re:.*gate", "bf16")]
    plan = make_plan(open_checkpoint(family_directory("qwen3")), WeightScheme(4, 128), rules)
    config = make_quantization_config(plan)
    assert {tensor.precision for tensor in plan.rounded} == {"int4 g64", "int4 g128", "int4 g32", "int8 channel"}
    assert len(config["config_groups"]) == 4
    for tensor in plan.rounded:
        groups = [
            group["weights"]
            for group in config["config_groups"].values()
            if any(is_match(target, get_hf_module(tensor.name)) for target in group["targets"])
        ]
        assert len(groups) == 1, tensor.name
        assert tensor.scheme is not None
        assert (groups[0]["num_bits"], groups[0]["group_size"]) == (tensor.scheme.bits, tensor.scheme.group_size)
    assert sorted(config["ignore"]) == ["model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj"]


@pytest.mark.parametrize(
    ("head", "formats", "common"),
    [
        ("fp8", ["float-quantized"], "float-quantized"),
        ("bf16", ["float-quantized"], "float-quantized"),
        ("int8", ["float-quantized", "pack-quantized"], "mixed-precision"),
    ],
)
def test_floats_have_the_format_that_other_readers_know(
    head: str, formats: list[str], common: str, family_directory: FamilyDirectory
) -> None:
    plan = make_plan(open_checkpoint(family_directory("llama-8-2")), FLOAT8, [KeepRule("lm_head", head)])
    config = make_quantization_config(plan)
    groups = list(config["config_groups"].values())
    assert ([group["format"] for group in groups], config["format"]) == (formats, common)
    assert groups[0]["input_activations"] is None
    kept = {key: groups[0]["weights"][key] for key in ("num_bits", "type", "strategy", "group_size", "symmetric")}
    assert kept == {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None, "symmetric": True}


def test_the_library_accepts_what_is_written(family_directory: FamilyDirectory) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    rules = [KeepRule("lm_head", "int8")]
    for scheme in (WeightScheme(4, 32), WeightScheme(8, None), WeightScheme(4, None, symmetric=False), FLOAT8):
        plan = make_plan(open_checkpoint(family_directory("llama-8-2")), scheme, rules)
        parsed = library.QuantizationConfig.model_validate(make_quantization_config(plan))
        weights = next(iter(parsed.config_groups.values())).weights
        assert (weights.num_bits, weights.group_size, weights.symmetric) == (
            scheme.bits,
            scheme.group_size,
            scheme.symmetric,
        )
