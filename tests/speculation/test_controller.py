"""The controller on simulated machines and texts. Times are in plain steps, so plain decoding takes 1 per token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from gptfast.errors import UserError
from gptfast.speculation.controller import HOPELESS_WAIT, SpeculationController

ACCEPTANCES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
DRAFT_COSTS = (0.0, 0.1, 0.3, 0.6, 0.9, 1.2)
ROW_COSTS = (0.01, 0.05, 0.2, 0.5)
MACHINES = tuple(itertools.product(DRAFT_COSTS, ROW_COSTS))
MAX_K = 8


@dataclass
class Simulation:
    """Decodes with a controller where a proposal takes `draft_cost` and every further row of a verify step `row_cost`.

    The controller is shown noisy times, and `spent` counts true ones: a slow moment is none of its decisions.

    Attributes:
        acceptance: of a token, by its place in the text, if those before it in the round are accepted.
        lag_cost: what a draft model takes to read a token that was decoded without it.
        slowness: of the machine, for everything, by the place in the text.
        proposing: share of the rounds for which the proposer has an idea.
        spent: at index i, the time that was spent when i + 1 tokens were decoded.
        asked: the controller's choices.
    """

    acceptance: float | Callable[[int], float]
    draft_cost: float
    row_cost: float
    is_noisy: bool = False
    lag_cost: float = 0.0
    slowness: Callable[[int], float] = lambda _place: 1.0
    proposing: float = 1.0
    seed: int = 0
    controller: SpeculationController = field(default_factory=lambda: SpeculationController(max_k=MAX_K))
    spent: list[float] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def decode(self, tokens: int) -> float:
        """Decode a text; its time per token, so 1 is as fast as plain decoding."""
        text, noise = random.Random(self.seed), random.Random(1000 + self.seed)
        lag, now = 0, 0.0

        def show(seconds: float) -> float:
            seconds *= self.slowness(len(self.spent))
            if not self.is_noisy:
                return seconds
            return seconds * noise.uniform(0.9, 1.1) * (10 if noise.random() < 0.01 else 1)

        while len(self.spent) < tokens:
            k = self.controller.choose_k()
            self.asked.append(k)
            if k == 0 or text.random() >= self.proposing:
                self.controller.record_plain(show(1.0))
                now, lag, accepted = now + 1.0, lag + 1, 0
            else:
                place, accepted = len(self.spent), 0
                while accepted < k and text.random() < self.find_acceptance(place + accepted):
                    accepted += 1
                draft_s, verify_s = k * self.draft_cost + lag * self.lag_cost, 1 + k * self.row_cost
                self.controller.record_round(
                    proposed=k, accepted=accepted, draft_s=show(draft_s), verify_s=show(verify_s)
                )
                now, lag = now + draft_s + verify_s, 0
            self.spent += [now] * (accepted + 1)
        return now / len(self.spent)

    def find_acceptance(self, place: int) -> float:
        return self.acceptance(place) if callable(self.acceptance) else self.acceptance


def find_best_fixed(acceptance: float, draft_cost: float, row_cost: float) -> float:
    """The time per token of the best k, 0 included: theorem 3.8 of Leviathan et al. 2022, with a cost per row."""
    return min((1 + k * (draft_cost + row_cost)) / sum(acceptance**i for i in range(k + 1)) for k in range(MAX_K + 1))


@pytest.mark.parametrize("is_noisy", [False, True])
@pytest.mark.parametrize(("tokens", "limit"), [(200, 1.04), (2000, 1.02)])
def test_it_is_never_slower_than_plain_decoding(tokens: int, limit: float, is_noisy: bool) -> None:
    times = {
        (acceptance, *machine, seed): Simulation(acceptance, *machine, is_noisy, seed=seed).decode(tokens)
        for acceptance in ACCEPTANCES
        for machine in MACHINES
        for seed in range(400 // tokens + 1)
    }
    assert max(times.values()) <= limit, max(times.items(), key=lambda item: item[1])


@pytest.mark.parametrize("is_noisy", [False, True])
def test_where_speculation_pays_it_is_nearly_as_fast_as_the_best_k(is_noisy: bool) -> None:
    count = 0
    for acceptance, machine in itertools.product(ACCEPTANCES, MACHINES):
        best = find_best_fixed(acceptance, *machine)
        if best < 1 / 1.1:
            count += 1
            times = [Simulation(acceptance, *machine, is_noisy, seed=seed).decode(2000) for seed in range(3)]
            assert sum(times) / 3 < 1.1 * best, (acceptance, *machine)
    assert count == 55


@pytest.mark.parametrize("is_noisy", [False, True])
@pytest.mark.parametrize("machine", [(0.0, 0.05), (0.0, 0.5), (0.1, 0.2), (0.3, 0.05)])
def test_a_text_that_changes_is_followed(machine: tuple[float, float], is_noisy: bool) -> None:
    simulation = Simulation(lambda place: 0.0 if 600 <= place < 1200 else 0.9, *machine, is_noisy)
    simulation.decode(1800)
    first, second, third = (
        (simulation.spent[end - 1] - (simulation.spent[end - 601] if end > 600 else 0.0)) / 600
        for end in (600, 1200, 1800)
    )
    best = find_best_fixed(0.9, *machine)
    assert first < 1.1 * best
    assert second <= 1.03
    assert 1 - third > 0.6 * (1 - best)


@pytest.mark.parametrize(("draft_cost", "row_cost"), [(0.1, 0.05), (0.3, 0.2), (0.9, 0.05), (1.2, 0.01)])
def test_a_draft_model_that_must_read_what_it_missed_is_not_tried_too_often(draft_cost: float, row_cost: float) -> None:
    # Reading is ten times as fast as decoding, so a wait of 100 tokens costs ten draft steps.
    for tokens, limit in ((200, 1.035), (2000, 1.025)):
        for acceptance in (0.0, 0.4):
            simulation = Simulation(acceptance, draft_cost, row_cost, lag_cost=0.1 * draft_cost)
            assert simulation.decode(tokens) <= limit


@pytest.mark.parametrize("period", [20, 60, 300])
@pytest.mark.parametrize("is_noisy", [False, True])
def test_a_machine_that_changes_its_speed_is_no_reason_to_rest(period: int, is_noisy: bool) -> None:
    # Reading what was missed takes several plain steps, as of the int4 draft of a small model.
    best = find_best_fixed(0.95, 0.55, 0.05)
    for seed in range(5):
        simulation = Simulation(0.95, 0.55, 0.05, is_noisy, lag_cost=0.1, seed=seed)
        simulation.slowness = lambda place: 1.7 if place // period % 2 else 1.0
        assert simulation.decode(2000) < 1.08 * best


def test_one_slow_moment_at_the_start_does_not_cost_the_text() -> None:
    best = find_best_fixed(0.95, 0.55, 0.05)
    for slow in range(8):
        simulation = Simulation(0.95, 0.55, 0.05, lag_cost=0.1)
        simulation.slowness = lambda place, slow=slow: 3.0 if place == slow else 1.0  # type: ignore[misc]
        assert simulation.decode(400) < 1.1 * best


def test_a_proposer_that_seldom_has_an_idea_pays_where_it_has_one() -> None:
    assert Simulation(0.9, 0.0, 0.05, proposing=0.15).decode(2000) < 0.65
    assert Simulation(0.0, 0.0, 0.2, proposing=0.15).decode(2000) < 1.015


def test_k_grows_with_acceptance_and_falls_with_cost() -> None:
    def decode(acceptance: float, draft_cost: float) -> float:
        simulation = Simulation(acceptance, draft_cost, 0.05)
        simulation.decode(2000)
        rounds = [k for k in simulation.asked if k]
        return sum(rounds) / len(rounds)

    assert decode(0.5, 0.1) + 1 < decode(0.9, 0.1)
    assert decode(0.9, 0.5) + 1 < decode(0.9, 0.1)


def test_without_success_tries_become_rare_and_never_end() -> None:
    simulation = Simulation(0.0, 0.1, 0.02)
    simulation.decode(6000)
    places = [place for place, k in enumerate(simulation.asked) if k]
    gaps = [after - before for before, after in itertools.pairwise([*places, len(simulation.asked)])]
    assert len(places) < 100
    assert HOPELESS_WAIT <= max(gaps) <= HOPELESS_WAIT + 1


def test_plain_steps_are_measured_first_and_now_and_then() -> None:
    simulation = Simulation(1.0, 0.1, 0.05)
    simulation.decode(9000)
    assert simulation.asked[:3] == [0, 0, 1]
    plain = [place for place, k in enumerate(simulation.asked) if k == 0]
    assert len(plain) > 5
    assert max(after - before for before, after in itertools.pairwise(plain)) < 150
    lost = len(plain) * (1 - find_best_fixed(1.0, 0.1, 0.05))
    assert lost < 0.01 * simulation.spent[-1]


def test_a_single_slow_moment_does_not_end_speculation() -> None:
    for slow_round in range(1, 40):
        controller = SpeculationController(max_k=4)
        controller.record_plain(1.0)
        controller.record_plain(1.0)
        for number in range(60):
            factor = 20 if number == slow_round else 1
            k = controller.choose_k()
            assert k > 0
            controller.record_round(proposed=k, accepted=k, draft_s=0.2 * k * factor, verify_s=1.1 * factor)


def test_a_machine_that_becomes_slow_for_all_steps_alike_is_followed() -> None:
    controller = SpeculationController(max_k=4)
    chosen = []
    for number in range(1000):
        pace = 3 if number >= 300 else 1
        k = controller.choose_k()
        chosen.append(k)
        if k:
            controller.record_round(proposed=k, accepted=k, draft_s=0.1 * k * pace, verify_s=1.1 * pace)
        else:
            controller.record_plain(1.0 * pace)
    assert sum(k > 0 for k in chosen[500:]) > 450


def test_a_k_that_was_slow_is_tried_again() -> None:
    controller = SpeculationController(max_k=8)
    controller.record_plain(1.0)
    controller.record_plain(1.0)
    chosen = []
    for number in range(200):
        k = controller.choose_k()
        chosen.append(k)
        if k:
            slow = 3.0 if k > 4 and number < 20 else 1.0
            controller.record_round(proposed=k, accepted=k, draft_s=0.0, verify_s=(1 + 0.05 * k) * slow)
        else:
            controller.record_plain(1.0)
    assert max(chosen[10:20]) <= 4
    assert chosen[-1] == 8


def test_a_prompt_that_the_proposer_did_not_read_delays_its_return() -> None:
    def count_steps_to_return(unread: int) -> int:
        controller = SpeculationController(max_k=MAX_K)
        simulation = Simulation(0.0, 0.2, 0.05, lag_cost=0.002, controller=controller)
        for tokens in range(300, 1000):
            if not controller.is_speculating:
                break
            simulation.decode(tokens)
        controller.begin_text(unread=unread)
        for steps in range(1000):
            if controller.choose_k():
                return steps
            controller.record_plain(1.0)
        return 1000

    # 3000 tokens take 6 steps to read, for which the credit of 1 % must be saved.
    assert count_steps_to_return(0) + 50 < count_steps_to_return(3000) < 1000


@pytest.mark.parametrize("fixed_k", [0, 1, 3, 8])
def test_a_fixed_k_is_kept_whatever_it_costs(fixed_k: int) -> None:
    controller = SpeculationController(max_k=8, fixed_k=fixed_k)
    simulation = Simulation(0.0, 1.2, 0.5, controller=controller)
    simulation.decode(100)
    assert set(simulation.asked) == {fixed_k}
    assert controller.is_speculating == (fixed_k > 0)
    assert controller.statistics.rounds == (100 if fixed_k else 0)


def test_it_tells_whether_rounds_are_to_come() -> None:
    controller = SpeculationController(max_k=2)
    assert controller.is_speculating
    assert controller.choose_k() == 0
    Simulation(0.0, 1.2, 0.5, controller=controller).decode(10)
    assert not controller.is_speculating


def test_the_same_records_give_the_same_choices() -> None:
    first, second = (Simulation(0.7, 0.2, 0.05, is_noisy=True, seed=3) for _ in range(2))
    first.decode(500)
    second.decode(500)
    assert first.asked == second.asked
    assert len(set(first.asked)) > 2


def test_statistics_add_up() -> None:
    controller = SpeculationController(max_k=3, fixed_k=3)
    controller.record_plain(2.0)
    controller.record_round(proposed=3, accepted=3, draft_s=0.5, verify_s=2.25)
    controller.record_round(proposed=3, accepted=1, draft_s=0.5, verify_s=2.25)
    controller.record_round(proposed=1, accepted=0, draft_s=0.25, verify_s=2.0)
    controller.record_plain(2.0)
    statistics = controller.statistics
    assert (statistics.rounds, statistics.plain_steps) == (3, 2)
    assert statistics.proposed_counts == (3, 2, 2)
    assert statistics.accept_counts == (2, 1, 1)
    assert (statistics.proposed, statistics.accepted) == (7, 4)
    assert statistics.acceptance == 4 / 7
    assert statistics.mean_accepted_length == (4 + 3) / 3
    assert (statistics.draft_s, statistics.verify_s, statistics.plain_s) == (1.25, 6.5, 4.0)
    assert statistics.usual_k == 3
    assert statistics.draft_ms_per_token == pytest.approx(1250 / 7)
    assert (statistics.verify_ms, statistics.plain_ms) == (pytest.approx(6500 / 3), 2000.0)


def test_statistics_without_steps_are_zero() -> None:
    statistics = SpeculationController(max_k=2).statistics
    assert (statistics.rounds, statistics.plain_steps, statistics.proposed, statistics.accepted) == (0, 0, 0, 0)
    assert (statistics.acceptance, statistics.mean_accepted_length) == (0.0, 0.0)
    assert statistics.break_even_acceptances == (None, None)


@pytest.mark.parametrize(("draft_s", "row_s"), [(0.0, 0.0), (0.01, 0.02), (0.1, 0.5), (0.6, 0.1), (1.2, 0.5)])
def test_break_even_is_where_a_round_is_as_fast_as_plain_steps(draft_s: float, row_s: float) -> None:
    controller = SpeculationController(max_k=3, fixed_k=2)
    for k in (1, 2):
        for _ in range(3):
            controller.record_plain(1.0)
            controller.record_round(proposed=k, accepted=0, draft_s=k * draft_s, verify_s=1 + k * row_s)
    cost = draft_s + row_s
    # 1 + a = 1 + cost, and 1 + a + a^2 = 1 + 2 cost
    exact = (cost, (-1 + (1 + 8 * cost) ** 0.5) / 2)
    assert controller.statistics.break_even_acceptances == (pytest.approx(exact[0]), pytest.approx(exact[1]), None)


@pytest.mark.parametrize(("max_k", "fixed_k"), [(0, None), (-1, None), (4, 5), (4, -1)])
def test_an_impossible_k_is_refused(max_k: int, fixed_k: int | None) -> None:
    with pytest.raises(UserError, match=f"{max_k if fixed_k is None else fixed_k} tokens"):
        SpeculationController(max_k=max_k, fixed_k=fixed_k)
