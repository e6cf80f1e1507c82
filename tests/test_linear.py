"""The product of a single row, which is written out where it is compiled for a CPU."""

from __future__ import annotations

import pytest
import torch

from gptfast.compilation import compile_function
from gptfast.linear import multiply


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 65, 33), (1, 8, 576), (3, 65, 33)])
def test_the_compiled_product_equals_the_exact_one(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n * k)
    x = torch.randn(1, rows, k, generator=generator).to(dtype)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    found = compile_function(multiply)(x, weight, bias)
    assert found.shape == (1, rows, n)
    assert found.dtype == dtype
    # The sum is float32; the result and, in bfloat16, the sum before the bias are rounded once each.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * k**0.5)


def test_a_strided_row_is_read_as_it_lies() -> None:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    table = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    row = table[:, 1].view(1, 1, 16)
    assert row.stride(-1) != 1
    torch.testing.assert_close(compile_function(multiply)(row, weight), row @ weight.T)
