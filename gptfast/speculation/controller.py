"""How many tokens to speculate in the next round, so that decoding is never slower than one token at a time.

A round proposes k tokens, verifies them in one step of the target, and yields the n that were accepted and one more.
It pays if it takes less time than n + 1 plain steps, so time is counted in plain steps here: what a round wins is its
tokens less the plain steps that it took. Speculation lives on a credit of such steps. A round must be able to afford
that nothing is accepted; wins fill the credit, up to a limit, so that a good past pays for no long bad present; and
without any, plain steps add a little. So all that can be lost is the credit at the start, the first rounds,
from which costs are learnt, and a small share of the time. Within that, the k is chosen that promises the most tokens
per second.

A machine is not always equally fast, and what is compared must have been measured at about the same time. So before a
round is said not to pay, plain steps are timed again, and after a rest the first rounds only teach.

Nothing is drawn at random and no clock is read: the same records give the same choices.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptfast.errors import UserError
from gptfast.speculation.estimates import Acceptance, StepCosts

START_CREDIT = 3.0  # plain steps
CREDIT_LIMIT = 8.0  # plain steps
CREDIT_PER_STEP = 0.01  # that a plain step adds while speculation rests
RETURN_SHARE = 0.1  # of what was won in all, which trying again may cost
LENT_CREDIT = 1.0  # plain steps, that a return has beside what it costs

LEAST_SPEEDUP = 1.02  # promised, for speculation to go on
FIRST_PLAIN_STEPS = 2
FIRST_ROUNDS = 3  # before costs are judged: a first time is often a slow one
RETURN_ROUNDS = 2  # the same after a rest, if the credit bears them
ROUNDS_PER_PLAIN_STEP = 100  # while speculating, to know what it is compared with
FRESH_PLAIN_ROUNDS = 4  # for which a plain step's time is good enough to give up by
SHORTEST_WAIT, LONGEST_WAIT = 16, 128  # plain steps between tries
HOPELESS_WAIT = 512  # instead of the longest, while what was tried has cost more than it won
WIN_BACK_STEPS = 128  # within which what a try may lose must be won back, if every token were accepted


@dataclass(frozen=True)
class SpeculationStatistics:
    """What speculation did so far and what it cost.

    Attributes:
        rounds: steps that verified at least one proposed token.
        plain_steps: steps without this proposer: plain ones and, of one that stands before others, their rounds.
        proposed_counts: at index i, how many rounds proposed more than i tokens.
        accept_counts: at index i, how many rounds accepted more than i tokens.
        draft_s: seconds in which the rounds' tokens were proposed.
        verify_s: seconds of the rounds' target steps.
        plain_s: seconds of these steps for each token that they yielded.
        break_even_acceptances: at index k - 1, the acceptance of every token, given those before it, at which rounds
            of k tokens are as fast as plain steps; above 1 where no acceptance is enough, None where a time that it
            takes was not measured.
    """

    rounds: int
    plain_steps: int
    proposed_counts: tuple[int, ...]
    accept_counts: tuple[int, ...]
    draft_s: float
    verify_s: float
    plain_s: float
    break_even_acceptances: tuple[float | None, ...]

    @property
    def proposed(self) -> int:
        """Tokens that were proposed."""
        return sum(self.proposed_counts)

    @property
    def accepted(self) -> int:
        """Tokens of them that were accepted."""
        return sum(self.accept_counts)

    @property
    def acceptance(self) -> float:
        """Share of the proposed tokens that was accepted; 0 if none were proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a round yielded on average, the target's own included; 0 without rounds."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    @property
    def usual_k(self) -> int:
        """The length that most rounds proposed; 0 without rounds."""
        ends = [
            count - later for count, later in zip(self.proposed_counts, (*self.proposed_counts[1:], 0), strict=True)
        ]
        return 1 + ends.index(max(ends)) if self.rounds else 0

    @property
    def draft_ms_per_token(self) -> float:
        """Milliseconds that proposing a token took on average; 0 if none were."""
        return 1e3 * self.draft_s / self.proposed if self.proposed else 0.0

    @property
    def verify_ms(self) -> float:
        """Milliseconds of a round's target step on average; 0 without rounds."""
        return 1e3 * self.verify_s / self.rounds if self.rounds else 0.0

    @property
    def plain_ms(self) -> float:
        """Milliseconds of a plain step on average; 0 without any."""
        return 1e3 * self.plain_s / self.plain_steps if self.plain_steps else 0.0


