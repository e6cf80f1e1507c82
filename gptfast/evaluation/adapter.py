"""A session as the harness sees it. Importing this imports lm-eval; `harness.run_tasks` does so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from gptfast.config import SamplingConfig
from gptfast.errors import UserError
from gptfast.evaluation.scoring import read_blocks, score_block
from gptfast.generation import Stream, count_common
from gptfast.session import Session

T = TypeVar("T")

DEFAULT_MAX_NEW_TOKENS = 256
"""What the harness's own models generate where a task does not say."""
MAX_NEW_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""How tasks spell it, in the order in which the harness looks."""
SAMPLING_NAMES = ("top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationSettings:
    """How a task wants its answers generated."""

    max_new_tokens: int
    stop: tuple[str, ...]
    sampling: SamplingConfig


class SessionModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """See `lm_eval.api.model.LM` for the methods.

    Requests are answered in the order of their tokens, so that what one shares with the next is computed once.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        if session.tokenizer is None:
            raise UserError(f"random weights for {session.checkpoint.path} have no tokenizer; evaluate a checkpoint")
        self._session = session
        self._tokenizer = session.tokenizer
        self.max_length = session.runner.context

    @property
    def eot_token_id(self) -> int:
        """The token that stands before a text without context, if there is no BOS."""
        eos_id = self._tokenizer.eos_id
        if eos_id is not None:
            return eos_id
        if not self._session.eos_ids:
            raise UserError(
                f"{self._session.checkpoint.path} names no token for the start or the end of a text, which the harness "
                "puts before a text without context; add eos_token_id to its config.json"
            )
        return min(self._session.eos_ids)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without context."""
        bos_id = self._tokenizer.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """The ids of a text, behind BOS if the checkpoint wants it; without text and BOS, none."""
        adds_bos = self._tokenizer.adds_bos if add_special_tokens is None else add_special_tokens
        return self._tokenizer.encode(string, add_bos=adds_bos) if string or adds_bos else []

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding writes it."""
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """The log-likelihood of whole texts behind one BOS, in windows as long as the context that do not overlap."""
        return [self._score_text(*request.args) for request in show_progress(requests)]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """The text that follows each context, greedily if the task asks for nothing else.

        A context that leaves too little room loses its beginning.
        """
        prompts = []
        for context, asked in (request.args for request in requests):
            settings = parse_settings(asked)
            prompts.append((self._encode_context(context, settings), settings))
        texts = [""] * len(prompts)
        for i in show_progress(sorted(range(len(prompts)), key=lambda i: prompts[i][0])):
            ids, settings = prompts[i]
            stream = Stream(
                self._session,
                ids,
                max_new_tokens=settings.max_new_tokens,
                sampling=settings.sampling,
                stop=settings.stop,
                sample_ids=(i,),  # so that the repeats of a question differ
                reuse_cache=True,
            )
            texts[i] = "".join(stream)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        answers = [(0.0, True)] * len(requests)
        for i in show_progress(sorted(range(len(requests)), key=lambda i: requests[i][1] + requests[i][2])):
            answers[i] = self._score(*requests[i][1:])
        return answers

    def _score_text(self, text: str) -> float:
        ids = self.tok_encode(text, add_special_tokens=False)
        windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
        return sum(self._score(*make_disjoint_window(window))[0] for window in windows)

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The log-probability of the continuation, and whether greedy decoding writes it; a long context is cut."""
        session = self._session
        ids = ((context or [self.prefix_token_id]) + continuation)[-(self.max_length + 1) :]
        first = len(ids) - len(continuation)
        if not 0 < first < len(ids):
            raise UserError(
                f"a continuation of {len(continuation)} tokens cannot be scored: it needs at least one token, "
                f"and at most the model's context of {self.max_length}; leave this task out"
            )
        start = min(count_common(session.cached_ids, ids), first - 1)
        session.cached_ids, session.owner = [], self
        total, is_greedy = 0.0, True
        for logits, targets in read_blocks(session.runner, ids, first, start):
            total += float(score_block(logits, targets).sum())
            is_greedy = is_greedy and bool((logits.argmax(-1) == targets).all())
        session.cached_ids = ids[:-1]
        return total, is_greedy

    def _encode_context(self, context: str, settings: GenerationSettings) -> list[int]:
        room = self.max_length - settings.max_new_tokens
        if room < 1:
            raise UserError(
                f"a task asks for {settings.max_new_tokens} new tokens, which the model's context of "
                f"{self.max_length} has no room for; leave this task out"
            )
        return (self.tok_encode(context) or [self.prefix_token_id])[-room:]


def show_progress(requests: Sequence[T]) -> Iterable[T]:
    """The requests, with a bar on standard error if that is a terminal."""
    bar: Iterable[T] = tqdm(requests, desc="requests", disable=None)
    return bar


def parse_settings(asked: Mapping[str, Any]) -> GenerationSettings:
    """What a task's `generation_kwargs` ask for; raises UserError for what this runtime cannot do."""
    rest = dict(asked)
    until = rest.pop("until", None) or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    lengths = [rest.pop(name, None) for name in MAX_NEW_TOKENS_NAMES]
    samples = rest.pop("do_sample", None)
    temperature = rest.pop("temperature", 1.0 if samples else 0.0)
    sampling = SamplingConfig(
        temperature=0.0 if samples is False else float(temperature),
        **{name: rest.pop(name) for name in SAMPLING_NAMES if name in rest},
    )
    if rest:
        raise UserError(f"a task asks to generate with {', '.join(sorted(rest))}, which is not supported; leave it out")
    return GenerationSettings(
        max_new_tokens=int(next((length for length in lengths if length is not None), DEFAULT_MAX_NEW_TOKENS)),
        stop=tuple(text for text in stop if text),
        sampling=sampling,
    )
