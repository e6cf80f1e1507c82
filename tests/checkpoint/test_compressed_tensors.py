"""Directories that compressed-tensors wrote open to the integers it rounded to; what cannot be computed is named."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptfast.checkpoint import open_checkpoint
from gptfast.checkpoint.compressed_matrix import unpack_words
from gptfast.errors import CheckpointError, UserError
from gptfast.kernels.ops import Kernels
from gptfast.loading import load_model
from tests.reference.checkpoints import INDEX_NAME, edit_json, write_hf
from tests.reference.compressed_checkpoints import weights_args, write_compressed
from tests.reference.families import FAMILIES, random_tokens, random_weights
from tests.reference.model import reference_logits
from tests.reference.product import assert_holds, assert_refused, load_and_run

CONFIG = FAMILIES["llama-8-2"]
TIED = FAMILIES["llama-tied"]
QUERY = "layers.1.attention.wq.weight"
PREFIX = "model.layers.1.self_attn.q_proj"
HEAD = "output.weight"


def linear(args: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": args} | changes}


LAYERS_AND_HEAD = {
    "group_0": {"targets": ["re:.*layers.*"], "weights": weights_args(4, 32)},
    "group_1": {"targets": ["re:.*lm_head$"], "weights": weights_args(8)},
}
PRECEDENCE = {
    "group_0": {"targets": ["Linear"], "weights": weights_args(4, 64)},
    "group_1": {"targets": ["re:.*q_proj"], "weights": weights_args(8)},
    "group_2": {"targets": [PREFIX, "lm_head"], "weights": weights_args(8, 32)},
}
MIXED_FORMATS = {
    "group_0": {"targets": ["re:.*mlp.*"], "weights": weights_args(8), "format": "int-quantized"},
    "group_1": {"targets": ["re:.*self_attn.*"], "weights": weights_args(4, 32)},
}
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
FP8, FP8_TENSOR = weights_args(8, type="float"), weights_args(8, type="float", strategy="tensor")
# A head of 65 rows ends within a word of zero points, inputs of 90 within a word of codes.
ODD_ROWS = replace(CONFIG, vocab_size=65)
ODD_COLUMNS = replace(CONFIG, ffn_dim=90)

# The config, the groups, how `write_compressed` is called, and how two of the matrices are described.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str, str]] = {
    "int4 groups": (CONFIG, linear(weights_args(4, 32)), {"ignore": ["lm_head"]}, "int4 g32", "F32"),
    "int4 asymmetric": (
        CONFIG,
        linear(weights_args(4, 32, symmetric=False)),
        {"ignore": ["re:.*head"]},
        "int4 g32 asymmetric",
        "F32",
    ),
    "int4 channel": (ODD_COLUMNS, linear(weights_args(4)), {}, "int4 channel", "int4 channel"),
    "int8 channel": (ODD_COLUMNS, linear(weights_args(8)), {}, "int8 channel", "int8 channel"),
    "int8 channel asymmetric": (
        ODD_COLUMNS,
        linear(weights_args(8, symmetric=False)),
        {},
        "int8 channel asymmetric",
        "int8 channel asymmetric",
    ),
    "int8 groups": (CONFIG, linear(weights_args(8, 32)), {}, "int8 g32", "int8 g32"),
    "odd rows": (
        ODD_ROWS,
        linear(weights_args(4, 32, symmetric=False)),
        {},
        "int4 g32 asymmetric",
        "int4 g32 asymmetric",
    ),
    "one scale": (CONFIG, linear(weights_args(8, strategy="tensor")), {}, "int8 channel", "int8 channel"),
    "one scale asymmetric": (
        CONFIG,
        linear(weights_args(4, symmetric=False, strategy="tensor")),
        {},
        "int4 channel asymmetric",
        "int4 channel asymmetric",
    ),
    "two groups": (CONFIG, LAYERS_AND_HEAD, {}, "int4 g32", "int8 channel"),
    "exact names before patterns before classes": (CONFIG, PRECEDENCE, {}, "int8 g32", "int8 g32"),
    "two formats": (CONFIG, MIXED_FORMATS, {}, "int4 g32", "F32"),
    "int8 as it is": (
        CONFIG,
        linear(weights_args(8, 32, symmetric=False), format="int-quantized"),
        {},
        "int8 g32 asymmetric",
        "int8 g32 asymmetric",
    ),
    "bfloat16": (
        CONFIG,
        linear(weights_args(4, 32, symmetric=False)),
        {"ignore": ["lm_head"], "dtype": torch.bfloat16},
        "int4 g32 asymmetric",
        "BF16",
    ),
    "fp8 channel": (ODD_COLUMNS, linear(FP8, format="float-quantized"), {}, "fp8 channel", "fp8 channel"),
    "fp8 in the librarys own choice of format": (CONFIG, linear(FP8), {"ignore": ["lm_head"]}, "fp8 channel", "F32"),
    "fp8 dynamic": (
        CONFIG,
        linear(FP8, input_activations=DYNAMIC),
        {"ignore": ["lm_head"], "dtype": torch.bfloat16},
        "fp8 channel",
        "BF16",
    ),
    "fp8 static, one scale": (CONFIG, linear(FP8_TENSOR, input_activations=STATIC), {}, "fp8 channel", "fp8 channel"),
    "int4 with fp8 activations": (
        CONFIG,
        linear(weights_args(4, 32), input_activations=DYNAMIC, format="pack-quantized"),
        {},
        "int4 g32",
        "int4 g32",
    ),
    "shards": (CONFIG, LAYERS_AND_HEAD, {"max_shard_size": "30KB"}, "int4 g32", "int8 channel"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of int4 with zeros, the head as it was."""
    path = tmp_path_factory.mktemp("compressed") / "model"
    groups = linear(weights_args(4, 32, symmetric=False))
    write_compressed(path, random_weights(CONFIG), CONFIG, groups, ignore=["lm_head"])
    return path


