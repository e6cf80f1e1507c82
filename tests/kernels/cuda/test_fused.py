"""The fused step's products under Triton's interpreter, against the same formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptfast.kernels.cuda import fused_ops as fused
from gptfast.kernels.cuda import ops
from gptfast.kernels.cuda.configurations import MAX_ROWS, Configuration
from gptfast.kernels.cuda.packing import WEIGHTS_PER_WORD, PackedWeight, arrange_inputs, arrange_rows, pack, unpack
from tests.reference.quantized_weights import draw_k_quant, draw_quantized

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU, tests/gpu runs the kernels on it"
)

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
    fused.embed(torch.empty_like(x), inputs, gains, torch.arange(x.shape[0]), x)
    return inputs


def multiply(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.double() @ unpack(weight).double().T


def normalize(x: Tensor, gains: Tensor) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * gains.double()


@pytest.fixture
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one row of inputs, programs as they are of a large matrix, which for a small one would be of 2 rows."""

    def find_configuration(rows: int, *args: Any, exact_rows: bool) -> Configuration:
        chosen = ops.find_configuration(rows, *args, exact_rows=exact_rows)
        return chosen if rows > 1 or exact_rows else Configuration(8, 128, 1)

    monkeypatch.setattr(fused, "find_configuration", find_configuration)


FORMS = pytest.mark.parametrize(("rows", "exact_rows"), [(1, False), (1, True), (5, False)])


def check_head(kind: str, vocab: int, dim: int, rows: int, *, exact_rows: bool = False) -> None:
    weight, x, gains = make_matrix(kind, vocab, dim), draw(rows, dim), draw(dim, seed=1)
    logits = torch.full((rows, vocab), torch.nan)
    fused.project_head(logits, make_normed_inputs(x, gains, weight, exact_rows=exact_rows), EPS, weight, pdl=False)
    assert measure_error(logits, multiply(normalize(x, gains), weight)) < EXACT


@FORMS
@pytest.mark.parametrize("kind", KINDS)
def test_the_head_is_a_product_with_normed_inputs(kind: str, rows: int, exact_rows: bool) -> None:
    check_head(kind, 9, 256, rows, exact_rows=exact_rows)


@pytest.mark.parametrize(("vocab", "dim"), [(9, 576), (1, 32), (6, 288)])
def test_blocks_need_not_divide_the_head(vocab: int, dim: int) -> None:
    for kind in ("bf16", "int8", "int4 32"):
        check_head(kind, vocab, dim, 1)
        check_head(kind, vocab, dim, 3)


@pytest.mark.parametrize(("kind", "dim"), [("bf16", 512), ("bf16", 576), ("int8 32 zeros", 1024), ("int4 128", 3072)])
def test_a_row_may_take_several_blocks(kind: str, dim: int, large_blocks: None) -> None:
    check_head(kind, 16, dim, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [8192, 11_008, 14_336])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8", "int8 32 zeros", "int4 32", "int4 64 mins", "int4"])
def test_a_row_may_be_long(kind: str, dim: int) -> None:
    check_head(kind, 9, dim, 1)
    check_head(kind, 9, dim, MAX_ROWS)


def check_qkv(
    kind: str,
    heads: int,
    kv_heads: int,
    dim: int,
    batch: int,
    tokens: int,
    *,
    has_bias: bool = False,
    exact_rows: bool = False,
) -> None:
    slots, width, rows = 40, 256, batch * tokens
    weight = make_matrix(kind, (heads + 2 * kv_heads) * dim, width)
    x, gains = draw(rows, width), draw(width, seed=1)
    bias = draw(weight.shape[0], seed=2) if has_bias else None
    angles = draw(slots, dim // 2, seed=3)
    # Up to the last slot of the cache, and not all in a row.
    input_pos = torch.arange(slots - 2 * tokens + 1, slots, 2)
    caches = [draw(batch + 1, kv_heads, slots, dim, seed=seed) for seed in (4, 5)]
    expected_caches = [cache.double() for cache in caches]
    q = torch.full((batch, tokens, heads, dim), torch.nan)
    inputs = make_normed_inputs(x, gains, weight, exact_rows=exact_rows)
    fused.project_qkv(q, inputs, EPS, weight, bias, angles.cos(), angles.sin(), input_pos, *caches, pdl=False)

    product = multiply(normalize(x, gains), weight) + (0 if bias is None else bias.double())
    parts = product.view(batch, tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=2)
    cos, sin = angles.cos()[input_pos, None].double(), angles.sin()[input_pos, None].double()
    assert measure_error(q, rotate(parts[0], cos, sin)) < EXACT
    written = [rotate(parts[1], cos, sin).transpose(1, 2), parts[2].transpose(1, 2)]
    for cache, expected, values in zip(caches, expected_caches, written, strict=True):
        assert measure_error(cache[:batch, :, input_pos], values) < EXACT
        expected[:batch, :, input_pos] = cache[:batch, :, input_pos].double()
        assert torch.equal(cache.double(), expected), "no other slot is touched"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`model.apply_rope` in float64."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@FORMS
@pytest.mark.parametrize("kind", KINDS)
def test_queries_are_rotated_and_keys_and_values_are_cached(
    kind: str, rows: int, exact_rows: bool, large_blocks: None
) -> None:
    check_qkv(kind, 2, 1, 8, 1, rows, exact_rows=exact_rows)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 5)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 1, 10), (3, 3, 4), (1, 1, 2), (1, 1, 24)])
