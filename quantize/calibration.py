"""The text that GPTQ rounds by."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from gptfast.checkpoint.base import Checkpoint
from gptfast.errors import UserError
from gptfast.evaluation.text import PERPLEXITY_TOPICS
from gptfast.tokenizer import Tokenizer

SEQUENCES = 32
"""SmolLM2-135M is as good with 64 of them as with 16: its perplexity differs by 0.4 %, standard error 0.4 %.

They take 4 minutes and 1.5 (symmetric groups of 64, one core of a Zen 5, torch 2.13, 2026-11-30).
"""
LENGTH = 512
"""Tokens of a sequence."""
ENOUGH_TOKENS = 4096
"""Tokens; with fewer the result is worse, and with very few it is worse than without a calibration text.

SmolLM2-135M's Q4_1 file loses 0.26 nats per token with int4, and with int4-gptq 0.48 by 1 token, 0.18 by 32, 0.17 by
256, 0.13 by 1024 and 0.10 by 4096; standard errors are 0.01 to 0.02 (symmetric groups of 64, 4096 tokens scored of a
text of the same kind; one core of a Zen 5, torch 2.13, 2026-12-01).
"""


def read_calibration_ids(checkpoint: Checkpoint, path: Path | None) -> Tensor:
    """Token ids (B, S) int64 of a UTF-8 file or of the default text, as `make_calibration_ids` cuts them.

    Raises UserError if the checkpoint has no tokenizer, and as the functions do that read and cut the text.
    """
    tokenizer = checkpoint.load_tokenizer()
    if tokenizer is None:
        raise UserError(f"{checkpoint.path} has no tokenizer to read a calibration text with; use another mode")
    return make_calibration_ids(tokenizer, read_calibration_text(path))


def list_calibration_warnings(token_ids: Tensor) -> list[str]:
    """What a user should know before these token ids (B, S) are rounded by, a line each."""
    count = token_ids.numel()
    if count >= ENOUGH_TOKENS:
        return []
    return [
        f"the calibration text gives {count} of the {ENOUGH_TOKENS} tokens that int4-gptq should have, and with very "
        "few it is worse than int4; give a longer --calibration text"
    ]


def read_calibration_text(path: Path | None) -> str:
    """The text of a UTF-8 file; without one, what `pydoc_data.topics` says beside the text perplexity is measured on.

    Topics quote each other, so a paragraph that stands in several is taken once. Raises UserError if the file cannot
    be read.
    """
    if path is None:
        return read_default_text()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"the calibration text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the calibration text {path} is not UTF-8; convert it, or give another file") from error


def read_default_text() -> str:
    """Every paragraph of the topics that are not in `PERPLEXITY_TOPICS`, once, in their order."""
    from pydoc_data.topics import topics

    others = (text for name, text in topics.items() if name not in PERPLEXITY_TOPICS)
    paragraphs = dict.fromkeys(paragraph for text in others for paragraph in re.split(r"\n\n+", text.strip()))
    return "\n\n".join(paragraphs)


def make_calibration_ids(
    tokenizer: Tokenizer, text: str, *, sequences: int = SEQUENCES, length: int = LENGTH
) -> Tensor:
    """Token ids (B, S) int64 of the text, cut into at most that many sequences of that length from all over it.

    A text that is shorter than one sequence is one sequence. Raises UserError if the text has no token.
    """
    ids = torch.tensor(tokenizer.encode(text) if text else [], dtype=torch.int64)
    if not len(ids):
        raise UserError("the calibration text is empty; give another --calibration file")
    length = min(length, len(ids))
    rows = ids[: len(ids) // length * length].view(-1, length)
    if len(rows) <= sequences:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, sequences).long()]