@pytest.fixture
def directory(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source, tmp_path / "model")


def edit_quantization(directory: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    settings = json.loads((directory / "config.json").read_text())["quantization_config"]
    edit(settings)
    edit_json(directory / "config.json", quantization_config=settings)


def edit_weights(directory: Path, **changes: Tensor | None) -> None:
    """Set or remove tensors of the module `PREFIX`."""
    tensors = load_file(directory / "model.safetensors")
    for part, tensor in changes.items():
        tensors.pop(f"{PREFIX}.{part}", None)
        if tensor is not None:
            tensors[f"{PREFIX}.{part}"] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def get_weight(directory: Path, part: str) -> Tensor:
    return load_file(directory / "model.safetensors")[f"{PREFIX}.{part}"]


# What opens


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("case", CASES)
def test_what_the_library_writes_opens_to_the_same_values(case: str, tmp_path: Path) -> None:
    config, groups, options, layer_type, head_type = CASES[case]
    held = write_compressed(tmp_path / "model", random_weights(config), config, groups, **options)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.config == config
    assert checkpoint.names() == held.keys()
    assert checkpoint.describe_type(QUERY) == layer_type
    assert checkpoint.describe_type(HEAD) == head_type
    for name, expected in held.items():
        assert torch.equal(checkpoint.read(name).float(), expected), name
        quantized = checkpoint.read_quantized(name)
        assert (quantized is None) == (checkpoint.describe_type(name) in ("F32", "BF16")), name
        if quantized is not None:
            assert torch.equal(quantized.dequantize(), expected), name
            low, high = (0, 15) if quantized.zeros is not None else (-8, 7)
            assert quantized.bits == 8 or (quantized.codes.min() >= low and quantized.codes.max() <= high)
            assert quantized.is_float == checkpoint.describe_type(name).startswith("fp8")
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(checkpoint, dtype=dtype)
        assert torch.equal(model.layers[1].attention.wo.weight, held["layers.1.attention.wo.weight"].to(dtype))


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (CONFIG, linear(weights_args(4, 32, symmetric=False))),
        (CONFIG, LAYERS_AND_HEAD),
        (TIED, linear(weights_args(8))),
    ],
    ids=["asymmetric", "quantized head", "tied"],
)
def test_logits_equal_the_float64_reference(config: Any, groups: Any, tmp_path: Path) -> None:
    ignore = ["lm_head"] if config is TIED else []
    held = write_compressed(tmp_path / "model", random_weights(config), config, groups, ignore=ignore)
    tokens = random_tokens(config, 100)
    expected = reference_logits(held, config, tokens)
    assert (load_and_run(tmp_path / "model", tokens).double() - expected).abs().max() < 1e-4


