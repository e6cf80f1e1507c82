"""The perplexity of a text, as Hugging Face's guide "Perplexity of fixed-length models" defines it.

Shapes: S tokens that a window scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptfast.errors import UserError
from gptfast.evaluation.scoring import score_tokens
from gptfast.evaluation.statistics import Estimate, estimate_mean, exponentiate
from gptfast.evaluation.text import Window
from gptfast.session import Session


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text: the mean negative log-likelihood of its tokens, and the exponential of that."""

    nll_nats_per_token: Estimate
    perplexity: Estimate


def measure_perplexity(session: Session, ids: Sequence[int], windows: Iterable[Window]) -> Perplexity:
    """The perplexity over the tokens that the windows score; each window is read into an empty cache.

    Raises UserError if the model computes what is not a number.
    """
    forget_cache(session)
    return summarize_nll([score_window(session, ids, window) for window in windows])


def encode_text(session: Session, content: str) -> list[int]:
    """The text's token ids, behind BOS if the checkpoint wants it; raises UserError without text or tokenizer."""
    if session.tokenizer is None:
        raise UserError(f"random weights for {session.checkpoint.path} have no tokenizer; evaluate a checkpoint")
    if not content:
        raise UserError("the text to evaluate is empty; give another --text")
    return session.tokenizer.encode(content)


def check_window(session: Session, size: int) -> None:
    """Raise UserError if windows of `size` tokens are longer than the model's context."""
    context = session.runner.context
    if size > context:
        raise UserError(
            f"a window of {size} tokens is longer than the context of {session.checkpoint.path}, which is {context}; "
            f"give --window {context} or less"
        )


def forget_cache(session: Session) -> None:
    """Let no later text take what is read now for its own."""
    session.cached_ids = []
    session.owner = None


def score_window(session: Session, ids: Sequence[int], window: Window) -> Tensor:
    """The negative log-likelihoods in nats (S,) float64 of the tokens that the window scores."""
    nll = -score_tokens(session.runner, ids[window.start : window.stop], window.first - window.start)
    check_finite(session, nll)
    return nll


def check_finite(session: Session, nll: Tensor) -> None:
    """Raise UserError unless every value is a number."""
    if not torch.isfinite(nll).all():
        raise UserError(
            f"{session.checkpoint.path} computes logits that are not finite; try --dtype float32, "
            "and if that does not help the weights are damaged"
        )


def summarize_nll(windows: Sequence[Tensor]) -> Perplexity:
    """The perplexity from the negative log-likelihoods (S,) of each window."""
    mean = estimate_mean(windows)
    return Perplexity(mean, exponentiate(mean))
