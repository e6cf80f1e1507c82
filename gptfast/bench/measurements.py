"""The runs of a benchmark: reading a prompt, and decoding at a depth, each alone and with all that a user waits for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gptfast.bench.phases import Clock, PhaseTimer
from gptfast.config import SamplingConfig
from gptfast.generation import Stream
from gptfast.runner import Runner
from gptfast.session import Session

WARM_UP_STEPS = 8


@dataclass
class PrefillRuns:
    """Seconds of the runs with a prompt of one length."""

    prompt: list[int]
    steps_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    def warm_up(self, session: Session, sampling: SamplingConfig, clock: Clock) -> None:
        """Run once and keep nothing."""
        time_prefill(session, self.prompt, clock)
        time_first_token(session, self.prompt, sampling, clock)

    def run(self, session: Session, sampling: SamplingConfig, clock: Clock, phases: PhaseTimer) -> None:
        """Run once and keep what it took."""
        with phases.measure("prefill"):
            self.steps_s.append(time_prefill(session, self.prompt, clock))
        with phases.measure("end_to_end"):
            self.ttft_s.append(time_first_token(session, self.prompt, sampling, clock))


@dataclass
class DecodeRuns:
    """Seconds of the single steps and tokens of the runs that start with `depth` tokens in the cache."""

    depth: int
    new_tokens: int
    text: list[int]
    steps_s: list[list[float]] = field(default_factory=list)
    tokens_s: list[list[float]] = field(default_factory=list)

    def warm_up(self, session: Session, sampling: SamplingConfig, clock: Clock) -> None:
        """Run for a few steps, and where a run will end, and keep nothing."""
        count = min(WARM_UP_STEPS, self.new_tokens)
        time_steps(session, self.depth, count, clock)
        time_steps(session, self.depth + self.new_tokens, 1, clock)  # on CUDA perhaps another graph
        time_tokens(session, self.text, self.depth, count, sampling, clock)

    def run(self, session: Session, sampling: SamplingConfig, clock: Clock, phases: PhaseTimer) -> None:
        """Run once and keep what it took."""
        with phases.measure("decode"):
            self.steps_s.append(time_steps(session, self.depth, self.new_tokens, clock))
        with phases.measure("end_to_end"):
            self.tokens_s.append(time_tokens(session, self.text, self.depth, self.new_tokens, sampling, clock))


@torch.no_grad()
def fill_caches(session: Session, length: int) -> None:
    """Write random keys and values to the first `length` slots, in place of those of a text.

    What they are makes no difference to the time that reading them takes, and computing them for 2,048 tokens takes
    a large model minutes. They must be written: untouched pages would all be read from one page of zeros.
    """
    device = session.runner.device
    generator = torch.Generator(device).manual_seed(0)
    slots = torch.arange(length, device=device)
    for cache in session.runner.model.list_caches():
        rows, heads, _, head_dim = cache.k.shape
        k, v = torch.randn(2, rows, heads, length, head_dim, generator=generator, device=device)
        cache.write(slots, k, v)


def time_prefill(session: Session, prompt: list[int], clock: Clock) -> float:
    """Seconds of the steps that read a prompt into the empty cache."""
    start = clock()
    session.runner.prefill(prompt)
    return clock() - start


def time_first_token(session: Session, prompt: list[int], sampling: SamplingConfig, clock: Clock) -> float:
    """Seconds from the call with a prompt of ids to the first token's text."""
    session.cached_ids = []
    start = clock()
    next(make_stream(session, prompt, 1, sampling).iterate_steps())
    return clock() - start


def time_steps(session: Session, depth: int, count: int, clock: Clock) -> list[float]:
    """Seconds of each of `count` decode steps, nothing else, the first with `depth` tokens in the cache."""
    runner = session.runner
    tokens = make_tokens(runner)
    seconds = []
    for position in range(depth, depth + count):
        start = clock()
        runner.decode(tokens, position)
        seconds.append(clock() - start)
    return seconds


def make_tokens(runner: Runner) -> Tensor:
    """(B,) int64: which tokens they are makes no difference."""
    return torch.zeros(runner.batch_size, dtype=torch.int64, device=runner.device)


def time_tokens(
    session: Session, text: list[int], depth: int, count: int, sampling: SamplingConfig, clock: Clock
) -> list[float]:
    """Seconds of each of `count` tokens after the first as a user's loop gets them: step, sampling, detokenization.

    The first of them finds `depth` tokens in the cache, or 1 if `depth` is 0, as a text cannot begin with nothing.
    """
    prompt = text[: max(depth, 1)]
    if session.runner.batch_size == 1:
        session.cached_ids = list(prompt)  # see `fill_caches`
    steps = make_stream(session, prompt, count + 1, sampling).iterate_steps()
    next(steps)
    seconds = []
    for _ in range(count):
        start = clock()
        next(steps)
        seconds.append(clock() - start)
    return seconds


def make_stream(session: Session, prompt: list[int], new_tokens: int, sampling: SamplingConfig) -> Stream:
    """A text of exactly so many tokens in every row."""
    rows = session.runner.batch_size
    return Stream(
        session,
        prompt,
        max_new_tokens=new_tokens,
        sampling=sampling,
        sample_ids=range(rows),
        reuse_cache=rows == 1,
        ignore_eos=True,
    )
