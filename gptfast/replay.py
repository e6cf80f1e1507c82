"""Decode by replaying recorded steps: the host asks for a token with one call, and for the next before it has seen it.

Shapes: B batch, S tokens in a step, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gptfast.compilation import CompilationError, CompileStatistics
from gptfast.config import SamplingKind
from gptfast.decode import (
    MOST_VERIFIED,
    CatchUpState,
    Decoder,
    LogitsState,
    RoundState,
    TextState,
    catch_up,
    compute_logits,
    extend,
    verify_and_accept,
)
from gptfast.fused import FusedTransformer
from gptfast.graphs import Fetched, GraphBackend, Replay, send_ids
from gptfast.kernels.cuda.configurations import MAX_ROWS
from gptfast.model import Attention, Transformer
from gptfast.sampling import Sampler, SamplingTensors

logger = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Steps that the device has been asked for and the host has not seen: asking takes some 10 us of a step's 1,000 or
more, so a deeper queue gains nothing, and what lies in it when a text ends is computed in vain."""
KEPT_TOKENS = MOST_VERIFIED
"""Per row; a token must stay until the host has copied it, and what a draft model proposes until it is verified."""
ROUND_SIZES = (1, 4, MOST_VERIFIED)
"""Tokens that a step of speculation reads, padding included, each a recording; the products take up to 16 at the price
of 2."""
CAUGHT_UP = 4
"""Tokens that a draft model reads at once, padding included: more than the two that it lacks after a round."""

Prepare = Callable[[Callable[..., None]], Callable[..., None]]
"""Makes of a step in `gptfast.decode` what is recorded: itself, or its compiled form."""


