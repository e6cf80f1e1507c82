from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptfast.bench.measurements import DecodeRuns, PrefillRuns, fill_caches, time_steps, time_tokens
from gptfast.bench.phases import PhaseTimer
from gptfast.bench.summary import summarize_decode, summarize_prefill
from gptfast.config import SamplingConfig
from gptfast.session import Session
from tests.reference.clock import FakeClock
from tests.reference.sessions import load_tiny, random_prompt

GREEDY = SamplingConfig()


class CountingRunner:
    """Notes the calls that reach a session's runner."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefills: list[tuple[int, int]] = []
        self.positions: list[int] = []
        runner = session.runner
        prefill, decode = runner.prefill, runner.decode

        def note_prefill(tokens: list[int], start: int = 0) -> torch.Tensor:
            self.prefills.append((len(tokens), start))
            return prefill(tokens, start)

        def note_decode(tokens: torch.Tensor, position: int) -> torch.Tensor:
            self.positions.append(position)
            return decode(tokens, position)

        monkeypatch.setattr(runner, "prefill", note_prefill)
        monkeypatch.setattr(runner, "decode", note_decode)


@pytest.fixture
def calls(eager: Session, monkeypatch: pytest.MonkeyPatch) -> CountingRunner:
    return CountingRunner(eager, monkeypatch)


def test_a_step_is_timed_alone(eager: Session, calls: CountingRunner) -> None:
    assert time_steps(eager, 100, 5, FakeClock(tick=1.0)) == [1.0] * 5
    assert calls.positions == [100, 101, 102, 103, 104]
    assert calls.prefills == []


@pytest.mark.parametrize(("depth", "first"), [(0, 1), (1, 1), (300, 300)])
def test_tokens_are_timed_from_their_depth_on_without_reading_a_prompt(
    depth: int, first: int, eager: Session, calls: CountingRunner
) -> None:
    text = random_prompt(400)
    seconds = time_tokens(eager, text, depth, 4, GREEDY, FakeClock(tick=1.0))
    assert seconds == [1.0] * 4
    assert calls.positions == [first, first + 1, first + 2, first + 3]
    assert calls.prefills == [(1, first - 1)]  # all but the last token of the prompt are said to be in the cache


def test_several_rows_read_their_prompt_and_are_counted_together(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load_tiny(directory, batch_size=2)
    calls = CountingRunner(session, monkeypatch)
    runs = DecodeRuns(40, 4, random_prompt(100))
    runs.run(session, GREEDY, FakeClock(tick=0.5), PhaseTimer(FakeClock()))
    assert calls.prefills == [(40, 0)]
    assert calls.positions == [40, 41, 42, 43] * 2
    result = summarize_decode(runs, session, weight_bytes=1000, ceiling_gb_per_s=1.0)
    assert result.tokens_per_s.median == pytest.approx(4.0)
    assert result.end_to_end_tokens_per_s.median == pytest.approx(4.0)


def test_a_prompt_is_read_whole_every_time(eager: Session, calls: CountingRunner) -> None:
    runs = PrefillRuns(random_prompt(70))
    eager.cached_ids = random_prompt(70)
    for _ in range(3):
        runs.run(eager, GREEDY, FakeClock(tick=0.25), PhaseTimer(FakeClock()))
    assert calls.prefills == [(70, 0)] * 6
    result = summarize_prefill(runs)
    assert (result.prompt_tokens, result.tokens_per_s.runs) == (70, 3)
    assert result.tokens_per_s.median == pytest.approx(280.0)
    assert result.ttft_s.median == pytest.approx(0.25)


def test_warming_up_is_not_counted(eager: Session, calls: CountingRunner) -> None:
    prefill, decode = PrefillRuns(random_prompt(70)), DecodeRuns(20, 64, random_prompt(100))
    prefill.warm_up(eager, GREEDY, FakeClock())
    decode.warm_up(eager, GREEDY, FakeClock())
    kernel_steps, last, tokens = calls.positions[:8], calls.positions[8], calls.positions[9:]
    assert kernel_steps == tokens == list(range(20, 28))
    assert last == 84
    assert [prefill.steps_s, prefill.ttft_s, decode.steps_s, decode.tokens_s] == [[], [], [], []]


def test_runs_go_on_after_an_end_of_sequence_token(directory: Path) -> None:
    session = load_tiny(directory)
    every_token = frozenset(range(session.runner.model.config.vocab_size))
    assert session.tokenizer is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "eos_ids", every_token)
        assert len(time_tokens(session, random_prompt(50), 30, 10, GREEDY, FakeClock(tick=1.0))) == 10


def test_filled_caches_hold_no_page_that_was_never_written(directory: Path) -> None:
    session = load_tiny(directory)
    fill_caches(session, 500)
    for cache in session.runner.model.list_caches():
        for buffer in (cache.k, cache.v):
            assert buffer[:, :, :500].count_nonzero() > 0.99 * buffer[:, :, :500].numel()
            assert buffer[:, :, 500:].count_nonzero() == 0
            assert buffer.isfinite().all()


def test_decode_is_held_against_the_ceiling(eager: Session) -> None:
    runs = DecodeRuns(9, 1, [])
    runs.steps_s = [[0.002], [0.004], [0.003]]
    runs.tokens_s = [[0.005], [0.005], [0.010]]
    result = summarize_decode(runs, eager, weight_bytes=1_000_000, ceiling_gb_per_s=2.0)
    config = eager.runner.model.config
    kv_bytes = 10 * config.get_kv_bytes_per_token(4)
    assert (result.kv_bytes_per_step, result.bytes_per_step) == (kv_bytes, 1_000_000 + kv_bytes)
    assert result.step.p50_ms == pytest.approx(3.0)
    assert result.token.p50_ms == pytest.approx(5.0)
    assert result.floor_ms == pytest.approx((1_000_000 + kv_bytes) / 2e9 * 1e3)
    assert result.gb_per_s == pytest.approx((1_000_000 + kv_bytes) / 0.003 / 1e9)
    assert result.share == pytest.approx(result.floor_ms / 3.0)
    assert result.tokens_per_s.median == pytest.approx(1 / 0.003)
