"""Products with packed matrices against the dequantized ones in float64."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor

from gptfast.kernels import ops
from gptfast.kernels.packing import can_pack, pack
from gptfast.quantization import QuantizedWeight
from tests.reference.quantized_weights import draw_k_quant, draw_quantized

ROWS = (1, 2, 3, 5, 8, 16, 17, 64)
GROUPS = (32, 64, 128, None)
OUT_FEATURES = (8, 24, 65, 31_000, 32_001)
IN_FEATURES = (288, 576, 1536, 11_008)
LARGEST_QUICK = 4_000_000
EXACT, ROUNDED = 1e-5, 3e-2


@pytest.fixture(autouse=True)
def kernels() -> None:
    assert ops.has_cpu_kernels()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_inputs(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def measure_error(found: Tensor, x: Tensor, weight: Tensor) -> float:
    expected = x.double() @ weight.double().T
    return float((found - expected).norm() / expected.norm())


def multiply(x: Tensor, weight: Tensor | QuantizedWeight, *, rounds_inputs: bool = False) -> Tensor:
    return ops.linear(x, pack(weight), out_features=weight.shape[0], rounds_inputs=rounds_inputs)


def check_product(columns: int, out_features: int, group_size: int | None, bits: int) -> None:
    weight = draw_quantized(out_features, columns, bits, group_size)
    packed, dense = pack(weight), weight.dequantize()
    x = make_inputs(max(ROWS), columns)
    expected = x.double() @ dense.double().T if dense.numel() <= LARGEST_QUICK else x @ dense.T
    for rows in ROWS:
        for rounds_inputs, bound in ((False, EXACT), (True, ROUNDED)):
            found = ops.linear(x[:rows], packed, out_features=out_features, rounds_inputs=rounds_inputs)
            error = float((found - expected[:rows]).norm() / expected[:rows].norm())
            assert error < bound, (rows, rounds_inputs)


GRID = [
    (columns, out_features, group_size)
    for columns, out_features, group_size in itertools.product(IN_FEATURES, OUT_FEATURES, GROUPS)
    if columns % (group_size or 1) == 0
]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "out_features", "group_size"), [c for c in GRID if c[0] * c[1] <= LARGEST_QUICK])
def test_equals_the_dequantized_product(columns: int, out_features: int, group_size: int | None, bits: int) -> None:
    check_product(columns, out_features, group_size, bits)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "out_features", "group_size"), [c for c in GRID if c[0] * c[1] > LARGEST_QUICK])
def test_equals_the_dequantized_product_of_large_ones(
    columns: int, out_features: int, group_size: int | None, bits: int
) -> None:
    check_product(columns, out_features, group_size, bits)


@pytest.mark.parametrize("offset", ["zeros", "mins"])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_and_mins(bits: int, group_size: int | None, offset: Literal["zeros", "mins"]) -> None:
    weight = draw_quantized(72, 256, bits, group_size, offset)
    for rows in ROWS:
        x = make_inputs(rows, 256)
        assert measure_error(multiply(x, weight), x, weight.dequantize()) < EXACT
        assert measure_error(multiply(x, weight, rounds_inputs=True), x, weight.dequantize()) < ROUNDED


@pytest.mark.parametrize("bits", [4, 6])
def test_k_quants(bits: int) -> None:
    weight = draw_k_quant(40, 768, bits)
    assert can_pack(weight)
    assert pack(weight).numel() * 8 / weight.codes.numel() < {4: 4.7, 6: 6.6}[bits] * 48 / 40  # 40 rows fill 48
    for rows in ROWS:
        x = make_inputs(rows, 768)
        assert measure_error(multiply(x, weight), x, weight.dequantize()) < EXACT
        assert measure_error(multiply(x, weight, rounds_inputs=True), x, weight.dequantize()) < ROUNDED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [32, 90, 288])
def test_dense_matrices_of_any_width(columns: int, dtype: torch.dtype) -> None:
    weight = make_inputs(65, columns).to(dtype)
    for rows in ROWS:
        x = make_inputs(rows, columns)
        assert measure_error(multiply(x, weight), x, weight) < EXACT
        assert torch.equal(multiply(x, weight), multiply(x, weight, rounds_inputs=True))


@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_one_scale_per_channel_takes_any_width(rounds_inputs: bool) -> None:
    weight = draw_quantized(33, 90, 8, None)
    x = make_inputs(3, 90)
    found = multiply(x, weight, rounds_inputs=rounds_inputs)
    assert measure_error(found, x, weight.dequantize()) < (ROUNDED if rounds_inputs else EXACT)


ALL_KINDS = [
    make_inputs(65, 256),
    make_inputs(65, 256).half(),
    make_inputs(65, 256).bfloat16(),
    draw_quantized(65, 256, 4, 32),
    draw_quantized(65, 256, 4, 64, offset="mins"),
    draw_quantized(65, 256, 8, None),
    draw_quantized(65, 256, 8, 128, offset="zeros"),
    draw_k_quant(65, 256, 4),
    draw_k_quant(65, 256, 6),
]


@pytest.mark.parametrize("weight", ALL_KINDS)
@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_a_row_does_not_depend_on_the_rows_beside_it(weight: Tensor | QuantizedWeight, rounds_inputs: bool) -> None:
    x = make_inputs(16, 256)
    packed = pack(weight)
    together = ops.linear(x, packed, out_features=65, rounds_inputs=rounds_inputs)
    for rows in range(1, 17):
        some = ops.linear(x[16 - rows :], packed, out_features=65, rounds_inputs=rounds_inputs)
        assert torch.equal(some, together[16 - rows :]), rows


@pytest.mark.parametrize("weight", ALL_KINDS[3:])
def test_rounded_rows_are_alike_in_a_prompt_too(weight: QuantizedWeight) -> None:
    x = make_inputs(100, 256)
    together = multiply(x, weight, rounds_inputs=True)
    assert torch.equal(multiply(x[99:], weight, rounds_inputs=True), together[99:])


@pytest.mark.parametrize("weight", ALL_KINDS)
def test_threads_do_not_change_the_result(weight: Tensor | QuantizedWeight, threads: int) -> None:
    x = make_inputs(5, 256)
    expected = multiply(x, weight, rounds_inputs=True)
    torch.set_num_threads(4)
    assert torch.equal(multiply(x, weight, rounds_inputs=True), expected)


def test_several_callers_at_once() -> None:
    weight, x = draw_quantized(512, 256, 4, 32), make_inputs(4, 256)
    packed = pack(weight)
    expected = ops.linear(x, packed, out_features=512, rounds_inputs=True)
    wrong: list[Tensor] = []

    def call() -> None:
        for _ in range(200):
            found = ops.linear(x, packed, out_features=512, rounds_inputs=True)
            if not torch.equal(found, expected):
                wrong.append(found)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_bfloat16_inputs(rows: int, rounds_inputs: bool) -> None:
    weight, x = draw_quantized(65, 256, 4, 32), make_inputs(rows, 256).bfloat16()
    found = multiply(x, weight, rounds_inputs=rounds_inputs)
    assert found.dtype == torch.bfloat16
    assert measure_error(found.float(), x, weight.dequantize()) < 2e-2


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_added(rows: int, dtype: torch.dtype) -> None:
    weight, x, bias = make_inputs(65, 96), make_inputs(rows, 96), make_inputs(1, 65)[0].to(dtype)
    found = ops.linear(x, pack(weight), bias, out_features=65)
    torch.testing.assert_close(found, x @ weight.T + bias, atol=1e-4, rtol=1e-4)


def test_inputs_of_any_shape_and_layout() -> None:
    weight, x = draw_quantized(24, 64, 8, None), make_inputs(64, 12).T
    flat = multiply(x.contiguous(), weight)
    assert torch.equal(multiply(x, weight), flat)
    assert torch.equal(multiply(x.reshape(3, 4, 64), weight), flat.view(3, 4, 24))
    assert multiply(x[:0], weight).shape == (0, 24)


def test_a_nan_in_the_inputs_reaches_every_output() -> None:
    weight, x = draw_quantized(24, 64, 4, 32), make_inputs(2, 64)
    x[1, 5] = torch.nan
    for rounds_inputs in (False, True):
        found = multiply(x, weight, rounds_inputs=rounds_inputs)
        assert found[0].isfinite().all()
        assert found[1].isnan().all()


@pytest.mark.parametrize("weight", ALL_KINDS)
def test_an_embedding_is_the_dequantized_row(weight: Tensor | QuantizedWeight) -> None:
    dense = weight.float() if isinstance(weight, Tensor) else weight.dequantize()
    tokens = torch.tensor([[0, 64], [33, 15]])
    found = ops.embedding(tokens, pack(weight), dim=256, dtype=torch.float32)
    torch.testing.assert_close(found, dense[tokens], atol=1e-6, rtol=1e-6)
    half = ops.embedding(tokens, pack(weight), dim=256, dtype=torch.bfloat16)
    assert torch.equal(half, found.bfloat16())


def test_scales_are_held_in_two_bytes_only_where_that_is_exact() -> None:
    weight = draw_quantized(32, 256, 4, 32)
    fine = QuantizedWeight(weight.codes, weight.scales * 1.0001, 4)
    assert pack(fine).numel() - pack(weight).numel() == 2 * weight.scales.numel()
    x = make_inputs(1, 256)
    assert measure_error(multiply(x, fine), x, fine.dequantize()) < 1e-6


def test_what_does_not_fit_is_refused() -> None:
    weight = draw_quantized(32, 64, 4, 32)
    packed = pack(weight)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        ops.linear(make_inputs(1, 96), packed, out_features=32)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        ops.linear(make_inputs(1, 64), packed, out_features=31)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        ops.linear(make_inputs(1, 64).double(), packed, out_features=32)
    with pytest.raises(ValueError, match="damaged"):
        ops.linear(make_inputs(1, 64), packed[:-1], out_features=32)
    with pytest.raises(ValueError, match="vector of bytes"):
        ops.linear(make_inputs(1, 64), weight.scales, out_features=32)
    with pytest.raises(IndexError, match="vocabulary of 32"):
        ops.embedding(torch.tensor([32]), packed, dim=64, dtype=torch.float32)
    narrow = QuantizedWeight(weight.codes, torch.ones(32, 4), 4)
    assert not can_pack(narrow)
    with pytest.raises(ValueError, match="groups of 16"):
        pack(narrow)


@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_operators_are_what_they_say_to_the_compiler(rounds_inputs: bool) -> None:
    packed, bias = pack(draw_quantized(24, 64, 4, 32)), torch.ones(24)
    for x in (make_inputs(3, 64), make_inputs(20, 64).bfloat16()):
        torch.library.opcheck(torch.ops.gptfast.linear.default, (x, packed, bias, 24, rounds_inputs))
    tokens = torch.tensor([[1, 2]])
    torch.library.opcheck(torch.ops.gptfast.embedding.default, (tokens, packed, 64, torch.bfloat16))
