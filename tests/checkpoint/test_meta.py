"""Meta's directories: shards joined along the right axis, rotary rows undone, pickles that only hold weights."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptfast.checkpoint import open_checkpoint
from gptfast.config import ModelConfig
from gptfast.errors import CheckpointError
from gptfast.loading import load_model
from tests.reference.checkpoints import META_SCALED_ROPE, edit_json, interleave_rotary, write_meta
from tests.reference.families import FAMILIES, random_tokens, random_weights
from tests.reference.model import reference_logits, rope_frequencies
from tests.reference.product import assert_holds, assert_refused, load_and_run

WIDE_CONFIG, CONFIG = FAMILIES["llama-32-4"], FAMILIES["llama-8-2"]
WEIGHTS = random_weights(CONFIG)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_meta(tmp_path / "model", WEIGHTS, CONFIG)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_meta(tmp_path / "sharded", WEIGHTS, CONFIG, shards=2)


def edit_shard(file: Path, edit: dict[str, Tensor | None]) -> None:
    tensors = torch.load(file, weights_only=True) | edit
    torch.save({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


# What opens


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("release", ["llama2", "llama3"])
@pytest.mark.parametrize("config", [WIDE_CONFIG, CONFIG], ids=["32/4 heads", "8/2 heads"])
def test_every_number_of_shards_opens(shards: int, release: Any, config: ModelConfig, tmp_path: Path) -> None:
    weights = random_weights(config)
    assert_holds(write_meta(tmp_path / "model", weights, config, shards=shards, release=release), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_stored_dtype_opens(dtype: torch.dtype, tmp_path: Path) -> None:
    path = write_meta(tmp_path / "model", WEIGHTS, CONFIG, dtype=dtype, shards=2)
    assert_holds(path, {name: tensor.to(dtype) for name, tensor in WEIGHTS.items()})


@pytest.mark.parametrize("shards", [1, 2])
def test_logits_equal_the_float64_reference(shards: int, tmp_path: Path) -> None:
    tokens = random_tokens(WIDE_CONFIG, 120)
    weights = random_weights(WIDE_CONFIG)
    logits = load_and_run(write_meta(tmp_path / "model", weights, WIDE_CONFIG, shards=shards), tokens)
    assert (logits.double() - reference_logits(weights, WIDE_CONFIG, tokens)).abs().max() < 1e-4


def test_params_of_llama_3_are_read(directory: Path) -> None:
    config = open_checkpoint(directory).config
    assert replace(config, max_seq_len=CONFIG.max_seq_len) == CONFIG


def test_params_of_llama_2_leave_vocabulary_and_rope_base_to_be_found(tmp_path: Path) -> None:
    path = write_meta(tmp_path / "model", random_weights(WIDE_CONFIG), WIDE_CONFIG, release="llama2", shards=2)
    config = open_checkpoint(path).config
    assert replace(config, max_seq_len=WIDE_CONFIG.max_seq_len) == WIDE_CONFIG


def test_params_without_kv_heads_mean_one_for_each_query_head(tmp_path: Path) -> None:
    config = replace(CONFIG, n_kv_heads=CONFIG.n_heads)
    path = write_meta(tmp_path / "model", random_weights(config), config, shards=2)
    edit_json(path / "params.json", remove=["n_kv_heads"])
    assert_holds(path, random_weights(config))


def test_scaled_rope_of_llama_3_1_is_read(tmp_path: Path) -> None:
    config = replace(CONFIG, rope_scaling=META_SCALED_ROPE)
    path = write_meta(tmp_path / "model", WEIGHTS, config)
    assert open_checkpoint(path).config.rope_scaling == META_SCALED_ROPE


def test_stored_rotary_frequencies_are_passed_over(tmp_path: Path) -> None:
    path = write_meta(tmp_path / "model", WEIGHTS, CONFIG, shards=2, extra={"rope.freqs": torch.ones(4)})
    assert_holds(path, WEIGHTS)
    load_and_run(path, random_tokens(CONFIG, 8))


def test_the_name_of_the_directory_means_nothing(directory: Path) -> None:
    assert_holds(directory.rename(directory.parent / "Mixtral-8x7B"), WEIGHTS)


def test_the_writers_rotary_order_is_that_of_metas_complex_rotation() -> None:
    """Pairs (2i, 2i+1) as complex numbers, as Meta's code turns them, give the scores of half-split rows."""
    config = FAMILIES["llama3-rope"]
    weights = random_weights(config)
    x = torch.randn(20, config.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turns = torch.polar(
        torch.ones(20, config.head_dim // 2, dtype=torch.float64),
        torch.arange(20, dtype=torch.float64)[:, None] * rope_frequencies(config),
    )

    def half_split(rows: Tensor) -> Tensor:
        first, second = (x @ rows.double().T)[:, : config.head_dim].chunk(2, dim=-1)
        return torch.complex(first, second) * turns

    def interleaved(rows: Tensor) -> Tensor:
        pairs = (x @ rows.double().T)[:, : config.head_dim].unflatten(-1, (-1, 2))
        return torch.view_as_complex(pairs.contiguous()) * turns

    meta = interleave_rotary(weights, config)
    q, k = "layers.0.attention.wq.weight", "layers.0.attention.wk.weight"
    expected = (half_split(weights[q]) @ half_split(weights[k]).mH).real
    actual = (interleaved(meta[q]) @ interleaved(meta[k]).mH).real
    assert torch.allclose(actual, expected)
    assert not torch.allclose((interleaved(weights[q]) @ interleaved(weights[k]).mH).real, expected)


# What is refused


@pytest.mark.parametrize("number", [0, 1])
def test_a_missing_shard_is_named(number: int, tmp_path: Path) -> None:
    path = write_meta(tmp_path / "model", WEIGHTS, CONFIG, shards=4)
    (path / f"consolidated.0{number}.pth").unlink()
    assert_refused(path, f"consolidated.0{number}.pth")


def test_a_missing_last_shard_is_noticed(tmp_path: Path) -> None:
    path = write_meta(tmp_path / "model", WEIGHTS, CONFIG, shards=4)
    (path / "consolidated.03.pth").unlink()
    assert_refused(path)


def test_params_without_weights_are_refused(directory: Path) -> None:
    (directory / "consolidated.00.pth").unlink()
    assert_refused(directory, "consolidated")


@pytest.mark.parametrize("key", ["dim", "n_layers", "n_heads", "norm_eps"])
def test_params_without_a_needed_key_are_refused(key: str, directory: Path) -> None:
    edit_json(directory / "params.json", remove=[key])
    assert_refused(directory, key, "params.json")


@pytest.mark.parametrize("key", ["dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "norm_eps"])
def test_a_setting_of_the_wrong_kind_is_refused_or_ignored(key: str, directory: Path) -> None:
    for value in (None, "x", [1], {"a": 1}, 0, 1.5):
        edit_json(directory / "params.json", **{key: value})
        with contextlib.suppress(CheckpointError):
            load_model(open_checkpoint(directory), device="cpu", dtype=torch.float32)


def test_mixture_of_experts_is_refused(directory: Path) -> None:
    edit_json(directory / "params.json", moe={"num_experts": 8, "num_experts_per_tok": 2})
    assert_refused(directory, "params.json")


def test_a_missing_tensor_is_named(directory: Path) -> None:
    edit_shard(directory / "consolidated.00.pth", {"layers.1.attention.wk.weight": None})
    assert_refused(directory, "layers.1.attention.wk.weight")


def test_a_tensor_that_one_shard_lacks_is_named(sharded: Path) -> None:
    edit_shard(sharded / "consolidated.01.pth", {"layers.1.attention.wk.weight": None})
    assert_refused(sharded, "layers.1.attention.wk.weight", "consolidated.01.pth")


def test_an_unknown_tensor_is_named(directory: Path) -> None:
    edit_shard(directory / "consolidated.00.pth", {"layers.0.attention.wq.bias": torch.ones(64)})
    assert_refused(directory, "layers.0.attention.wq.bias")


def test_a_tensor_of_the_wrong_shape_is_named(directory: Path) -> None:
    edit_shard(directory / "consolidated.00.pth", {"layers.1.feed_forward.w1.weight": torch.ones(176, 64)})
    assert_refused(directory, "layers.1.feed_forward.w1.weight", "[176, 64]")


def test_shards_of_unequal_shapes_are_refused(sharded: Path) -> None:
    edit_shard(sharded / "consolidated.01.pth", {"layers.1.feed_forward.w1.weight": torch.ones(96, 32)})
    assert_refused(sharded, "layers.1.feed_forward.w1.weight")


@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_a_part_of_a_file_is_refused(share: float, directory: Path) -> None:
    file = directory / "consolidated.00.pth"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    assert_refused(directory, "consolidated.00.pth", "download")


def test_damaged_bytes_are_refused_or_do_no_harm(directory: Path) -> None:
    """Most bytes are weights, the last ones the archive's directory and the pickle: both kinds of hit occur."""
    file = directory / "consolidated.00.pth"
    content = file.read_bytes()
    generator = random.Random(0)
    refused = 0
    for attempt in range(60):
        damaged = bytearray(content)
        position = generator.randrange(len(content)) if attempt % 2 else -1 - generator.randrange(3000)
        damaged[position] ^= generator.randrange(1, 256)
        file.write_bytes(damaged)
        try:
            load_model(open_checkpoint(directory), device="cpu", dtype=torch.float32)
        except CheckpointError:
            refused += 1
    assert 0 < refused < 60


def test_a_git_lfs_pointer_is_recognized(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (directory / "consolidated.00.pth").write_text(pointer)
    assert_refused(directory, "consolidated.00.pth", "Git LFS")


class _MakesDirectory:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("container", ["torch file", "torch file beside tensors", "bare pickle"])
def test_a_pickle_with_code_is_refused_and_not_run(container: str, directory: Path, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    file = directory / "consolidated.00.pth"
    if container == "bare pickle":
        file.write_bytes(pickle.dumps(_MakesDirectory(trap)))
    elif container == "torch file":
        torch.save(_MakesDirectory(trap), file)
    else:
        torch.save(WEIGHTS | {"extra": _MakesDirectory(trap)}, file)
    assert_refused(directory, "consolidated.00.pth")
    assert not trap.exists()


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, torch.ones(3)])
def test_a_file_that_holds_no_table_of_tensors_is_refused(content: Any, directory: Path) -> None:
    torch.save(content, directory / "consolidated.00.pth")
    assert_refused(directory, "consolidated.00.pth")
