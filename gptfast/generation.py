"""The loop that a user calls: `generate` and `stream`.

Shapes: B batch.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptfast.chat import Message, encode_chat
from gptfast.config import SamplingConfig
from gptfast.errors import PromptError, UserError
from gptfast.sampling import Sampler
from gptfast.session import Session
from gptfast.speculation.speculator import Speculator
from gptfast.transcript import FinishReason, Transcript

DEFAULT_MAX_NEW_TOKENS = 256

Prompt = str | Sequence[int] | Sequence[Message]
"""Text to complete as it stands, token ids, or the messages of a chat."""


@dataclass(frozen=True)
class GenerationResult:
    """One text and what it took.

    Attributes:
        text: what was generated, without the stop string or end-of-sequence token that ended it.
        token_ids: every token that was generated, an end-of-sequence token included.
        finish_reason: `eos`, `stop`, `length`, or `interrupted` if the stream was left early.
        prompt_tokens: tokens of the prompt.
        reused_tokens: those of them that were in the cache from an earlier turn.
        ttft_s: seconds from the call to the first token, without compiling.
        prefill_s: seconds of the prompt's steps and the choice of the first token.
        decode_s: seconds of the later tokens' steps and choices, without detokenization or the caller's time; with a
            draft model, also of its reading the prompt.
        decode_steps: the model's steps in that time, each of which read its weights once.
        batch_size: rows that were decoded at once in this time.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    ttft_s: float
    prefill_s: float
    decode_s: float
    decode_steps: int
    batch_size: int = 1

    @property
    def new_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed per second; 0 if none were."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens of this row per second after the first, which prefill yields; 0 if there was no other."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s else 0.0


