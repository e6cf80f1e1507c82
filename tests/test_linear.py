"""Layers whose matrices are packed: their parts side by side, their bias, and the embedding that is the head too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gptfast.kernels import ops
from gptfast.kernels.packing import pack
from gptfast.linear import Embedding, PackedEmbedding, PackedLinear, PackedMatrix
from gptfast.quantization import WeightScheme
from gptfast.rounding import round_to_nearest

pytestmark = pytest.mark.skipif(not ops.has_cpu_kernels(), reason="there is no C++ compiler for the CPU kernels")

COLUMNS = 96


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pack_dense(weight: Tensor) -> PackedMatrix:
    rows, columns = weight.shape
    return PackedMatrix(pack(weight), (rows, columns), "float32")


@pytest.mark.parametrize("has_bias", [False, True])
def test_matrices_of_several_precisions_stand_side_by_side(has_bias: bool) -> None:
    dense, to_round = draw(40, COLUMNS, seed=1), draw(24, COLUMNS, seed=2)
    rounded = round_to_nearest(to_round, WeightScheme(bits=8, group_size=32), name="a matrix")
    parts = [pack_dense(dense), PackedMatrix(pack(rounded), (24, COLUMNS), "int8 g32"), pack_dense(draw(7, COLUMNS))]
    layer = PackedLinear(parts, rounds_inputs=False)
    bias = draw(71, seed=3)
    if has_bias:
        layer.bias = nn.Parameter(bias)
    x = draw(2, 3, COLUMNS, seed=4)
    expected = x @ torch.cat([dense, rounded.dequantize(), draw(7, COLUMNS)]).T + (bias if has_bias else 0)
    with torch.no_grad():
        found = layer(x)
    assert found.shape == (2, 3, 71)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert [precision for precision, _ in layer.list_matrices()] == ["float32", "int8 g32", "float32"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_is_read_by_rows_and_projected_onto_all_of_them(dtype: torch.dtype) -> None:
    weight = draw(50, COLUMNS)
    packed = PackedEmbedding(pack_dense(weight), dtype=dtype, rounds_inputs=False)
    dense = Embedding(50, COLUMNS)
    dense.weight = nn.Parameter(weight.to(dtype))
    tokens = torch.tensor([[0, 49, 7], [7, 7, 1]])
    assert torch.equal(packed(tokens), dense(tokens))
    x = draw(1, 4, COLUMNS, seed=5).to(dtype)
    logits = packed.project(x)
    assert logits.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(logits.float(), x.float() @ weight.T, rtol=0.01, atol=tolerance)


def test_a_layer_prints_all_that_its_compiled_code_depends_on() -> None:
    matrix = pack_dense(draw(8, COLUMNS))
    layers = [
        PackedLinear([matrix], rounds_inputs=False),
        PackedLinear([matrix], rounds_inputs=True),
        PackedLinear([matrix, matrix], rounds_inputs=False),
        PackedEmbedding(matrix, dtype=torch.float32, rounds_inputs=False),
        PackedEmbedding(matrix, dtype=torch.bfloat16, rounds_inputs=False),
    ]
    assert len({repr(layer) for layer in layers}) == len(layers)
