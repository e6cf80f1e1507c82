"""The layout of the CUDA kernels, as tensors of any device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from gptfast.kernels.cuda.packing import (
    INPUT_FACTORS,
    KINDS,
    WEIGHTS_PER_WORD,
    Kind,
    arrange_inputs,
    arrange_rows,
    can_pack,
    pack,
    unpack,
)
from gptfast.quantization import FLOAT8, QuantizedWeight
from gptfast.rounding import round_to_nearest
from tests.reference.quantized_weights import draw_k_quant, draw_quantized

GROUPS = (16, 32, 48, 64, 96, 128, 256, None)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("offset", [None, "zeros", "mins"])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_matrix_comes_back(bits: int, group_size: int | None, offset: str | None) -> None:
    weight = draw_quantized(5, 3 * 256, bits, group_size, offset)
    if can_pack(weight):
        packed = pack(weight)
        assert packed.shape == (5, 768)
        torch.testing.assert_close(unpack(packed), weight.dequantize(), rtol=0, atol=2e-6 if offset == "mins" else 0)
    else:
        assert (bits, group_size) in {(4, 16), (4, 48)}


@pytest.mark.parametrize("bits", [4, 6])
def test_a_k_quant_comes_back(bits: int) -> None:
    weight = draw_k_quant(7, 512, bits)
    assert torch.equal(unpack(pack(weight)), weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [32, 33, 90])
def test_a_dense_matrix_comes_back_and_is_no_copy_if_its_rows_are_aligned(dtype: torch.dtype, columns: int) -> None:
    weight = draw(3, columns).to(dtype)
    packed = pack(weight)
    assert torch.equal(unpack(packed), weight.float())
    assert (packed.words.data_ptr() == weight.data_ptr()) == (columns == 32)


def test_a_matrix_of_eight_bit_floats_comes_back() -> None:
    weight, scales = draw(3, 64).to(torch.float8_e4m3fn), torch.tensor([1.0, 0.5, 3.0])
    assert torch.equal(unpack(pack(weight, scales)), weight.float() * scales[:, None])


@pytest.mark.parametrize("columns", [64, 90])
def test_a_rounded_matrix_of_eight_bit_floats_comes_back(columns: int) -> None:
    weight = round_to_nearest(draw(5, columns), FLOAT8)
    assert can_pack(weight)
    packed = pack(weight)
    assert (packed.kind, packed.shape) == ("fp8", (5, columns))
    assert torch.equal(unpack(packed), weight.dequantize())


@pytest.mark.parametrize(("bits", "group_size", "columns"), [(8, None, 90), (4, None, 33), (8, 16, 48)])
def test_rows_are_padded_to_whole_loads(bits: int, group_size: int | None, columns: int) -> None:
    weight = draw_quantized(4, columns, bits, group_size)
    packed = pack(weight)
    assert packed.words.shape[1] * 4 % 16 == 0
    assert packed.shape == weight.shape
    assert torch.equal(unpack(packed), weight.dequantize())


def test_words_hold_weights_from_the_lowest_bits_on() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(2)[None]
    packed = pack(QuantizedWeight(codes, torch.ones(1, 1), 4))
    assert [f"{word & 0xFFFFFFFF:08x}" for word in packed.words[0].tolist()] == ["76543210", "fedcba98"] * 2


def test_scales_take_two_bytes_only_where_that_is_exact() -> None:
    weight = draw_quantized(4, 64, 4, 32)
    for factor, dtype in ((1.0, torch.bfloat16), (1 + 2**-9, torch.float16), (1 + 2**-14, torch.float32)):
        scales = torch.tensor([1.0, 1.5]).repeat(4, 1) * factor
        packed = pack(dataclasses.replace(weight, scales=scales))
        assert packed.scales is not None
        assert packed.scales.dtype == dtype
        assert torch.equal(packed.scales.float(), scales)


def test_what_has_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no matrices of torch\.float32"):
        pack(draw(4, 32))
    with pytest.raises(ValueError, match="int4 in groups of 16"):
        pack(draw_quantized(4, 64, 4, 16))
    with pytest.raises(ValueError, match="needs scales"):
        pack(draw(4, 32).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="has no scales"):
        pack(draw(4, 32).half(), torch.ones(4))
    assert not can_pack(draw(4, 32))


@pytest.mark.parametrize("kind", WEIGHTS_PER_WORD)
@pytest.mark.parametrize("columns", [64, 90])
def test_inputs_lie_in_planes_of_equal_places_in_a_word(kind: Kind, columns: int) -> None:
    x = draw(2, columns)
    per_word = WEIGHTS_PER_WORD[kind]
    planes = arrange_inputs(x, kind)
    assert planes.shape == (2, per_word, -(-columns // 32) * 32 // per_word)
    factors = [INPUT_FACTORS[kind]] * per_word if kind != "int4" else [256.0, 16.0] * 4
    for k in range(columns):
        assert torch.equal(planes[:, k % per_word, k // per_word], x[:, k] * factors[k % per_word])
    rows = arrange_rows(x.half(), kind)
    in_place = 1 if kind in KINDS.values() and kind != "fp8" else per_word
    for k in range(columns):
        assert torch.equal(rows[:, k % in_place, k // in_place], x.half()[:, k])
