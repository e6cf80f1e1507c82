"""What the next round of speculation will take and yield, told from the last ones."""

from __future__ import annotations

import statistics
from collections import deque

PRIOR_ACCEPTANCE, PRIOR_TRIALS = 0.7, 2.0  # hopeful, so that a try is not given up before it has shown anything
POSITION_TRIALS = 4.0  # trials that the mean of all positions counts as at each of them
MEMORY_ROUNDS = 32  # of the acceptance

RECENT_STEPS = 5  # of one kind, whose lower median is its time
FRESH_ROUNDS = 50  # for which the verify time of a k is believed
PRIOR_ROW_COST = 0.05  # of a plain step, for each row more than what was measured
SURPRISE = 1.5  # times what was expected: a step that takes longer met a busy machine and counts as this
LEAST_LAG = 16  # tokens, to tell a lag's cost from the noise


class Acceptance:
    """How likely each position's token is accepted if those before it are."""

    def __init__(self, max_k: int) -> None:
        self._max_k = max_k
        self.forget()

    def forget(self) -> None:
        """Begin anew, as for a text that has changed."""
        self._tried, self._accepted = [0.0] * self._max_k, [0.0] * self._max_k
        self._all_tried, self._all_accepted = PRIOR_TRIALS, PRIOR_TRIALS * PRIOR_ACCEPTANCE

    def record(self, proposed: int, accepted: int) -> None:
        """Learn from a round; nothing is known of the tokens behind the first that was wrong."""
        keep = 1 - 1 / MEMORY_ROUNDS
        tried = min(accepted + 1, proposed)
        self._tried = [keep * count + (i < tried) for i, count in enumerate(self._tried)]
        self._accepted = [keep * count + (i < accepted) for i, count in enumerate(self._accepted)]
        self._all_tried = keep * self._all_tried + tried
        self._all_accepted = keep * self._all_accepted + accepted

    def estimate_tokens(self) -> list[float]:
        """Tokens that a round of k proposals yields, at index k: 1 + a1 + a1 a2 + ... (Leviathan et al. 2022)."""
        mean = self._all_accepted / self._all_tried
        tokens, reached = [1.0], 1.0
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            reached *= (accepted + POSITION_TRIALS * mean) / (tried + POSITION_TRIALS)
            tokens.append(tokens[-1] + reached)
        return tokens


class RecentTimes:
    """The last times of one kind of step; false if there never was one.

    Attributes:
        typical_s: their lower median in seconds, which no slow moment moves much; 0 if there are none.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self.typical_s = 0.0

    def __bool__(self) -> bool:
        return self.typical_s > 0

    def renew(self) -> None:
        """Have the next time replace all; until then the typical one stays."""
        self._seconds.clear()

    def add(self, seconds: float) -> None:
        """Forget the oldest for this one."""
        self._seconds.append(seconds)
        self.typical_s = statistics.median_low(self._seconds)


class StepCosts:
    """What plain steps, proposals and verify steps take.

    Attributes:
        plain: times of plain steps.
        catch_up: times that a draft model took per token of its lag.
        lag: tokens that were decoded without the proposer, and which it has yet to read.
        rounds: how many were recorded.
        rounds_in_turn: those since the last plain step.
        largest_k: the most proposals of the rounds that are still believed.
    """

    def __init__(self) -> None:
        self.plain = RecentTimes()
        self.catch_up = RecentTimes()
        self.lag = self.rounds = self.rounds_in_turn = self.largest_k = 0
        self._draft = RecentTimes()
        self._verify: dict[int, RecentTimes] = {}
        self._last_round: dict[int, int] = {}
        self._fresh: list[int] = []

    def renew_rounds(self) -> None:
        """Have the next round's times replace those of earlier ones."""
        for times in (self._draft, *self._verify.values()):
            times.renew()

    def record_plain(self, seconds: float, tokens: int) -> None:
        """Learn from a step that yielded so many tokens, in `seconds` each."""
        self.plain.add(seconds)
        self.rounds_in_turn = 0
        self.lag += tokens

    def record_round(self, k: int, draft_s: float, verify_s: float) -> float:
        """Learn from a round of k proposals; its seconds, without what a busy machine seems to have added."""
        draft_s = self._record_draft(k, draft_s)
        if self.plain:
            verify_s = min(verify_s, SURPRISE * self.estimate_verify_s(k))
        self._verify.setdefault(k, RecentTimes()).add(verify_s)
        self.lag = 0
        self.rounds += 1
        self.rounds_in_turn += 1
        self._last_round[k] = self.rounds
        self._fresh = sorted(k for k, last in self._last_round.items() if self.rounds - last < FRESH_ROUNDS)
        self.largest_k = self._fresh[-1]
        return draft_s + verify_s

    def _record_draft(self, k: int, draft_s: float) -> float:
        """A lag is part of what a round costs, but what it took is only an upper bound of what proposals take."""
        usual_s = k * self._draft.typical_s
        if self._draft and not self.lag:
            draft_s = min(draft_s, SURPRISE * usual_s)
        if self._draft and self.lag >= LEAST_LAG:
            self.catch_up.add(max(draft_s - usual_s, 0.0) / self.lag)
        if not self._draft or not self.lag or draft_s < usual_s:
            self._draft.add(draft_s / k)
        return draft_s

    def estimate_verify_s(self, k: int) -> float:
        """Seconds of a verify step of k proposals: as measured, or on the line between those that were.

        Above the largest it is told from the prior, which is hopeful: trying it costs little and tells.
        """
        below = max((known for known in self._fresh if known <= k), default=0)
        above = min((known for known in self._fresh if known > k), default=0)
        below_s = self._verify[below].typical_s if below else self.plain.typical_s
        if not above or below == k:
            return below_s + (k - below) * PRIOR_ROW_COST * self.plain.typical_s
        return below_s + (self._verify[above].typical_s - below_s) * (k - below) / (above - below)

    def estimate_round_steps(self, k: int) -> float:
        """Plain steps in whose time a round of k proposals without a lag is done."""
        return (k * self._draft.typical_s + self.estimate_verify_s(k)) / self.plain.typical_s

    def estimate_catch_up_steps(self) -> float:
        """Plain steps in whose time the lag is read."""
        return self.lag * self.catch_up.typical_s / self.plain.typical_s

    def find_break_even(self, k: int) -> float | None:
        """The a with 1 + a + ... + a^k equal to the plain steps that a round takes; None if not measured."""
        if not self.plain or k not in self._verify:
            return None
        steps = (k * self._draft.typical_s + self._verify[k].typical_s) / self.plain.typical_s
        low, high = 0.0, max(steps - 1, 0.0)
        for _ in range(60):
            middle = (low + high) / 2
            if sum(middle**i for i in range(k + 1)) < steps:
                low = middle
            else:
                high = middle
        return high
