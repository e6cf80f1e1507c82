"""int4 as torch's tinygemm kernel reads it; its values are those of the library's kernel for CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gptfast.kernels.cuda.tinygemm import (
    TinygemmWeight,
    compute_scales_and_zeros,
    explain_refusal,
    is_exact,
    multiply,
    pack,
    pack_codes,
)
from gptfast.quantization import QuantizedWeight
from tests.reference import tinygemm
from tests.reference.quantized_weights import draw_k_quant, draw_quantized

Offset = Literal["zeros", "mins"] | None


@pytest.fixture
def _operators() -> Iterator[None]:
    library = tinygemm.register()
    yield
    del library


def draw_inputs(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("offset", [None, "zeros", "mins"])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_scales_and_zeros_are_as_the_library_applies_them(group_size: int, offset: Offset) -> None:
    """By its kernel for CPUs, which takes the same, but codes one by one."""
    weight = draw_quantized(48, 512, 4, group_size, offset)
    scales_and_zeros = compute_scales_and_zeros(weight).bfloat16().contiguous()
    packed = pack_codes(weight)
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).view(48, 512).int()
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
    x = draw_inputs(3, 512)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(x, words, group_size, scales_and_zeros)
    expected = x.float() @ weight.dequantize().T
    assert (product.float() - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize(
    ("codes", "offset", "expected"),
    [([-8, 7, 0, 1], None, [0x0F, 0x89]), ([0, 15, 8, 9], "zeros", [0x0F, 0x89]), ([3, 4, 5, 6], "mins", [0x34, 0x56])],
)
def test_the_first_of_two_codes_is_in_the_upper_bits(codes: list[int], offset: Offset, expected: list[int]) -> None:
    weight = replace(draw_quantized(8, 32, 4, 32, offset), codes=torch.tensor([codes * 8] * 8, dtype=torch.int8))
    assert pack_codes(weight).tolist() == [expected * 8] * 8


@pytest.mark.usefixtures("_operators")
@pytest.mark.parametrize("offset", [None, "zeros", "mins"])
@pytest.mark.parametrize(("columns", "group_size", "inner_tiles"), [(512, 128, 8), (192, 64, 4), (96, 32, 2)])
def test_a_product_is_that_of_the_matrix(columns: int, group_size: int, inner_tiles: int, offset: Offset) -> None:
    weight = draw_quantized(40, columns, 4, group_size, offset)
    packed = pack(weight)
    assert packed.words.shape == (5, columns // (16 * inner_tiles), 32, inner_tiles // 2)
    assert packed.shape == (40, columns)
    x = draw_inputs(6, columns).view(2, 3, columns)
    expected = x.float() @ weight.dequantize().T
    product = multiply(x, packed)
    assert product.dtype == torch.bfloat16
    assert product.shape == (2, 3, 40)
    assert (product.float() - expected).abs().max() < 0.01 * expected.abs().max()


def test_shapes_are_those_that_the_library_tells_the_compiler() -> None:
    weight = draw_quantized(40, 192, 4, 64, "zeros").to(torch.device("meta"))
    packed = pack(weight)
    assert packed.words.shape == (5, 3, 32, 2)
    with FakeTensorMode():
        x = torch.empty(2, 3, 192, dtype=torch.bfloat16)
        words = torch.empty(packed.words.shape, dtype=torch.int32)
        scales_and_zeros = torch.empty(packed.scales_and_zeros.shape, dtype=torch.bfloat16)
        assert multiply(x, TinygemmWeight(words, scales_and_zeros, 64)).shape == (2, 3, 40)


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (draw_quantized(8, 64, 8, 32), "it is int8"),
        (draw_quantized(8, 64, 4, 16), "groups are of 16"),
        (draw_quantized(8, 512, 4, None), "groups are of 512"),
        (draw_quantized(12, 64, 4, 32), "12 outputs are no multiple of 8"),
    ],
    ids=["int8", "g16", "channel", "rows"],
)
def test_what_the_kernel_cannot_hold_is_named(weight: QuantizedWeight, reason: str) -> None:
    assert reason in str(explain_refusal(weight))
    with pytest.raises(ValueError, match=reason):
        pack(weight)


def test_what_the_kernel_holds_is_not_refused() -> None:
    for group_size in (32, 64, 128, 256):
        assert explain_refusal(draw_quantized(8, 256, 4, group_size)) is None


def test_scales_that_bfloat16_does_not_hold_are_noticed() -> None:
    weight = draw_quantized(8, 64, 4, 32)
    assert is_exact(weight)
    assert not is_exact(replace(weight, scales=weight.scales * 1.001))
    assert not is_exact(draw_k_quant(8, 256, 4))
