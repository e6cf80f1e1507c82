"""The sums of products with packed matrices, which the kernels of `linear` and of `fused` end in ways of their own.

Shapes: those of `gptfast.kernels.cuda.linear`.

`gptfast.kernels.cuda.packing` describes words and the order of inputs. Loops over constants are `tl.static_range`, and
what differs between kinds of weights is `tl.constexpr`, so nothing of it is left in the code that runs.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# The arguments of kernels have the types of Triton's own language.

from __future__ import annotations

import triton
import triton.language as tl

ROWS: tl.constexpr = tl.constexpr(16)
"""Rows of inputs that `multiply_rows` always computes, so that a row's sums do not depend on how many are asked for."""
SIGN_AND_7: tl.constexpr = tl.constexpr(0x87F00000 - (1 << 32))
SIGN_AND_15: tl.constexpr = tl.constexpr(0x8FFFE000 - (1 << 32))
UPPER_HALF: tl.constexpr = tl.constexpr(0xFFFF0000 - (1 << 32))


@triton.jit
def shift_byte(words, byte: tl.constexpr):
    """A byte of each word to the top of a float's mantissa, bits 15 to 22; what lies beside it is to be masked."""
    if byte == 0:
        return words << 15
    elif byte == 1:
        return words << 7
    elif byte == 2:
        return words >> 1
    else:
        return words >> 9


