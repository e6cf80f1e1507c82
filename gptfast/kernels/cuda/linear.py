"""Products with packed matrices in Triton: one row of inputs by multiply-adds, up to 16 by tensor cores.

Shapes: M rows of inputs, N out_features, W words of a row, P weights of a word, G groups of a row.

`gptfast.kernels.cuda.packing` describes words and the order of inputs. Loops over constants are `tl.static_range`, and
what differs between kinds of weights is `tl.constexpr`, so nothing of it is left in the code that runs.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# The arguments of kernels have the types of Triton's own language.

from __future__ import annotations

import triton
import triton.language as tl

from gptfast.kernels.cuda.linear_sums import ROWS, add_words, finish_vector, load_block, make_operand, sum_rows

MAGIC = 0x3F800000
"""The bits of 1.0, for the kernels' argument: one instruction masks and merges with a register, two with a literal."""


@triton.jit(do_not_specialize=["magic"], do_not_specialize_on_alignment=["scales", "mins"])
def multiply_vector(
    out,
    x,
    words,
    scales,
    mins,
    bias,
    N,
    magic,
    W: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    zero: tl.constexpr,
    even_rows: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
):
    """One row of inputs: x (P, W) float32 as `arrange_inputs` makes them, out (N,); a program computes block_rows.

    All warps lie along a row: block_words is a multiple of 128 a warp, so that a thread holds 4 neighbouring words of
    every row of the block, and its 16 bytes lie in one group. To the compiler the scales are not aligned, as it would
    else load several at once, in another arrangement of threads, and exchange them through shared memory.
    """
    first = tl.program_id(0) * block_rows
    last = block_rows - 1 if even_rows else tl.minimum(N - 1 - first, block_rows - 1)
    words += first.to(tl.int64) * W
    if scales is not None:
        scales += first * G
    if mins is not None:
        mins += first * G
    has_mins: tl.constexpr = mins is not None
    total = tl.zeros((block_rows, block_words // 4), tl.float32)
    for start in range(0, W, block_words):
        tile, scale, least = load_block(
            words, scales, mins, first, last, start, W, G, 0, block_rows, block_words, False
        )
        total = add_words(
            total, x, tile, scale, least, start, magic, W, G, P, kind, zero, has_mins, block_rows, block_words
        )
    result = finish_vector(total, scales, mins, first, last, G, kind, 0, block_rows)
    row = tl.minimum(tl.arange(0, block_rows), last)
    if bias is not None:
        result += tl.load(bias + first + row).to(tl.float32)
    tl.store(out + first + row, result, mask=None if even_rows else tl.arange(0, block_rows) <= last)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["scales", "mins"])
def multiply_rows(
    out,
    x,
    words,
    scales,
    mins,
    bias,
    M,
    N,
    W: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    zero: tl.constexpr,
    operand: tl.constexpr,
    even_rows: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
    splits: tl.constexpr,
):
    """M <= 16 rows of inputs: x (M, P, W) as `arrange_rows` makes them, out (M, N); a program computes block_rows."""
    first = tl.program_id(0) * block_rows
    last = block_rows - 1 if even_rows else tl.minimum(N - 1 - first, block_rows - 1)
    words += first.to(tl.int64) * W
    if scales is not None:
        scales += first * G
    if mins is not None:
        mins += first * G
    result = sum_rows(
        x, words, scales, mins, M, first, last, W, G, P, kind, zero, operand, 0, block_rows, block_words, splits
    )
    if bias is not None:
        row = tl.minimum(tl.arange(0, block_rows), last)
        result += tl.load(bias + first + row).to(tl.float32)[:, None]
    m = tl.arange(0, ROWS)
    n = first + tl.arange(0, block_rows)
    keep = (m < M)[None, :]
    if not even_rows:
        keep = keep & (n < N)[:, None]
    tl.store(out + m[None, :] * N + n[:, None], result, mask=keep)


@triton.jit
def expand_rows(
    out,
    words,
    scales,
    mins,
    N,
    W: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    zero: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
):
    """The matrix as floats, out (N, P * W), for int4, int8 and fp8; a program expands block_rows by block_words."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    word = tl.program_id(1) * block_words + tl.arange(0, block_words)
    inside = (row < N)[:, None] & (word < W)[None, :]
    row = row.to(tl.int64)
    tile = tl.load(words + row[:, None] * W + word[None, :], mask=inside, other=0)
    group = row[:, None] * G + (word // (W // G))[None, :]
    unit: tl.constexpr = 1 if kind == "fp8" else 128
    scale = tl.load(scales + group, mask=inside, other=0).to(tl.float32) * unit
    least = 0.0 if mins is None else tl.load(mins + group, mask=inside, other=0).to(tl.float32)
    w0 = make_operand(tile, 0, kind, zero) * scale + least
    w1 = make_operand(tile, 1, kind, zero) * scale + least
    w2 = make_operand(tile, 2, kind, zero) * scale + least
    w3 = make_operand(tile, 3, kind, zero) * scale + least
    if P == 4:
        joined = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    else:
        w4 = make_operand(tile, 4, kind, zero) * scale + least
        w5 = make_operand(tile, 5, kind, zero) * scale + least
        w6 = make_operand(tile, 6, kind, zero) * scale + least
        w7 = make_operand(tile, 7, kind, zero) * scale + least
        joined = tl.join(
            tl.join(tl.join(w0, w4), tl.join(w2, w6)),
            tl.join(tl.join(w1, w5), tl.join(w3, w7)),
        )
    k = tl.program_id(1) * block_words * P + tl.arange(0, block_words * P)
    weights = tl.reshape(joined, (block_rows, block_words * P))
    tl.store(out + row[:, None] * (P * W) + k[None, :], weights, mask=(row < N)[:, None] & (k < P * W)[None, :])


def get_operand(dtype: str) -> tl.dtype:
    """What `multiply_rows` multiplies for inputs of `dtype`; the interpreter has no products of less than float32."""
    return tl.float32 if triton.knobs.runtime.interpret else getattr(tl, dtype)