class Stream:
    """Text as it is made: iterate for the pieces, then ask for the `result`, also after leaving early.

    The arguments are those of `stream` and `generate`; `speculates` is whether the session's speculator is used.
    """

    def __init__(
        self,
        session: Session,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        sample_ids: Sequence[int] = (0,),
        reuse_cache: bool = False,
        ignore_eos: bool = False,
        speculates: bool = True,
    ) -> None:
        self._session = session
        self._speculator = session.speculator if speculates else None
        self._sampling = session.defaults.sampling if sampling is None else sampling
        start = time.perf_counter()
        self.prompt_ids = encode_prompt(session, prompt)
        self._max_new_tokens = resolve_max_new_tokens(session, len(self.prompt_ids), max_new_tokens)
        self._sample_ids = tuple(sample_ids)
        if len(self._sample_ids) != session.runner.batch_size:
            raise UserError(
                f"{len(self._sample_ids)} samples cannot be decoded at once by a session of batch size "
                f"{session.runner.batch_size}; load it with that batch size"
            )
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        eos_ids: frozenset[int] = frozenset() if ignore_eos else session.eos_ids
        self._transcripts = [Transcript(session.tokenizer, eos_ids, stops) for _ in self._sample_ids]
        if reuse_cache and len(self._sample_ids) > 1:
            raise UserError("several samples at once cannot go on from each other's cache; reuse it with batch size 1")
        session.reserve(len(self.prompt_ids) + self._max_new_tokens)
        self._encode_s = time.perf_counter() - start
        session.warm_up(len(self.prompt_ids), self._sampling)
        self._reuses_cache = reuse_cache
        self._reused_tokens = self._decode_steps = self._count = 0
        self._ttft_s = self._prefill_s = self._decode_s = 0.0
        self._steps = self._run()

    def __iter__(self) -> Iterator[str]:
        """The pieces of the first row's text, none of them empty or ending within a character."""
        return (piece for piece in self.iterate_steps() if piece)

    def iterate_steps(self) -> Iterator[str]:
        """What each step in turn, prefill first, adds to the first row's text, which may be nothing."""
        first = self._transcripts[0]
        for _ in self._steps:
            yield first.take_text()

    def results(self) -> list[GenerationResult]:
        """What was generated so far, one result per row; `interrupted` if it could have gone on."""
        return [
            GenerationResult(
                text=transcript.text,
                token_ids=tuple(transcript.token_ids),
                finish_reason=transcript.finish_reason or "interrupted",
                prompt_tokens=len(self.prompt_ids),
                reused_tokens=self._reused_tokens,
                ttft_s=self._ttft_s,
                prefill_s=self._prefill_s,
                decode_s=self._decode_s,
                decode_steps=self._decode_steps,
                batch_size=len(self._transcripts),
            )
            for transcript in self._transcripts
        ]

    @property
    def result(self) -> GenerationResult:
        """The first row's result so far."""
        return self.results()[0]

    def _run(self) -> Iterator[None]:
        """One step per turn, each ending with its tokens in the transcripts."""
        session, runner = self._session, self._session.runner
        if self._reuses_cache:
            self._reused_tokens = count_common(session.cached_ids, self.prompt_ids[:-1])
        session.cached_ids = []
        session.owner = self
        start = time.perf_counter()
        logits = runner.prefill(self.prompt_ids[self._reused_tokens :], self._reused_tokens)
        session.cached_ids = list(self.prompt_ids)
        if self._max_new_tokens == 0:
            self._prefill_s = time.perf_counter() - start
            self._finish("length")
            yield
            return
        sampler = Sampler(
            self._sampling, self.prompt_ids, logits.shape[-1], sample_ids=self._sample_ids, device=runner.device
        )
        tokens = sampler.choose(logits, len(self.prompt_ids))
        speculator = self._speculator
        steps = self._decode(sampler, tokens) if speculator is None else self._speculate(sampler, tokens, speculator)
        added = next(steps)
        now = time.perf_counter()
        self._prefill_s = now - start
        self._ttft_s = self._encode_s + self._prefill_s
        while not self._record(added):
            yield
            if session.owner is not self:
                raise UserError("another text was begun on this session, which overwrote this one; use two sessions")
            start = time.perf_counter()
            added = next(steps)
            self._decode_s += time.perf_counter() - start
            self._decode_steps += 1
        yield

    def _decode(self, sampler: Sampler, tokens: Tensor) -> Iterator[list[list[int]]]:
        """What every row gets in each turn, first its first token and then one of each step."""
        values = tokens.tolist()
        yield [[value] for value in values]
        steps = self._session.runner.extend(sampler, tokens, len(self.prompt_ids), self._max_new_tokens - 1)
        for following in steps:
            self._session.cached_ids.append(values[0])
            values = following
            yield [[value] for value in values]

    def _speculate(self, sampler: Sampler, tokens: Tensor, speculator: Speculator) -> Iterator[list[list[int]]]:
        """The same for a single row, of which a step adds one or several."""
        added = tokens.tolist()
        text = [*self.prompt_ids, *added]
        yield [added]
        speculator.begin(text)
        while True:
            added = speculator.advance(text, sampler, len(self.prompt_ids) + self._max_new_tokens - len(text))
            text += added
            # The last token is chosen and not yet read.
            self._session.cached_ids = text[:-1]
            yield [added]

    def _record(self, added: Sequence[Sequence[int]]) -> bool:
        """Append a step's tokens to the rows, each up to its end; True if no row goes on."""
        for transcript, values in zip(self._transcripts, added, strict=True):
            for value in values:
                if transcript.finish_reason is None:
                    transcript.push(value)
        self._count += len(added[0])
        if self._count == self._max_new_tokens:
            self._finish("length")
        return all(transcript.finish_reason is not None for transcript in self._transcripts)

    def _finish(self, reason: FinishReason) -> None:
        for transcript in self._transcripts:
            if transcript.finish_reason is None:
                transcript.finish(reason)


