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
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptfast.kernels.cuda.attention_sums import (
    add_chunks,
    find_entries,
    find_fours,
    find_slots,
    store_sums,
    sum_chunk,
)

MAX_TOKENS, MAX_DIM = 16, 256
CHUNK = 256
"""The slots of a program; to cut otherwise changes results by rounding."""
COMBINED = 16
"""The chunks whose sums are loaded together and have one maximum; another number changes results by rounding."""
COMBINED_ELEMENTS = 128
"""What a warp of them adds up of one chunk: 16 bytes a thread."""
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
    """A program (rows, B * K, C) computes block_rows of the S * G rows of queries over a chunk, or leaves."""
    head, chunk = tl.program_id(1), tl.program_id(2)
    first, last = find_slots(input_pos, S, window)
    start = chunk * chunk_slots
    if (start > last) | (start + chunk_slots <= first):
        return
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    maximum, weight, value = sum_chunk(
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
        scale,
        K,
        G,
        D,
        key_operand,
        value_operand,
        block_dim,
        chunk_slots,
        block_slots,
    )
    entry = find_entries(row, head, S, tl.num_programs(2), K, G) + chunk * S * (K * G)
    store_sums(values, maxima, weights, entry, row < S * G, maximum, weight, value, D)


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
    H: tl.constexpr,
    D: tl.constexpr,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
    chunk_slots: tl.constexpr,
    block_chunks: tl.constexpr,
) -> None:
    """A program (heads, S, B) adds up what block_heads of a token have of the chunks it sees: out (B, S, H, D)."""
    fours: tl.constexpr = block_dim // 4
    index = tl.arange(0, block_heads * fours)
    head, four = tl.program_id(0) * block_heads + index // fours, index % fours
    token, batch, S = tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    position = tl.load(input_pos + token).to(tl.int32)
    last_chunk = position // chunk_slots
    first_chunk = 0 if window is None else tl.maximum(position - window + 1, 0) // chunk_slots
    result = add_chunks(
        values,
        maxima,
        weights,
        (batch * C * S + token) * H + head,
        four,
        S * H,
        head < H,
        position,
        first_chunk,
        last_chunk,
        window,
        scale,
        D,
        chunk_slots,
        block_chunks,
    )
    dim, is_dim = find_fours(four, D)
    elements = ((batch * S + token) * H + head).to(tl.int64)[:, None] * D + dim
    tl.store(out + elements, result, mask=(head < H)[:, None] & is_dim)


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
    check_scratch(scratch, q, k)
    out = q.new_empty(batch, tokens, heads * dim)
    tile, constants = describe_sums(q, k)
    chunks, block_heads = -(-slots // CHUNK), choose_heads(dim)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        attend_chunk[(-(-tokens * heads // kv_heads // tile.rows), batch * kv_heads, chunks)](
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
            **constants,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
        combine_chunks[(-(-heads // block_heads), tokens, batch)](
            out,
            *scratch,
            input_pos,
            chunks,
            sliding_window,
            scale=constants["scale"],
            H=heads,
            D=dim,
            block_heads=block_heads,
            block_dim=constants["block_dim"],
            chunk_slots=CHUNK,
            block_chunks=COMBINED,
            num_warps=1,
            num_stages=1,
            enable_fp_fusion=False,
        )
    return out


def describe_sums(q: Tensor, k: Tensor) -> tuple[Tile, dict[str, Any]]:
    """The tile for queries (B, S, H, D) and keys (B or more, K, L, D), and the constants of what sums their chunks."""
    _, tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    tile = choose_tile(group * tokens, dim, exact=is_exact(q.dtype, k.dtype))
    key_operand, value_operand = choose_operands(q.dtype, k.dtype)
    return tile, {
        "scale": math.log2(math.e) / math.sqrt(dim),
        "K": k.shape[1],
        "G": group,
        "D": dim,
        "key_operand": key_operand,
        "value_operand": value_operand,
        "block_rows": tile.rows,
        "block_dim": pad_dim(dim),
        "chunk_slots": CHUNK,
        "block_slots": tile.slots,
    }


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


def pad_dim(dim: int) -> int:
    """How many dimensions of a head a program computes: powers of two, and no less than a product takes."""
    return max(16, int(triton.next_power_of_2(dim)))


def choose_heads(dim: int) -> int:
    """How many heads of a token a warp of `combine_chunks` adds up."""
    return max(1, COMBINED_ELEMENTS // pad_dim(dim))


def make_scratch(
    batch_size: int, tokens: int, heads: int, head_dim: int, slots: int, *, device: torch.device
) -> Scratch:
    """Memory for calls of up to this size, which may share it if they follow each other on one stream."""
    entries = batch_size * -(-slots // CHUNK) * tokens * heads
    sizes = ((entries, head_dim), (entries,), (entries,))
    return Scratch(*(torch.empty(size, device=device) for size in sizes))


def check_scratch(scratch: Scratch, q: Tensor, k: Tensor) -> None:
    """Refuse one that is too small for queries (B, S, H, D) and keys (B or more, K, L, D)."""
    batch, tokens, heads, dim = q.shape
    entries = batch * -(-k.shape[2] // CHUNK) * tokens * heads
    if scratch.values.shape[0] < entries or scratch.values.shape[1] != dim:
        raise ValueError(f"a scratch of {tuple(scratch.values.shape)} does not fit queries of {tuple(q.shape)}")


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