def test_heads_may_be_of_any_even_size(
    heads: int, kv_heads: int, dim: int, batch: int, tokens: int, large_blocks: None
) -> None:
    check_qkv("int8", heads, kv_heads, dim, batch, tokens, has_bias=True)


def test_every_row_of_a_batch_has_its_cache() -> None:
    check_qkv("bf16", 2, 1, 8, 4, 1)
    check_qkv("bf16", 2, 1, 8, 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, MAX_ROWS)])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4 128"])
def test_heads_of_common_sizes(kind: str, dim: int, batch: int, tokens: int) -> None:
    check_qkv(kind, 4, 2, dim, batch, tokens, has_bias=True)


def check_sum(kind: str, dim: int, width: int, rows: int, *, has_bias: bool = False, exact_rows: bool = False) -> None:
    """The residual stream, and what is left to the next product."""
    weight, next_weight = make_matrix(kind, dim, width), make_matrix("int4", 7, dim)
    x, inputs, gains = draw(rows, dim), draw(rows, width, seed=1), draw(dim, seed=2)
    bias = draw(dim, seed=3) if has_bias else None
    expected = x.double() + multiply(inputs, weight) + (0 if bias is None else bias.double())
    following = fused.make_inputs(next_weight, rows, x.dtype, exact_rows=exact_rows, follows=weight, is_normed=True)
    plain = make_plain_inputs(inputs, weight, exact_rows=exact_rows)
    fused.add_product(x, following, gains, plain, weight, bias, pdl=False)
    assert measure_error(x, expected) < EXACT
    again = make_normed_inputs(x, gains, next_weight, exact_rows=exact_rows)
    assert torch.equal(following.planes, again.planes)
    assert following.squares is not None
    torch.testing.assert_close(following.squares.sum(1), x.square().sum(1))


@FORMS
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_added_in_place_and_becomes_the_next_inputs(
    kind: str, rows: int, exact_rows: bool, large_blocks: None
) -> None:
    check_sum(kind, 19, 256, rows, exact_rows=exact_rows)


@pytest.mark.parametrize(("dim", "width"), [(10, 576), (9, 32)])
def test_a_sum_may_have_a_bias_and_any_shape(dim: int, width: int) -> None:
    for kind in ("bf16", "int4 32"):
        check_sum(kind, dim, width, 1, has_bias=True)
        check_sum(kind, dim, width, 3, has_bias=True)


def check_swiglu(kind: str, ffn_dim: int, rows: int, next_kind: str, *, exact_rows: bool = False) -> None:
    weight, next_weight = make_matrix(kind, 2 * ffn_dim, 256), make_matrix(next_kind, 3, ffn_dim)
    x, gains = draw(rows, 256), draw(256, seed=1)
    out = fused.make_inputs(next_weight, rows, x.dtype, exact_rows=exact_rows)
    inputs = make_normed_inputs(x, gains, weight, exact_rows=exact_rows)
    fused.project_swiglu(out, inputs, EPS, weight, pdl=False)
    gate, up = multiply(normalize(x, gains), weight).chunk(2, dim=-1)
    arrange = arrange_inputs if out.is_vector else arrange_rows
    assert measure_error(out.planes, arrange(F.silu(gate) * up, next_weight.kind).double()) < 5 * EXACT


@FORMS
@pytest.mark.parametrize(
    ("kind", "next_kind"), [(kind, kind) for kind in WEIGHTS_PER_WORD] + [("int4 64 mins", "bf16"), ("bf16", "int4")]
)
def test_swiglu_becomes_the_next_inputs(
    kind: str, next_kind: str, rows: int, exact_rows: bool, large_blocks: None
) -> None:
    check_swiglu(
        kind, 256 if next_kind == "K-quant" or " " in next_kind else 40, rows, next_kind, exact_rows=exact_rows
    )


