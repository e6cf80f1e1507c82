"""The packed tensors against those of the compressed-tensors library, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptfast.quantization import FLOAT8, QuantizedWeight, WeightScheme
from gptfast.rounding import round_to_nearest
from quantize.packing import compute_packed_bytes, pack

helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")

SCHEMES = [
    WeightScheme(4, 32),
    WeightScheme(4, None),
    WeightScheme(4, 64, symmetric=False),
    WeightScheme(8, None),
    WeightScheme(8, 32, symmetric=False),
    FLOAT8,
]


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 70), columns=st.integers(1, 70), bits=st.sampled_from([4, 8]), seed=st.integers(0, 99))
def test_signed_codes_are_packed_like_the_library_packs_them(rows: int, columns: int, bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    low = -(1 << (bits - 1))
    codes = torch.randint(low, -low, (rows, columns), generator=generator).to(torch.int8)
    weight = QuantizedWeight(codes, torch.ones(rows, 1), bits)
    packed = pack(weight, WeightScheme(bits, None))
    assert torch.equal(packed["weight_packed"], helpers.pack_to_int32(codes, bits))
    assert packed["weight_shape"].tolist() == [rows, columns]


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 70), groups=st.integers(1, 5), bits=st.sampled_from([4, 8]), seed=st.integers(0, 99))
def test_zeros_are_packed_along_the_rows(rows: int, groups: int, bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    offset = 8 if bits == 4 else 0  # our codes of 4 bits with zeros are unsigned, the library's are signed
    low = -(1 << (bits - 1))
    codes = torch.randint(low, -low, (rows, groups * 32), generator=generator).to(torch.int8)
    zeros = torch.randint(low, -low, (rows, groups), generator=generator).to(torch.int8)
    weight = QuantizedWeight(codes + offset, torch.ones(rows, groups), bits, zeros + offset)
    packed = pack(weight, WeightScheme(bits, 32, symmetric=False))
    assert torch.equal(packed["weight_packed"], helpers.pack_to_int32(codes, bits))
    assert torch.equal(packed["weight_zero_point"], helpers.pack_to_int32(zeros, bits, packed_dim=0))


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
@pytest.mark.parametrize("shape", [(65, 64), (8, 192)])
def test_sizes_are_known_before_anything_is_packed(scheme: WeightScheme, shape: tuple[int, int]) -> None:
    packed = pack(round_to_nearest(torch.randn(shape), scheme), scheme)
    assert compute_packed_bytes(shape, scheme) == {name: tensor.nbytes for name, tensor in packed.items()}


def test_floats_are_stored_as_they_are_with_scales_of_four_bytes() -> None:
    weight = round_to_nearest(torch.randn(16, 33), FLOAT8)
    packed = pack(weight, FLOAT8)
    assert packed.keys() == {"weight", "weight_scale"}
    assert packed["weight"].dtype == torch.float8_e4m3fn
    assert (packed["weight_scale"].dtype, packed["weight_scale"].shape) == (torch.float32, (16, 1))
    assert torch.equal(packed["weight"].float() * packed["weight_scale"], weight.dequantize())


def test_scales_of_two_bytes_lose_nothing() -> None:
    scheme = WeightScheme(4, 32)
    weight = round_to_nearest(torch.randn(64, 64), scheme)
    scales = pack(weight, scheme)["weight_scale"]
    assert scales.dtype == torch.bfloat16
    assert torch.equal(scales.float(), weight.scales)
