"""Attention of up to 16 tokens over the filled part of a cache in Triton, cut along the cache (flash-decoding).

Shapes: B batch, S tokens in this call, H query heads, K key/value heads, G = H / K query heads that share one,
D head_dim, L cache slots, C chunks of `CHUNK` slots that the cache has.

A program of `attend_chunk` computes one chunk for the G * S rows of queries that read one key/value head, and
`combine_chunks` adds up the chunks of a token and head (Dao et al. 2023). Grids and addresses follow from shapes alone,
so a CUDA graph serves every position: how much is read is decided on the device by `input_pos`.

The bits of a token's result depend neither on the tokens beside it nor on the cache's length. Chunks and the blocks
inside them begin at fixed slots; the rows of a tensor core's product do not mix, and a tile never has the 64 rows from
which on Triton chooses other instructions; no product and sum are contracted to one rounding in one kernel and to two
in another; a slot that a token does not see adds zero; and a token is the sum of its own chunks alone, in one order.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS, MAX_DIM = 16, 256
CHUNK = 256
"""The slots of a program; to cut otherwise changes results by rounding."""
COMBINED, COMBINED_DIM = 32, 32
"""The chunks that `combine_chunks` holds at once, and how much of a head: as little as is read at full speed."""
WARPS = 4
OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Tile(NamedTuple):
    """What a program of `attend_chunk` multiplies at once, with how many warps, and its loads on their way.

    Results depend, by rounding, on all but the rows.
    """

    rows: int
    slots: int
    warps: int
    stages: int


class Scratch(NamedTuple):
    """What `attend_chunk` leaves for `combine_chunks`, float32, an entry for each row of B, chunk, token and head.

    Attributes:
        values: (entries, D) sums of weighted values.
        maxima: (entries,) the largest score that a token sees in a chunk.
        weights: (entries,) sums of weights, which are exp(score - maximum).
    """

    values: Tensor
    maxima: Tensor
    weights: Tensor


@triton.jit(do_not_specialize=["S", "L"], do_not_specialize_on_alignment=["input_pos"])  # type: ignore[untyped-decorator]
def attend_chunk(
    values: tl.tensor,
    maxima: tl.tensor,
    weights: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    input_pos: tl.tensor,
    S: tl.tensor,
    L: tl.tensor,
    window: tl.tensor,
    scale: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    key_operand: tl.constexpr,
    value_operand: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
    chunk_slots: tl.constexpr,
    block_slots: tl.constexpr,
) -> None:
    """A program (rows, B * K, C) computes block_rows of the S * G rows of queries over a chunk, or leaves.

    `scale` is log2(e) / sqrt(D), as weights are powers of two. Queries and keys are multiplied as `key_operand`, and
    weights and values as `value_operand`. The loop's bounds are fixed, but what no token sees is not loaded.
    """
    head, chunk = tl.program_id(1), tl.program_id(2)
    start = chunk * chunk_slots
    last = tl.load(input_pos + S - 1).to(tl.int32)
    first = 0 if window is None else tl.load(input_pos).to(tl.int32) - window + 1
    if (start > last) | (start + chunk_slots <= first):
        return

    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    token = row // G
    is_row = token < S
    position = tl.load(input_pos + token, mask=is_row, other=-1).to(tl.int32)
    batch = head // K
    query_head = head % K * G + row % G
    dim = tl.arange(0, block_dim)
    is_element = is_row[:, None] & (dim < D)[None, :]
    query = ((batch * S + token) * (K * G) + query_head).to(tl.int64) * D
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

    entry = ((batch * tl.num_programs(2) + chunk) * S + token) * (K * G) + query_head
    tl.store(values + entry.to(tl.int64)[:, None] * D + dim[None, :], value, mask=is_element)
    tl.store(maxima + entry, maximum, mask=is_row)
    tl.store(weights + entry, weight, mask=is_row)


@triton.jit(do_not_specialize=["C"], do_not_specialize_on_alignment=["input_pos"])  # type: ignore[untyped-decorator]
def combine_chunks(
    out: tl.tensor,
    values: tl.tensor,
    maxima: tl.tensor,
    weights: tl.tensor,
    input_pos: tl.tensor,
    C: tl.tensor,
    window: tl.tensor,
    scale: tl.constexpr,
    D: tl.constexpr,
    block_dim: tl.constexpr,
    chunk_slots: tl.constexpr,
    block_chunks: tl.constexpr,
) -> None:
    """A program (H * parts of D, S, B) adds up what a token and head has of the chunks it sees: out (B, S, H, D)."""
    parts: tl.constexpr = (D + block_dim - 1) // block_dim
    head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    token, batch = tl.program_id(1), tl.program_id(2)
    H, S = tl.num_programs(0) // parts, tl.num_programs(1)
    position = tl.load(input_pos + token).to(tl.int32)
    last = position // chunk_slots
    first = 0 if window is None else tl.maximum(position - window + 1, 0) // chunk_slots
    dim = part * block_dim + tl.arange(0, block_dim)
    maximum = tl.full((1,), float("-inf"), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    value = tl.zeros((block_dim,), tl.float32)
    start = first // block_chunks * block_chunks
    while start <= last:
        chunk = start + tl.arange(0, block_chunks)
        is_seen = (chunk >= first) & (chunk <= last)
        entry = ((batch * C + chunk) * S + token) * H + head
        chunk_maximum = tl.load(maxima + entry, mask=is_seen, other=float("-inf"))
        chunk_weight = tl.load(weights + entry, mask=is_seen, other=0)
        elements = entry.to(tl.int64)[:, None] * D + dim[None, :]
        chunk_value = tl.load(values + elements, mask=is_seen[:, None] & (dim < D)[None, :], other=0)
        new_maximum = tl.maximum(maximum, tl.max(chunk_maximum, axis=0))
        subtrahend = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        powers = tl.exp2((chunk_maximum - subtrahend) * scale)
        kept = tl.exp2((maximum - subtrahend) * scale)
        weight = weight * kept + tl.sum(powers * chunk_weight, axis=0)
        value = value * kept + tl.sum(powers[:, None] * chunk_value, axis=0)
        maximum = new_maximum
        start += block_chunks
    elements = ((batch * S + token) * H + head).to(tl.int64) * D + dim
    tl.store(out + elements, value / weight, mask=dim < D)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_pos: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    sliding_window: int | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Attention of S <= 16 tokens over the slots of a cache up to their own: (B, S, H * D) in q's dtype.

    The contract is that of `gptfast.kernels.ops.attention`, and float16 is taken too. What is refused there of the
    positions' values cannot be here, as they are on the device: they must ascend below L.

    Args:
        q: (B, S, H, D) float32, bfloat16 or float16, contiguous. With a cache of the same dtype or of int8, products
            are of q's dtype and weights are rounded to it, else they are of float32.
        k: (B or more, K, L, D) float32, bfloat16, float16 or int8, the whole buffer; the first B rows are read.
        v: The same for the values.
        input_pos: (S,) int64; token i sees slots 0 to `input_pos[i]`.
        k_scales: (B or more, K, L, 1) float32, with int8 only: a key is its codes times this.
        v_scales: The same for the values.
        sliding_window: How many slots a token sees at most, its own among them.
        scratch: What `make_scratch` made for no less; where there is none, it is allocated.

    Scores are divided by sqrt(D); sums are in float32. Slots after the last position and before the first one's window
    are not read; of finite inputs, a token's result depends on what it sees alone.

    Raises:
        ValueError: shapes, dtypes or the scratch do not fit.
    """
    check_inputs(q, k, v, input_pos, k_scales, v_scales, sliding_window)
    batch, tokens, heads, dim = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    if scratch is None:
        scratch = make_scratch(batch, tokens, heads, dim, slots, device=q.device)
    chunks = -(-slots // CHUNK)
    if scratch.values.shape[0] < batch * chunks * tokens * heads or scratch.values.shape[1] != dim:
        raise ValueError(f"a scratch of {tuple(scratch.values.shape)} does not fit queries of {tuple(q.shape)}")
    out = q.new_empty(batch, tokens, heads * dim)
    group = heads // kv_heads
    tile = choose_tile(group * tokens, dim, exact=is_exact(q.dtype, k.dtype))
    key_operand, value_operand = choose_operands(q.dtype, k.dtype)
    scale = math.log2(math.e) / math.sqrt(dim)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        attend_chunk[(-(-group * tokens // tile.rows), batch * kv_heads, chunks)](
            *scratch,
            q,
            k,
            v,
            k_scales,
            v_scales,
            input_pos,
            tokens,
            slots,
            sliding_window,
            scale=scale,
            K=kv_heads,
            G=group,
            D=dim,
            key_operand=key_operand,
            value_operand=value_operand,
            block_rows=tile.rows,
            block_dim=max(16, triton.next_power_of_2(dim)),
            chunk_slots=CHUNK,
            block_slots=tile.slots,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
        combine_chunks[(heads * -(-dim // COMBINED_DIM), tokens, batch)](
            out,
            *scratch,
            input_pos,
            chunks,
            sliding_window,
            scale=scale,
            D=dim,
            block_dim=COMBINED_DIM,
            chunk_slots=CHUNK,
            block_chunks=COMBINED,
            num_warps=WARPS,
            num_stages=1,
            enable_fp_fusion=False,
        )
    return out


def is_exact(query_dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether products are of float32: no narrower type holds both."""
    return query_dtype == torch.float32 or cache_dtype not in (query_dtype, torch.int8)


def choose_operands(query_dtype: torch.dtype, cache_dtype: torch.dtype) -> tuple[tl.dtype, tl.dtype]:
    """What queries and keys, and what weights and values are multiplied as; only weights are rounded to it."""
    if triton.knobs.runtime.interpret or is_exact(query_dtype, cache_dtype):
        # The interpreter's products of anything less are wrong.
        return tl.float32, tl.float32
    operand = OPERANDS[query_dtype]
    # A weight times a value's scale can be less than float16 holds.
    return operand, tl.bfloat16 if cache_dtype == torch.int8 else operand


def choose_tile(rows: int, dim: int, *, exact: bool) -> Tile:
    """The tile for so many rows of queries: 99 KiB of shared memory suffice, and up to D = 128 nothing is spilled."""
    if exact:
        return Tile(16, 32 if dim <= 128 else 16, warps=4 if dim <= 64 else 8, stages=2)
    return Tile(16 if rows <= 16 else 32, 64, warps=4, stages=3 if dim <= 128 else 2)


def make_scratch(
    batch_size: int, tokens: int, heads: int, head_dim: int, slots: int, *, device: torch.device
) -> Scratch:
    """Memory for calls of up to this size, which may share it if they follow each other on one stream."""
    entries = batch_size * -(-slots // CHUNK) * tokens * heads
    sizes = ((entries, head_dim), (entries,), (entries,))
    return Scratch(*(torch.empty(size, device=device) for size in sizes))


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_pos: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    sliding_window: int | None,
) -> None:
    """Refuse what `attend` cannot compute; of tensors, only shapes and dtypes are looked at."""
    if q.dim() != 4 or not q.is_contiguous() or q.numel() == 0 or q.dtype not in OPERANDS:
        raise ValueError(f"queries must be (B, S, H, D), contiguous floats, not {tuple(q.shape)} {q.dtype}")
    batch, tokens, heads, dim = q.shape
    if tokens > MAX_TOKENS or dim > MAX_DIM:
        raise ValueError(
            f"this attends for up to {MAX_TOKENS} tokens with heads of up to {MAX_DIM}, not {tokens} of {dim}"
        )
    if k.dim() != 4 or k.shape != v.shape or k.dtype != v.dtype or not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError(f"keys and values must be (B, K, L, D), contiguous and alike, not {k.shape} and {v.shape}")
    if k.dtype not in OPERANDS and k.dtype != torch.int8:
        raise ValueError(f"keys and values must be float32, bfloat16, float16 or int8, not {k.dtype}")
    if k.shape[0] < batch or k.shape[3] != dim or k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"queries of shape {tuple(q.shape)} do not fit a cache of {tuple(k.shape)}")
    for scales in (k_scales, v_scales):
        if (scales is not None) != (k.dtype == torch.int8):
            raise ValueError("an int8 cache needs scales, and no other has any")
        if scales is not None and (
            scales.shape != (*k.shape[:3], 1) or scales.dtype != torch.float32 or not scales.is_contiguous()
        ):
            raise ValueError(f"scales must be (B, K, L, 1), contiguous and float32, not {scales.shape} {scales.dtype}")
    if input_pos.shape != (tokens,) or input_pos.dtype != torch.int64 or not input_pos.is_contiguous():
        raise ValueError(f"positions must be int64, one for each of {tokens} tokens, not {input_pos.shape}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError("a sliding window has at least one slot")


@functools.cache
def register_operator() -> torch.library.Library:
    """Make `gptfast::cuda_attention` known to torch, once; it takes `gptfast::attention`'s arguments in their order.

    On CPU tensors it runs under Triton's interpreter alone. What it needs for the time of a call it allocates: an
    operator that writes to an argument is refused in the model's compiled region (see `TransformerBlock`), and in a
    CUDA graph the memory comes from the graph's pool, to which it returns in the graph.
    """
    library = torch.library.Library("gptfast", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(  # type: ignore[no-untyped-call]
        "cuda_attention(Tensor q, Tensor k, Tensor v, Tensor? k_scales, Tensor? v_scales, Tensor input_pos, "
        "int? sliding_window) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    for key in ["CUDA", "CPU"] if triton.knobs.runtime.interpret else ["CUDA"]:
        library.impl("cuda_attention", run_operator, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake("gptfast::cuda_attention", make_shape, lib=library)
    return library


def run_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    input_pos: Tensor,
    sliding_window: int | None,
) -> Tensor:
    """`attend`, as `gptfast::cuda_attention` is called."""
    return attend(q, k, v, input_pos, k_scales=k_scales, v_scales=v_scales, sliding_window=sliding_window)


def make_shape(q: Tensor, *_: Tensor | int | None) -> Tensor:
    """What `run_operator` returns."""
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])
