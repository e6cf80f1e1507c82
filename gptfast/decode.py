"""The steps of decoding as pure functions: what is compiled, and all that is compiled.

Shapes: B batch, S tokens in this call, N cache slots attended, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gptfast.sampling import SamplingTensors, accept_tokens, choose_tokens

MOST_VERIFIED = 16
"""Tokens of a draft, and the one before it, that are verified at once; the CPU's products cost little more for a few
rows than for one, and each twice that for twice as many from about 8 on."""


class Decoder(Protocol):
    """A `Transformer`, or what computes the same in another way."""

    def __call__(self, tokens: Tensor, input_pos: Tensor, kv_pos: Any, rows: Tensor | None = None) -> Any:
        """See `Transformer.forward`."""


def prefill(model: Decoder, tokens: Tensor, input_pos: Tensor, kv_pos: Tensor | None, last: Tensor) -> Tensor:
    """Read a chunk of the prompt into the cache; (B, V) float32 logits after the token at index `last` (1,).

    A chunk shorter than S is padded at its end. The padding writes to slots after the prompt's, which are
    rewritten before they are ever looked at.
    """
    logits: Tensor = model(tokens, input_pos, kv_pos, last)
    return logits[:, 0]


def decode_one_token(model: Decoder, tokens: Tensor, input_pos: Tensor, kv_pos: Tensor | None) -> Tensor:
    """Extend every row by one token (B, 1) at `input_pos` (1,); (B, V) float32 logits of the next."""
    logits: Tensor = model(tokens, input_pos, kv_pos)
    return logits[:, -1]


def verify(model: Decoder, tokens: Tensor, input_pos: Tensor, kv_pos: Tensor | None) -> Tensor:
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


def compute_logits(model: Decoder, state: LogitsState) -> None:
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
        vocab_size: V, the ids that may be chosen; a draft model may have more.
    """

    tokens: Tensor
    input_pos: Tensor
    last_pos: Tensor
    rows: Tensor
    chosen: Tensor
    sampling: SamplingTensors
    seen: Tensor | None
    vocab_size: int


def extend(model: Decoder, state: TextState) -> None:
    """Extend every row by its token and choose the next, for a model that needs no `kv_pos`."""
    go_on(decode_one_token(model, state.tokens[:, None], state.input_pos, None), state)


def go_on(logits: Tensor, state: TextState) -> None:
    """Choose every row's next token by the logits (B, V or more) after its token, and make it the row's token."""
    # Beyond the cache a step would write to memory of others; only steps that no one asked for come there.
    state.input_pos.copy_(torch.minimum(state.input_pos + 1, state.last_pos))
    logits = logits[:, : state.vocab_size]
    tokens = choose_tokens(logits, state.sampling, state.input_pos, state.rows, state.seen)
    if state.seen is not None:
        state.seen.scatter_(1, tokens[:, None], True)
    state.tokens.copy_(tokens)
    state.chosen.index_copy_(0, state.input_pos % state.chosen.shape[0], tokens[None])


@dataclass(frozen=True)
class CatchUpState:
    """What is read of a text that has grown by more than one token.

    Attributes:
        tokens: (1, S) int64, to read, with padding at the end.
        input_pos: (S,) int64, where they stand.
        last: (1,) int64, the index of the last that is no padding.
        text: what goes on from there.
    """

    tokens: Tensor
    input_pos: Tensor
    last: Tensor
    text: TextState


def catch_up(model: Decoder, state: CatchUpState) -> None:
    """Read S tokens of a single row and choose the next as `extend` does, for a model that needs no `kv_pos`."""
    state.text.input_pos.copy_(state.input_pos[state.last])
    go_on(prefill(model, state.tokens, state.input_pos, None, state.last), state.text)


@dataclass(frozen=True)
class RoundState:
    """What a round of speculation reads and writes on the device.

    Attributes:
        tokens: (1, S) int64, the last token of the text and those drafted after it, with padding at the end.
        input_pos: (S,) int64, where they stand.
        count: (1,) int64, how many were drafted.
        rows: (1,) int64, which sample the text is.
        sampling: how tokens are chosen.
        seen: (1, V) bool, the tokens of the text so far; None without a repetition penalty.
        result: (S + 1,) int64, what `accept_tokens` returns.
    """

    tokens: Tensor
    input_pos: Tensor
    count: Tensor
    rows: Tensor
    sampling: SamplingTensors
    seen: Tensor | None
    result: Tensor


def verify_and_accept(model: Decoder, state: RoundState) -> None:
    """Read what was drafted and choose the tokens that stand, for a model that needs no `kv_pos`."""
    logits = verify(model, state.tokens, state.input_pos, None)[0]
    drafted, positions = state.tokens[0, 1:], state.input_pos + 1
    state.result.copy_(accept_tokens(logits, drafted, state.sampling, positions, state.rows, state.seen, state.count))
