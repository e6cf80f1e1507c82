"""Whether a text that was speculated is the one that plain decoding gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptfast.config import SamplingConfig
from gptfast.generation import GenerationResult, Stream
from gptfast.session import Session


@dataclass(frozen=True)
class Divergence:
    """The first token in which two texts differ.

    Attributes:
        index: of the token among the new ones, from 0.
        speculated, plain: its ids in the two texts; None where one has ended.
        top_2_margin: how far the target's largest logit is above the second there, before temperature and filters.
    """

    index: int
    speculated: int | None
    plain: int | None
    top_2_margin: float


def find_divergence(
    session: Session,
    prompt_ids: Sequence[int],
    result: GenerationResult,
    *,
    sampling: SamplingConfig,
    sample_id: int = 0,
    ignore_eos: bool = False,
) -> Divergence | None:
    """Decode plainly as many tokens as `result` has, and compare; None if they are the same.

    `result` is what the session's speculation made of the prompt with this sampling.
    """
    speculator, session.speculator = session.speculator, None
    try:
        plain = Stream(
            session,
            prompt_ids,
            max_new_tokens=result.new_tokens,
            sampling=sampling,
            sample_ids=(sample_id,),
            ignore_eos=ignore_eos,
        )
        for _ in plain:
            pass
    finally:
        session.speculator = speculator
    return compare(session, prompt_ids, result.token_ids, plain.result.token_ids)


def compare(
    session: Session, prompt_ids: Sequence[int], speculated: Sequence[int], plain: Sequence[int]
) -> Divergence | None:
    """Where two texts after the same prompt first differ, if they do."""
    for index in range(max(len(speculated), len(plain))):
        a, b = (ids[index] if index < len(ids) else None for ids in (speculated, plain))
        if a != b:
            first, second = session.runner.prefill([*prompt_ids, *plain[:index]])[0].topk(2).values.tolist()
            session.cached_ids = []
            return Divergence(index, a, b, first - second)
    return None