@pytest.mark.parametrize("ffn_dim", [7, 1])
def test_any_number_of_gates(ffn_dim: int, large_blocks: None) -> None:
    check_swiglu("int4 32", ffn_dim, 1, "int8")
    check_swiglu("int4 32", ffn_dim, 2, "int8")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_begins_the_stream_and_the_first_inputs(kind: str, rows: int) -> None:
    table, weight, gains = make_matrix(kind, 20, 256), make_matrix("int8", 3, 256), draw(256)
    tokens, x = torch.tensor([19, 0, 7])[:rows], torch.full((rows, 256), torch.nan)
    inputs = fused.make_inputs(weight, rows, x.dtype, exact_rows=False, follows=table, is_normed=True)
    assert inputs.squares is not None
    inputs.squares.fill_(torch.nan)
    fused.embed(x, inputs, gains, tokens, table)
    torch.testing.assert_close(x, unpack(table)[tokens])
    arrange = arrange_inputs if inputs.is_vector else arrange_rows
    torch.testing.assert_close(inputs.planes, arrange(x * gains, weight.kind))
    torch.testing.assert_close(inputs.squares.sum(1), x.square().sum(1))


def run_layer(x: Tensor, weights: dict[str, PackedWeight], input_pos: Tensor, cache: Tensor) -> dict[str, Tensor]:
    """All kernels one after another, with queries in the place of what attention makes of them."""
    rows, dim = x.shape
    options = {"rows": rows, "dtype": x.dtype, "exact_rows": True}
    normed = {
        name: fused.make_inputs(weights[name], **options, follows=weights[before], is_normed=True)  # type: ignore[arg-type]
        for name, before in (("wqkv", "w2"), ("w13", "wo"), ("head", "w2"))
    }
    stream, gains = torch.empty_like(x), draw(dim, seed=9)
    caches = cache.clone(), cache.clone()
    q = x.new_empty(1, rows, 4, dim // 4)
    angles = draw(cache.shape[2], dim // 8, seed=3)
    tables = angles.cos(), angles.sin()
    fused.embed(stream, normed["wqkv"], gains, torch.arange(rows), x)
    fused.project_qkv(q, normed["wqkv"], EPS, weights["wqkv"], None, *tables, input_pos, *caches, pdl=False)
    attended = make_plain_inputs(q.view(rows, dim), weights["wo"], exact_rows=True)
    fused.add_product(stream, normed["w13"], gains, attended, weights["wo"], None, pdl=False)
    gated = fused.make_inputs(weights["w2"], **options)  # type: ignore[arg-type]
    fused.project_swiglu(gated, normed["w13"], EPS, weights["w13"], pdl=False)
    fused.add_product(stream, normed["head"], gains, gated, weights["w2"], None, pdl=False)
    logits = x.new_empty(rows, weights["head"].shape[0])
    fused.project_head(logits, normed["head"], EPS, weights["head"], pdl=False)
    keys, values = (each[0, :, input_pos].transpose(0, 1) for each in caches)
    return {"q": q[0], "keys": keys, "values": values, "stream": stream, "logits": logits}


@pytest.mark.parametrize(
    "kind",
    ["bf16", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fp8", "int8", "int4 32", "int4 32 mins"))],
)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: str) -> None:
    dim, ffn_dim = 64, 128
    shapes = {
        "wqkv": (6 * 16, dim),
        "wo": (dim, dim),
        "w13": (2 * ffn_dim, dim),
        "w2": (dim, ffn_dim),
        "head": (9, dim),
    }
    weights = {name: make_matrix(kind, *shape) for name, shape in shapes.items()}
    x, cache, input_pos = draw(5, dim), torch.zeros(1, 1, 12, dim // 4), torch.arange(7, 12)
    together = run_layer(x, weights, input_pos, cache)
    for start, stop in ((4, 5), (1, 3)):
        alone = run_layer(x[start:stop], weights, input_pos[start:stop], cache)
        for name, values in alone.items():
            assert torch.equal(values, together[name][start:stop]), name


def test_float16_holds_gains_times_a_large_stream() -> None:
    weight = make_matrix("fp16", 9, 64)
    x, gains = (draw(3, 64) * 10_000).half(), draw(64, seed=1) * 30
    inputs = make_normed_inputs(x, gains, weight)
    assert inputs.planes.dtype == torch.float16
    assert (x * gains.half()).isinf().any()
    logits = torch.empty(3, 9)
    fused.project_head(logits, inputs, EPS, weight, pdl=False)
    assert measure_error(logits, multiply(normalize(x, gains), weight)) < 1e-3
