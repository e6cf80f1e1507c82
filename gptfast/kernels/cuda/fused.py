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

from gptfast.kernels.cuda.linear import (
    ROWS,
    add_words,
    find_rows,
    finish_vector,
    load_block,
    make_operand,
    sum_rows,
)

HEADROOM: tl.constexpr = tl.constexpr(64)
"""What gains times the residual stream are divided by in float16, which would hold no more than the stream itself."""


@triton.jit
def locate_rows(N, distance: tl.constexpr, even_rows: tl.constexpr, block_rows: tl.constexpr):
    """Of `find_rows`, the first row or pair of this program and the last index, and its row in the matrix."""
    if distance == 0:
        first = tl.program_id(0) * block_rows
        last = block_rows - 1 if even_rows else tl.minimum(N - 1 - first, block_rows - 1)
        return first, last, first
    else:
        pairs: tl.constexpr = block_rows // 2
        first = tl.program_id(0) * pairs
        last = pairs - 1 if even_rows else tl.minimum(N // 2 - 1 - first, pairs - 1)
        return first, last, first // distance * (2 * distance) + first % distance


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
    words,
    scales,
    mins,
    first,
    last,
    W: tl.constexpr,
    G: tl.constexpr,
    distance: tl.constexpr,
    is_vector: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
    splits: tl.constexpr,
    pdl: tl.constexpr,
):
    """Let the next kernel start, load the first block of weights, and wait for the kernel before.

    The block is for `multiply`. For several rows of inputs there is none: the compiler has the loads of that loop under
    way before it begins, and a wait among them would not hold back those of the inputs.
    """
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
    if is_vector:
        tile, scale, least = load_block(
            words, scales, mins, first, last, 0, W, G, distance, block_rows, block_words, False
        )
    else:
        tile, scale, least = first, first, first
        if pdl:
            row = find_rows(tl.arange(0, block_rows), first, last, distance, block_rows)
            fetch_rows(words, row, W, splits)
    if pdl:
        tl.extra.cuda.gdc_wait()
    return tile, scale, least


@triton.jit
def multiply(
    planes,
    tile,
    scale,
    least,
    words,
    scales,
    mins,
    M,
    first,
    last,
    magic,
    W: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    zero: tl.constexpr,
    operand: tl.constexpr,
    distance: tl.constexpr,
    is_vector: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
    splits: tl.constexpr,
):
    """The inputs times the rows of this program: (block_rows, 1 or 16) float32.

    Of one row of inputs, a block is loaded before the one before it is multiplied.
    """
    if is_vector:
        has_mins: tl.constexpr = mins is not None
        loops: tl.constexpr = block_words < W
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
    first, last, base = locate_rows(N, half, even_rows, block_rows)
    words += base.to(tl.int64) * W
    if scales is not None:
        scales += base * G
    if mins is not None:
        mins += base * G
    tile, scale, least = start(
        words, scales, mins, first, last, W, G, half, is_vector, block_rows, block_words, splits, pdl
    )
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
        planes,
        tile,
        scale,
        least,
        words,
        scales,
        mins,
        M,
        first,
        last,
        magic,
        W,
        G,
        P,
        kind,
        zero,
        operand,
        half,
        is_vector,
        block_rows,
        block_words,
        splits,
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
    first, last, base = locate_rows(N, 0, even_rows, block_rows)
    words += base.to(tl.int64) * W
    if scales is not None:
        scales += base * G
    if mins is not None:
        mins += base * G
    tile, scale, least = start(
        words, scales, mins, first, last, W, G, 0, is_vector, block_rows, block_words, splits, pdl
    )
    m = list_inputs(is_vector)
    index = tl.arange(0, block_rows)
    n = first + tl.minimum(index, last)
    gain = tl.load(gains + n).to(tl.float32)[:, None]
    is_stored = (m < M)[None, :] & (index <= last)[:, None]
    residual = x + m[None, :] * N + n[:, None]
    before = tl.load(residual, mask=is_stored, other=0).to(tl.float32)
    sums = multiply(
        planes,
        tile,
        scale,
        least,
        words,
        scales,
        mins,
        M,
        first,
        last,
        magic,
        W,
        G,
        P,
        kind,
        zero,
        operand,
        0,
        is_vector,
        block_rows,
        block_words,
        splits,
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
    first, last, base = locate_rows(2 * F, F, even_rows, block_rows)
    words += base.to(tl.int64) * W
    if scales is not None:
        scales += base * G
    if mins is not None:
        mins += base * G
    tile, scale, least = start(
        words, scales, mins, first, last, W, G, F, is_vector, block_rows, block_words, splits, pdl
    )
    m = list_inputs(is_vector)
    square = load_squares(squares, m, M, parts)
    sums = multiply(
        planes,
        tile,
        scale,
        least,
        words,
        scales,
        mins,
        M,
        first,
        last,
        magic,
        W,
        G,
        P,
        kind,
        zero,
        operand,
        F,
        is_vector,
        block_rows,
        block_words,
        splits,
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
    first, last, base = locate_rows(N, 0, even_rows, block_rows)
    words += base.to(tl.int64) * W
    if scales is not None:
        scales += base.to(tl.int64) * G
    if mins is not None:
        mins += base.to(tl.int64) * G
    tile, scale, least = start(
        words, scales, mins, first, last, W, G, 0, is_vector, block_rows, block_words, splits, pdl
    )
    m = list_inputs(is_vector)
    square = load_squares(squares, m, M, parts)
    sums = multiply(
        planes,
        tile,
        scale,
        least,
        words,
        scales,
        mins,
        M,
        first,
        last,
        magic,
        W,
        G,
        P,
        kind,
        zero,
        operand,
        0,
        is_vector,
        block_rows,
        block_words,
        splits,
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
    pdl: tl.constexpr,
):
    """The rows of these tokens (M,) int64 as the residual stream x (M, E), and as the first product's inputs.

    A program (M,) makes a row, of a matrix of words or, with P = 1, of elements.
    """
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
    if pdl:
        tl.extra.cuda.gdc_wait()
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
