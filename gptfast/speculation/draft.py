"""A smaller model as the proposer, with a key/value cache of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gptfast.errors import UserError
from gptfast.graphs import Fetched
from gptfast.model import Transformer
from gptfast.runner import PREFILL_CHUNKS, Runner
from gptfast.sampling import Sampler

CATCH_UP_TOKENS = max(PREFILL_CHUNKS) // 2
"""Read at once after a while without proposals: few enough for the small prefill step, which is always compiled."""


class DraftModel:
    """Decodes ahead of the target, token by token.

    Its cache is rolled back by position: what it holds of tokens that were rejected is overwritten. After a round in
    which all were accepted it lacks the last of them, and reads it together with the target's own token.

    Args:
        runner: of the draft model, for one text.
        vocab_size: of the target; logits of the draft beyond it stand for padding and are left out.
    """

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        assert runner.batch_size == 1
        self.runner = runner
        self._vocab_size = vocab_size
        self._read_ids: list[int] = []
        self._fetch_drafted: Fetched = list

    def begin(self, tokens: Sequence[int]) -> None:
        """Read all but the last token, which the first proposal starts from."""
        if len(tokens) > 1 and self._can_read(tokens[:-1]):
            known = self._count_known(tokens)
            if known < len(tokens) - 1:
                self.runner.prefill(tokens[known:-1], known)
            self._remember(tokens[:-1])

    def propose(self, tokens: Sequence[int], k: int, sampler: Sampler) -> Tensor:
        """At most `k` tokens; fewer where the draft's context ends. See `Proposer.propose`."""
        k = max(0, min(k, self.runner.context + 1 - len(tokens))) if self._can_read(tokens) else 0
        if k == 0:
            return torch.empty(0, dtype=torch.int64, device=self.runner.device)
        known = self._count_known(tokens)
        self._remember(tokens[:known])  # what comes after it is overwritten now
        while len(tokens) - known > CATCH_UP_TOKENS:
            self.runner.prefill(tokens[known : known + CATCH_UP_TOKENS], known)
            known += CATCH_UP_TOKENS
        drafted = self.runner.draft(sampler, tokens[known:], known, k, self._vocab_size)
        self._remember(tokens)
        self._fetch_drafted = self.runner.fetch(drafted[:-1])
        return drafted

    def _can_read(self, tokens: Sequence[int]) -> bool:
        """Whether the text fits the draft's context and has none of the target's ids that the draft lacks."""
        if len(tokens) > self.runner.context:
            return False
        return self.runner.vocab_size >= self._vocab_size or max(tokens) < self.runner.vocab_size

    def _count_known(self, tokens: Sequence[int]) -> int:
        """How many tokens, at most all but the last, the cache holds from the first on."""
        held = [*self._read_ids, *self._fetch_drafted()][: len(tokens) - 1]
        if list(tokens[: len(held)]) == held:
            return len(held)
        return next(i for i, (ours, theirs) in enumerate(zip(held, tokens, strict=False)) if ours != theirs)

    def _remember(self, tokens: Sequence[int]) -> None:
        self._read_ids, self._fetch_drafted = list(tokens), list


def cut_layers(model: Transformer, n_layers: int) -> Transformer:
    """The first layers of a model with its embedding, norm and output layer, whose weights it shares.

    Caches are its own. Raises UserError unless `n_layers` is 1 to one less than the model has.
    """
    if not 0 < n_layers < model.config.n_layers:
        raise UserError(
            f"a draft of {n_layers} layers cannot be cut from a model of {model.config.n_layers}; "
            f"use layers:1 to layers:{model.config.n_layers - 1}"
        )
    with torch.device("meta"):
        draft = Transformer(dataclasses.replace(model.config, n_layers=n_layers))
    draft.set_kernels(model.kernels)
    for name in {name.rpartition(".")[0] for name, _ in draft.named_parameters()}:
        draft.set_submodule(name, model.get_submodule(name))
    return draft.eval()
