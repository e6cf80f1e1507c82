"""The fused step's products under Triton's interpreter, against the same formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptfast.kernels.cuda import fused_ops as fused
from gptfast.kernels.cuda.configurations import MAX_ROWS
from gptfast.kernels.cuda.packing import PackedWeight, arrange_inputs, arrange_rows, pack, unpack
from gptfast.model import apply_rope
from tests.reference.quantized_weights import draw_k_quant, draw_quantized

pytest.importorskip("triton")

EPS = 1e-5
EXACT = 2e-5
"""Of the norm: what integers in a mantissa leave of float32."""
KINDS = ("bf16", "fp16", "fp8", "int8", "int8 32 zeros", "int4", "int4 32", "int4 128", "int4 64 mins", "K-quant")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_matrix(kind: str, out_features: int, in_features: int) -> PackedWeight:
    """A matrix in the named form, of a magnitude that leaves outputs near 1."""
    name, *rest = kind.split()
    if name == "K-quant":
        return pack(draw_k_quant(out_features, in_features, 4))
    if name.startswith("int"):
        group, offset = (int(rest[0]) if rest else None), (rest[1] if len(rest) > 1 else None)
        return pack(draw_quantized(out_features, in_features, int(name[3:]), group, offset))  # type: ignore[arg-type]
    dense = draw(out_features, in_features) / in_features**0.5
    if name == "fp8":
        scales = dense.abs().amax(1) / 448
        return pack((dense / scales[:, None]).to(torch.float8_e4m3fn), scales)
    return pack(dense.to(torch.bfloat16 if name == "bf16" else torch.float16))


def measure_error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm())


def make_plain_inputs(x: Tensor, weight: PackedWeight, *, exact_rows: bool = False) -> fused.Inputs:
    """What a kernel before would have left of x (M, K)."""
    inputs = fused.make_inputs(weight, x.shape[0], x.dtype, exact_rows=exact_rows)
    inputs.planes.copy_((arrange_inputs if inputs.is_vector else arrange_rows)(x, weight.kind))
    return inputs


def make_normed_inputs(x: Tensor, gains: Tensor, weight: PackedWeight, *, exact_rows: bool = False) -> fused.Inputs:
    """What `embed` leaves of the rows of x."""
    inputs = fused.make_inputs(weight, x.shape[0], x.dtype, exact_rows=exact_rows, is_normed=True)
    fused.embed(torch.empty_like(x), inputs, gains, torch.arange(x.shape[0]), x, pdl=False)
    return inputs


def multiply(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.double() @ unpack(weight).double().T


def normalize(x: Tensor, gains: Tensor) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * gains.double()


def check_head(kind: str, vocab: int, dim: int, rows: int, *, exact_rows: bool = False) -> None:
    weight, x, gains = make_matrix(kind, vocab, dim), draw(rows, dim), draw(dim, seed=1)
    logits = torch.full((rows, vocab), torch.nan)
    fused.project_head(logits, make_normed_inputs(x, gains, weight, exact_rows=exact_rows), EPS, weight, pdl=False)
    assert measure_error(logits, multiply(normalize(x, gains), weight)) < EXACT


@pytest.mark.parametrize(("rows", "exact_rows"), [(1, False), (1, True), (5, False), (MAX_ROWS, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_head_is_a_product_with_normed_inputs(kind: str, rows: int, exact_rows: bool) -> None:
    check_head(kind, 33, 256, rows, exact_rows=exact_rows)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("vocab", "dim"), [(9, 576), (5, 1536), (1, 32), (6, 288)])
def test_blocks_need_not_divide_the_head(vocab: int, dim: int, rows: int) -> None:
    for kind in ("bf16", "int8", "int4 32"):
        check_head(kind, vocab, dim, rows)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [8192, 11_008, 14_336])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8", "int8 32 zeros", "int4 32", "int4 64 mins", "int4"])
def test_a_row_may_be_long(kind: str, dim: int) -> None:
    check_head(kind, 9, dim, 1)
    check_head(kind, 9, dim, 2)


def check_qkv(
    kind: str, heads: int, kv_heads: int, dim: int, *, batch: int, tokens: int, has_bias: bool, exact_rows: bool = False
) -> None:
    slots, width, rows = 40, 64 if kind != "K-quant" and "128" not in kind else 256, batch * tokens
    weight = make_matrix(kind, (heads + 2 * kv_heads) * dim, width)
    x, gains = draw(rows, width), draw(width, seed=1)
    bias = draw(weight.shape[0], seed=2) if has_bias else None
    angles = draw(slots, dim // 2, seed=3)
    # The last slots of the cache, not all in a row.
    input_pos = torch.arange(slots - 2 * tokens + 1, slots, 2)[-tokens:]
    caches = [draw(batch + 1, kv_heads, slots, dim, seed=seed) for seed in (4, 5)]
    expected_caches = [cache.double() for cache in caches]
    q = torch.full((batch, tokens, heads, dim), torch.nan)
    inputs = make_normed_inputs(x, gains, weight, exact_rows=exact_rows)
    fused.project_qkv(q, inputs, EPS, weight, bias, angles.cos(), angles.sin(), input_pos, *caches, pdl=False)

    product = multiply(normalize(x, gains), weight) + (0 if bias is None else bias.double())
    parts = product.view(batch, tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=2)
    cos, sin = angles.cos()[input_pos, None].double(), angles.sin()[input_pos, None].double()
    assert measure_error(q, apply_rope(parts[0], cos, sin)) < EXACT
    expected_caches[0][:batch, :, input_pos] = apply_rope(parts[1], cos, sin).transpose(1, 2).double()
    expected_caches[1][:batch, :, input_pos] = parts[2].transpose(1, 2)
    for cache, expected in zip(caches, expected_caches, strict=True):
        assert measure_error(cache[:batch, :, input_pos], expected[:batch, :, input_pos]) < EXACT
        expected[:batch, :, input_pos] = cache[:batch, :, input_pos].double()
        assert torch.equal(cache.double(), expected), "no other slot is touched"


@pytest.mark.parametrize(("batch", "tokens", "exact_rows"), [(1, 1, False), (1, 1, True), (3, 2, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_queries_are_rotated_and_keys_and_values_are_cached(
    kind: str, batch: int, tokens: int, exact_rows: bool
) -> None:
    check_qkv(kind, 2, 1, 16, batch=batch, tokens=tokens, has_bias=False, exact_rows=exact_rows)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 1), (1, 16), (2, 5)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 8), (4, 2, 10), (1, 1, 2), (2, 1, 96)])
def test_heads_may_be_of_any_even_size(heads: int, kv_heads: int, dim: int, batch: int, tokens: int) -> None:
    check_qkv("int8", heads, kv_heads, dim, batch=batch, tokens=tokens, has_bias=True)


def check_sum(kind: str, dim: int, width: int, rows: int, *, has_bias: bool = False, exact_rows: bool = False) -> None:
    """The residual stream, and what the next product makes of what is left to it."""
    weight, following_weight = make_matrix(kind, dim, width), make_matrix("int4", 7, dim)
    x, inputs, gains = draw(rows, dim), draw(rows, width, seed=1), draw(dim, seed=2)
    bias = draw(dim, seed=3) if has_bias else None
    expected = x.double() + multiply(inputs, weight) + (0 if bias is None else bias.double())
    following = fused.make_inputs(
        following_weight, rows, x.dtype, exact_rows=exact_rows, follows=weight, is_normed=True
    )
    plain = make_plain_inputs(inputs, weight, exact_rows=exact_rows)
    fused.add_product(x, following, gains, plain, weight, bias, pdl=False)
    assert measure_error(x, expected) < EXACT
    again = make_normed_inputs(x, gains, following_weight, exact_rows=exact_rows)
    assert torch.equal(following.planes, again.planes)
    assert following.squares is not None
    assert again.squares is not None
    torch.testing.assert_close(following.squares.sum(1), again.squares.sum(1))


@pytest.mark.parametrize(("rows", "exact_rows"), [(1, False), (1, True), (5, False), (MAX_ROWS, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_added_in_place_and_becomes_the_next_inputs(kind: str, rows: int, exact_rows: bool) -> None:
    check_sum(kind, 33, 256, rows, exact_rows=exact_rows)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("dim", "width"), [(64, 576), (30, 1536), (96, 32)])
def test_a_sum_may_have_a_bias_and_any_shape(dim: int, width: int, rows: int) -> None:
    for kind in ("bf16", "int8", "int4 32"):
        check_sum(kind, dim, width, rows, has_bias=True)


def check_swiglu(kind: str, ffn_dim: int, rows: int, *, exact_rows: bool = False) -> None:
    weight, x, gains = make_matrix(kind, 2 * ffn_dim, 256), draw(rows, 256), draw(256, seed=1)
    gate, up = multiply(normalize(x, gains), weight).chunk(2, dim=-1)
    expected = F.silu(gate) * up
    for next_kind in ("bf16", "fp16", "fp8", "int8", "int4"):
        next_weight = make_matrix(next_kind, 3, ffn_dim)
        out = fused.make_inputs(next_weight, rows, x.dtype, exact_rows=exact_rows)
        inputs = make_normed_inputs(x, gains, weight, exact_rows=exact_rows)
        fused.project_swiglu(out, inputs, EPS, weight, pdl=False)
        arrange = arrange_inputs if out.is_vector else arrange_rows
        assert measure_error(out.planes, arrange(expected, next_weight.kind).double()) < 5 * EXACT


@pytest.mark.parametrize(("rows", "exact_rows"), [(1, False), (1, True), (5, False), (MAX_ROWS, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_swiglu_becomes_the_next_inputs(kind: str, rows: int, exact_rows: bool) -> None:
    check_swiglu(kind, 40, rows, exact_rows=exact_rows)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("ffn_dim", [7, 1, 100])
def test_any_number_of_gates(ffn_dim: int, rows: int) -> None:
    check_swiglu("int4 32", ffn_dim, rows)