def test_a_quantized_embedding_opens(tmp_path: Path) -> None:
    groups = {"group_0": {"targets": ["Embedding", "Linear"], "weights": weights_args(8)}}
    held = write_compressed(tmp_path / "model", random_weights(CONFIG), CONFIG, groups)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.describe_type("tok_embeddings.weight") == "int8 channel"
    assert torch.equal(checkpoint.read("tok_embeddings.weight"), held["tok_embeddings.weight"])


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_scales_of_half_precision_are_widened(scale_dtype: torch.dtype, directory: Path) -> None:
    scales = get_weight(directory, "weight_scale").to(scale_dtype)
    edit_weights(directory, weight_scale=scales)
    quantized = open_checkpoint(directory).read_quantized(QUERY)
    assert quantized is not None
    assert torch.equal(quantized.scales, scales.float())


def test_a_config_of_earlier_releases_opens(source: Path, directory: Path) -> None:
    old = {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": "weight",
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "group",
                    "symmetric": False,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "global_compression_ratio": 1.89,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense", "global_sparsity": 0.12, "sparsity_structure": "unstructured"},
    }
    edit_json(directory / "config.json", remove=["quantization_config"], compression_config=old)
    tokens = random_tokens(CONFIG, 20)
    assert torch.equal(load_and_run(directory, tokens), load_and_run(source, tokens))


@pytest.mark.parametrize("missing", ["strategy", "type", "dynamic"])
def test_what_a_group_leaves_out_has_the_librarys_default(missing: str, source: Path, directory: Path) -> None:
    edit_quantization(directory, lambda settings: settings["config_groups"]["group_0"]["weights"].pop(missing))
    assert torch.equal(open_checkpoint(directory).read(QUERY), open_checkpoint(source).read(QUERY))


def test_a_config_without_groups_is_that_of_dense_layers(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    write_hf(tmp_path, weights, CONFIG, overrides={"quantization_config": settings})
    assert_holds(tmp_path, weights)


@pytest.mark.parametrize("actorder", [None, "group"])
def test_groups_of_consecutive_columns_are_in_order(actorder: str | None, source: Path, directory: Path) -> None:
    expected = open_checkpoint(source).read(QUERY)
    for order in (torch.arange(64) // 32, torch.full((64,), -1)):
        tensors = load_file(directory / "model.safetensors")
        modules = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
        tensors |= {f"{module}.weight_g_idx": order.int() for module in modules}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        edit_quantization(
            directory, lambda settings: settings["config_groups"]["group_0"]["weights"].update(actorder=actorder)
        )
        assert torch.equal(open_checkpoint(directory).read(QUERY), expected)


@given(
    bits=st.sampled_from([4, 8]),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    seed=st.integers(0, 2**31),
)
def test_words_unpack_to_what_the_library_packed(bits: int, shape: tuple[int, int], seed: int) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    unpacked = unpack_words(pack_to_int32(codes, bits), bits, shape[1])
    assert torch.equal(unpacked, codes + 8 if bits == 4 else codes)


# What is refused


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", None])
def test_other_methods_are_refused_by_name(method: str | None, directory: Path) -> None:
    edit_quantization(directory, lambda settings: settings.update(quant_method=method))
    assert_refused(directory, "quantization_config", repr(method), "compressed-tensors")


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("quantization_status", "frozen", "frozen"),
        ("kv_cache_scheme", {"num_bits": 8, "type": "float"}, "kv_cache_scheme"),
        ("moe_sparsity_config", {"method": "prune"}, "moe_sparsity_config"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparse-24-bitmask"),
        ("transform_config", {"config_groups": {"R1": {"type": "hadamard"}}}, "transform_config"),
        ("config_groups", None, "lacks config_groups"),
        ("config_groups", [], "config_groups"),
        ("config_groups", {"W4A16": ["Linear"]}, "W4A16"),
        ("config_groups", {"group_0": {"targets": ["Linear"], "weights": None}}, "lacks weights"),
        ("ignore", "lm_head", "ignore"),
        ("ignore", ["re:(lm_head"], "re:(lm_head"),
    ],
)
def test_settings_that_are_not_computed_are_refused_by_name(key: str, value: Any, word: str, directory: Path) -> None:
    edit_quantization(directory, lambda settings: settings.update({key: value}))
    assert_refused(directory, word, "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("input_activations", {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}),
        ("output_activations", {"num_bits": 8, "type": "int"}),
        ("format", "nvfp4-pack-quantized"),
        ("format", "marlin-24"),
        ("targets", "Linear"),
        ("targets", [1]),
    ],
)
def test_groups_that_are_not_computed_are_refused_by_name(key: str, value: Any, directory: Path) -> None:
    edit_quantization(directory, lambda settings: settings["config_groups"]["group_0"].update({key: value}))
    assert_refused(directory, key, "group_0", str(value)[:15])


