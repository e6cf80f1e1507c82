"""The steps of decoding as pure functions: what is compiled, and all that is compiled.

Shapes: B batch, S tokens in this call, N cache slots attended, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptfast.model import Transformer
from gptfast.sampling import SamplingTensors, choose_tokens


def prefill(model: Transformer, tokens: Tensor, input_pos: Tensor, kv_pos: Tensor, last: Tensor) -> Tensor:
    """Read a chunk of the prompt into the cache; (B, V) float32 logits after the token at index `last` (1,).

    A chunk shorter than S is padded at its end. The padding writes to slots after the prompt's, which are
    rewritten before they are ever looked at.
    """
    logits: Tensor = model(tokens, input_pos, kv_pos, last)
    return logits[:, 0]


def decode_one_token(model: Transformer, tokens: Tensor, input_pos: Tensor, kv_pos: Tensor | None) -> Tensor:
    """Extend every row by one token (B, 1) at `input_pos` (1,); (B, V) float32 logits of the next."""
    logits: Tensor = model(tokens, input_pos, kv_pos)
    return logits[:, -1]


def verify(model: Transformer, tokens: Tensor, input_pos: Tensor, kv_pos: Tensor | None) -> Tensor:
    """Read a chunk of tokens (1 or B, S) as `prefill` does; (1 or B, S, V) float32 logits after every one of them."""
    logits: Tensor = model(tokens, input_pos, kv_pos)
    return logits


@dataclass(frozen=True)
class LogitsState:
    """What a recorded step of S tokens reads and writes.

    Attributes:
        tokens: (B, S) int64, to read.
        input_pos: (S,) int64, where they stand.
        logits: (B, S, V) float32, what comes out.
    """

    tokens: Tensor
    input_pos: Tensor
    logits: Tensor


def compute_logits(model: Transformer, state: LogitsState) -> None:
    """Extend every row by S tokens, for a model that needs no `kv_pos`."""
    state.logits.copy_(model(state.tokens, state.input_pos, None))


@dataclass(frozen=True)
class TextState:
    """What growing texts keep on the device between recorded steps.

    Attributes:
        tokens: (B,) int64, the last of every row, not yet read.
        input_pos: (1,) int64, where they stand.
        last_pos: (1,) int64, the last place that the cache has room for.
        rows: (B,) int64, which sample every row is.
        chosen: (R, B) int64, the latest tokens: that for position p in row p % R.
        sampling: how tokens are chosen.
        seen: (B, V) bool, the tokens of every row so far; None without a repetition penalty.
    """

    tokens: Tensor
    input_pos: Tensor
    last_pos: Tensor
    rows: Tensor
    chosen: Tensor
    sampling: SamplingTensors
    seen: Tensor | None


def extend(model: Transformer, state: TextState) -> None:
    """Extend every row by its token and choose the next, for a model that needs no `kv_pos`."""
    logits = decode_one_token(model, state.tokens[:, None], state.input_pos, None)
    # Beyond the cache a step would write to memory of others; only steps that no one asked for come there.
    state.input_pos.copy_(torch.minimum(state.input_pos + 1, state.last_pos))
    tokens = choose_tokens(logits, state.sampling, state.input_pos, state.rows, state.seen)
    if state.seen is not None:
        state.seen.scatter_(1, tokens[:, None], True)
    state.tokens.copy_(tokens)
    state.chosen.index_copy_(0, state.input_pos % state.chosen.shape[0], tokens[None])
