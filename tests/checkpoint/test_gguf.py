"""GGUF files of every family and block type against gguf's own dequantizer."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from gptfast.cache import CACHE_VARIABLE
from gptfast.checkpoint import open_checkpoint
from gptfast.checkpoint.base import Checkpoint
from gptfast.checkpoint.gguf import GgufCheckpoint
from gptfast.config import ModelConfig, RopeScaling
from gptfast.errors import CheckpointError
from gptfast.loading import load_model
from gptfast.quantization import WeightScheme
from gptfast.rounding import round_to_nearest
from tests.reference.families import FAMILIES, WIDE, random_tokens, random_weights
from tests.reference.gguf_files import (
    EXPANDED_TYPES,
    GGUF_ARCHITECTURES,
    QUANTIZED_TYPES,
    SCALE_OFFSETS,
    gguf_name,
    rope_factor_tensor,
    write_gguf,
)
from tests.reference.model import reference_logits
from tests.reference.product import assert_holds, assert_refused, load_and_run
from tests.reference.sessions import run_process

CONFIG = FAMILIES["llama-8-2"]
WEIGHTS = random_weights(CONFIG)
WIDE_WEIGHTS = random_weights(WIDE)
BLOCK_TYPES = [*QUANTIZED_TYPES, *SCALE_OFFSETS]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "model.gguf", WEIGHTS, CONFIG)
    return tmp_path / "model.gguf"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """One file of each block type, with what gguf makes of it."""
    directory = tmp_path_factory.mktemp("quantized")
    files = {}
    for name in [*EXPANDED_TYPES, *BLOCK_TYPES]:
        path = directory / f"{name}.gguf"
        files[name] = path, write_gguf(path, WIDE_WEIGHTS, WIDE, types=name)
    return files


def stored_config(config: ModelConfig) -> ModelConfig:
    """What a GGUF file can say of a family: float32 eps, factors in place of Llama 3.1's rule."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        scaling = RopeScaling("factors", factors=tuple(rope_factor_tensor(config).tolist()))
    return replace(
        config,
        architecture=GGUF_ARCHITECTURES[config.architecture],
        norm_eps=float(np.float32(config.norm_eps)),
        rope_scaling=scaling,
    )


def open_gguf(path: Path) -> GgufCheckpoint:
    checkpoint: Checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GgufCheckpoint)
    return checkpoint


