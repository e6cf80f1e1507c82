"""Perplexity against transformers, on the same token ids and windows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gptfast.download import peek_default_model
from gptfast.errors import UserError
from gptfast.evaluation.perplexity import check_window, encode_text, measure_perplexity
from gptfast.evaluation.text import Window, plan_windows, read_default_text
from gptfast.generation import Stream, stream
from gptfast.session import Session, load
from tests.reference.sessions import CONTEXT, PROMPT, load_tiny, random_prompt, tiny_config

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("tiny_cache")

PARITY = 1e-3
"""Of the perplexity, as a fraction."""
MODEL = peek_default_model()


@torch.no_grad()
def transformers_perplexity(model: Any, ids: list[int], windows: list[Window]) -> float:
    """The exponential of the mean loss over the tokens that the windows score."""
    losses = []
    for window in windows:
        logits = model(torch.tensor([ids[window.start : window.stop]])).logits[0].float()
        predicting = logits[window.first - window.start - 1 : -1]
        losses.append(F.cross_entropy(predicting, torch.tensor(ids[window.first : window.stop]), reduction="none"))
    return math.exp(torch.cat(losses).double().mean())


def load_transformers(directory: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, **options
    ).eval()


@pytest.mark.parametrize(("size", "stride"), [(300, 150), (64, 64), (500, 1)], ids=["half", "none", "most"])
def test_perplexity_equals_that_of_transformers(size: int, stride: int, session: Session, directory: Path) -> None:
    ids = random_prompt(700 if stride > 1 else 505)
    windows = plan_windows(len(ids), size, stride)
    expected = transformers_perplexity(load_transformers(directory), ids, windows)
    result = measure_perplexity(session, ids, windows)
    assert result.perplexity.value == pytest.approx(expected, rel=PARITY)
    assert result.perplexity.value == pytest.approx(math.exp(result.nll_nats_per_token.value))


def test_the_comparison_notices_a_window_that_begins_a_token_late(eager: Session, directory: Path) -> None:
    ids = random_prompt(400)
    windows = [Window(w.start + 1, w.first, w.stop) for w in plan_windows(len(ids), 64, 32)[1:]]
    expected = transformers_perplexity(load_transformers(directory), ids, plan_windows(len(ids), 64, 32))
    assert measure_perplexity(eager, ids, windows).perplexity.value != pytest.approx(expected, rel=PARITY)


def test_the_order_of_windows_leaves_no_trace(eager: Session) -> None:
    ids = random_prompt(300)
    windows = plan_windows(len(ids), 100, 50)
    forward, backward = (measure_perplexity(eager, ids, each) for each in (windows, windows[::-1]))
    assert forward.perplexity.value == pytest.approx(backward.perplexity.value, rel=1e-12)


def test_a_text_begun_before_cannot_go_on_in_the_overwritten_cache(eager: Session) -> None:
    begun = stream(eager, PROMPT, max_new_tokens=5)
    next(iter(begun.iterate_steps()))
    measure_perplexity(eager, random_prompt(50), plan_windows(50, 32, 16))
    with pytest.raises(UserError, match="another text"):
        list(begun)
    again = Stream(eager, PROMPT, max_new_tokens=3, reuse_cache=True)
    list(again)
    assert again.result.reused_tokens == 0


def test_a_window_longer_than_the_context_is_refused(eager: Session) -> None:
    check_window(eager, CONTEXT)
    with pytest.raises(UserError, match=f"{CONTEXT + 1} tokens .* --window {CONTEXT}"):
        check_window(eager, CONTEXT + 1)


def test_random_weights_are_refused(eager: Session) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        encode_text(replace(eager, tokenizer=None), PROMPT)


def test_weights_that_compute_no_numbers_are_refused(directory: Path) -> None:
    session = load_tiny(directory)
    session.runner.model.norm.weight = nn.Parameter(torch.full((tiny_config().dim,), math.nan))
    with pytest.raises(UserError, match="not finite"):
        measure_perplexity(session, random_prompt(40), plan_windows(40, 32, 16))


@pytest.mark.skipif(MODEL is None, reason="the default model is not on this machine; `gptfast download` fetches it")
def test_the_default_model_has_the_perplexity_that_transformers_finds() -> None:
    assert MODEL is not None
    session = load(MODEL, dtype="float32", activations="fp32")
    ids = encode_text(session, read_default_text().content)[:2048]
    windows = plan_windows(len(ids), 1024, 512)
    result = measure_perplexity(session, ids, windows)
    theirs = load_transformers(MODEL.parent, gguf_file=MODEL.name)
    assert result.perplexity.value == pytest.approx(transformers_perplexity(theirs, ids, windows), rel=PARITY)
    assert 5 < result.perplexity.value < 30
