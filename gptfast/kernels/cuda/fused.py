"""The products of a decoding step with all that stands between them, in Triton: four kernels of a layer, and the ends.

Shapes: B batch, S tokens in this call, M = B * S <= 16 rows, H query heads, K key/value heads, D head_dim, L cache
slots, E dim, F ffn_dim, V vocabulary, and those of `gptfast.kernels.cuda.linear`.

The residual stream x (M, E) is in the model's dtype and changes in place. What adds to it also writes what the next
product reads: g * x, with that product's gains g, in the order of its words, and sums of squares of x, one of each
program. RMSNorm is linear but for one number a row, so the next product multiplies its sums by that, and no program
reads x or computes a norm that another one has computed. Rows that are needed together, the two of a rotary pair or of
a SwiGLU, are read by one program from where they lie.

A kernel starts while the one before it still runs, if `pdl` (programmatic dependent launch; sm_90 on). So each lets the
next one start, loads weights, which nobody writes, waits for the end of the one before, and only then reads what that
or any before it wrote, and writes. All wait, so what one may read all that follow may.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# The arguments of kernels have the types of Triton's own language.

from __future__ import annotations

import triton
import triton.language as tl

from gptfast.kernels.cuda.fused_sums import (
    HEADROOM,
    compute_norm,
    list_inputs,
    load_squares,
    locate_rows,
    multiply,
    split_pairs,
    start,
    store_inputs,
    store_normed,
)
from gptfast.kernels.cuda.linear_sums import make_operand


@triton.jit(do_not_specialize=["magic", "M", "S", "L"], do_not_specialize_on_alignment=["scales", "mins"])
def project_qkv(
    q,
    k_cache,
    v_cache,
    planes,
    squares,
    words,
    scales,
    mins,
    bias,
    cos,
    sin,
    input_pos,
    M,
    S,
    L,
    magic,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    has_batch: tl.constexpr,
    E: tl.constexpr,
    eps: tl.constexpr,
    parts: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    zero: tl.constexpr,
    operand: tl.constexpr,
    is_vector: tl.constexpr,
    even_rows: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
    splits: tl.constexpr,
    pdl: tl.constexpr,
):
    """RMSNorm, wqkv and rotary embedding: queries (B, S, H, D), and keys and values into the cache's slots `input_pos`.

    A program computes block_rows / 2 pairs (i, i + D / 2) of heads; those of values are pairs that are not rotated.
    """
    half: tl.constexpr = D // 2
    N: tl.constexpr = (H + 2 * K) * D
    rows, weight = locate_rows(N, half, even_rows, block_rows), (words, scales, mins)
    first, last, _ = rows
    block = start(weight, rows, W, G, operand, half, block_rows, block_words, splits, pdl)
    m = list_inputs(is_vector)
    index = tl.arange(0, block_rows // 2)
    pair = first + tl.minimum(index, last)
    head, i = pair // half, pair % half
    is_stored = (m < M)[None, :] & (index <= last)[:, None]
    # A division by what is no constant would take some 20 instructions, for what is 1 almost always.
    token = m % S if has_batch else m
    batch = m // S if has_batch else tl.zeros_like(m)
    position = tl.load(input_pos + token, mask=m < M, other=0)
    angle = position[None, :] * half + i[:, None]
    c, s = tl.load(cos + angle), tl.load(sin + angle)
    square = load_squares(squares, m, M, parts)
    sums = multiply(
        planes, block, weight, M, rows, magic, W, G, P, kind, zero, operand, half, block_rows, block_words, splits
    )
    a, b = split_pairs(sums * compute_norm(planes, square, E, eps))
    if bias is not None:
        a += tl.load(bias + head * D + i).to(tl.float32)[:, None]
        b += tl.load(bias + head * D + half + i).to(tl.float32)[:, None]
    is_rotated = (head < H + K)[:, None]
    c = tl.where(is_rotated, c, 1.0)
    s = tl.where(is_rotated, s, 0.0)
    rotated = tl.join(a * c - b * s, b * c + a * s)

    element = i[:, None, None] + (tl.arange(0, 2) * half)[None, None, :]
    query = (m[None, :] * H + head[:, None])[:, :, None] * D + element
    tl.store(q + query, rotated, mask=(is_stored & (head < H)[:, None])[:, :, None])
    # A cache can have more elements than int32 counts; positions are int64.
    row = (batch * K)[None, :] + ((head - H) % K)[:, None]
    slot = (row * L + position[None, :])[:, :, None] * D + element
    tl.store(k_cache + slot, rotated, mask=(is_stored & (head >= H)[:, None] & is_rotated)[:, :, None])
    tl.store(v_cache + slot, rotated, mask=(is_stored & (head >= H + K)[:, None])[:, :, None])


@triton.jit(do_not_specialize=["magic", "M", "N"], do_not_specialize_on_alignment=["scales", "mins"])
def add_product(
    x,
    next_planes,
    next_squares,
    gains,
    planes,
    words,
    scales,
    mins,
    bias,
    M,
    N,
    magic,
    next_W: tl.constexpr,
    next_P: tl.constexpr,
    next_kind: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    zero: tl.constexpr,
    operand: tl.constexpr,
    is_vector: tl.constexpr,
    even_rows: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
    splits: tl.constexpr,
    pdl: tl.constexpr,
):
    """A product that is added to the residual stream x (M, N), which then becomes the next product's inputs."""
    rows, weight = locate_rows(N, 0, even_rows, block_rows), (words, scales, mins)
    first, last, _ = rows
    block = start(weight, rows, W, G, operand, 0, block_rows, block_words, splits, pdl)
    m = list_inputs(is_vector)
    index = tl.arange(0, block_rows)
    n = first + tl.minimum(index, last)
    gain = tl.load(gains + n).to(tl.float32)[:, None]
    is_stored = (m < M)[None, :] & (index <= last)[:, None]
    residual = x + m[None, :] * N + n[:, None]
    before = tl.load(residual, mask=is_stored, other=0).to(tl.float32)
    sums = multiply(
        planes, block, weight, M, rows, magic, W, G, P, kind, zero, operand, 0, block_rows, block_words, splits
    )
    if bias is not None:
        sums += tl.load(bias + n).to(tl.float32)[:, None]
    # What follows sees what the stream holds, not what was rounded away.
    after = (before + sums).to(x.dtype.element_ty)
    tl.store(residual, after, mask=is_stored)
    store_normed(
        next_planes,
        next_squares,
        tl.program_id(0),
        m,
        n,
        after.to(tl.float32),
        gain,
        is_stored,
        M,
        tl.num_programs(0),
        next_W,
        next_P,
        next_kind,
        is_vector,
    )


