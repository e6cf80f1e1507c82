"""Decode by replaying recorded steps: the host asks for a token with one call, and for the next before it has seen it.

Shapes: B batch, S tokens in a step, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gptfast.compilation import CompileStatistics
from gptfast.config import SamplingKind
from gptfast.decode import LogitsState, TextState, compute_logits, extend
from gptfast.graphs import Fetched, GraphBackend, Replay
from gptfast.model import Transformer
from gptfast.sampling import Sampler, SamplingTensors

IN_FLIGHT = 2
"""Steps that the device has been asked for and the host has not seen: asking takes some 10 us of a step's 1,000 or
more, so a deeper queue gains nothing, and what lies in it when a text ends is computed in vain."""
KEPT_TOKENS = 2 * IN_FLIGHT
"""Per row; a token must stay until the host has copied it."""

Prepare = Callable[[Callable[..., None]], Callable[..., None]]
"""Makes of a step in `gptfast.decode` what is recorded: itself, or its compiled form."""


class RecordedSteps:
    """The steps of one model as recordings, each made when it is first needed; and the buffers between them.

    The model must attend by its kernel, which reads from `input_pos` on the device how far. Recordings hold for the
    caches that they were made with; `forget` them when those move. `statistics` is told what making them takes.
    """

    def __init__(
        self,
        model: Transformer,
        batch_size: int,
        graphs: GraphBackend,
        prepare: Prepare,
        statistics: CompileStatistics,
    ) -> None:
        assert model.kernels is not None
        self._model, self._batch_size, self._graphs, self._prepare = model, batch_size, graphs, prepare
        self._statistics = statistics
        self.replayed = 0
        self.forget(last_pos=0)

    def forget(self, last_pos: int) -> None:
        """Start anew, with caches whose last slot is `last_pos`."""
        self._last_pos = last_pos
        self._readers: dict[int, tuple[LogitsState, Replay]] = {}
        self._extenders: dict[SamplingKind, tuple[TextState, Replay]] = {}

    def read(self, tokens: Tensor, position: int) -> Tensor:
        """Extend every row by its tokens (B, S) int64 from `position` on; (B, S, V) float32 logits after each of them.

        They are overwritten by the next call for as many tokens.
        """
        count = tokens.shape[1]
        state, replay = self.get_reader(count)
        state.tokens.copy_(tokens)
        torch.arange(position, position + count, out=state.input_pos)
        self._replay(replay)
        return state.logits

    def extend(self, sampler: Sampler, tokens: Tensor, position: int, count: int) -> Iterator[list[int]]:
        """The `count` tokens of every row after its token (B,) int64 at `position`, one of each row at a time.

        The step after the one that is waited for is under way; leaving early lets it end unseen. What `sampler` has
        seen is not brought up to date.
        """
        assert position + count <= self._last_pos + 1
        state, replay = self.get_extender(sampler.sampling.kind)
        state.tokens.copy_(tokens)
        state.input_pos.fill_(position)
        state.rows.copy_(sampler.rows)
        state.sampling.load(sampler.sampling)
        if state.seen is not None and sampler.seen is not None:
            state.seen.copy_(sampler.seen)
        waiting: deque[Fetched] = deque()
        for place in range(position + 1, position + 1 + count):
            self._replay(replay)
            waiting.append(self._graphs.fetch(state.chosen[place % KEPT_TOKENS]))
            if len(waiting) == IN_FLIGHT:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()

    def get_reader(self, count: int) -> tuple[LogitsState, Replay]:
        """What `read` replays for so many tokens, and what it reads and writes; recorded if need be."""
        if count not in self._readers:
            self._readers[count] = self._record_reader(count)
        return self._readers[count]

    def get_extender(self, kind: SamplingKind) -> tuple[TextState, Replay]:
        """What `extend` replays for this kind of sampling, and what it reads and writes; recorded if need be."""
        if kind not in self._extenders:
            self._extenders[kind] = self._record_extender(kind)
        return self._extenders[kind]

    def _record_reader(self, count: int) -> tuple[LogitsState, Replay]:
        device, rows = self._model.device, self._batch_size
        state = LogitsState(
            tokens=torch.zeros(rows, count, dtype=torch.int64, device=device),
            input_pos=torch.arange(self._last_pos + 1 - count, self._last_pos + 1, device=device),
            logits=torch.empty(rows, count, self._model.config.vocab_size, device=device),
        )
        step = self._prepare(compute_logits)
        return state, self._record(lambda: step(self._model, state))

    def _record_extender(self, kind: SamplingKind) -> tuple[TextState, Replay]:
        device, rows = self._model.device, self._batch_size
        seen = torch.zeros(rows, self._model.config.vocab_size, dtype=torch.bool, device=device)
        last_pos = torch.full((1,), self._last_pos, device=device)
        state = TextState(
            tokens=torch.zeros(rows, dtype=torch.int64, device=device),
            input_pos=last_pos.clone(),
            last_pos=last_pos,
            rows=torch.arange(rows, device=device),
            chosen=torch.zeros(KEPT_TOKENS, rows, dtype=torch.int64, device=device),
            sampling=SamplingTensors(kind, device),
            seen=seen if kind.has_penalty else None,
        )
        step = self._prepare(extend)
        return state, self._record(lambda: step(self._model, state))

    def _record(self, function: Callable[[], None]) -> Replay:
        start = time.perf_counter()
        replay = self._graphs.record(function)
        self._statistics.seconds += time.perf_counter() - start
        self._statistics.compiled += 1
        return replay

    def _replay(self, replay: Replay) -> None:
        self.replayed += 1
        replay()