@pytest.mark.parametrize(
    ("activations", "lines"),
    [(None, 0), (DYNAMIC, 1), (STATIC, 1)],
    ids=["none", "dynamic", "static"],
)
def test_activations_that_were_to_be_fp8_are_left_alone_with_one_line(
    activations: dict[str, Any] | None, lines: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groups = linear(FP8, input_activations=activations, format="float-quantized")
    held = write_compressed(tmp_path / "model", random_weights(CONFIG), CONFIG, groups)
    tokens = random_tokens(CONFIG, 40)
    caplog.clear()
    logits = load_and_run(tmp_path / "model", tokens)
    assert (logits.double() - reference_logits(held, CONFIG, tokens)).abs().max() < 1e-4
    said = [record.getMessage() for record in caplog.records if "activations" in record.getMessage()]
    assert len(said) == lines
    assert all(str(tmp_path / "model") in line and "fp8" in line for line in said)


@pytest.fixture(scope="module")
def fp8_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8") / "model"
    write_compressed(path, random_weights(CONFIG), CONFIG, linear(FP8, format="float-quantized"))
    return path


@pytest.fixture
def fp8_directory(fp8_source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(fp8_source, tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("type", "int"),
        ("num_bits", 4),
        ("strategy", "group"),
        ("strategy", "block"),
        ("symmetric", False),
    ],
)
def test_floats_that_are_not_computed_are_refused_by_name(key: str, value: Any, fp8_directory: Path) -> None:
    edit_quantization(
        fp8_directory,
        lambda settings: settings["config_groups"]["group_0"]["weights"].update({"group_size": 32, key: value}),
    )
    assert_refused(fp8_directory, key, "group_0")


@pytest.mark.parametrize("changes", [{"type": "int"}, {"num_bits": 4}])
def test_other_activations_of_floats_are_refused_by_name(changes: dict[str, Any], fp8_directory: Path) -> None:
    edit_quantization(
        fp8_directory,
        lambda settings: settings["config_groups"]["group_0"].update(input_activations=DYNAMIC | changes),
    )
    assert_refused(fp8_directory, "input_activations", "group_0")


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("weight_scale", None, ["lacks tensor"]),
        ("weight_scale", torch.ones(64), ["[64]", "[64, 1]"]),
        ("weight_scale", torch.full((64, 1), torch.inf), ["not finite"]),
        ("weight", torch.ones(64, 64, dtype=torch.int8), ["int8", "float8_e4m3fn"]),
        ("weight", torch.ones(64, 64).to(torch.float8_e5m2), ["float8_e5m2", "float8_e4m3fn"]),
        ("weight_zero_point", torch.zeros(64, 1), ["does not account for"]),
        ("input_scale", torch.ones(1), ["does not account for"]),
    ],
)
def test_a_part_of_floats_that_contradicts_the_config_is_named(
    part: str, value: Tensor | None, words: list[str], fp8_directory: Path
) -> None:
    edit_weights(fp8_directory, **{part: value})
    assert_refused(fp8_directory, f"{PREFIX}.{part}", *words)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("kernels", ["cpp", "triton", None])
