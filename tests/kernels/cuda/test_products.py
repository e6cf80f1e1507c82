"""Products with random matrices: what they are of, and what they are found by."""

from __future__ import annotations

import pytest
import torch

from gptfast.kernels.cuda.configurations import Configuration
from gptfast.kernels.cuda.packing import pack, unpack
from gptfast.kernels.cuda.products import Format, Product, describe_packed, draw_packed, find_format
from tests.reference.quantized_weights import draw_quantized

FORMATS = (
    Format("bf16"),
    Format("fp16"),
    Format("fp8"),
    Format("int8"),
    Format("int8", 32, has_mins=True),
    Format("int4", 32),
    Format("int4", None, has_mins=True),
)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_random_matrices_have_products_near_one_and_are_described_as_they_are(form: Format) -> None:
    weight = draw_packed(form, 64, 256, torch.Generator().manual_seed(0))
    assert weight.shape == (64, 256)
    assert find_format(weight) == form
    size = unpack(weight).norm() / 64**0.5
    assert 0.5 < size < (1.5 if not form.has_mins or form.kind == "int4" else 3)
    described = describe_packed(form, 64, 256)
    for name in ("words", "scales", "mins"):
        ours, other = getattr(weight, name), getattr(described, name)
        assert (ours is None) == (other is None)
        assert ours is None or (ours.shape, ours.dtype, other.device.type) == (other.shape, other.dtype, "meta")


def test_a_matrix_of_a_model_is_drawn_in_its_form() -> None:
    weight = pack(draw_quantized(16, 96, 4, 32, "mins"))
    form = find_format(weight)
    assert form == Format("int4", 32, has_mins=True)
    drawn = describe_packed(form, 16, weight.width)
    assert (drawn.words.shape, drawn.group_size) == (weight.words.shape, weight.group_size)


@pytest.mark.parametrize(
    ("product", "key"),
    [
        (Product(Format("int4", 128), 8, 256, 1), ("int4", False, 8, 256, 128)),
        (Product(Format("int4", 128), 8, 128, 5), ("int4", True, 8, 128, 0)),  # one group is a row's scale
        (Product(Format("bf16"), 8, 90, 1, exact_rows=True), ("bf16", True, 8, 96, 0)),
    ],
)
def test_a_product_is_found_as_its_operator_finds_it(product: Product, key: tuple[object, ...]) -> None:
    assert product.key == key


def test_a_product_has_its_own_configuration_or_that_in_use() -> None:
    product = Product(Format("int4", 32), 4096, 4096, 1)
    assert product.find_configuration(None) == Configuration(8, 512, 4)
    own = Product(Format("int4", 32), 4096, 4096, 1, configuration=Configuration(2, 256, 2))
    assert own.find_configuration(None) == Configuration(2, 256, 2)
