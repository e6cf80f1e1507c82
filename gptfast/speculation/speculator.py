"""Rounds of speculative decoding: propose, verify in one step of the target, keep what the target would have said.

The rule of acceptance is that a proposed token stays if it is the one that the target itself chooses at its place, with
the noise that belongs to the place. So the text is that of plain decoding with the same seed, whatever was proposed,
and thereby distributed as the target's (Daliri et al. 2024, drafter-invariant speculative decoding). The rule of
Leviathan et al. 2022 accepts a little more at a temperature, but its text would depend on where rounds begin, and the
controller lets that depend on the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptfast.config import SamplingConfig
from gptfast.graphs import send_ids
from gptfast.runner import Runner
from gptfast.sampling import Sampler
from gptfast.speculation.controller import SpeculationController, SpeculationStatistics
from gptfast.speculation.draft import DraftModel
from gptfast.speculation.proposer import Proposer


@dataclass(frozen=True)
class Lane:
    """A proposer, what reports call it, and what decides how many tokens it is asked for."""

    name: str
    proposer: Proposer
    controller: SpeculationController


class Speculator:
    """Extends a text by one round, or by one plain step, at a time; each lane is asked if those before it pass.

    Attributes:
        lanes: in the order in which they are asked.
        rounds, plain_steps: how many there were, in all texts.
    """

    def __init__(self, target: Runner, lanes: Sequence[Lane]) -> None:
        assert target.batch_size == 1
        self._target = target
        self.lanes = tuple(lanes)
        self.rounds = self.plain_steps = 0

    @property
    def statistics(self) -> dict[str, SpeculationStatistics]:
        """What every lane did in all texts so far, by name."""
        return {lane.name: lane.controller.statistics for lane in self.lanes}

    def count_draft_bytes(self) -> int:
        """Bytes of weights that draft models read in all texts so far, each once for a proposed token."""
        return sum(
            lane.proposer.runner.model.count_weight_bytes_per_token() * lane.controller.statistics.proposed
            for lane in self.lanes
            if isinstance(lane.proposer, DraftModel)
        )

    def list_runners(self) -> list[Runner]:
        """Those of the draft models."""
        return [lane.proposer.runner for lane in self.lanes if isinstance(lane.proposer, DraftModel)]

    def warm_up(self, prompt_tokens: int | None, sampling: SamplingConfig) -> None:
        """Compile the steps that draft models need for a prompt of that length, or for any if None."""
        for runner in self.list_runners():
            # That of a single token is the small prefill step, for what a draft model missed while it rested.
            for tokens in (prompt_tokens, 1):
                runner.warm_up(tokens, sampling=sampling, drafts_for=self._target.vocab_size)

    def begin(self, tokens: Sequence[int]) -> None:
        """Have the proposers that will be asked read the start of a text; see `Proposer.begin`."""
        for lane in self.lanes:
            if reads := lane.controller.is_speculating:
                lane.proposer.begin(tokens)
            lane.controller.begin_text(unread=0 if reads else len(tokens))

    def advance(self, tokens: Sequence[int], sampler: Sampler, most: int) -> list[int]:
        """1 to `most` tokens that follow `tokens`, all of the text so far, of which the cache lacks the last."""
        position, device = len(tokens) - 1, self._target.device
        passed: list[Lane] = []
        for lane in self.lanes:
            start = self._target.note_moment()
            k = min(lane.controller.choose_k(), most - 1)
            proposed = lane.proposer.propose(tokens, k, sampler)[:k] if k > 0 else ()
            if len(proposed) == 0:
                passed.append(lane)
                continue
            drafted = proposed if isinstance(proposed, Tensor) else send_ids(proposed, device)
            middle = self._target.note_moment()
            values = self._target.accept(sampler, tokens[-1], drafted, position)
            end = self._target.note_moment()
            self.rounds += 1
            lane.controller.record_round(
                proposed=len(drafted),
                accepted=len(values) - 1,
                draft_s=middle.count_seconds_since(start),
                verify_s=end.count_seconds_since(middle),
            )
            for later in self.lanes[len(passed) + 1 :]:
                later.controller.skip(len(values))
            break
        else:
            start = self._target.note_moment()
            none = torch.empty(0, dtype=torch.int64, device=device)
            values = self._target.accept(sampler, tokens[-1], none, position)
            end = self._target.note_moment()
            self.plain_steps += 1
        # What a lane competes with is what happens without it.
        for lane in passed:
            lane.controller.record_plain(end.count_seconds_since(start) / len(values), tokens=len(values))
        return values
