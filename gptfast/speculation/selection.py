"""From `--draft` to proposers: what may be named there, and whether it fits the target."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from gptfast.checkpoint import open_checkpoint
from gptfast.checkpoint.base import Checkpoint
from gptfast.decode import MOST_VERIFIED
from gptfast.errors import UserError
from gptfast.fused import FusedTransformer, explain_unfusable
from gptfast.loading import Weights, check_memory, estimate_weight_bytes, load_model
from gptfast.model import Transformer
from gptfast.runner import Runner
from gptfast.speculation.controller import SpeculationController
from gptfast.speculation.draft import DraftModel, cut_layers
from gptfast.speculation.ngram import NgramProposer
from gptfast.speculation.proposer import Proposer
from gptfast.speculation.speculator import Lane, Speculator
from gptfast.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NGRAM = "ngram"
LAYERS = re.compile(r"layers:(\d+)")
PRECISIONS: dict[str, Weights] = {"int4": "int4", "int8": "int8"}
"""In which a model drafts for itself; fp8 takes the bytes of int8 and is coarser."""
CHOICES = "give ngram, int4, int8, layers:N or a checkpoint's path, or two as in ngram,int4"
MOST_DRAFTED = 8
MOST_LOOKED_UP = MOST_VERIFIED - 1
"""Tokens in a round that is free to choose: a draft model's cost time, and looked-up ones cost none."""
AS_SMALL = 1.15
"""A checkpoint that takes at most this many times the bytes of the asked draft is used as it is stored."""


def open_speculator(
    draft: str, target: Runner, checkpoint: Checkpoint, tokenizer: Tokenizer | None, *, k: int | None = None
) -> Speculator:
    """What speculates for the target, which was loaded from the checkpoint.

    Args:
        draft: `ngram`, a draft model, or `ngram,` and a draft model. A draft model is the path of a checkpoint with
            the same vocabulary, `int4` or `int8` for the target's checkpoint in that precision, or `layers:N` for the
            target's first layers.
        k: tokens in every round; None to have the measured times and acceptance decide.

    Raises:
        UserError: what `draft` names is not there or does not fit the target, or `k` is out of range.
    """
    check_draft(draft, k, target.batch_size)
    if target.device.type == "cpu" and target.model.kernels is None:
        logger.warning("without the CPU kernels a verified token may differ from a plain one; --check-exact tells")
    if target.model.kernels in ("inductor", "torchao"):
        logger.warning(
            "with the kernels %s a verified token may differ from a plain one; --check-exact tells",
            target.model.kernels,
        )
    lanes = []
    for name in split_draft(draft):
        proposer: Proposer
        if name == NGRAM:
            proposer, most = NgramProposer(), MOST_LOOKED_UP
        else:
            proposer, most = _open_draft_model(name, target, checkpoint, tokenizer), MOST_DRAFTED
        lanes.append(Lane(name, proposer, SpeculationController(max_k=k or most, fixed_k=k)))
    return Speculator(target, lanes)


def check_draft(draft: str | Path | None, k: int | None, batch_size: int) -> None:
    """Refuse what can be refused before a model is loaded; see `open_speculator`."""
    if draft is None:
        if k is not None:
            raise UserError(f"{k} tokens are to be speculated but nothing proposes them; name a draft")
        return
    if batch_size != 1:
        raise UserError("speculation decodes one text at a time; use batch size 1, or no draft")
    if k is not None and not (isinstance(k, int) and 1 <= k < MOST_VERIFIED):
        raise UserError(f"{k!r} tokens cannot be speculated at once; use 1 to {MOST_VERIFIED - 1}, or None for auto")
    for name in split_draft(os.fspath(draft)):
        is_known = name in (NGRAM, *PRECISIONS) or LAYERS.fullmatch(name)
        if not is_known and not Path(os.path.expanduser(name)).exists():
            raise UserError(f"the draft {name} does not exist; {CHOICES}")


def split_draft(draft: str) -> list[str]:
    """The proposers that it names, one or two, in the order in which they are asked."""
    # Only there does a comma part two; a path may have one too.
    names = draft.split(",", 1) if draft.startswith(f"{NGRAM},") else [draft]
    if "" in names or names.count(NGRAM) > 1:
        raise UserError(f"draft {draft!r} does not say what proposes; {CHOICES}")
    return names


def _open_draft_model(name: str, target: Runner, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> DraftModel:
    model = _load_draft_model(name, target, checkpoint, tokenizer)
    fused = None
    if target.fused is not None and explain_unfusable(model, target.kv_dtype) is None:
        fused = FusedTransformer(model, pdl=target.fused.pdl)
    runner = Runner(
        model,
        compile=target.compiling_was_asked,
        kv_dtype=target.kv_dtype,
        graphs=target.graphs,
        fused=fused,
        uses_graph_trees=target.uses_graph_trees,
    )
    return DraftModel(runner, target.vocab_size)


def _load_draft_model(name: str, target: Runner, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> Transformer:
    if cut := LAYERS.fullmatch(name):
        return cut_layers(target.model, int(cut[1]))
    weights: Weights = "stored"
    if name in PRECISIONS:
        weights = _choose_weights(checkpoint, PRECISIONS[name], target)
    else:
        path = Path(os.path.expanduser(name))
        checkpoint, target_checkpoint = open_checkpoint(path), checkpoint
        check_vocabulary(checkpoint.load_tokenizer(), tokenizer, str(path), str(target_checkpoint.path))
    dtype = target.model.dtype
    check_memory(checkpoint, weights, dtype, target.device)
    # A rounded product makes a draft sooner and hardly worse, and what it drafts is verified.
    return load_model(checkpoint, device=target.device, dtype=dtype, weights=weights, rounds_inputs=True)


def _choose_weights(checkpoint: Checkpoint, weights: Weights, target: Runner) -> Weights:
    """What to load a draft of that precision from: a checkpoint that is as small already is not rounded again."""
    stored, asked = (
        estimate_weight_bytes(checkpoint, choice, target.model.dtype, target.device) for choice in ("stored", weights)
    )
    return "stored" if stored <= AS_SMALL * asked else weights


def check_vocabulary(draft: Tokenizer | None, target: Tokenizer | None, draft_name: str, target_name: str) -> None:
    """Raise UserError unless every id that both have stands for the same text; one may be padded beyond the other."""
    if draft is None or target is None:
        raise UserError(f"the vocabulary of the draft {draft_name} cannot be compared; use int4, int8 or layers:N")
    ours, theirs = list_spellings(draft), list_spellings(target)
    for token_id, (in_draft, in_target) in enumerate(zip(ours, theirs, strict=False)):
        if in_draft != in_target:
            raise UserError(
                f"the draft {draft_name} has another vocabulary than {target_name}: token {token_id} is {in_draft!r} "
                f"and not {in_target!r}; use a draft with the same tokenizer"
            )


def list_spellings(tokenizer: Tokenizer) -> list[bytes]:
    """What every id stands for in UTF-8, a control token its name; empty where there is no token.

    Files of one vocabulary differ in which tokens they call control tokens.
    """
    control = {token_id: text.encode() for text, token_id in tokenizer.control_tokens.items()}
    return [control.get(token_id) or tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
