"""What may stand between a target and its next tokens: anything that guesses them.

Draft models and n-gram lookup are such; heads that read the target's hidden states would be others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gptfast.sampling import Sampler


class Proposer(Protocol):
    """Guesses how a text goes on. A wrong guess costs time and never changes the text."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Get ready for a text that begins with `tokens`, the prompt and the first token after it."""

    def propose(self, tokens: Sequence[int], k: int, sampler: Sampler) -> Sequence[int] | Tensor:
        """At most `k` tokens that may follow `tokens`, all of the text so far: prompt and output.

        `sampler` is what the target chooses with; its noise belongs to a place, so equal logits choose equal tokens.
        Between calls a text may also shrink or be another one. Returns ids or a tensor (n,) int64, none of them
        without an idea.
        """