def test_a_float_that_is_no_number_is_refused(byte: int, kernels: Kernels | None, fp8_directory: Path) -> None:
    codes = get_weight(fp8_directory, "weight").view(torch.uint8)
    codes[-1, -1] = byte
    edit_weights(fp8_directory, weight=codes.view(torch.float8_e4m3fn))
    with pytest.raises(CheckpointError, match=f"{QUERY} .*NaN"):
        load_model(open_checkpoint(fp8_directory), kernels=kernels)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("type", "float"),
        ("num_bits", 3),
        ("num_bits", "4"),
        ("strategy", "block"),
        ("strategy", "tensor_group"),
        ("group_size", -1),
        ("group_size", None),
        ("symmetric", "yes"),
    ],
)
def test_weights_that_are_not_computed_are_refused_by_name(key: str, value: Any, directory: Path) -> None:
    edit_quantization(directory, lambda settings: settings["config_groups"]["group_0"]["weights"].update({key: value}))
    assert_refused(directory, key, "group_0")


@pytest.mark.parametrize("value", [None, "x", [1], ["x"], ["re:a{99999999999999999999}"], {"a": 1}, -1, 0, 2**40, True])
def test_a_setting_of_the_wrong_kind_is_refused_or_ignored(value: Any, source: Path, directory: Path) -> None:
    settings = json.loads((source / "config.json").read_text())["quantization_config"]
    group = settings["config_groups"]["group_0"]
    for level in (settings, settings["config_groups"], group, group["weights"]):
        for key in list(level):
            kept, level[key] = level[key], value
            edit_json(directory / "config.json", quantization_config=settings)
            level[key] = kept
            with contextlib.suppress(UserError):
                load_model(open_checkpoint(directory))


# Tensors that don't fit


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"])
def test_a_missing_part_is_named(part: str, directory: Path) -> None:
    edit_weights(directory, **{part: None})
    assert_refused(directory, f"lacks tensor {PREFIX}.{part}")


@pytest.mark.parametrize("part", ["weight", "k_scale", "input_scale", "weight_global_scale"])
def test_an_unread_part_is_named(part: str, directory: Path) -> None:
    edit_weights(directory, **{part: torch.ones(64, 64)})
    assert_refused(directory, f"{PREFIX}.{part}")


def test_zeros_of_a_symmetric_scheme_are_named(directory: Path) -> None:
    edit_quantization(
        directory, lambda settings: settings["config_groups"]["group_0"]["weights"].update(symmetric=True)
    )
    assert_refused(directory, "weight_zero_point", "quantization_config")


def test_a_quantized_module_that_no_group_targets_is_named(directory: Path) -> None:
    edit_quantization(directory, lambda settings: settings["ignore"].append(PREFIX))
    assert_refused(directory, PREFIX, "does not account for")


def test_quantized_modules_of_a_config_without_groups_are_named(directory: Path) -> None:
    edit_quantization(directory, lambda settings: settings["config_groups"].clear())
    assert_refused(directory, "weight_packed", "does not account for")


