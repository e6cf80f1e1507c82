"""The steps of decoding as pure functions: what is compiled, and all that is compiled.

Shapes: B batch, S tokens in this call, N cache slots attended, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from gptfast.model import Transformer


def prefill(model: Transformer, tokens: Tensor, input_pos: Tensor, kv_pos: Tensor, last: Tensor) -> Tensor:
    """Read a chunk of the prompt into the cache; (B, V) float32 logits after the token at index `last` (1,).

    A chunk shorter than S is padded at its end. The padding writes to slots after the prompt's, which are
    rewritten before they are ever looked at.
    """
    logits: Tensor = model(tokens, input_pos, kv_pos, last)
    return logits[:, 0]


def decode_one_token(model: Transformer, tokens: Tensor, input_pos: Tensor, kv_pos: Tensor) -> Tensor:
    """Extend every row by one token (B, 1) at `input_pos` (1,); (B, V) float32 logits of the next."""
    logits: Tensor = model(tokens, input_pos, kv_pos)
    return logits[:, -1]


def verify(model: Transformer, tokens: Tensor, input_pos: Tensor, kv_pos: Tensor) -> Tensor:
    """Read a chunk of tokens (1 or B, S) as `prefill` does; (1 or B, S, V) float32 logits after every one of them."""
    logits: Tensor = model(tokens, input_pos, kv_pos)
    return logits
