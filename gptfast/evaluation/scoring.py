"""What a model makes of given tokens, in blocks that bound the memory whatever the vocabulary.

Shapes: S tokens to score, R rows of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gptfast.runner import PREFILL_CHUNKS, Runner

CHUNK_TOKENS = max(PREFILL_CHUNKS)
"""Rows of logits that are held at once: 131 MB for a vocabulary of 128,000."""
BLOCK_ROWS = 32
"""Rows of them that are computed with at once, in float64."""


def read_blocks(runner: Runner, ids: Sequence[int], first: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """The tokens `ids[first:]` as targets (R,) int64, each block behind the logits (R, V) float32 that predict it.

    The cache holds `ids[:start]` already, with `start` below `first`; the other tokens are read into it.
    """
    assert 0 <= start < first < len(ids)
    targets = torch.tensor(ids[first:], device=runner.device)
    if start < first - 1:
        runner.prefill(ids[start : first - 1], start)
    for rows in torch.split(targets, CHUNK_TOKENS):
        logits = runner.score(ids[first - 1 : first - 1 + len(rows)], first - 1)
        yield from zip(torch.split(logits, BLOCK_ROWS), torch.split(rows, BLOCK_ROWS), strict=True)
        first += len(rows)


def score_block(logits: Tensor, targets: Tensor) -> Tensor:
    """The log-probabilities in nats (R,) float64, on the CPU, of the targets (R,) under logits (R, V)."""
    logits = logits.double()
    return (logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)).cpu()


def score_tokens(runner: Runner, ids: Sequence[int], first: int) -> Tensor:
    """The log-probabilities in nats (S,) float64 of `ids[first:]` after all tokens before them."""
    return torch.cat([score_block(logits, targets) for logits, targets in read_blocks(runner, ids, first)])