@triton.jit(do_not_specialize=["magic", "M"], do_not_specialize_on_alignment=["scales", "mins"])
def project_swiglu(
    next_planes,
    planes,
    squares,
    words,
    scales,
    mins,
    M,
    magic,
    F: tl.constexpr,
    E: tl.constexpr,
    eps: tl.constexpr,
    parts: tl.constexpr,
    next_W: tl.constexpr,
    next_P: tl.constexpr,
    next_kind: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    zero: tl.constexpr,
    operand: tl.constexpr,
    is_vector: tl.constexpr,
    even_rows: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
    splits: tl.constexpr,
    pdl: tl.constexpr,
):
    """RMSNorm, w13 and SwiGLU: the inputs of w2. A program computes block_rows / 2 pairs (i, i + F)."""
    rows, weight = locate_rows(2 * F, F, even_rows, block_rows), (words, scales, mins)
    first, last, _ = rows
    block = start(weight, rows, W, G, operand, F, block_rows, block_words, splits, pdl)
    m = list_inputs(is_vector)
    square = load_squares(squares, m, M, parts)
    sums = multiply(
        planes, block, weight, M, rows, magic, W, G, P, kind, zero, operand, F, block_rows, block_words, splits
    )
    gate, up = split_pairs(sums * compute_norm(planes, square, E, eps))
    index = tl.arange(0, block_rows // 2)
    is_stored = (m < M)[None, :] & (index <= last)[:, None]
    store_inputs(
        next_planes,
        m[None, :],
        (first + tl.minimum(index, last))[:, None],
        gate * tl.sigmoid(gate) * up,
        is_stored,
        next_W,
        next_P,
        next_kind,
        is_vector,
    )


@triton.jit(do_not_specialize=["magic", "M", "N"], do_not_specialize_on_alignment=["scales", "mins"])
def project_head(
    logits,
    planes,
    squares,
    words,
    scales,
    mins,
    M,
    N,
    magic,
    E: tl.constexpr,
    eps: tl.constexpr,
    parts: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    zero: tl.constexpr,
    operand: tl.constexpr,
    is_vector: tl.constexpr,
    even_rows: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
    splits: tl.constexpr,
    pdl: tl.constexpr,
):
    """RMSNorm and the output layer: logits (M, N) float32."""
    rows, weight = locate_rows(N, 0, even_rows, block_rows), (words, scales, mins)
    first, last, _ = rows
    block = start(weight, rows, W, G, operand, 0, block_rows, block_words, splits, pdl)
    m = list_inputs(is_vector)
    square = load_squares(squares, m, M, parts)
    sums = multiply(
        planes, block, weight, M, rows, magic, W, G, P, kind, zero, operand, 0, block_rows, block_words, splits
    )
    index = tl.arange(0, block_rows)
    is_stored = (m < M)[None, :] & (index <= last)[:, None]
    n = first + tl.minimum(index, last)
    tl.store(logits + m[None, :] * N + n[:, None], sums * compute_norm(planes, square, E, eps), mask=is_stored)


@triton.jit(do_not_specialize=["E"], do_not_specialize_on_alignment=["tokens"])
def embed(
    x,
    planes,
    squares,
    gains,
    tokens,
    words,
    scales,
    mins,
    E,
    parts: tl.constexpr,
    next_W: tl.constexpr,
    next_P: tl.constexpr,
    next_kind: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    zero: tl.constexpr,
    is_vector: tl.constexpr,
    block_words: tl.constexpr,
):
    """The rows of these tokens (M,) int64 as the residual stream x (M, E), and as the first product's inputs.

    A program (M,) makes a row, of a matrix of words or, with P = 1, of elements.
    """
    m = tl.program_id(0)
    token = tl.load(tokens + m)
    unit: tl.constexpr = 128.0 if kind == "int4" or kind == "int8" else 1.0
    square = tl.zeros((block_words,), tl.float32)
    for start_word in range(0, W, block_words):
        word = start_word + tl.arange(0, block_words)
        inside = word < W
        tile = tl.load(words + token * W + word, mask=inside, other=0)
        for i in tl.static_range(P):
            value = tile.to(tl.float32) if P == 1 else make_operand(tile, i, kind, zero)
            if scales is not None:
                group = token * G + word // (W // G)
                value *= tl.load(scales + group, mask=inside, other=0).to(tl.float32) * unit
                if mins is not None:
                    value += tl.load(mins + group, mask=inside, other=0).to(tl.float32)
            n = word * P + i
            is_element = n < E
            rounded = value.to(x.dtype.element_ty)
            tl.store(x + m * E + n, rounded, mask=is_element)
            value = tl.where(is_element, rounded.to(tl.float32), 0)
            square += value * value
            value *= tl.load(gains + n, mask=is_element, other=0).to(tl.float32)
            if planes.dtype.element_ty == tl.float16:
                value /= HEADROOM
            store_inputs(planes, m, n, value, is_element, next_W, next_P, next_kind, is_vector)
    part = tl.arange(0, triton.next_power_of_2(parts))
    tl.store(squares + m * parts + part, tl.where(part == 0, tl.sum(square), 0), mask=part < parts)
