"""The text that a model is measured on, and the windows that it is read in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from gptfast.errors import UserError

PERPLEXITY_TOPICS = ("debugger", "formatstrings", "string-methods", "strings", "types", "typesmapping")
"""The topics of `pydoc_data.topics` that make the default text: 130,000 characters, in this order.

Topics quote each other, but no paragraph of these stands in any other topic (Python 3.11). So whatever must not have
seen this text, such as the calibration of a quantizer, may read every topic that is not listed here.
"""


@dataclass(frozen=True)
class Text:
    """A text and what it is called."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        """The first 16 hexadecimal digits of the hash of its UTF-8 bytes."""
        return hashlib.sha256(self.content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Window:
    """A stretch of the text that the model reads from an empty cache.

    Attributes:
        start: position in the text of its first token.
        first: position of the first token that is scored here.
        stop: position after its last token, which is the last that is scored.
    """

    start: int
    first: int
    stop: int


def read_default_text() -> Text:
    """The default text, which every installation of CPython carries; Python versions differ in its words."""
    from pydoc_data.topics import topics

    return Text("pydoc_data.topics", "\n".join(topics[name] for name in PERPLEXITY_TOPICS))


def check_windows(n_tokens: int, size: int, stride: int) -> None:
    """Raise UserError if there is nothing to score, or windows would be too short or skip tokens."""
    if size < 2:
        raise UserError(f"window is {size}; it must be at least 2 tokens, as the first of a window is not scored")
    if not 1 <= stride <= size:
        raise UserError(f"stride is {stride}; it must be 1 to the window of {size} tokens, or tokens would be skipped")
    if n_tokens < 2:
        raise UserError(f"perplexity of {n_tokens} tokens is not defined; give a longer --text or more --tokens")


def plan_windows(n_tokens: int, size: int, stride: int) -> list[Window]:
    """Windows of `size` tokens that advance by `stride`; each scores the tokens that none before it scored.

    The last one ends with the text and may be shorter. The first token of a window has no context, so it is not
    scored: that leaves out one token of the text, or one of every window where they do not overlap. Raises UserError
    as `check_windows` does.
    """
    check_windows(n_tokens, size, stride)
    windows = []
    scored = 0
    for start in range(0, n_tokens, stride):
        first, stop = max(scored, start + 1), min(start + size, n_tokens)
        if first < stop:
            windows.append(Window(start, first, stop))
        if stop == n_tokens:
            break
        scored = stop
    return windows
