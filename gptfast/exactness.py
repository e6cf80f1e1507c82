"""Whether a text that was speculated is the one that plain decoding gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gptfast.generation import Stream
from gptfast.session import Session


@dataclass(frozen=True)
class Divergence:
    """The first token in which two texts differ.

    Attributes:
        index: of the token among the new ones, from 0.
        speculated, plain: its ids in the two texts; None where one has ended.
        top_2_margin: how far the largest logit of plain decoding is above the second there, before temperature and
            filters.
    """

    index: int
    speculated: int | None
    plain: int | None
    top_2_margin: float


def find_divergence(session: Session, speculated: Stream, plain: Stream) -> Divergence | None:
    """Run a plain stream and compare its tokens with those of a finished one; None if they are the same.

    Both are of one row, and of the session; they differ in `speculates` alone.
    """
    for _ in plain:
        pass
    ours, theirs = speculated.result.token_ids, plain.result.token_ids
    for index in range(max(len(ours), len(theirs))):
        a, b = (ids[index] if index < len(ids) else None for ids in (ours, theirs))
        if a != b:
            text = [*plain.prompt_ids, *theirs[:index]]
            session.cached_ids = []
            logits = session.runner.prefill(plain.prompt_ids)
            for position in range(len(plain.prompt_ids), len(text)):
                logits = session.runner.decode(torch.tensor(text[position : position + 1]), position)
            first, second = logits[0].topk(2).values.tolist()
            return Divergence(index, a, b, first - second)
    return None
