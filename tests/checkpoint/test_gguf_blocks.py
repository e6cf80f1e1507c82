"""Blocks as small integers: the same numbers as gguf's own dequantizer, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from gptfast.cache import CACHE_VARIABLE
from gptfast.checkpoint import open_checkpoint
from gptfast.checkpoint.gguf_blocks import can_unpack, unpack_blocks
from gptfast.checkpoint.random import RandomCheckpoint
from gptfast.errors import CheckpointError
from gptfast.quantization import SUPER_BLOCK
from tests.reference.checkpoints import write_hf, write_meta
from tests.reference.families import FAMILIES, WIDE, random_weights
from tests.reference.gguf_files import write_gguf

# The offsets of a block's float16 numbers, the bits of a code, the codes that share a scale.
UNPACKED = {
    "Q4_0": ((0,), 4, 32),
    "Q4_1": ((0, 2), 4, 32),
    "Q8_0": ((0,), 8, 32),
    "Q4_K": ((0, 2), 4, 32),
    "Q6_K": ((208,), 6, 16),
}
EXPANDED = ("F32", "F16", "BF16", "Q5_0", "Q2_K", "Q5_K", "IQ4_NL")
QUERY, KEY, DOWN = "layers.0.attention.wq.weight", "layers.0.attention.wk.weight", "layers.0.feed_forward.w2.weight"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def draw_blocks(name: str, rows: int, super_blocks: int, seed: int) -> np.ndarray:
    """(rows, bytes) uint8: every bit random but for the float16 numbers, which are finite, of any size and sign."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[Type[name]]
    generator = np.random.default_rng(seed)
    count = rows * super_blocks * SUPER_BLOCK // block_size
    blocks = generator.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for offset in UNPACKED[name][0]:
        numbers = (generator.normal(size=count) * 2.0 ** generator.integers(-24, 15, count)).clip(-65504, 65504)
        blocks[:, offset : offset + 2] = numbers.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", UNPACKED)
@given(rows=st.integers(1, 5), super_blocks=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_blocks_are_the_numbers_that_gguf_makes_of_them(name: str, rows: int, super_blocks: int, seed: int) -> None:
    data = draw_blocks(name, rows, super_blocks, seed)
    weight = unpack_blocks(torch.from_numpy(data), name)
    expected = torch.from_numpy(gguf.dequantize(data, Type[name]))
    assert torch.equal(weight.dequantize().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", UNPACKED)
def test_codes_have_the_range_of_their_bits(name: str) -> None:
    """10,240 random codes of at most 8 bits take every value."""
    _, bits, group_size = UNPACKED[name]
    weight = unpack_blocks(torch.from_numpy(draw_blocks(name, 10, 4, seed=1)), name)
    low = 0 if weight.mins is not None else -(2 ** (bits - 1))
    assert weight.codes.dtype == torch.int8
    assert weight.codes.unique().tolist() == list(range(low, low + 2**bits))
    assert (weight.bits, weight.group_size, weight.shape) == (bits, group_size, (10, 4 * SUPER_BLOCK))
    assert weight.zeros is None
    assert (weight.mins is not None) == (name in ("Q4_1", "Q4_K"))


@pytest.mark.parametrize(("name", "largest"), [("Q4_K", 63), ("Q6_K", 128)])
def test_scales_of_a_super_block_are_small_integers_times_its_own(name: str, largest: int) -> None:
    weight = unpack_blocks(torch.from_numpy(draw_blocks(name, 10, 4, seed=2)), name)
    assert weight.super_scales is not None
    assert weight.super_scales.shape == (10, 4)
    pairs = [(weight.scales, weight.super_scales)]
    if weight.mins is not None:
        assert weight.super_mins is not None
        pairs.append((weight.mins, weight.super_mins))
    assert len(pairs) == (2 if name == "Q4_K" else 1)
    for values, scales in pairs:
        factors = (values.view(10, 4, -1) / scales[..., None]).nan_to_num().round()
        assert torch.equal((factors * scales[..., None]).flatten(1), values)
        assert factors.abs().max() == largest


@pytest.mark.parametrize("name", UNPACKED)
def test_matrices_are_read_in_the_order_of_the_weights(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weights = write_gguf(path, random_weights(WIDE), WIDE, types=name)
    checkpoint = open_checkpoint(path)
    for tensor in (QUERY, KEY, DOWN, "tok_embeddings.weight"):
        weight = checkpoint.read_quantized(tensor)
        assert weight is not None
        assert torch.equal(weight.dequantize(), weights[tensor])
        assert checkpoint.describe_type(tensor) == name
    assert checkpoint.read_quantized("norm.weight") is None
    assert checkpoint.describe_type("norm.weight") == "F32"


@pytest.mark.parametrize("name", EXPANDED)
def test_other_types_are_only_read_expanded(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weights = write_gguf(path, random_weights(WIDE), WIDE, types=name)
    checkpoint = open_checkpoint(path)
    assert not can_unpack(name)
    assert checkpoint.read_quantized(QUERY) is None
    assert checkpoint.describe_type(QUERY) == name
    assert torch.equal(checkpoint.read(QUERY).float(), weights[QUERY])


@pytest.mark.parametrize("name", [DOWN, KEY])
def test_a_matrix_of_the_wrong_shape_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, random_weights(WIDE) | {name: torch.ones(96, 256)}, WIDE, types="Q4_0")
    with pytest.raises(CheckpointError, match=rf"{name}.*\[96, 256\]"):
        open_checkpoint(path).read_quantized(name)


# The readers whose tensors are all dense


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("write", [write_hf, write_meta])
def test_dense_matrices_are_described_by_their_dtype(
    write: Callable[..., Path], dtype: torch.dtype, tmp_path: Path
) -> None:
    config = FAMILIES["llama-8-2"]
    checkpoint = open_checkpoint(write(tmp_path / "model", random_weights(config), config, dtype=dtype))
    described = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert {checkpoint.describe_type(name) for name in checkpoint.names()} == {described}
    assert checkpoint.read_quantized(QUERY) is None


def test_random_weights_are_as_if_stored_in_bfloat16() -> None:
    checkpoint = RandomCheckpoint("llama-3.2-1b")
    assert checkpoint.describe_type(QUERY) == "BF16"
    assert checkpoint.read_quantized(QUERY) is None
