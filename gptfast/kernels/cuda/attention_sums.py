"""Parts that the attention kernels share: what a chunk of the cache adds to a token, and the sum of chunks.

Shapes: B batch, S tokens in this call, H query heads, K key/value heads, G = H / K query heads that share one,
D head_dim, L cache slots, C chunks of the cache, R rows of queries, of which row r is token r // G, query head r % G of
the G that read one key/value head.

A softmax over the slots of a chunk is held as three sums of a row: its largest score, the sum of weights
exp(score - maximum), and the values' sum with these weights. An entry is a chunk's three for a token and a query head,
with the number ((batch * C + chunk) * S + token) * H + query head.
"""

# mypy: disable-error-code="assignment, import-untyped, no-untyped-def, untyped-decorator"
# The arguments of kernels have the types of Triton's own language, and its tuples grow.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_slots(input_pos, S, window):
    """The first and the last slot that a token of the call sees, as int32; the first can be negative in a window."""
    last = tl.load(input_pos + S - 1).to(tl.int32)
    first = last * 0 if window is None else tl.load(input_pos).to(tl.int32) - window + 1
    return first, last


@triton.jit
def find_entries(row, head, S, C, K: tl.constexpr, G: tl.constexpr):
    """The entries of rows (R,) in chunk 0, for `head` = batch * K + key/value head; a chunk is S * K * G entries."""
    return (head // K * C * S + row // G) * (K * G) + head % K * G + row % G


@triton.jit
def sum_chunk(
    q,
    k,
    v,
    k_scales,
    v_scales,
    input_pos,
    row,
    head,
    start,
    first,
    last,
    S,
    L,
    window,
    scale: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    key_operand: tl.constexpr,
    value_operand: tl.constexpr,
    block_dim: tl.constexpr,
    chunk_slots: tl.constexpr,
    block_slots: tl.constexpr,
):
    """What rows (R,) have of the chunk from slot `start` on: maxima (R,), weights (R,), values (R, block_dim).

    `scale` is log2(e) / sqrt(D), as weights are powers of two. Queries and keys are multiplied as `key_operand`, and
    weights and values as `value_operand`. The loop's bounds are fixed, but what no token sees is not loaded.
    """
    block_rows: tl.constexpr = row.shape[0]
    token = row // G
    is_row = token < S
    position = tl.load(input_pos + token, mask=is_row, other=-1).to(tl.int32)
    dim = tl.arange(0, block_dim)
    is_element = is_row[:, None] & (dim < D)[None, :]
    query = ((head // K * S + token) * (K * G) + head % K * G + row % G).to(tl.int64) * D
    queries = tl.load(q + query[:, None] + dim[None, :], mask=is_element, other=0).to(key_operand)

    # A row of the cache can have more elements than int32 counts, one of its heads cannot.
    offset = head.to(tl.int64) * L
    k += offset * D
    v += offset * D
    if k_scales is not None:
        k_scales += offset
        v_scales += offset
    maximum = tl.full((block_rows,), float("-inf"), tl.float32)
    weight = tl.zeros((block_rows,), tl.float32)
    value = tl.zeros((block_rows, block_dim), tl.float32)
    for block in range(0, chunk_slots, block_slots):
        slot = start + block + tl.arange(0, block_slots)
        is_read = (slot >= first) & (slot <= last)
        elements = slot[:, None] * D + dim[None, :]
        is_loaded = is_read[:, None] & (dim < D)[None, :]
        keys = tl.load(k + elements, mask=is_loaded, other=0)
        scores = tl.dot(queries, tl.trans(keys.to(key_operand)), input_precision="tf32x3")
        if k_scales is not None:
            scores *= tl.load(k_scales + slot, mask=is_read, other=0)[None, :]
        is_seen = slot[None, :] <= position[:, None]
        if window is not None:
            is_seen = is_seen & (slot[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # Of a row that has seen nothing so far, all differences are -inf instead of NaN.
        subtrahend = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        powers = tl.exp2((scores - subtrahend[:, None]) * scale)
        kept = tl.exp2((maximum - subtrahend) * scale)
        weight = weight * kept + tl.sum(powers, axis=1)
        if v_scales is not None:
            powers *= tl.load(v_scales + slot, mask=is_read, other=0)[None, :]
        factors = tl.load(v + elements, mask=is_loaded, other=0).to(value_operand)
        if v_scales is not None:
            # Else the compiler converts codes after it has read them from shared memory one by one, in columns.
            factors = tl.where(is_loaded, factors, 0)
        value = tl.dot(powers.to(value_operand), factors, value * kept[:, None], input_precision="tf32x3")
        maximum = new_maximum
    return maximum, weight, value


@triton.jit
def store_sums(values, maxima, weights, entry, is_row, maximum, weight, value, D: tl.constexpr):
    """Leave what `sum_chunk` returned in the rows' entries (R,)."""
    dim = tl.arange(0, value.shape[1])
    elements = entry.to(tl.int64)[:, None] * D + dim[None, :]
    tl.store(values + elements, value, mask=is_row[:, None] & (dim < D)[None, :])
    tl.store(maxima + entry, maximum, mask=is_row)
    tl.store(weights + entry, weight, mask=is_row)


@triton.jit
def divide(value, weight, is_row):
    """The weighted mean of rows (R,): (R, dimensions); a row that there is not has no weight."""
    return value / tl.where(is_row, weight, 1.0)[:, None]


@triton.jit
def find_fours(four, D: tl.constexpr):
    """Of fours (F,) of dimensions of a head, these dimensions and which there are: (F, 4), (F, 4)."""
    dim = four[:, None] * 4 + tl.arange(0, 4)[None, :]
    if D % 4 == 0:  # else the compiler does not see that there are four or none
        return dim, (four * 4 < D)[:, None] & (dim >= 0)
    else:
        return dim, dim < D


@triton.jit
def add_chunks(
    values,
    maxima,
    weights,
    entry,
    four,
    stride,
    is_row,
    position,
    first_chunk,
    last_chunk,
    window,
    scale: tl.constexpr,
    D: tl.constexpr,
    chunk_slots: tl.constexpr,
    block_chunks: tl.constexpr,
):
    """What fours (F,) of dimensions have of the chunks from first_chunk to last_chunk that their row sees: (F, 4).

    `entry` (F,) are those of chunk 0, and `stride` lies between the entries of two chunks. A thread has a four, with
    its row's maximum and weight: (rows, dimensions) would have the compiler hand these from thread to thread.

    The chunks' numbers alone say how they are added up: one after the other, with one maximum for every block_chunks of
    them. So the bits are those of any program, whatever rows it has and how many warps: a block that a row sees nothing
    of multiplies its sums with 1 and adds 0.
    """
    dim, is_dim = find_fours(four, D)
    is_element = is_row[:, None] & is_dim
    last = tl.where(is_row, position // chunk_slots, -1)
    step = stride.to(tl.int64) * D
    maximum = tl.full(entry.shape, float("-inf"), tl.float32)
    weight = tl.zeros(entry.shape, tl.float32)
    value = tl.zeros(dim.shape, tl.float32)
    start = first_chunk // block_chunks * block_chunks
    while start <= last_chunk:
        # Being volatile, all loads of a block are on their way before the first is waited for, and come from where the
        # stores of other programs are.
        one = entry + start * stride
        elements = one.to(tl.int64)[:, None] * D + dim
        chunk_maxima = ()
        chunk_weights = ()
        chunk_values = ()
        for i in tl.static_range(block_chunks):
            is_seen = start + i <= last
            if window is not None:
                is_seen = is_seen & ((start + i + 1) * chunk_slots > position - window + 1)
            is_loaded = is_seen[:, None] & is_element
            chunk_maxima += (tl.load(maxima + one + i * stride, mask=is_seen, other=float("-inf"), volatile=True),)
            chunk_weights += (tl.load(weights + one + i * stride, mask=is_seen, other=0, volatile=True),)
            chunk_values += (tl.load(values + elements + i * step, mask=is_loaded, other=0, volatile=True),)
        new_maximum = maximum
        for i in tl.static_range(block_chunks):
            new_maximum = tl.maximum(new_maximum, chunk_maxima[i])
        # Of a row that has seen nothing so far, all differences are -inf instead of NaN.
        subtrahend = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        kept = tl.exp2((maximum - subtrahend) * scale)
        weight *= kept
        value *= kept[:, None]
        for i in tl.static_range(block_chunks):
            power = tl.exp2((chunk_maxima[i] - subtrahend) * scale)
            weight += power * chunk_weights[i]
            value += power[:, None] * chunk_values[i]
        maximum = new_maximum
        start += block_chunks
    return divide(value, weight, is_row)