class RecordedSteps:
    """The steps of one model as recordings, each made when it is first needed; and the buffers between them.

    The model must attend by its kernel, which reads from `input_pos` on the device how far. Recordings hold for the
    caches that they were made with; `forget` them when those move. `statistics` is told what making them takes. With
    `fused`, that computes the steps which it has room for.
    """

    def __init__(
        self,
        model: Transformer,
        batch_size: int,
        graphs: GraphBackend,
        prepare: Prepare,
        statistics: CompileStatistics,
        fused: FusedTransformer | None = None,
    ) -> None:
        assert model.kernels is not None
        self._model, self._batch_size, self._graphs, self._prepare = model, batch_size, graphs, prepare
        self._statistics, self._fused = statistics, fused
        self.replayed = 0
        self.forget(last_pos=0)

    def forget(self, last_pos: int) -> None:
        """Start anew, with caches whose last slot is `last_pos`."""
        self._last_pos = last_pos
        self._cache_address = get_cache_address(self._model)
        self._readers: dict[int, tuple[LogitsState, Replay]] = {}
        self._extenders: dict[tuple[SamplingKind, int], tuple[TextState, Replay]] = {}
        self._catchers: dict[tuple[SamplingKind, int], tuple[CatchUpState, Replay]] = {}
        self._rounds: dict[tuple[SamplingKind, int], tuple[RoundState, Replay]] = {}

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
        load_sampler(state, sampler)
        waiting: deque[Fetched] = deque()
        for place in range(position + 1, position + 1 + count):
            self._replay(replay)
            waiting.append(self._graphs.fetch(state.chosen[place % KEPT_TOKENS]))
            if len(waiting) == IN_FLIGHT:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()

    def draft(self, sampler: Sampler, tokens: Sequence[int], position: int, count: int, vocab_size: int) -> Tensor:
        """The `count` tokens (count,) int64 that a single row goes on with after its tokens from `position` on.

        At most `CAUGHT_UP` tokens are read, and up to `KEPT_TOKENS` chosen, of the first `vocab_size` ids; the host
        waits for none of them. What `sampler` has seen is not brought up to date.
        """
        first = position + len(tokens)
        assert count <= KEPT_TOKENS
        assert first + count <= self._last_pos + 2
        text, extend_text = self.get_extender(sampler.sampling.kind, vocab_size)
        # What is recorded now chooses tokens as well, so the sampler is loaded after it.
        catcher = self.get_catcher(sampler.sampling.kind, vocab_size) if len(tokens) > 1 else None
        load_sampler(text, sampler)
        if catcher is None:
            text.tokens.fill_(tokens[0])
            text.input_pos.fill_(position)
            self._replay(extend_text)
        else:
            state, catch_up_text = catcher
            state.tokens[0, : len(tokens)].copy_(send_ids(tokens, state.tokens.device))
            torch.arange(position, position + CAUGHT_UP, out=state.input_pos)
            state.last.fill_(len(tokens) - 1)
            self._replay(catch_up_text)
        for _ in range(count - 1):
            self._replay(extend_text)
        places = torch.arange(first, first + count, device=text.chosen.device) % KEPT_TOKENS
        return text.chosen.index_select(0, places)[:, 0]

    def accept(self, sampler: Sampler, last: int, drafted: Tensor, position: int) -> list[int]:
        """The next tokens of a single row whose token at `position` is `last`; see `Sampler.accept`.

        One replay reads that token and those `drafted` after it, and chooses; the host waits once.
        """
        count = drafted.shape[0]
        size = get_round_size(1 + count)
        assert position + size <= self._last_pos + 1
        state, replay = self.get_round(sampler.sampling.kind, size)
        state.tokens[0, 0].fill_(last)
        state.tokens[0, 1 : 1 + count].copy_(drafted)
        torch.arange(position, position + size, out=state.input_pos)
        state.count.fill_(count)
        load_sampler(state, sampler)
        self._replay(replay)
        accepted, *values = self._graphs.fetch(state.result)()
        sampler.remember(state.result[None, 1 : accepted + 2])
        return values[: accepted + 1]

    def get_reader(self, count: int) -> tuple[LogitsState, Replay]:
        """What `read` replays for so many tokens, and what it reads and writes; recorded if need be."""
        if count not in self._readers:
            self._readers[count] = self._record_reader(count)
        return self._readers[count]

    def get_extender(self, kind: SamplingKind, vocab_size: int | None = None) -> tuple[TextState, Replay]:
        """What `extend` replays for this kind of sampling, and what it reads and writes; recorded if need be.

        Of a draft model, `vocab_size` is how many ids its target has.
        """
        key = kind, vocab_size or self._model.config.vocab_size
        if key not in self._extenders:
            self._extenders[key] = self._record_extender(*key)
        return self._extenders[key]

    def get_catcher(self, kind: SamplingKind, vocab_size: int) -> tuple[CatchUpState, Replay]:
        """What `draft` replays first after several tokens, and what it reads; recorded if need be."""
        if (kind, vocab_size) not in self._catchers:
            self._catchers[kind, vocab_size] = self._record_catcher(kind, vocab_size)
        return self._catchers[kind, vocab_size]

    def get_round(self, kind: SamplingKind, size: int) -> tuple[RoundState, Replay]:
        """What `accept` replays for so many tokens, padding included; recorded if need be."""
        if (kind, size) not in self._rounds:
            self._rounds[kind, size] = self._record_round(kind, size)
        return self._rounds[kind, size]

    def _record_reader(self, count: int) -> tuple[LogitsState, Replay]:
        device, rows = self._model.device, self._batch_size
        state = LogitsState(
            tokens=torch.zeros(rows, count, dtype=torch.int64, device=device),
            input_pos=self._get_last_positions(count),
            logits=torch.empty(rows, count, self._model.config.vocab_size, device=device),
        )
        return state, self._record(compute_logits, rows * count, state)

    def _record_extender(self, kind: SamplingKind, vocab_size: int) -> tuple[TextState, Replay]:
        device, rows = self._model.device, self._batch_size
        last_pos = torch.full((1,), self._last_pos, device=device)
        state = TextState(
            tokens=torch.zeros(rows, dtype=torch.int64, device=device),
            input_pos=last_pos.clone(),
            last_pos=last_pos,
            rows=torch.arange(rows, device=device),
            chosen=torch.zeros(KEPT_TOKENS, rows, dtype=torch.int64, device=device),
            sampling=SamplingTensors(kind, device),
            seen=make_seen(kind, rows, vocab_size, device),
            vocab_size=vocab_size,
        )
        return state, self._record(extend, rows, state)

    def _record_catcher(self, kind: SamplingKind, vocab_size: int) -> tuple[CatchUpState, Replay]:
        device = self._model.device
        text, _ = self.get_extender(kind, vocab_size)
        state = CatchUpState(
            tokens=torch.zeros(1, CAUGHT_UP, dtype=torch.int64, device=device),
            input_pos=self._get_last_positions(CAUGHT_UP),
            last=torch.full((1,), CAUGHT_UP - 1, device=device),
            text=text,
        )
        return state, self._record(catch_up, CAUGHT_UP, state)

    def _record_round(self, kind: SamplingKind, size: int) -> tuple[RoundState, Replay]:
        device = self._model.device
        state = RoundState(
            tokens=torch.zeros(1, size, dtype=torch.int64, device=device),
            input_pos=self._get_last_positions(size),
            count=torch.zeros(1, dtype=torch.int64, device=device),
            rows=torch.zeros(1, dtype=torch.int64, device=device),
            sampling=SamplingTensors(kind, device),
            seen=make_seen(kind, 1, self._model.config.vocab_size, device),
            result=torch.zeros(size + 1, dtype=torch.int64, device=device),
        )
        return state, self._record(verify_and_accept, size, state)

    def _get_decoder(self, tokens: int) -> Decoder:
        """What computes a step of so many tokens in all rows."""
        return self._model if self._fused is None or tokens > MAX_ROWS else self._fused

    def _get_last_positions(self, count: int) -> Tensor:
        """Those at the end of the cache, where what is recorded harms no text."""
        return torch.arange(self._last_pos + 1 - count, self._last_pos + 1, device=self._model.device)

    def _record(self, step: Callable[..., None], tokens: int, state: object) -> Replay:
        """Record a step of so many tokens in all rows, of single operators where the machine cannot compile it."""
        start, decoder = time.perf_counter(), self._get_decoder(tokens)
        prepared = self._prepare(step)
        try:
            replay = self._graphs.record(lambda: prepared(decoder, state))
        except CompilationError as error:
            logger.warning("nothing can be compiled here, so what is recorded is slower: %s", error)
            self._prepare = use_as_it_is
            replay = self._graphs.record(lambda: step(decoder, state))
        self._statistics.seconds += time.perf_counter() - start
        self._statistics.compiled += 1
        return replay

    def _replay(self, replay: Replay) -> None:
        assert get_cache_address(self._model) == self._cache_address, "another runner has taken the caches away"
        self.replayed += 1
        replay()


def get_cache_address(model: Transformer) -> int:
    """Where the model's first cache lies, 0 before there is one."""
    attention = model.layers[0].attention
    assert isinstance(attention, Attention)
    return attention.kv_cache.k.data_ptr() if hasattr(attention, "kv_cache") else 0


def use_as_it_is(step: Callable[..., None]) -> Callable[..., None]:
    """The `Prepare` of steps that are not compiled."""
    return step


def get_round_size(tokens: int) -> int:
    """How many a step of speculation reads for so many, padding included."""
    return next(size for size in ROUND_SIZES if size >= tokens)


def make_seen(kind: SamplingKind, rows: int, vocab_size: int, device: torch.device) -> Tensor | None:
    """Nothing seen yet by any row (rows, vocab_size), or None where there is no penalty for it."""
    return torch.zeros(rows, vocab_size, dtype=torch.bool, device=device) if kind.has_penalty else None


def load_sampler(state: TextState | RoundState, sampler: Sampler) -> None:
    """Have a recorded step choose as `sampler` does after what it has seen."""
    state.rows.copy_(sampler.rows)
    state.sampling.load(sampler.sampling)
    if state.seen is not None and sampler.seen is not None:
        state.seen.copy_(sampler.seen[:, : state.seen.shape[1]])
