"""What separates two models of one tokenizer on a text.

Shapes: S tokens that a window scores, R rows of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptfast.errors import UserError
from gptfast.evaluation.perplexity import Perplexity, check_finite, encode_text, forget_cache, summarize_nll
from gptfast.evaluation.scoring import read_blocks, score_block
from gptfast.evaluation.statistics import Estimate, estimate_mean, exponentiate
from gptfast.evaluation.text import Window
from gptfast.session import Session
from gptfast.tokenizer import Tokenizer


@dataclass(frozen=True)
class Comparison:
    """A model beside a base that has read the same tokens; errors of differences are paired, token by token.

    Attributes:
        base_nll_nats_per_token, base_perplexity: see `Perplexity`; of the base.
        nll_difference_nats_per_token: the model's less the base's.
        perplexity_ratio: the model's over the base's.
        kl_nats_per_token: the mean of KL(base || model) over the predictions of the scored tokens.
        top1_agreement: the share of those predictions that put the same token first.
    """

    base_nll_nats_per_token: Estimate
    base_perplexity: Estimate
    nll_difference_nats_per_token: Estimate
    perplexity_ratio: Estimate
    kl_nats_per_token: Estimate
    top1_agreement: Estimate


def compare_models(
    session: Session, base: Session, ids: Sequence[int], windows: Iterable[Window]
) -> tuple[Perplexity, Comparison]:
    """The model's perplexity and what separates it from the base; each window is read by both in turn.

    Where one of them pads its vocabulary, KL and agreement are taken over the tokens that both have. Raises
    UserError if one of them computes what is not a number.
    """
    forget_cache(session)
    forget_cache(base)
    scores = [compare_window(session, base, ids, window) for window in windows]
    nll, base_nll, kl, agreement = zip(*scores, strict=True)
    difference = estimate_mean([a - b for a, b in zip(nll, base_nll, strict=True)])
    base_perplexity = summarize_nll(base_nll)
    return summarize_nll(nll), Comparison(
        base_nll_nats_per_token=base_perplexity.nll_nats_per_token,
        base_perplexity=base_perplexity.perplexity,
        nll_difference_nats_per_token=difference,
        perplexity_ratio=exponentiate(difference),
        kl_nats_per_token=estimate_mean(kl),
        top1_agreement=estimate_mean(agreement),
    )


def compare_window(session: Session, base: Session, ids: Sequence[int], window: Window) -> Tensor:
    """What `compare_block` says of the tokens that the window scores (4, S)."""
    read, first = ids[window.start : window.stop], window.first - window.start
    blocks = zip(read_blocks(session.runner, read, first), read_blocks(base.runner, read, first), strict=True)
    scores = torch.cat([compare_block(*ours, base_logits) for ours, (base_logits, _) in blocks], dim=1)
    check_finite(session, scores[0])
    check_finite(base, scores[1])
    return scores


def compare_block(logits: Tensor, targets: Tensor, base_logits: Tensor) -> Tensor:
    """(4, R) float64 on the CPU from logits of both (R, V) and the targets (R,).

    The rows are the negative log-likelihoods of the model and of the base, KL(base || model), all in nats, and 1
    where both put the same token first.
    """
    common = min(logits.shape[-1], base_logits.shape[-1])
    log_p, log_q = (each[:, :common].double().log_softmax(-1) for each in (logits, base_logits))
    kl = (log_q.exp() * (log_q - log_p)).sum(-1)
    agrees = log_p.argmax(-1) == log_q.argmax(-1)
    nll, base_nll = -score_block(logits, targets), -score_block(base_logits, targets)
    return torch.stack([nll, base_nll, kl.cpu(), agrees.double().cpu()])


def encode_for_both(session: Session, base: Session, content: str) -> list[int]:
    """The text's token ids, the same for both; raises UserError if their tokenizers are not the same by content."""
    ids, base_ids = encode_text(session, content), encode_text(base, content)
    assert session.tokenizer is not None
    assert base.tokenizer is not None
    paths = f"{session.checkpoint.path} and {base.checkpoint.path}"
    spellings = zip(spell_tokens(session.tokenizer), spell_tokens(base.tokenizer), strict=False)
    for token_id, (ours, theirs) in enumerate(spellings):
        if ours != theirs:
            raise UserError(
                f"{paths} have different tokenizers (token {token_id} is {ours!r} and {theirs!r}), so their "
                "predictions cannot be compared; give two checkpoints of one model family"
            )
    if ids != base_ids:
        raise UserError(
            f"{paths} have the same vocabulary but split this text differently, so their predictions cannot be "
            "compared; give both the same tokenizer files"
        )
    return ids


def spell_tokens(tokenizer: Tokenizer) -> list[bytes]:
    """How every token is spelled, control tokens too; empty for an id without a token."""
    control = {token_id: spelling.encode() for spelling, token_id in tokenizer.control_tokens.items()}
    return [control.get(i) or tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
