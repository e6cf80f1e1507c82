"""Attention of `gptfast.kernels.cuda.attention` in one launch, for a decoding step of few: the last program combines.

Shapes: those of `gptfast.kernels.cuda.attention_sums`, and of what a product reads: M = B * S rows, P weights of a
word, W words of a row.

A program computes a chunk for block_rows of the rows that read one key/value head, as `attention.attend_chunk` does.
Whichever of the chunks of these rows is ready last then adds them all up, in their order, as `combine_chunks` does: the
bits are those of the two launches. Why it sees what the others stored is said at `attend_and_combine`.

A kernel starts while the one before it still runs, if `pdl` (programmatic dependent launch; sm_90 on). All that this
one reads was written by kernels before it, so it waits for them at once, and so does a program that has nothing to do:
the next kernel may rely on everything that came before this one.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# The arguments of kernels have the types of Triton's own language.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptfast.kernels.cuda.attention import (
    CHUNK,
    COMBINED,
    COMBINED_ELEMENTS,
    Scratch,
    Tile,
    check_inputs,
    check_scratch,
    describe_sums,
    make_scratch,
)
from gptfast.kernels.cuda.attention_sums import (
    add_chunks,
    divide,
    find_entries,
    find_fours,
    find_slots,
    store_sums,
    sum_chunk,
)
from gptfast.kernels.cuda.fused_sums import store_inputs
from gptfast.kernels.cuda.packing import WEIGHTS_PER_WORD, Kind

FEWEST_ROWS = 16
"""Of queries in a tile; see `attention.choose_tile`."""


class FusedScratch(NamedTuple):
    """What the programs of a call leave for the last of them, and how many have arrived.

    Attributes:
        sums: as between the two launches.
        tickets: (T,) int32, one for the rows of a program in each row of the batch; 0 before and after every call.
    """

    sums: Scratch
    tickets: Tensor


@triton.jit
def find_elements(row, head, dim, S, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """Where dimensions of rows of queries stand in the result (M, H * D): its rows and columns."""
    return head // K * S + row // G, (head % K * G + row % G) * D + dim


@triton.jit(do_not_specialize=["S", "L"], do_not_specialize_on_alignment=["input_pos"])
def attend_and_combine(
    out,
    values,
    maxima,
    weights,
    tickets,
    q,
    k,
    v,
    k_scales,
    v_scales,
    input_pos,
    S,
    L,
    window,
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
    block_chunks: tl.constexpr,
    combined_rows: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    kind: tl.constexpr,
    is_vector: tl.constexpr,
    pdl: tl.constexpr,
):
    """A program (rows, B * K, C) computes a chunk, or leaves; the last one of its rows writes them: out (M, P, W).

    It is the last if it draws the ticket that counts all others. How many draw one follows from `input_pos`: those
    whose chunks lie between the first and the last slot that a token of the call sees. Where that is one chunk, its
    sums are the result: combining would multiply them with 1 and add 0.

    What orders the last program's loads after the stores of the others: each program's threads store, then meet at a
    barrier, after which one thread draws the ticket with acq_rel at the scope of the GPU. As a release that is
    cumulative: it publishes what the barrier has put before it, the stores of all threads. As an acquire by the thread
    that draws the last ticket it sees what all before have released, since they changed the same number, each acquiring
    what the one before it had. The number reaches the other threads of the last program through a barrier, so their
    loads come after; these are volatile, so that none is served by the first cache with what lay there earlier.

    Nobody else touches a ticket after the last has been drawn, so its program sets it to 0, with one thread and a plain
    store: the end of the kernel, for which all that follow wait, puts it before the next call. The same holds for the
    sums, which the next call overwrites.
    """
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head, chunk = tl.program_id(1), tl.program_id(2)
    first, last = find_slots(input_pos, S, window)
    start = chunk * chunk_slots
    if (start > last) | (start + chunk_slots <= first):
        return
    row_start = tl.program_id(0) * block_rows
    row = row_start + tl.arange(0, block_rows)
    is_row = row < S * G
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
    first_chunk = tl.maximum(first, 0) // chunk_slots
    last_chunk = last // chunk_slots
    if first_chunk == last_chunk:
        dim = tl.arange(0, block_dim)
        m, n = find_elements(row[:, None], head, dim[None, :], S, K, G, D)
        mask = is_row[:, None] & (dim < D)[None, :]
        store_inputs(out, m, n, divide(value, weight, is_row), mask, W, P, kind, is_vector)
        return

    entry = find_entries(row, head, S, tl.num_programs(2), K, G) + chunk * S * (K * G)
    store_sums(values, maxima, weights, entry, is_row, maximum, weight, value, D)
    tl.debug_barrier()
    ticket = tickets + head * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") != last_chunk - first_chunk:
        return

    tl.store(ticket, 0)
    row_end = tl.minimum(row_start + block_rows, S * G)
    fours: tl.constexpr = block_dim // 4
    index = tl.arange(0, combined_rows * fours)
    four = index % fours
    dim, is_dim = find_fours(four, D)
    while row_start < row_end:
        some = row_start + index // fours
        is_some = some < row_end
        result = add_chunks(
            values,
            maxima,
            weights,
            find_entries(some, head, S, tl.num_programs(2), K, G),
            four,
            S * (K * G),
            is_some,
            tl.load(input_pos + some // G, mask=is_some, other=-1).to(tl.int32),
            first_chunk,
            last_chunk,
            window,
            scale,
            D,
            chunk_slots,
            block_chunks,
        )
        m, n = find_elements(some[:, None], head, dim, S, K, G, D)
        store_inputs(out, m, n, result, is_some[:, None] & is_dim, W, P, kind, is_vector)
        row_start += combined_rows


def attend_fused(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_pos: Tensor,
    scratch: FusedScratch,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    sliding_window: int | None = None,
    kind: Kind | None = None,
    is_vector: bool = False,
    pdl: bool = False,
) -> None:
    """`attention.attend` in one launch, to memory of the caller: nothing is allocated.

    Args:
        out: (B, S, H * D) of any float dtype, or with `kind` planes (B * S, P, W) as a product with such a matrix reads
            them. What pads a row is not written.
        q: As `attend` takes them, the positions, keys and values with their scales too.
        k: See there.
        v: See there.
        input_pos: See there.
        scratch: What `make_fused_scratch` made for no less. Calls that share it must follow each other.
        k_scales: See there.
        v_scales: See there.
        sliding_window: See there.
        kind: Of the matrix that `out` is multiplied with.
        is_vector: Whether `out` is for the kernel of one row, as `packing.arrange_inputs` makes it, in float32; else it
            is as `packing.arrange_rows` does.
        pdl: Start while the kernel before still runs, and let the next one do so; sm_90 on. See the module.

    Raises:
        ValueError: shapes, dtypes or the scratch do not fit.
    """
    check_inputs(q, k, v, input_pos, k_scales, v_scales, sliding_window)
    check_scratch(scratch.sums, q, k)
    batch, tokens, heads, _ = q.shape
    per_word, words = check_out(out, q, kind, is_vector=is_vector)
    tile, constants = describe_sums(q, k)
    grid = (-(-tokens * heads // k.shape[1] // tile.rows), batch * k.shape[1], -(-k.shape[2] // CHUNK))
    if scratch.tickets.dtype != torch.int32 or scratch.tickets.numel() < grid[0] * grid[1]:
        raise ValueError(f"{grid[0] * grid[1]} tickets are drawn, int32, and there are {scratch.tickets.numel()}")
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        attend_and_combine[grid](
            out,
            *scratch.sums,
            scratch.tickets,
            q,
            k,
            v,
            k_scales,
            v_scales,
            input_pos,
            tokens,
            k.shape[2],
            sliding_window,
            **constants,
            block_chunks=COMBINED,
            combined_rows=choose_combined_rows(tile, constants["block_dim"]),
            W=words,
            P=per_word,
            kind=kind,
            is_vector=is_vector,
            pdl=pdl,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
            launch_pdl=pdl,
        )


def choose_combined_rows(tile: Tile, block_dim: int) -> int:
    """How many rows of queries a program adds up at once."""
    return max(1, min(tile.rows, COMBINED_ELEMENTS * tile.warps // block_dim))


def make_fused_scratch(
    batch_size: int, tokens: int, heads: int, kv_heads: int, head_dim: int, slots: int, *, device: torch.device
) -> FusedScratch:
    """Memory for calls of up to this size."""
    sums = make_scratch(batch_size, tokens, heads, head_dim, slots, device=device)
    blocks = -(-tokens * heads // kv_heads // FEWEST_ROWS)
    return FusedScratch(sums, torch.zeros(batch_size * kv_heads * blocks, dtype=torch.int32, device=device))


def check_out(out: Tensor, q: Tensor, kind: Kind | None, *, is_vector: bool) -> tuple[int, int]:
    """Refuse memory that a call's result does not fit; the planes P and words W that it is written in."""
    batch, tokens, heads, dim = q.shape
    if kind is None:
        if out.shape != (batch, tokens, heads * dim) or not out.is_contiguous():
            raise ValueError(f"{tuple(out.shape)} does not hold what attention gives {tuple(q.shape)}")
        return 1, heads * dim
    per_word = 1 if kind in ("bf16", "fp16") and not is_vector else WEIGHTS_PER_WORD[kind]
    shape = (batch * tokens, per_word)
    if out.dim() != 3 or out.shape[:2] != shape or per_word * out.shape[2] < heads * dim or not out.is_contiguous():
        raise ValueError(f"{tuple(out.shape)} does not hold what attention gives {tuple(q.shape)} for {kind}")
    if is_vector and out.dtype != torch.float32:
        raise ValueError(f"inputs for the kernel of one row must be float32, not {out.dtype}")
    return per_word, out.shape[2]