def stream(
    session: Session,
    prompt: Prompt,
    *,
    max_new_tokens: int | None = None,
    sampling: SamplingConfig | None = None,
    stop: str | Sequence[str] = (),
    reuse_cache: bool = False,
    ignore_eos: bool = False,
) -> Stream:
    """Generate a text piece by piece.

    Args:
        session: from `load`, of batch size 1.
        prompt: text to complete as it stands, token ids, or messages for the checkpoint's chat template.
        max_new_tokens: at most so many; None for 256, or what the context leaves.
        sampling: how tokens are chosen; None for what the checkpoint asks for, else greedy.
        stop: one or several strings that end the text where they first occur.
        reuse_cache: do not compute what the prompt shares with the text before it in this session.
        ignore_eos: go on after an end-of-sequence token, as a measurement wants it.

    Raises:
        PromptError: the prompt is empty, does not fit the context, or needs a tokenizer or template that is missing.
    """
    return Stream(
        session,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        reuse_cache=reuse_cache,
        ignore_eos=ignore_eos,
    )


def generate(
    session: Session,
    prompt: Prompt,
    *,
    max_new_tokens: int | None = None,
    sampling: SamplingConfig | None = None,
    stop: str | Sequence[str] = (),
    num_samples: int = 1,
    ignore_eos: bool = False,
) -> list[GenerationResult]:
    """Generate `num_samples` texts, as many at once as the session's batch size; see `stream` for the rest.

    Sample i is the same for a seed whatever the batch size. A last batch that is not full is not padded with
    surplus results.
    """
    if num_samples < 1:
        raise UserError(f"{num_samples} samples are asked for; ask for at least 1")
    results: list[GenerationResult] = []
    size = session.runner.batch_size
    for first in range(0, num_samples, size):
        batch = Stream(
            session,
            prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            sample_ids=range(first, first + size),
            ignore_eos=ignore_eos,
        )
        for _ in batch:
            pass
        results += batch.results()
    return results[:num_samples]


def encode_prompt(session: Session, prompt: Prompt) -> list[int]:
    """The prompt's token ids; raises PromptError if there are none or the checkpoint cannot encode it."""
    tokenizer = session.tokenizer
    vocab_size = session.runner.vocab_size
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError("random weights have no tokenizer; give a number of tokens or token ids as the prompt")
        return tokenizer.encode(prompt)
    messages = [item for item in prompt if isinstance(item, Message)]
    if len(prompt) == 0:
        raise PromptError("the prompt has no tokens; give it some text")
    if len(messages) == len(prompt):
        if tokenizer is None or session.chat_template is None:
            raise PromptError("this model has no chat template; give a plain prompt to be completed")
        return encode_chat(tokenizer, session.chat_template, messages)
    ids: list[int] = []
    for item in prompt:
        if isinstance(item, bool | Message) or not hasattr(item, "__index__"):
            raise PromptError(f"the prompt holds {item!r}; give text, token ids or messages, and not a mixture")
        ids.append(operator.index(item))
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise PromptError(f"token id {token_id} is not in the vocabulary of {vocab_size}; use ids below that")
    return ids


def make_synthetic_prompt(session: Session, length: int) -> list[int]:
    """`length` ordinary token ids, the same at every call, for measuring."""
    context = session.runner.context
    if not 1 <= length <= context:
        raise PromptError(
            f"a synthetic prompt of {length} tokens is not possible; ask for 1 to the context of {context}"
        )
    vocab_size = session.runner.vocab_size
    control = set(session.tokenizer.control_tokens.values()) if session.tokenizer else set()
    ids = torch.randint(vocab_size, (2 * length + 512,), generator=torch.Generator().manual_seed(0)).tolist()
    return [token_id for token_id in ids if token_id not in control][:length]


def resolve_max_new_tokens(session: Session, prompt_tokens: int, asked: int | None) -> int:
    """How many tokens may be generated; raises PromptError if what is asked does not fit the context."""
    context = session.runner.context
    room = context - prompt_tokens
    if asked is not None and asked < 0:
        raise UserError(f"max-new-tokens is {asked}; it must be 0 or more")
    if room < (1 if asked is None else asked):
        raise PromptError(
            f"the prompt has {prompt_tokens} tokens and {asked or 1} new ones are asked for, "
            f"but the model's context is {context}; shorten the prompt or ask for fewer"
        )
    return min(DEFAULT_MAX_NEW_TOKENS, room) if asked is None else asked


def count_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many items both begin with."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
