"""From token ids to shown text: end-of-sequence tokens, stop strings, and no half characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gptfast.errors import UserError
from gptfast.tokenizer import StreamDecoder, Tokenizer

FinishReason = Literal["eos", "stop", "length", "interrupted"]


class Transcript:
    """The text of one row as it grows.

    Attributes:
        token_ids: every token pushed so far.
        finish_reason: why it ended, or None while it goes on.
        text: all that may be shown of it; what could still become a stop string is held back until it is decided.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_ids: frozenset[int], stop: Sequence[str]) -> None:
        if "" in stop:
            raise UserError("an empty stop string would end every text at once; leave it out")
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.text = ""
        self._decoder = StreamDecoder(tokenizer) if tokenizer is not None else None
        self._eos_ids = eos_ids
        self._stop = tuple(stop)
        self._held = ""
        self._taken = 0

    def push(self, token_id: int) -> None:
        """Append a token; sets `finish_reason` if it ends the text."""
        self.token_ids.append(token_id)
        if token_id in self._eos_ids:
            self.finish("eos")
        elif self._decoder is not None:
            self._append(self._decoder.feed(token_id))

    def finish(self, reason: FinishReason) -> None:
        """End the text and release what was held back."""
        if self._decoder is not None:
            self._append(self._decoder.flush())
        if self.finish_reason is None:  # a stop string may have stood in what was released
            self.text += self._held
            self._held = ""
            self.finish_reason = reason

    def take_text(self) -> str:
        """What may be shown since the last call."""
        new = self.text[self._taken :]
        self._taken = len(self.text)
        return new

    def _append(self, text: str) -> None:
        pending = self._held + text
        # The stop string that is complete first, wherever a token ends; of those the one that began first.
        ends = [(pending.find(stop) + len(stop), pending.find(stop)) for stop in self._stop if stop in pending]
        if ends:
            self.text += pending[: min(ends)[1]]
            self._held = ""
            self.finish_reason = "stop"
            return
        kept = max((count_overlap(pending, stop) for stop in self._stop), default=0)
        self.text += pending[: len(pending) - kept]
        self._held = pending[len(pending) - kept :]


def count_overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
