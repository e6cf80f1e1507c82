"""Round-to-nearest: its error bounds, the search for ranges and the memory it takes."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gptfast.errors import UserError
from gptfast.quantization import FLOAT8, QuantizedWeight, WeightScheme
from gptfast.rounding import choose_codes, get_code_range, round_to_nearest, span_range
from tests.reference.matrices import matrices
from tests.reference.sessions import run_process

SCHEMES = [WeightScheme(bits, group, symmetric) for bits in (4, 8) for group in (16, 64, None) for symmetric in (1, 0)]
FOUR_BITS = [scheme for scheme in SCHEMES if scheme.bits == 4]
MATRICES = matrices(128, (-12, 12))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def repeat_scales(rounded: QuantizedWeight) -> Tensor:
    return rounded.scales.repeat_interleave(rounded.group_size, dim=1)


def sum_costs(weight: Tensor, rounded: QuantizedWeight) -> Tensor:
    """What the search minimizes, of every group, in float64."""
    costs = (rounded.dequantize().double() - weight.double()).square() * weight.double().abs()
    return costs.view(*rounded.scales.shape, -1).sum(-1)


def round_without_search(weight: Tensor, scheme: WeightScheme) -> QuantizedWeight:
    scales, zeros = span_range(weight, scheme.group_size or weight.shape[1], scheme)
    codes = choose_codes(weight, scales, zeros, scheme)
    return QuantizedWeight(codes, scales, scheme.bits, None if scheme.symmetric else zeros.to(torch.int8))


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
@settings(max_examples=10, deadline=None)
@given(weight=MATRICES)
def test_a_range_that_spans_the_group_leaves_no_error_above_half_a_scale(scheme: WeightScheme, weight: Tensor) -> None:
    rounded = round_without_search(weight, scheme)
    errors = (rounded.dequantize() - weight).abs()
    assert (errors <= repeat_scales(rounded) / 2 * (1 + 1e-4)).all()


@pytest.mark.parametrize("group_size", [16, 64, None])
def test_symmetric_8_bits_cut_no_weight_off_and_use_all_codes(group_size: int | None) -> None:
    """Up to what rounding the scale up to bfloat16 takes: its last bit is one part in 128 at most."""
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(4))
    rounded = round_to_nearest(weight, WeightScheme(8, group_size))
    steps = (weight / repeat_scales(rounded)).view(*rounded.scales.shape, -1)
    low, high = steps.amin(-1), steps.amax(-1)
    assert float(low.min()) >= -128 * (1 + 1e-6)
    assert float(high.max()) <= 127 * (1 + 1e-6)
    assert ((low < -128 * 127 / 128) | (high > 127 * 127 / 128)).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
@settings(max_examples=10, deadline=None)
@given(weight=MATRICES)
def test_codes_and_zeros_are_those_of_the_format_and_scales_are_of_bfloat16(
    scheme: WeightScheme, weight: Tensor
) -> None:
    rounded = round_to_nearest(weight, scheme)
    least, largest = get_code_range(scheme)
    groups = 128 // (scheme.group_size or 128)
    assert rounded.bits == scheme.bits
    assert rounded.codes.dtype == torch.int8
    assert rounded.codes.shape == weight.shape
    assert int(rounded.codes.min()) >= least
    assert int(rounded.codes.max()) <= largest
    assert rounded.scales.shape == (len(weight), groups)
    assert rounded.scales.dtype == torch.float32
    assert rounded.scales.equal(rounded.scales.bfloat16().float())
    assert (rounded.zeros is None) == scheme.symmetric
    if rounded.zeros is not None:
        assert rounded.zeros.dtype == torch.int8
        assert rounded.zeros.shape == rounded.scales.shape
        assert int(rounded.zeros.min()) >= least
        assert int(rounded.zeros.max()) <= largest


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
@settings(max_examples=10, deadline=None)
@given(weight=MATRICES)
def test_every_code_is_a_nearest_one(scheme: WeightScheme, weight: Tensor) -> None:
    rounded = round_to_nearest(weight, scheme)
    least, largest = get_code_range(scheme)
    error = (rounded.dequantize() - weight).abs()
    for step in (-1, 1):
        moved = (rounded.codes.int() + step).clamp(least, largest).to(torch.int8)
        other = QuantizedWeight(moved, rounded.scales, rounded.bits, rounded.zeros)
        assert (error <= (other.dequantize() - weight).abs() + repeat_scales(rounded).abs() * 1e-4).all()


@pytest.mark.parametrize("scheme", FOUR_BITS, ids=WeightScheme.describe)
@settings(max_examples=10, deadline=None)
@given(weight=MATRICES)
def test_the_search_never_costs_more_than_the_whole_range(scheme: WeightScheme, weight: Tensor) -> None:
    searched = sum_costs(weight, round_to_nearest(weight, scheme))
    assert (searched <= sum_costs(weight, round_without_search(weight, scheme)) * (1 + 1e-5)).all()


@pytest.mark.parametrize(("symmetric", "share"), [(True, 0.75), (False, 0.92)])
def test_the_search_saves_much_of_the_cost(symmetric: bool, share: float) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    scheme = WeightScheme(4, 64, symmetric)
    searched = sum_costs(weight, round_to_nearest(weight, scheme)).sum()
    assert searched < share * sum_costs(weight, round_without_search(weight, scheme)).sum()


def test_the_search_comes_close_to_the_best_of_thousands_of_scales() -> None:
    weight = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    extreme = float(weight.abs().max())
    signed = torch.linspace(extreme / 14, extreme / 4, 4000)
    scales = torch.cat([signed, -signed])[:, None]
    codes = (weight / scales).round().clamp(-8, 7)
    best = ((codes * scales - weight).square() * weight.abs()).sum(-1).min()
    assert sum_costs(weight, round_to_nearest(weight, WeightScheme(4, 32))).sum() < 1.02 * best


def test_an_outlier_takes_the_code_that_only_one_side_has() -> None:
    for sign in (1, -1):
        weight = torch.linspace(-7, 7, 32)[None] * sign
        weight[0, -1] = 8 * sign
        rounded = round_to_nearest(weight, WeightScheme(4, 32))
        assert int(rounded.codes[0, -1]) == -8
        assert rounded.scales.item() * sign < 0


def test_a_matrix_on_the_grid_of_a_scheme_is_rounded_exactly() -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (8, 128), generator=generator)
    codes.view(8, 4, 32)[..., 0], codes.view(8, 4, 32)[..., 1] = 0, 15
    weight = ((codes - 5) * 0.25).float()
    assert round_to_nearest(weight, WeightScheme(4, 32, symmetric=False)).dequantize().equal(weight)


FLOATS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
NUMBERS = FLOATS[FLOATS.isfinite()].unique()


@settings(max_examples=25, deadline=None)
@given(weight=matrices(128, (-40, 35)))
def test_floats_of_8_bits_are_the_nearest_and_the_even_one_of_two(weight: Tensor) -> None:
    rounded = round_to_nearest(weight, FLOAT8)
    assert (rounded.codes.dtype, rounded.scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert rounded.scales.shape == (len(weight), 1)
    assert rounded.zeros is None
    steps = (weight / rounded.scales).double()
    distances = (steps[..., None] - NUMBERS.double()).abs()
    chosen = (steps - rounded.codes.double()).abs()
    assert chosen.equal(distances.amin(-1))
    is_tied = (distances == chosen[..., None]).sum(-1) > 1
    assert (rounded.codes.view(torch.uint8)[is_tied] % 2 == 0).all()


@settings(max_examples=25, deadline=None)
@given(weight=MATRICES)
def test_floats_of_8_bits_keep_four_significant_ones(weight: Tensor) -> None:
    rounded = round_to_nearest(weight, FLOAT8)
    error = (rounded.dequantize() - weight).abs()
    least_normal = 2**-6 * rounded.scales
    bound = torch.where(weight.abs() >= least_normal, weight.abs() * 2**-4, least_normal * 2**-4)
    assert (error <= bound * (1 + 1e-5)).all()
    largest = rounded.codes.float().abs().amax(1)
    assert largest.equal(torch.where(weight.abs().amax(1) > 0, 448.0, 0.0))


def test_floats_of_8_bits_round_ties_as_torch_does() -> None:
    """448 makes the scale 1; between numbers of three bits behind the point lie ties of four."""
    weight = torch.tensor([[448.0, 17.0, 19.0, -17.0, 2**-9 * 1.5, 2**-10, 3.0, 0.0]])
    expected = torch.tensor([[448.0, 16.0, 20.0, -16.0, 2**-8, 0.0, 3.0, 0.0]])
    rounded = round_to_nearest(weight, FLOAT8)
    assert rounded.dequantize().equal(expected)
    assert rounded.dequantize().equal(weight.to(torch.float8_e4m3fn).float())


def test_what_was_rounded_to_floats_of_8_bits_comes_back() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(5))
    rounded = round_to_nearest(weight, FLOAT8)
    again = round_to_nearest(rounded.dequantize(), FLOAT8)
    assert again.codes.view(torch.uint8).equal(rounded.codes.view(torch.uint8))


def test_numbers_too_small_for_a_scale_become_zero_and_not_nan() -> None:
    weight = torch.full((1, 64), 1e-44)
    assert round_to_nearest(weight, FLOAT8).dequantize().abs().max() < 1e-40


def test_zeros_are_rounded_to_zeros() -> None:
    for scheme in (*SCHEMES, FLOAT8):
        assert round_to_nearest(torch.zeros(2, 64), scheme).dequantize().equal(torch.zeros(2, 64))


def test_the_dtype_of_the_same_numbers_and_the_slices_do_not_matter() -> None:
    weight = torch.randn(300, 2048, generator=torch.Generator().manual_seed(3)).bfloat16()
    for scheme in (WeightScheme(4, 64, symmetric=False), WeightScheme(8, None), FLOAT8):
        whole, part = round_to_nearest(weight, scheme), round_to_nearest(weight[137:139].float(), scheme)
        assert whole.select_rows(slice(137, 139)).dequantize().equal(part.dequantize())


def test_a_group_that_does_not_divide_the_inputs_is_refused() -> None:
    with pytest.raises(UserError, match=r"layers\.0\.x has 90 inputs, which groups of 64 do not divide"):
        round_to_nearest(torch.ones(2, 90), WeightScheme(4, 64), name="layers.0.x")


@pytest.mark.parametrize("scheme", [*SCHEMES, FLOAT8], ids=WeightScheme.describe)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_not_a_number_is_refused(scheme: WeightScheme, value: str) -> None:
    weight = torch.ones(2, 64)
    weight[1, 3] = float(value)
    with pytest.raises(UserError, match=r"layers\.0\.x has weights that are not finite"):
        round_to_nearest(weight, scheme, name="layers.0.x")


MEMORY_PROGRAM = """
from pathlib import Path
import torch
from gptfast.quantization import WeightScheme
from gptfast.rounding import round_to_nearest

def read_peak_bytes():  # getrusage would count what the parent held
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

torch.set_num_threads(1)
round_to_nearest(torch.ones(4096, 512), WeightScheme({bits}, 32, symmetric=False))
head = torch.ones(128256, 256, dtype=torch.bfloat16)
before = read_peak_bytes()
rounded = round_to_nearest(head, WeightScheme({bits}, 32, symmetric=False))
held = sum(tensor.nbytes for tensor in (rounded.codes, rounded.scales, rounded.zeros))
print(read_peak_bytes() - before - held)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_head_is_rounded_in_little_memory_and_in_silence(bits: int) -> None:
    outcome = run_process("-c", MEMORY_PROGRAM.format(bits=bits))
    assert outcome.exit_code == 0
    assert outcome.stderr == ""
    assert int(outcome.stdout) < 32e6