class SpeculationController:
    """Chooses k before every step from the acceptance and the times of those before.

    Args:
        max_k: the most tokens to propose in a round.
        fixed_k: always this k, 0 for none, without looking at what it costs.

    Raises:
        UserError: `max_k` is below 1, or `fixed_k` is not within 0 and `max_k`.
    """

    def __init__(self, *, max_k: int, fixed_k: int | None = None) -> None:
        if max_k < 1:
            raise UserError(f"at most {max_k} tokens are to be speculated; allow at least 1")
        if fixed_k is not None and not 0 <= fixed_k <= max_k:
            raise UserError(f"{fixed_k} tokens cannot be speculated; choose 0 to {max_k}")
        self._max_k, self._is_fixed = max_k, fixed_k is not None
        self._k = fixed_k or 0
        self._costs = StepCosts()
        self._acceptance = Acceptance(max_k)
        self._credit = START_CREDIT
        self._is_speculating = True
        self._won = 0.0  # plain steps, since speculation was last taken up
        self._won_in_all = 0.0
        self._plain_due = FIRST_PLAIN_STEPS
        self._rounds_to_judge = FIRST_ROUNDS - 1
        self._wait = self._steps_to_try = SHORTEST_WAIT
        self._plain_steps = 0
        self._proposed_counts, self._accept_counts = [0] * max_k, [0] * max_k
        self._draft_s = self._verify_s = self._plain_s = 0.0

    @property
    def is_speculating(self) -> bool:
        """Whether rounds are to come, though a plain step may come first."""
        return self._k > 0 if self._is_fixed else self._is_speculating

    def choose_k(self) -> int:
        """How many tokens to propose now; 0 for a plain step."""
        return self._k

    def begin_text(self, *, unread: int) -> None:
        """Another text begins, and the proposer has yet to read `unread` tokens of its prompt."""
        self._costs.lag = unread

    def skip(self, tokens: int) -> None:
        """Note that so many tokens were decoded without asking."""
        self._costs.lag += tokens

    def record_plain(self, seconds: float, tokens: int = 1) -> None:
        """Learn from a step without this proposer, also from one where tokens were asked for and none proposed.

        It is a plain one, or another's round, which yields several `tokens`; `seconds` are those of each.
        """
        self._plain_steps += 1
        self._plain_s += seconds
        self._costs.record_plain(seconds, tokens)
        if self._is_fixed:
            return
        if self._is_speculating:
            self._plain_due -= 1
        else:
            self._steps_to_try -= 1
            self._credit = min(self._credit + CREDIT_PER_STEP, CREDIT_LIMIT)
            if self._steps_to_try <= 0 and self._may_return():
                self._is_speculating, self._won = True, 0.0
                self._credit = max(self._credit, self._estimate_return_steps() + LENT_CREDIT)
                self._acceptance.forget()
                self._learn_anew()
        self._k = self._choose()

    def record_round(self, *, proposed: int, accepted: int, draft_s: float, verify_s: float) -> None:
        """Learn from a round.

        Args:
            proposed: tokens that were proposed, 1 to `max_k`.
            accepted: how many of them were right, from the first on.
            draft_s: seconds that proposing them took. Reading the prompt is not part of it.
            verify_s: seconds of the target's step, with the choice of its tokens.
        """
        assert 1 <= proposed <= self._max_k
        assert 0 <= accepted <= proposed
        for i in range(proposed):
            self._proposed_counts[i] += 1
            self._accept_counts[i] += i < accepted
        self._draft_s += draft_s
        self._verify_s += verify_s
        spent_s = self._costs.record_round(proposed, draft_s, verify_s)
        if self._is_fixed:
            return
        assert self._costs.plain, "the first steps that are asked for are plain"
        self._acceptance.record(proposed, accepted)
        won = accepted + 1 - spent_s / self._costs.plain.typical_s
        self._won += won
        self._won_in_all += won
        self._credit = min(self._credit + won, CREDIT_LIMIT)
        self._rounds_to_judge -= 1
        if self._costs.rounds_in_turn >= ROUNDS_PER_PLAIN_STEP:
            self._plain_due = 1
        if self._costs.rounds >= FIRST_ROUNDS and not self._can_go_on():
            if self._costs.rounds_in_turn > FRESH_PLAIN_ROUNDS:
                self._costs.plain.renew()
                self._plain_due = FIRST_PLAIN_STEPS
                self._learn_anew()
            else:
                self._rest()
        self._k = self._choose()

    @property
    def statistics(self) -> SpeculationStatistics:
        """All that was recorded so far."""
        return SpeculationStatistics(
            rounds=self._costs.rounds,
            plain_steps=self._plain_steps,
            proposed_counts=tuple(self._proposed_counts),
            accept_counts=tuple(self._accept_counts),
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            plain_s=self._plain_s,
            break_even_acceptances=tuple(self._costs.find_break_even(k) for k in range(1, self._max_k + 1)),
        )

    def _choose(self) -> int:
        return self._find_best()[0] if self._is_speculating and self._plain_due <= 0 else 0

    def _can_go_on(self) -> bool:
        if self._credit < self._costs.estimate_round_steps(1) - 1:
            return False
        return self._rounds_to_judge > 0 or self._find_best()[1] >= LEAST_SPEEDUP

    def _rest(self) -> None:
        self._is_speculating = False
        longest = LONGEST_WAIT if self._won_in_all > 0 else HOPELESS_WAIT
        self._wait = SHORTEST_WAIT if self._won > 0 else min(2 * self._wait, longest)
        self._steps_to_try = self._wait

    def _learn_anew(self) -> None:
        """Have the next rounds measure what rounds take, before they are judged by it."""
        self._rounds_to_judge = RETURN_ROUNDS
        self._costs.renew_rounds()

    def _may_return(self) -> bool:
        """Whether to speculate again, given that the first round may yield nothing by it.

        The credit or a share of what was won in all must bear that. The first time is free: what the lag of a draft
        model costs is not known yet, and the least at once. A lag may then grow faster than the credit, until another
        text begins. And if every token were accepted, the loss would have to be won back before the longest wait is
        over.
        """
        lost = self._estimate_return_steps()
        if self._costs.catch_up and max(self._credit, RETURN_SHARE * self._won_in_all) < lost:
            return False
        least = min(self._costs.estimate_round_steps(k) / (k + 1) for k in range(1, self._max_k + 1))
        return lost < (1 - least) * WIN_BACK_STEPS

    def _estimate_return_steps(self) -> float:
        return self._costs.estimate_round_steps(1) - 1 + self._costs.estimate_catch_up_steps()

    def _find_best(self) -> tuple[int, float]:
        """The k of at least 1 with the highest promised speedup, and that speedup.

        None above 1 costs more than half the credit if nothing is accepted, and none is above twice what was verified
        lately.
        """
        best_k, best_speedup = 1, 0.0
        tokens = self._acceptance.estimate_tokens()
        for k in range(1, min(self._max_k, max(1, 2 * self._costs.largest_k)) + 1):
            steps = self._costs.estimate_round_steps(k)
            if k > 1 and steps - 1 > self._credit / 2:
                break
            if tokens[k] / steps > best_speedup:
                best_k, best_speedup = k, tokens[k] / steps
        return best_k, best_speedup
