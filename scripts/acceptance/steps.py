"""A model's steps as the runtime executes them, replayed or run by the host, and the text that they make."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gptfast.checkpoint.random import RandomCheckpoint
from gptfast.config import GenerationDefaults, SamplingConfig
from gptfast.generation import Stream
from gptfast.graphs import Fetched, GraphBackend, Replay
from gptfast.runner import Runner
from gptfast.sampling import Sampler
from gptfast.session import Session
from gptfast.speculation.speculator import Speculator

LABEL = "llama-3.2-1b"


class SwitchedGraphs:
    """A `GraphBackend` that can run the work itself instead of the graph of it, which must be the same to the bit.

    Attributes:
        replays: whether it replays; else the host launches what was recorded.
        recorded, replayed: how often it did.
    """

    def __init__(self, graphs: GraphBackend) -> None:
        self._graphs = graphs
        self.replays = True
        self.recorded = self.replayed = 0

    def record(self, function: Callable[[], None]) -> Replay:
        """See `GraphBackend.record`."""
        replay = self._graphs.record(function)
        self.recorded += 1

        def run() -> None:
            if self.replays:
                self.replayed += 1
                replay()
            else:
                function()

        return run

    def fetch(self, source: Tensor) -> Fetched:
        """See `GraphBackend.fetch`."""
        return self._graphs.fetch(source)

    @contextlib.contextmanager
    def direct(self) -> Iterator[None]:
        """Within, the host launches."""
        self.replays = False
        try:
            yield
        finally:
            self.replays = True


def draw_prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """So many random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return ids


def begin_text(runner: Runner, prompt: Sequence[int], sampling: SamplingConfig) -> tuple[Sampler, Tensor]:
    """Read a prompt and choose the token after it, (1,)."""
    logits = runner.prefill(prompt)
    sampler = Sampler(sampling, prompt, runner.vocab_size, device=runner.device)
    return sampler, sampler.choose(logits, len(prompt))


def iterate_text(runner: Runner, prompt: Sequence[int], sampling: SamplingConfig, count: int) -> Iterator[int]:
    """The `count` tokens after a prompt, one at a time."""
    sampler, token = begin_text(runner, prompt, sampling)
    yield from token.tolist()
    for values in runner.extend(sampler, token, len(prompt), count - 1):
        yield values[0]


def extend_text(runner: Runner, prompt: Sequence[int], sampling: SamplingConfig, count: int) -> list[int]:
    """The same at once."""
    return list(iterate_text(runner, prompt, sampling, count))


def compute_logits(runner: Runner, prompt: Sequence[int], following: Sequence[int], n_verified: int) -> Tensor:
    """Logits (len(following), V) after each of the tokens that follow a prompt, the last `n_verified` in one step."""
    runner.prefill(prompt)
    n_single = len(following) - n_verified
    ids = torch.tensor(following, device=runner.device)
    rows = [runner.decode(ids[i : i + 1], len(prompt) + i) for i in range(n_single)]
    if n_verified:
        rows.append(runner.verify(ids[n_single:], len(prompt) + n_single))
    return torch.cat(rows)


def make_session(runner: Runner, *, eos_ids: Sequence[int] = (), speculator: Speculator | None = None) -> Session:
    """A session of a model that was made without a checkpoint, with these ends of a text."""
    checkpoint = RandomCheckpoint(LABEL)
    checkpoint.generation = GenerationDefaults(eos_ids=tuple(eos_ids))
    return Session(checkpoint=checkpoint, runner=runner, tokenizer=None, load_s=0.0, speculator=speculator)


def write_text(
    session: Session, prompt: Sequence[int], sampling: SamplingConfig, count: int, *, speculates: bool = True
) -> Stream:
    """A stream that has run to its end, of at most `count` tokens."""
    stream = Stream(session, prompt, max_new_tokens=count, sampling=sampling, speculates=speculates)
    for _ in stream:
        pass
    return stream


def measure_difference(a: Tensor, b: Tensor) -> float:
    """The norm of the difference over that of `b`."""
    return float((a.float() - b.float()).norm() / b.float().norm())
