"""Hugging Face directories: every published form opens to the same model, every damaged one is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptfast.checkpoint import open_checkpoint
from gptfast.errors import CheckpointError
from gptfast.loading import load_model
from tests.reference.checkpoints import INDEX_NAME, edit_json, hf_name, save_hf_tensors, write_hf, write_json
from tests.reference.families import FAMILIES, random_tokens, random_weights
from tests.reference.product import assert_holds, assert_refused, load_and_run

FamilyDirectory = Callable[[str], Path]

CONFIG = FAMILIES["llama-8-2"]
WEIGHTS = random_weights(CONFIG)
TOKENS = random_tokens(CONFIG, 80)
LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "model", WEIGHTS, CONFIG)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "sharded", WEIGHTS, CONFIG, shards=3)


def edit_weights(file: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


# What opens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"spelling": "type"},
        {"rope_location": "rope_parameters"},
        {"rope_location": "rope_parameters", "spelling": "type"},
    ],
    ids=["4.x", "4.x early", "5.x", "5.x early"],
)
def test_every_family_opens_to_its_config_and_weights(family: str, form: Any, tmp_path: Path) -> None:
    weights = random_weights(FAMILIES[family])
    path = write_hf(tmp_path / "model", weights, FAMILIES[family], **form)
    assert open_checkpoint(path).config == FAMILIES[family]
    assert_holds(path, weights)


@pytest.mark.parametrize(
    "form",
    [{"shards": 1}, {"shards": 1, "index": True}, {"shards": 3}, {"shards": 3, "index": False}],
    ids=["single file", "single file with index", "shards", "shards without index"],
)
def test_every_way_to_split_the_file_opens(form: Any, tmp_path: Path) -> None:
    assert_holds(write_hf(tmp_path / "model", WEIGHTS, CONFIG, **form), WEIGHTS)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_every_stored_dtype_opens(dtype: torch.dtype, computed: torch.dtype, tmp_path: Path) -> None:
    path = write_hf(tmp_path / "model", WEIGHTS, CONFIG, dtype=dtype)
    assert_holds(path, {name: tensor.to(dtype) for name, tensor in WEIGHTS.items()})
    model = load_model(open_checkpoint(path), device="cpu", dtype=computed)
    expected = WEIGHTS["tok_embeddings.weight"].to(dtype).to(computed)
    assert torch.equal(model.tok_embeddings.weight, expected)
    assert {parameter.dtype for parameter in model.parameters()} == {computed}


@pytest.mark.parametrize("name", ["Mixtral-8x7B-Instruct", "llama-70b-int4", "x", "gpt2 (copy)", "模型"])
def test_the_name_of_the_directory_means_nothing(name: str, directory: Path) -> None:
    renamed = directory.rename(directory.parent / name)
    assert open_checkpoint(renamed).config == CONFIG
    assert_holds(renamed, WEIGHTS)


def test_tied_model_with_a_copy_of_the_head_opens(tmp_path: Path) -> None:
    config = FAMILIES["llama-tied"]
    weights = random_weights(config)
    path = write_hf(tmp_path / "plain", weights, config)
    copied = write_hf(
        tmp_path / "copied", weights | {"output.weight": weights["tok_embeddings.weight"].clone()}, config
    )
    tokens = random_tokens(config, 80)
    assert torch.equal(load_and_run(copied, tokens), load_and_run(path, tokens))


def test_tied_model_with_its_embedding_only_under_the_heads_name_opens(tmp_path: Path) -> None:
    config = FAMILIES["llama-tied"]
    weights = random_weights(config)
    path = write_hf(tmp_path / "plain", weights, config)
    renamed = {name.replace("tok_embeddings", "output"): tensor for name, tensor in weights.items()}
    under_head = write_hf(tmp_path / "under-head", renamed, config)
    tokens = random_tokens(config, 80)
    assert torch.equal(load_and_run(under_head, tokens), load_and_run(path, tokens))


def test_stored_rotary_frequencies_of_old_exports_are_passed_over(directory: Path) -> None:
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}
    edit_weights(directory / "model.safetensors", lambda tensors: tensors.update(frequencies))
    assert_holds(directory, WEIGHTS)
    load_and_run(directory, TOKENS)


def test_the_order_of_the_tensors_in_the_file_means_nothing(tmp_path: Path, directory: Path) -> None:
    backwards = write_hf(tmp_path / "backwards", dict(reversed(WEIGHTS.items())), CONFIG, shards=5)
    assert torch.equal(load_and_run(backwards, TOKENS), load_and_run(directory, TOKENS))


# Tensors that don't fit


@pytest.mark.parametrize(
    "name",
    [
        "tok_embeddings.weight",
        "layers.2.attention.wk.weight",
        "layers.0.feed_forward.w2.weight",
        "layers.1.ffn_norm.weight",
        "norm.weight",
        "output.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str, directory: Path) -> None:
    edit_weights(directory / "model.safetensors", lambda tensors: tensors.pop(hf_name(name)))
    assert_refused(directory, name)


@pytest.mark.parametrize("name", ["layers.1.attention.wq.bias", "layers.0.attention.k_norm.weight"])
def test_a_missing_bias_or_head_norm_is_named(name: str, tmp_path: Path) -> None:
    config = FAMILIES["qwen2" if name.endswith("bias") else "qwen3"]
    weights = {key: tensor for key, tensor in random_weights(config).items() if key != name}
    assert_refused(write_hf(tmp_path / "model", weights, config), name)


@pytest.mark.parametrize(
    "stored_name",
    ["model.layers.0.self_attn.W_pack.weight", "model.layers.1.mlp.experts.0.w1.weight", "transformer.wte.weight"],
)
def test_an_unknown_tensor_is_named(stored_name: str, directory: Path) -> None:
    edit_weights(directory / "model.safetensors", lambda tensors: tensors.update({stored_name: torch.ones(4, 4)}))
    assert_refused(directory, stored_name)


@pytest.mark.parametrize("stored_name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight"])
def test_a_tensor_that_the_config_has_no_place_for_is_named(stored_name: str, directory: Path) -> None:
    """A bias that the family doesn't have, a layer after the last: neither may stay unread."""
    edit_weights(directory / "model.safetensors", lambda tensors: tensors.update({stored_name: torch.ones(64)}))
    with pytest.raises(CheckpointError) as caught:
        load_model(open_checkpoint(directory), device="cpu", dtype=torch.float32)
    canonical = {"q_proj.bias": "layers.0.attention.wq.bias", "up_proj.weight": "layers.3.feed_forward.w3.weight"}
    names = {stored_name, canonical[stored_name.split(".", 4)[-1]]}
    assert any(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.1.attention.wk.weight", (64, 64)),
        ("layers.0.feed_forward.w1.weight", (96, 64)),
        ("tok_embeddings.weight", (319, 64)),
        ("norm.weight", (1, 64)),
        ("layers.2.attention.wo.weight", (64 * 64,)),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_named(name: str, shape: tuple[int, ...], directory: Path) -> None:
    edit_weights(directory / "model.safetensors", lambda tensors: tensors.update({hf_name(name): torch.ones(shape)}))
    assert_refused(directory, name, str(list(shape)))


def test_a_matrix_of_the_wrong_shape_is_named_where_it_is_rounded_too(directory: Path) -> None:
    name = "layers.1.attention.wo.weight"
    edit_weights(directory / "model.safetensors", lambda tensors: tensors.update({hf_name(name): torch.ones(64, 32)}))
    with pytest.raises(CheckpointError, match=r"layers\.1\.attention\.wo\.weight .* \[64, 32\]"):
        load_model(open_checkpoint(directory), weights="int8")


def test_config_and_weights_of_different_models_are_told_apart(directory: Path) -> None:
    edit_json(directory / "config.json", intermediate_size=176)
    assert_refused(directory, "feed_forward", "192")


def test_integer_weights_are_refused(directory: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(
        directory / "model.safetensors",
        lambda tensors: tensors.update({name: torch.ones(192, 64, dtype=torch.int8)}),
    )
    assert_refused(directory, "layers.0.feed_forward.w3.weight", "int8")


# Damaged directories


def test_a_shard_that_is_not_on_disk_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert_refused(sharded, "model-00002-of-00003.safetensors")


def test_a_tensor_that_is_only_in_the_index_is_named(sharded: Path) -> None:
    name = "model.layers.9.mlp.up_proj.weight"
    index = json.loads((sharded / INDEX_NAME).read_text())
    index["weight_map"][name] = "model-00001-of-00003.safetensors"
    write_json(sharded / INDEX_NAME, index)
    assert_refused(sharded, name, "model-00001-of-00003.safetensors")


def test_a_tensor_in_another_shard_than_the_index_says_is_named(sharded: Path) -> None:
    name = "model.norm.weight"
    index = json.loads((sharded / INDEX_NAME).read_text())
    owner = index["weight_map"][name]
    other = next(file for file in sorted(index["weight_map"].values()) if file != owner)
    index["weight_map"][name] = other
    write_json(sharded / INDEX_NAME, index)
    assert_refused(sharded, name, other)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "model", WEIGHTS, CONFIG, shards=2, index=False)
    edit_weights(
        path / "model-00001-of-00002.safetensors",
        lambda tensors: tensors.update({hf_name(name): WEIGHTS[name] for name in WEIGHTS}),
    )
    assert_refused(path, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("weight_map", [None, [], {}, {"model.norm.weight": None}])
def test_an_index_that_maps_nothing_is_refused(weight_map: Any, sharded: Path) -> None:
    write_json(sharded / INDEX_NAME, {"metadata": {}, "weight_map": weight_map})
    assert_refused(sharded, INDEX_NAME)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_git_lfs_pointer_is_recognized(file: str, directory: Path) -> None:
    (directory / file).write_text(LFS_POINTER)
    assert_refused(directory, file, "Git LFS", "git lfs pull")


@pytest.mark.parametrize("share", [0, 0.0001, 0.5, 0.999])
def test_a_part_of_a_file_is_refused(share: float, directory: Path) -> None:
    file = directory / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    assert_refused(directory, "model.safetensors", "download")


def test_trailing_bytes_are_refused(directory: Path) -> None:
    with (directory / "model.safetensors").open("ab") as file:
        file.write(bytes(100))
    assert_refused(directory, "model.safetensors")


def test_pickled_weights_are_not_read(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    torch.save(tensors, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    assert_refused(directory, "safetensors", ".bin")


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere")


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    assert_refused(tmp_path, str(tmp_path))


def test_the_writer_splits_and_indexes(tmp_path: Path) -> None:
    """The faults above are made by editing what this writes, so it must write what it says."""
    save_hf_tensors(tmp_path, {"a": torch.ones(2), "b": torch.ones(3)}, shards=2, index=True)
    assert set(load_file(tmp_path / "model-00002-of-00002.safetensors")) == {"b"}
    assert json.loads((tmp_path / INDEX_NAME).read_text())["weight_map"]["a"].startswith("model-00001")
