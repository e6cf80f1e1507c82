from __future__ import annotations

from gptfast.bench.phases import PHASES, PhaseTimer
from gptfast.bench.summary import summarize_phases
from tests.reference.clock import FakeClock


def test_phases_add_up_what_ran_within_them() -> None:
    clock = FakeClock()
    phases = PhaseTimer(clock)
    for seconds in (2.0, 3.0):
        with phases.measure("decode"):
            clock.pass_by(seconds)
        clock.pass_by(0.5)
    with phases.measure("load"):
        clock.pass_by(1.0)
    summary = summarize_phases(phases)
    assert (summary.decode_s, summary.load_s, summary.prefill_s) == (5.0, 1.0, 0.0)
    assert (summary.other_s, summary.wall_s) == (1.0, 7.0)


def test_every_phase_is_reported() -> None:
    summary = summarize_phases(PhaseTimer(FakeClock()))
    assert set(vars(summary)) == {f"{phase}_s" for phase in PHASES} | {"other_s", "wall_s"}