# What opens


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_opens_to_its_config_and_weights(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    write_gguf(tmp_path / "model.gguf", random_weights(config), config)
    assert open_checkpoint(tmp_path / "model.gguf").config == stored_config(config)
    assert_holds(tmp_path / "model.gguf", random_weights(config))


@pytest.mark.parametrize("family", ["llama-32-4", "llama-bias", "llama3-rope", "mistral", "qwen2", "qwen3"])
def test_logits_equal_the_float64_reference(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    weights = write_gguf(
        tmp_path / "model.gguf", random_weights(config), config, types="Q8_0" if config.head_dim == 32 else "F16"
    )
    tokens = random_tokens(config, 200)
    expected = reference_logits(weights, config, tokens)
    assert (load_and_run(tmp_path / "model.gguf", tokens).double() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", EXPANDED_TYPES)
def test_dense_types_keep_their_dtype(name: str, quantized: Any) -> None:
    path, weights = quantized[name]
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    assert_holds(path, {key: t.to(dtype) if t.dim() == 2 else t for key, t in weights.items()})


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_expand_to_what_gguf_makes_of_them(name: str, quantized: Any) -> None:
    path, weights = quantized[name]
    assert_holds(path, weights)
    model = load_model(open_checkpoint(path), device="cpu", dtype=torch.bfloat16)
    assert torch.equal(model.tok_embeddings.weight, weights["tok_embeddings.weight"].bfloat16())


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_handed_out_in_the_order_of_the_weights(name: str, quantized: Any) -> None:
    path, weights = quantized[name]
    checkpoint = open_gguf(path)
    for tensor in ("layers.0.attention.wq.weight", "layers.0.attention.wk.weight", "layers.0.feed_forward.w2.weight"):
        blocks = checkpoint.read_blocks(tensor)
        assert blocks.type == name
        assert blocks.shape == tuple(weights[tensor].shape)
        assert blocks.data.dtype == torch.uint8
        expanded = gguf.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[blocks.type])
        assert torch.equal(torch.from_numpy(expanded), weights[tensor])


MEMORY_PROGRAM = """
import sys
from pathlib import Path
import torch
from gptfast.checkpoint import open_checkpoint
from gptfast.quantization import WeightScheme

def read_peak_bytes():  # getrusage would count what the parent held
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

torch.set_num_threads(1)
checkpoint, scheme = open_checkpoint(Path(sys.argv[1])), WeightScheme(8, None)
checkpoint.read_rounded("layers.0.attention.wo.weight", (256, 256), scheme)
before = read_peak_bytes()
checkpoint.read_rounded("tok_embeddings.weight", (65_536, 256), scheme)
print(read_peak_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_matrix_that_is_rounded_again_never_stands_there_in_float32(tmp_path: Path) -> None:
    config = replace(WIDE, vocab_size=65_536, tie_word_embeddings=True)
    name, shape, scheme = "tok_embeddings.weight", (config.vocab_size, config.dim), WeightScheme(8, None)
    write_gguf(tmp_path / "model.gguf", random_weights(config), config, types="Q8_0")
    checkpoint = open_gguf(tmp_path / "model.gguf")
    rounded, expected = checkpoint.read_rounded(name, shape, scheme), round_to_nearest(checkpoint.read(name), scheme)
    assert rounded.codes.equal(expected.codes)
    assert rounded.scales.equal(expected.scales)
    outcome = run_process("-c", MEMORY_PROGRAM, tmp_path / "model.gguf")
    assert outcome.exit_code == 0, outcome.stderr
    # The mapped blocks of 8.5 bits are pages of this process too, and codes stand there twice while they are joined.
    assert int(outcome.stdout) < 4.5 * config.vocab_size * config.dim


def test_dense_tensors_have_no_blocks(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.0\.attention\.wq\.weight.*F32"):
        open_gguf(path).read_blocks("layers.0.attention.wq.weight")


def test_projections_of_unequal_types_open(tmp_path: Path) -> None:
    types = {
        "layers.0.attention.wq.weight": "Q4_K",
        "layers.0.attention.wk.weight": "Q8_0",
        "layers.0.attention.wv.weight": "Q6_K",
        "layers.0.feed_forward.w1.weight": "Q4_0",
        "layers.0.feed_forward.w2.weight": "Q6_K",
        "layers.0.feed_forward.w3.weight": "Q4_1",
        "tok_embeddings.weight": "Q8_0",
    }
    weights = write_gguf(tmp_path / "model.gguf", WIDE_WEIGHTS, WIDE, types=types)
    assert_holds(tmp_path / "model.gguf", weights)
    tokens = random_tokens(WIDE, 100)
    expected = reference_logits(weights, stored_config(WIDE), tokens)
    assert (load_and_run(tmp_path / "model.gguf", tokens).double() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["Mixtral-8x7B.Q2_K.gguf", "model", "weights.bin"])
def test_the_name_of_the_file_means_nothing(name: str, path: Path) -> None:
    assert_holds(path.rename(path.parent / name), WEIGHTS)


def test_a_directory_with_one_file_opens(path: Path) -> None:
    assert_holds(path.parent, WEIGHTS)


def test_a_directory_with_several_files_is_refused(path: Path) -> None:
    (path.parent / "other.gguf").write_bytes(path.read_bytes())
    assert_refused(path.parent, "model.gguf", "other.gguf")


def test_rotary_factors_of_one_change_nothing(tmp_path: Path, path: Path) -> None:
    factors = {"rope_freqs.weight": torch.ones(CONFIG.head_dim // 2)}
    write_gguf(tmp_path / "factors.gguf", WEIGHTS, CONFIG, extra=factors)
    tokens = random_tokens(CONFIG, 60)
    assert torch.equal(load_and_run(tmp_path / "factors.gguf", tokens), load_and_run(path, tokens))


def test_ends_of_text_are_read(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", WEIGHTS, CONFIG, metadata={"tokenizer.ggml.eot_token_id": 300})
    generation = open_checkpoint(tmp_path / "model.gguf").generation
    assert set(generation.eos_ids) == {CONFIG.vocab_size - 1, 300}
    assert generation.bos_id == CONFIG.vocab_size - 2


# What was kept of an earlier file


def test_a_second_open_reads_the_same(path: Path) -> None:
    first, second = open_checkpoint(path), open_checkpoint(path)
    assert second.config == first.config
    assert second.generation == first.generation
    assert_holds(path, WEIGHTS)


def test_a_replaced_file_is_read_anew(path: Path) -> None:
    open_checkpoint(path)
    config = FAMILIES["qwen3"]
    write_gguf(path, random_weights(config), config)
    assert open_checkpoint(path).config == stored_config(config)
    assert_holds(path, random_weights(config))


def test_a_file_replaced_by_one_of_the_same_size_is_read_anew(path: Path) -> None:
    open_checkpoint(path)
    earlier = path.stat()
    other = replace(CONFIG, rope_theta=10_000.0)
    write_gguf(path, WEIGHTS, other)
    assert path.stat().st_size == earlier.st_size
    os.utime(path, ns=(earlier.st_atime_ns, earlier.st_mtime_ns + 1_000_000))
    assert open_checkpoint(path).config == stored_config(other)


def test_a_cache_that_cannot_be_written_costs_no_result(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").write_text("a file where the cache would be")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "occupied"))
    assert_holds(path, WEIGHTS)


# What is refused


@pytest.mark.parametrize("architecture", ["gemma3", "mamba", "phi3", "qwen3moe"])
def test_other_architectures_are_refused_by_name(architecture: str, path: Path) -> None:
    (path.parent / "model.gguf").unlink()
    write_gguf(path, WEIGHTS, CONFIG, architecture=architecture)
    assert_refused(path, architecture, "llama")


def test_experts_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", WEIGHTS, CONFIG, metadata={"llama.expert_count": 8})
    assert_refused(tmp_path / "model.gguf", "8 experts")


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_rotary_scaling_that_is_not_computed_is_refused(kind: str, tmp_path: Path) -> None:
    scaling: dict[str, int | float | str | bool] = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "model.gguf", WEIGHTS, CONFIG, metadata=scaling)
    assert_refused(tmp_path / "model.gguf", kind)


def test_partly_rotated_heads_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", WEIGHTS, CONFIG, metadata={"llama.rope.dimension_count": 4})
    assert_refused(tmp_path / "model.gguf", "rotates")


@pytest.mark.parametrize("name", ["layers.1.attention.wk.weight", "tok_embeddings.weight", "norm.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    weights = {key: tensor for key, tensor in WEIGHTS.items() if key != name}
    write_gguf(tmp_path / "model.gguf", weights, CONFIG)
    assert_refused(tmp_path / "model.gguf", name)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": torch.ones(8)}
    write_gguf(tmp_path / "model.gguf", WEIGHTS, CONFIG, extra=extra)
    assert_refused(tmp_path / "model.gguf", "blk.0.attn_sinks.weight")


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    name = "layers.1.feed_forward.w2.weight"
    write_gguf(tmp_path / "model.gguf", WEIGHTS | {name: torch.ones(64, 96)}, CONFIG)
    assert_refused(tmp_path / "model.gguf", name, "[64, 96]")


def test_a_quantized_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    name = "layers.1.feed_forward.w2.weight"
    write_gguf(tmp_path / "model.gguf", WEIGHTS | {name: torch.ones(64, 96)}, CONFIG, types="Q8_0")
    assert_refused(tmp_path / "model.gguf", name, "[64, 96]")


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["Q5_0", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("byte", [0x7C, 0xFC])
def test_damaged_blocks_are_refused_without_a_warning_of_numpys(
    byte: int, kind: str, quantized: Any, tmp_path: Path
) -> None:
    name, path = "layers.0.feed_forward.w2.weight", quantized[kind][0]
    content = bytearray(path.read_bytes())
    stored = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == gguf_name(name))
    content[stored.data_offset : stored.data_offset + stored.n_bytes] = bytes([byte]) * int(stored.n_bytes)
    (tmp_path / "model.gguf").write_bytes(content)
    assert_refused(tmp_path / "model.gguf", name, "NaN or infinite")


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "attention.head_count", "feed_forward_length"])
def test_a_file_without_a_size_is_refused(key: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", WEIGHTS, CONFIG, without=[f"llama.{key}"])
    assert_refused(tmp_path / "model.gguf", "model.gguf")


@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.999])
def test_a_part_of_a_file_is_refused(share: float, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert_refused(path, "model.gguf", "download")


def test_a_file_cut_after_it_was_first_opened_is_refused(path: Path) -> None:
    open_checkpoint(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert_refused(path, "model.gguf", "download")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x63\x00\x00\x00" + bytes(64), b"<html>not found</html>"])
def test_a_file_that_is_no_gguf_is_refused(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    assert_refused(path, "model.gguf")


def test_a_git_lfs_pointer_is_recognized(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert_refused(path, "model.gguf", "Git LFS")


# The writer itself


def test_the_writer_interleaves_the_rows_of_llama_and_of_no_other(tmp_path: Path) -> None:
    """Row 2i of a head holds half-split row i, row 2i + 1 row i + D/2, as llama.cpp's converter writes them."""
    name = "layers.0.attention.wk.weight"
    for family, expected in (("llama-8-2", [0, 4, 1, 5, 2, 6, 3, 7]), ("qwen2", [0, 1, 2, 3, 4, 5, 6, 7])):
        config = FAMILIES[family]
        weights = random_weights(config)
        weights[name] = torch.arange(float(len(weights[name])))[:, None].expand_as(weights[name]).contiguous()
        write_gguf(tmp_path / family, weights, config)
        stored = next(t for t in gguf.GGUFReader(tmp_path / family).tensors if t.name == gguf_name(name))
        assert stored.data[:8, 0].tolist() == expected
