"""What the kernels of `gptfast.kernels.cuda.fused` have in common: how they start, sum, and leave inputs for the next.

Shapes: those of that module.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# The arguments of kernels have the types of Triton's own language.

from __future__ import annotations

import triton
import triton.language as tl

from gptfast.kernels.cuda.linear_sums import ROWS, add_words, find_rows, finish_vector, load_block, sum_rows

HEADROOM: tl.constexpr = tl.constexpr(64)
"""What gains times the residual stream are divided by in float16, which would hold no more than the stream itself."""


@triton.jit
def locate_rows(N, distance: tl.constexpr, even_rows: tl.constexpr, block_rows: tl.constexpr):
    """Of `find_rows`, this program's first row or pair and the last index; and which row of the matrix the first is."""
    if distance == 0:
        first = tl.program_id(0) * block_rows
        last = block_rows - 1 if even_rows else tl.minimum(N - 1 - first, block_rows - 1)
        return first, last, first.to(tl.int64)
    else:
        pairs: tl.constexpr = block_rows // 2
        first = tl.program_id(0) * pairs
        last = pairs - 1 if even_rows else tl.minimum(N // 2 - 1 - first, pairs - 1)
        return first, last, (first // distance * (2 * distance) + first % distance).to(tl.int64)


@triton.jit
def fetch_rows(words, row, W: tl.constexpr, splits: tl.constexpr):
    """Have the first 512 bytes of each part of these rows brought into the L2 cache, for `sum_rows` to find there."""
    line: tl.constexpr = 128 * 8 // words.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = min(4, triton.next_power_of_2(W // splits // line))
    index = tl.arange(0, splits * lines)
    word = tl.minimum(index // lines * (W // splits) + index % lines * line, W - 1)
    addresses = (words + row[:, None] * W + word[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def start(
    weight,
    rows,
    W: tl.constexpr,
    G: tl.constexpr,
    operand: tl.constexpr,
    distance: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
    splits: tl.constexpr,
    pdl: tl.constexpr,
):
    """Let the next kernel start, load the first block of weights, and wait for the kernel before.

    The block is for `multiply`. For several rows of inputs there is none: the compiler has the loads of that loop under
    way before it begins, and a wait among them would not hold back those of the inputs.
    """
    words, scales, mins = weight
    first, last, row = rows
    words += row * W
    if scales is not None:
        scales += row * G
    if mins is not None:
        mins += row * G
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
    if operand is None:
        block = load_block(words, scales, mins, first, last, 0, W, G, distance, block_rows, block_words, False)
    else:
        block = rows
        if pdl:
            fetch_rows(words, find_rows(tl.arange(0, block_rows), first, last, distance, block_rows), W, splits)
    if pdl:
        tl.extra.cuda.gdc_wait()
    return block


@triton.jit
def multiply(
    planes,
    block,
    weight,
    M,
    rows,
    magic,
    W: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    zero: tl.constexpr,
    operand: tl.constexpr,
    distance: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
    splits: tl.constexpr,
):
    """The inputs times the rows of this program: (block_rows, 1) float32, or with an `operand` (block_rows, 16).

    Of one row of inputs, a block is loaded before the one before it is multiplied.
    """
    words, scales, mins = weight
    first, last, row = rows
    words += row * W
    if scales is not None:
        scales += row * G
    if mins is not None:
        mins += row * G
    if operand is None:
        has_mins: tl.constexpr = mins is not None
        loops: tl.constexpr = block_words < W
        tile, scale, least = block
        total = tl.zeros((block_rows, block_words // 4), tl.float32)
        for word in range(0, W, block_words):
            if loops:
                # Scales are needed last.
                _, scale, least = load_block(
                    words, scales, mins, first, last, word, W, G, distance, block_rows, block_words, False
                )
                next_tile, _, _ = load_block(
                    words, None, None, first, last, word + block_words, W, G, distance, block_rows, block_words, True
                )
            total = add_words(
                total, planes, tile, scale, least, word, magic, W, G, P, kind, zero, has_mins, block_rows, block_words
            )
            if loops:
                tile = next_tile
        return finish_vector(total, scales, mins, first, last, G, kind, distance, block_rows)[:, None]
    else:
        return sum_rows(
            planes,
            words,
            scales,
            mins,
            M,
            first,
            last,
            W,
            G,
            P,
            kind,
            zero,
            operand,
            distance,
            block_rows,
            block_words,
            splits,
        )


@triton.jit
def split_pairs(sums):
    """The first rows of a program's pairs and the second ones: (block_rows, M) in, two of (block_rows / 2, M) out."""
    pairs: tl.constexpr = sums.shape[0] // 2
    return tl.split(tl.permute(tl.reshape(sums, (2, pairs, sums.shape[1])), (1, 2, 0)))


@triton.jit
def list_inputs(is_vector: tl.constexpr):
    """The rows of inputs that a program computes, there or not."""
    return tl.arange(0, 1) if is_vector else tl.arange(0, ROWS)


@triton.jit
def load_squares(squares, m, M, parts: tl.constexpr):
    """The sums of squares of `store_normed`, for `compute_norm`: (rows, parts)."""
    part = tl.arange(0, triton.next_power_of_2(parts))
    inside = (m < M)[:, None] & (part < parts)[None, :]
    return tl.load(squares + m[:, None] * parts + part[None, :], mask=inside, other=0)


@triton.jit
def compute_norm(planes, squares, E: tl.constexpr, eps: tl.constexpr):
    """What the sums of `multiply` are to be multiplied with if `store_normed` wrote the inputs: (1, rows)."""
    norm = tl.rsqrt(tl.sum(squares, axis=1) / E + eps)
    if planes.dtype.element_ty == tl.float16:
        norm *= HEADROOM
    return norm[None, :]


@triton.jit
def store_inputs(
    planes, m, n, values, mask, W: tl.constexpr, P: tl.constexpr, kind: tl.constexpr, is_vector: tl.constexpr
):
    """Write elements n of rows m of what a product reads, in its order: planes (M, P, W).

    With `is_vector` they are float32 and carry the powers of two of `packing.arrange_inputs`, else they are what
    `packing.arrange_rows` makes. All but `planes` and the constants are of one shape, or broadcast to it.
    """
    plane = n % P
    if is_vector:
        if kind == "int4":
            values *= tl.where(plane % 2 == 0, 256.0, 16.0)
        elif kind == "int8":
            values *= 256.0
        elif kind == "fp8":
            values *= 2.0**60
        elif kind == "fp16":
            values *= 2.0**56
    tl.store(planes + (m * P + plane) * W + n // P, values, mask=mask)


@triton.jit
def store_normed(
    planes,
    squares,
    part,
    m,
    n,
    x,
    gain,
    mask,
    M,
    parts,
    W: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    is_vector: tl.constexpr,
):
    """`store_inputs` of the residual stream x (n, m) times gains (n, 1), and sums of its squares: (M, parts)."""
    values = x * gain
    if planes.dtype.element_ty == tl.float16:
        values /= HEADROOM
    store_inputs(planes, m[None, :], n[:, None], values, mask, W, P, kind, is_vector)
    tl.store(squares + m * parts + part, tl.sum(tl.where(mask, x * x, 0), axis=0), mask=m < M)