@triton.jit
def place_weights(words, index: tl.constexpr, kind: tl.constexpr, magic):
    """Weight `index` of each word as float32, times a power of two, by shifts and masks alone.

    Integers of int4 and int8 stand in the mantissa: 1 + q * `get_step`. Floats keep sign, exponent and mantissa, but as
    their exponent then counts from 127, fp8 is too small by 2 ** 120 and fp16 by 2 ** 112.
    """
    if kind == "int4":
        bits = (shift_byte(words, index // 2) & (15 << (15 + index % 2 * 4))) | magic
    elif kind == "int8":
        bits = (shift_byte(words, index) & (255 << 15)) | magic
    elif kind == "fp8":
        bits = ((words << (24 - 8 * index)) >> 4) & SIGN_AND_7
    elif kind == "fp16":
        bits = ((words << (16 - 16 * index)) >> 3) & SIGN_AND_15
    else:
        bits = words << 16 if index == 0 else words & UPPER_HALF
    return bits.to(tl.float32, bitcast=True)


@triton.constexpr_function
def get_step(index, kind):
    """What 1 of an integer is in the float that `place_weights` makes."""
    return 1 / 16 if kind == "int4" and index % 2 else 1 / 256


@triton.jit
def load_once(pointers, inside, even: tl.constexpr):
    """Load what no other program reads, so that it does not push out of the cache what all do."""
    if even:
        return tl.load(pointers, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def find_rows(index, first, last, distance: tl.constexpr, block_rows: tl.constexpr):
    """Where the rows of a program lie, of these indices, counted from its first one.

    They follow each other, or with a `distance` are the pairs from number `first` on: the rows n and n + distance of
    every 2 * distance, the first of all pairs and then the second. Indices after `last` are those of the last row or
    pair.
    """
    if distance == 0:
        return tl.minimum(index, last)
    else:
        pairs: tl.constexpr = block_rows // 2
        pair = tl.minimum(index % pairs, last)
        if distance % pairs == 0:
            return index // pairs * distance + pair
        else:
            start = first % distance
            return (start + pair) // distance * distance + pair + index // pairs * distance


@triton.jit
def load_tile(words, row, start, W: tl.constexpr, block_words: tl.constexpr, may_end: tl.constexpr):
    """The words from `start` on of these rows: (block_rows, block_words).

    Those after the last are 0, or anything if `may_end` says that whole blocks lie there, which nobody uses.
    """
    word = start + tl.arange(0, block_words)
    pointers = words + row[:, None] * W + word[None, :]
    even: tl.constexpr = W % block_words == 0
    if even and may_end:
        return tl.load(pointers, mask=(word < W)[None, :], eviction_policy="evict_first")
    else:
        return load_once(pointers, (word < W)[None, :], even)


@triton.jit
def load_per_four(
    values,
    first,
    last,
    start,
    W: tl.constexpr,
    G: tl.constexpr,
    distance: tl.constexpr,
    block_rows: tl.constexpr,
    fours: tl.constexpr,
    may_end: tl.constexpr,
):
    """Of scales or mins, those of 4 * fours words of each row, for `spread_per_four`.

    Loaded as one long row, since a thread then gets those of its own words: over a matrix in which no neighbours are
    contiguous the compiler lets the threads lie across the rows, over a vector as they lie over one of as many inputs,
    and either has them exchange what they have loaded through shared memory.
    """
    if G == 1:
        return tl.load(values + find_rows(tl.arange(0, block_rows), first, last, distance, block_rows))
    else:
        index = tl.arange(0, block_rows * fours)[None, :]
        row = find_rows(index // fours, first, last, distance, block_rows)
        four = start // 4 + index % fours
        pointers = values + row * G + four // (W // 4 // G)
        return load_once(pointers, four < W // 4, W // 4 % fours == 0 and not may_end)


@triton.jit
def load_block(
    words,
    scales,
    mins,
    first,
    last,
    start,
    W: tl.constexpr,
    G: tl.constexpr,
    distance: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
    may_end: tl.constexpr,
):
    """What `add_words` needs of the words from `start` on: `load_tile`, and `load_per_four` of scales and of mins.

    In the place of what there is not is the tile, since a loop can carry tensors alone.
    """
    fours: tl.constexpr = block_words // 4
    row = find_rows(tl.arange(0, block_rows), first, last, distance, block_rows)
    tile = load_tile(words, row, start, W, block_words, may_end)
    scale = tile
    least = tile
    if scales is not None and (G > 1 or mins is not None):
        scale = load_per_four(scales, first, last, start, W, G, distance, block_rows, fours, may_end)
    if mins is not None:
        least = load_per_four(mins, first, last, start, W, G, distance, block_rows, fours, may_end)
    return tile, scale, least


@triton.jit
def spread_per_four(loaded, G: tl.constexpr, block_rows: tl.constexpr, fours: tl.constexpr):
    """What `load_per_four` loaded as (block_rows, fours) float32."""
    if G == 1:
        return tl.broadcast_to(loaded.to(tl.float32)[:, None], (block_rows, fours))
    else:
        return tl.reshape(loaded.to(tl.float32), (block_rows, fours))


@triton.jit
def load_shared(pointers, inside, even: tl.constexpr):
    """Load what many programs read."""
    if even:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def add_words(
    total,
    x,
    tile,
    scale,
    least,
    start,
    magic,
    W: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    zero: tl.constexpr,
    has_mins: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
):
    """Add the products with what `load_block` loaded from `start` on to `total` (block_rows, block_words / 4).

    What a thread loads at once, 4 words, lies in one group and is summed first.
    """
    fours: tl.constexpr = block_words // 4
    word = start + tl.arange(0, block_words)
    product = tl.zeros((block_rows, block_words), tl.float32)
    surplus = tl.zeros((block_words,), tl.float32)
    sums = tl.zeros((block_words,), tl.float32)
    for i in tl.static_range(P):
        inputs = load_shared(x + i * W + word, word < W, W % block_words == 0)
        product += place_weights(tile, i, kind, magic) * inputs[None, :]
        if kind == "int4" or kind == "int8":
            surplus += inputs * (1 + zero * get_step(i, kind))
            sums += inputs * get_step(i, kind)
    product = tl.sum(tl.reshape(product, (block_rows, fours, 4)), axis=2)
    if kind == "int4" or kind == "int8":
        product -= tl.sum(tl.reshape(surplus, (fours, 4)), axis=1)[None, :]
    if G == 1 and not has_mins:
        return total + product
    else:
        total += product * spread_per_four(scale, G, block_rows, fours)
        if has_mins:
            sums = tl.sum(tl.reshape(sums, (fours, 4)), axis=1)
            total += spread_per_four(least, G, block_rows, fours) * sums[None, :]
        return total


@triton.jit
def finish_vector(
    total,
    scales,
    mins,
    first,
    last,
    G: tl.constexpr,
    kind: tl.constexpr,
    distance: tl.constexpr,
    block_rows: tl.constexpr,
):
    """The sums of `add_words` over whole rows, times what is common to all their words: (block_rows,)."""
    result = tl.sum(total, axis=1)
    if kind == "fp8":
        result *= 2.0**60
    if kind == "fp16":
        result *= 2.0**56
    if G == 1 and mins is None and scales is not None:
        row = find_rows(tl.arange(0, block_rows), first, last, distance, block_rows)
        result *= tl.load(scales + row).to(tl.float32)
    return result


@triton.jit
def load_groups(values, row, word, W: tl.constexpr, G: tl.constexpr, groups: tl.constexpr):
    """Of scales or mins, those of the groups from words (splits,) of each row on: (splits, block_rows, groups)."""
    group = (word // (W // G))[:, None] + tl.arange(0, groups)[None, :]
    return load_once(values + row[None, :, None] * G + group[:, None, :], (group < G)[:, None, :], False)


@triton.jit
def spread_groups(values, count: tl.constexpr):
    """(splits, block_rows, groups) in, each `count` times: (splits, block_rows, groups * count) float32."""
    shape: tl.constexpr = values.shape
    repeated = tl.broadcast_to(values.to(tl.float32)[:, :, :, None], (shape[0], shape[1], shape[2], count))
    return tl.reshape(repeated, (shape[0], shape[1], shape[2] * count))


@triton.jit
def make_operand(tile, i: tl.constexpr, kind: tl.constexpr, zero: tl.constexpr):
    """Weights `i` of a tile of words as float32; integers are divided by 128.

    Bits of an integer at the top of the mantissa, with no exponent, are that integer times 2 ** -134, or of int4 every
    other time 2 ** -130: unlike `place_weights` this needs no argument, which would keep the compiler from doing it in
    the arrangement of threads that a tensor core wants.
    """
    if kind == "bf16" or kind == "fp16":
        return tile.to(tl.float32)
    elif kind == "fp8":
        return place_weights(tile, i, kind, 0) * (2.0**120)
    elif kind == "int8":
        bits = shift_byte(tile, i) & (255 << 15)
        return bits.to(tl.float32, bitcast=True) * (2.0**127) - zero / 128
    else:
        bits = shift_byte(tile, i // 2) & (15 << (15 + i % 2 * 4))
        return bits.to(tl.float32, bitcast=True) * (2.0**127 if i % 2 == 0 else 2.0**123) - zero / 128


@triton.jit
def sum_rows(
    x,
    words,
    scales,
    mins,
    M,
    first,
    last,
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
    """M <= 16 rows of inputs times the rows of `find_rows`, the first of which the pointers tell: (block_rows, 16).

    The sums are float32, and of inputs that are not there 0. The words of bf16 and fp16 are their single weights, with
    P = 1. A row is cut into `splits` parts, which the warps work on side by side, since few rows would else keep few of
    them busy. `operand` is what is multiplied: the inputs' dtype, or float32 where that has no product. Weights are
    exact in it where a group covers the block, as its sums are then multiplied with the scale; else, and where there
    are mins, they are rounded to it after scaling.
    """
    part_words: tl.constexpr = W // splits
    even: tl.constexpr = part_words % block_words == 0
    has_groups: tl.constexpr = G > 1 or mins is not None
    scales_sums: tl.constexpr = mins is None and (G == 1 or W // G % block_words == 0)
    groups: tl.constexpr = max(1, block_words // (W // G)) if G > 1 else 1
    unit: tl.constexpr = 128 if kind == "int4" or kind == "int8" else 1
    row = find_rows(tl.arange(0, block_rows), first, last, distance, block_rows)
    m = tl.arange(0, ROWS)
    split = tl.arange(0, splits) * part_words
    total = tl.zeros((splits, block_rows, ROWS), tl.float32)
    if has_groups and scales_sums:
        # One block ahead, as the compiler does it for what is larger.
        next_scale = load_groups(scales, row, split, W, G, 1)
    for start in range(0, part_words, block_words):
        word = (split + start)[:, None] + tl.arange(0, block_words)[None, :]
        inside = word < W
        if has_groups and scales_sums:
            scale = next_scale.to(tl.float32) * unit
            next_scale = load_groups(scales, row, split + start + block_words, W, G, 1)
        elif has_groups:
            scale = spread_groups(load_groups(scales, row, split + start, W, G, groups), block_words // groups) * unit
            if mins is not None:
                least = spread_groups(load_groups(mins, row, split + start, W, G, groups), block_words // groups)
        tile = load_once(words + row[None, :, None] * W + word[:, None, :], inside[:, None, :], even)
        part = tl.zeros((splits, block_rows, ROWS), tl.float32) if has_groups and scales_sums else total
        for i in tl.static_range(P):
            weight = make_operand(tile, i, kind, zero)
            if not scales_sums:
                weight *= scale
                if mins is not None:
                    weight += least
            pointers = x + m[None, None, :] * (P * W) + i * W + word[:, :, None]
            if even:
                inputs = tl.load(pointers, mask=(m < M)[None, None, :], other=0)
            else:
                inputs = tl.load(pointers, mask=(m < M)[None, None, :] & inside[:, :, None], other=0)
            part = tl.dot(weight.to(operand), inputs.to(operand), part, input_precision="ieee")
        if has_groups and scales_sums:
            total += part * scale
        else:
            total = part
    result = tl.sum(total, axis=0)
    if not has_groups and scales is not None:
        result *= (tl.load(scales + row).to(tl.float32) * unit)[:, None]
    return result
