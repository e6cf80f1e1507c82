"""Triton kernels that do nothing but read, or nothing at all: what a GPU can do at best."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# The arguments of kernels have the types of Triton's own language.

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 8192
"""Elements of 4 bytes that a program reads at once: 16 loads of 16 bytes by each of 128 threads."""


@triton.jit
def read_block(out, values, block: tl.constexpr):
    """A program adds up its block of int32, which no other reads, and writes one sum."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(values + index, eviction_policy="evict_first"), axis=0))


@triton.jit
def add_one(counter, waits: tl.constexpr):
    """A program counts how often it ran; with `waits` it may begin before the one before it has ended, on sm_90."""
    if waits:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(counter, tl.load(counter) + 1)