def test_a_dense_module_that_a_group_targets_is_named(directory: Path) -> None:
    edit_quantization(directory, lambda settings: settings["ignore"].clear())
    assert_refused(directory, "lm_head.weight", "does not account for")


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("weight_packed", torch.zeros(64, 9, dtype=torch.int32), ["[64, 9]", "[64, 8]"]),
        ("weight_packed", torch.zeros(64, 8, dtype=torch.int64), ["int64"]),
        ("weight_shape", torch.tensor([64, 96]), ["weight_packed", "[64, 12]"]),
        ("weight_shape", torch.tensor([64, 63]), ["63", "group_size 32"]),
        ("weight_shape", torch.tensor([-64, -64]), ["[-64, -64]"]),
        ("weight_shape", torch.tensor([64, 64, 1]), ["[3]"]),
        ("weight_shape", torch.tensor([64.0, 64.0]), ["float32"]),
        ("weight_scale", torch.ones(64, 1), ["[64, 1]", "[64, 2]"]),
        ("weight_scale", torch.ones(64, 2, dtype=torch.int32), ["int32"]),
        ("weight_scale", torch.full((64, 2), torch.nan), ["not finite"]),
        ("weight_scale", torch.full((64, 2), torch.inf), ["not finite"]),
        ("weight_zero_point", torch.zeros(64, 2, dtype=torch.int8), ["[64, 2]", "[8, 2]"]),
        ("weight_zero_point", torch.zeros(8, 2, dtype=torch.int8), ["int8"]),
        ("weight_g_idx", torch.arange(64, dtype=torch.int32) % 2, ["actorder"]),
        ("weight_g_idx", torch.arange(64, dtype=torch.int32) % 2 - 1, ["actorder"]),
        ("weight_g_idx", torch.zeros(32, dtype=torch.int32), ["[32]"]),
    ],
)
def test_a_part_that_contradicts_the_others_is_named(
    part: str, value: Tensor, words: list[str], directory: Path
) -> None:
    edit_weights(directory, **{part: value})
    checkpoint = open_checkpoint(directory)
    for read in (checkpoint.read, checkpoint.read_quantized):
        with pytest.raises(CheckpointError) as caught:
            read(QUERY)
        for word in [PREFIX, *words]:
            assert word in str(caught.value)
    assert_refused(directory, PREFIX, *words)


def test_a_matrix_of_another_shape_than_the_config_asks_for_is_named(directory: Path) -> None:
    parts = {name: get_weight(directory, name) for name in ("weight_packed", "weight_scale", "weight_zero_point")}
    edit_weights(
        directory,
        weight_packed=parts["weight_packed"][:32],
        weight_scale=parts["weight_scale"][:32],
        weight_zero_point=parts["weight_zero_point"][:4],
        weight_shape=torch.tensor([32, 64]),
    )
    assert_refused(directory, QUERY, "[32, 64]", "[64, 64]")
    with pytest.raises(CheckpointError, match=r"\[32, 64\]"):
        open_checkpoint(directory).read_quantized(QUERY)


@pytest.mark.parametrize("weight", [torch.ones(64, 64), torch.ones(64, dtype=torch.int8)])
def test_int8_codes_of_another_form_are_named(weight: Tensor, tmp_path: Path) -> None:
    groups = linear(weights_args(8), format="int-quantized")
    write_compressed(tmp_path / "model", random_weights(CONFIG), CONFIG, groups)
    edit_weights(tmp_path / "model", weight=weight)
    assert_refused(tmp_path / "model", f"{PREFIX}.weight")


def test_a_zero_beyond_int4_is_named(tmp_path: Path) -> None:
    groups = linear(weights_args(4, symmetric=False, strategy="tensor"))
    write_compressed(tmp_path / "model", random_weights(CONFIG), CONFIG, groups)
    edit_weights(tmp_path / "model", weight_zero_point=torch.tensor([9], dtype=torch.int8))
    assert_refused(tmp_path / "model", f"{PREFIX}.weight_zero_point", "9")


def test_a_part_that_only_the_index_has_is_named(tmp_path: Path) -> None:
    write_compressed(tmp_path / "model", random_weights(CONFIG), CONFIG, LAYERS_AND_HEAD, max_shard_size="30KB")
    index = json.loads((tmp_path / "model" / INDEX_NAME).read_text())
    owner = tmp_path / "model" / index["weight_map"][f"{PREFIX}.weight_scale"]
    tensors = load_file(owner)
    del tensors[f"{PREFIX}.weight_scale"]
    save_file(tensors, owner, metadata={"format": "pt"})
    assert_refused(tmp_path / "model", f"{PREFIX}.weight_scale", owner.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_head_of_a_tied_model_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    write_compressed(tmp_path / "model", random_weights(CONFIG), CONFIG, linear(weights_args(8)), dtype=dtype)
    edit_json(tmp_path / "model" / "config.json", tie_word_embeddings=True)
    assert_refused(tmp_path / "model", HEAD, "tie_word_embeddings")
