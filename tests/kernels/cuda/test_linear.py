"""Products on CUDA tensors under Triton's interpreter, against the expanded matrix in float64."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gptfast.kernels.cuda import ops
from gptfast.kernels.cuda.configurations import MAX_ROWS, Configuration
from gptfast.kernels.cuda.packing import PackedWeight, can_pack, pack, unpack
from tests.reference.quantized_weights import draw_k_quant, draw_quantized
from tests.reference.sessions import run_process

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU, tests/gpu runs the kernels on it"
)

EXACT = 2e-5
"""Of the norm: what integers in a mantissa leave of float32."""
OUT_FEATURES = 9


@pytest.fixture(autouse=True, scope="module")
def _operators() -> None:
    ops.register_operators()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pack_float8(weight: Tensor) -> PackedWeight:
    scales = weight.abs().amax(1) / 448
    return pack((weight / scales[:, None]).to(torch.float8_e4m3fn), scales)


def list_kinds(out_features: int, in_features: int) -> dict[str, PackedWeight]:
    """A matrix of that shape in every form that has a kernel."""
    kinds = {
        "bf16": pack(draw(out_features, in_features).bfloat16()),
        "fp16": pack(draw(out_features, in_features).half()),
        "fp8": pack_float8(draw(out_features, in_features)),
    }
    for bits, offset in itertools.product((4, 8), (None, "zeros", "mins")):
        for group_size in (16, 32, 64, 128, None):
            if in_features % (group_size or 1) == 0:
                weight = draw_quantized(out_features, in_features, bits, group_size, offset)
                if can_pack(weight):
                    kinds[f"int{bits} {group_size} {offset}"] = pack(weight)
    if in_features % 256 == 0:
        kinds |= {f"K-quant of {bits}": pack(draw_k_quant(out_features, in_features, bits)) for bits in (4, 6)}
    return kinds


def measure_error(found: Tensor, x: Tensor, weight: PackedWeight) -> float:
    expected = x.double() @ unpack(weight).double().T
    return float((found - expected).norm() / expected.norm())


def check(weight: PackedWeight, *row_counts: int) -> None:
    """By the kernel of one row and by that of several."""
    x = draw(max(row_counts), weight.in_features)
    assert measure_error(ops.linear(x[:1], weight), x[:1], weight) < EXACT
    for rows in row_counts:
        assert measure_error(ops.linear(x[:rows], weight, exact_rows=True), x[:rows], weight) < EXACT, rows


KINDS = list_kinds(OUT_FEATURES, 256)


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_gives_the_product_of_its_matrix(kind: str) -> None:
    check(KINDS[kind], 1, 5, MAX_ROWS)


def list_common_kinds(out_features: int, in_features: int) -> list[PackedWeight]:
    weights = [
        pack(draw(out_features, in_features).bfloat16()),
        pack(draw_quantized(out_features, in_features, 8, None)),
        pack(draw_quantized(out_features, in_features, 4, 32)),
        pack(draw_quantized(out_features, in_features, 4, 32, "mins")),
    ]
    if in_features % 128 == 0:
        weights.append(pack(draw_quantized(out_features, in_features, 4, 128)))
    return weights


@pytest.mark.parametrize(("out_features", "in_features"), [(8, 288), (5, 1536), (17, 576), (1, 32)])
def test_blocks_need_not_divide_a_matrix(out_features: int, in_features: int) -> None:
    for weight in list_common_kinds(out_features, in_features):
        check(weight, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("out_features", "in_features"), [(24, 11_008), (24, 14_336), (1_001, 288)])
def test_blocks_need_not_divide_a_large_matrix(out_features: int, in_features: int) -> None:
    for weight in list_common_kinds(out_features, in_features):
        check(weight, 1, 2)


@pytest.mark.parametrize(
    "configuration",
    [Configuration(8, 128, 1), Configuration(4, 128, 1), Configuration(4, 512, 2), Configuration(2, 256, 2)],
)
@pytest.mark.parametrize("kind", ["bf16", "int8 16 None", "int4 32 zeros", "int4 64 None"])
def test_a_product_does_not_depend_on_its_configuration(
    kind: str, configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "choose_configuration", lambda *args, **options: configuration)
    x = draw(1, 256)
    assert measure_error(ops.linear(x, KINDS[kind]), x, KINDS[kind]) < EXACT


@pytest.mark.parametrize(("block_words", "splits"), [(16, 1), (16, 2), (32, 1), (64, 1)])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8 64 None", "int8 None zeros", "int4 32 zeros", "int4 128 None"])
def test_several_rows_do_not_depend_on_their_configuration(
    kind: str, block_words: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = Configuration(16, block_words, 2, 2, splits)
    monkeypatch.setattr(ops, "choose_configuration", lambda *args, **options: configuration)
    x = draw(3, 256)
    assert measure_error(ops.linear(x, KINDS[kind]), x, KINDS[kind]) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: str) -> None:
    x = draw(MAX_ROWS, 256)
    together = ops.linear(x, KINDS[kind], exact_rows=True)
    for rows in (1, 2, 15):
        assert torch.equal(ops.linear(x[-rows:], KINDS[kind], exact_rows=True), together[-rows:]), rows
    x[0] = torch.nan
    assert torch.equal(ops.linear(x, KINDS[kind], exact_rows=True)[1:], together[1:])


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "int8 None None", "int4 64 zeros", "K-quant of 4"])
def test_many_rows_multiply_the_expanded_matrix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, bias = draw(40, 256), draw(OUT_FEATURES)
    whole = ops.linear(x, KINDS[kind], bias)
    assert measure_error(whole - bias, x, KINDS[kind]) < EXACT
    monkeypatch.setattr(ops, "SCRATCH_ELEMENTS", 4 * 256)
    torch.testing.assert_close(ops.linear(x, KINDS[kind], bias), whole)


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("kind", ["bf16", "int8 None None", "int4 32 None"])
def test_a_bias_is_added(kind: str, rows: int) -> None:
    x, bias = draw(rows, 256), draw(OUT_FEATURES, seed=1)
    found = ops.linear(x, KINDS[kind], bias)
    torch.testing.assert_close(found, x @ unpack(KINDS[kind]).T + bias, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_the_result_has_the_dtype_of_the_inputs(rows: int, dtype: torch.dtype) -> None:
    x = draw(rows, 256).to(dtype)
    found = ops.linear(x, KINDS["int4 64 None"])
    assert found.dtype == dtype
    assert measure_error(found.double(), x, KINDS["int4 64 None"]) < 1e-2


@pytest.mark.parametrize("in_features", [33, 90])
def test_one_scale_per_channel_takes_any_width(in_features: int) -> None:
    weights = [
        pack(draw(5, in_features).half()),
        *(pack(draw_quantized(5, in_features, bits, None)) for bits in (4, 8)),
    ]
    x = draw(20, in_features)
    for weight, rows in itertools.product(weights, (1, 2, 20)):
        assert measure_error(ops.linear(x[:rows], weight), x[:rows], weight) < EXACT


def test_inputs_of_any_shape_and_layout() -> None:
    weight, x = KINDS["int4 32 None"], draw(256, 12).T
    flat = ops.linear(x.contiguous(), weight)
    assert torch.equal(ops.linear(x, weight), flat)
    assert torch.equal(ops.linear(x.reshape(3, 4, 256), weight), flat.view(3, 4, OUT_FEATURES))
    assert ops.linear(x[:0], weight).shape == (0, OUT_FEATURES)


@pytest.mark.parametrize("kind", ["bf16", "int8 128 zeros", "int4 32 None"])
def test_a_nan_in_the_inputs_reaches_every_output_of_its_row(kind: str) -> None:
    x = draw(2, 256)
    x[1, 5] = torch.nan
    found = ops.linear(x, KINDS[kind])
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
    assert ops.linear(x[1:], KINDS[kind]).isnan().all()


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("rows", [1, MAX_ROWS])
def test_few_rows_make_no_buffer_of_the_size_of_the_matrix(rows: int) -> None:
    weight, x = pack(draw_quantized(64, 256, 4, 32)), draw(rows, 256)
    with LargestTensor() as largest:
        ops.linear(x, weight)
    assert largest.elements <= x.numel()


@pytest.mark.parametrize("kind", ["bf16", "int4 32 zeros"])
def test_operators_are_what_they_say_to_the_compiler(kind: str) -> None:
    weight, x, bias = KINDS[kind], draw(3, 256), draw(OUT_FEATURES)
    tensors = weight.words, weight.scales, weight.mins, bias, weight.kind
    operators = torch.ops.gptfast
    inputs = ops.arrange_inputs(x[:1], weight.kind).contiguous()
    torch.library.opcheck(operators.cuda_multiply_vector.default, (inputs, *tensors, torch.bfloat16))
    inputs = ops.arrange_rows(x, weight.kind).contiguous()
    torch.library.opcheck(operators.cuda_multiply_rows.default, (inputs, *tensors))
    torch.library.opcheck(operators.cuda_multiply_matrix.default, (x, *tensors))


def test_a_run_on_a_cpu_does_without_triton(directory: Path) -> None:
    program = f"""
import sys, gptfast
session = gptfast.load({str(directory)!r})
gptfast.generate(session, "Once", max_new_tokens=2)
from gptfast.kernels.cuda import ops
ops.register_operators()
print("triton" in sys.modules, "gptfast.kernels.cuda.linear" in sys.modules)
"""
    outcome = run_process("-c", program)
    assert outcome.stdout == "False False\n", outcome.stderr
