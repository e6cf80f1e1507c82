"""The fused step of small models on a GPU, by the checks of scripts/gpu_acceptance.py."""

from __future__ import annotations

import pytest
import torch
from acceptance import fused
from acceptance.findings import Findings
from acceptance.random_weights import BF16, FP8, INT4_G32, INT8, build_model
from acceptance.steps import SwitchedGraphs

from gptfast.kernels.cuda.products import Format
from gptfast.kernels.cuda.timing import open_graphs
from gptfast.model import Transformer
from tests.gpu.test_models import CONFIG, DEVICE

pytestmark = pytest.mark.gpu


def build(form: Format, *, exact_rows: bool = False) -> Transformer:
    head = INT8 if form.kind == "int4" else None
    return build_model(CONFIG, form, dtype=torch.bfloat16, device=DEVICE, head=head, exact_rows=exact_rows)


@pytest.mark.parametrize("form", [BF16, FP8, INT8, INT4_G32], ids=lambda form: form.name)
def test_the_fused_step_is_the_model_s(form: Format, findings: Findings) -> None:
    """Logits, bits of replays and of launches without each other's overlap, texts, and nothing that waits."""
    graphs = SwitchedGraphs(open_graphs(DEVICE))
    with torch.no_grad():
        fused.check_fused(findings, build(form), form.name, graphs, repeats=5, text_tokens=64)
    assert findings.checks
    assert not findings.failed


@pytest.mark.parametrize("form", [BF16, INT4_G32], ids=lambda form: form.name)
def test_a_row_has_its_bits_whatever_is_beside_it(form: Format, findings: Findings) -> None:
    with torch.no_grad():
        fused.check_rows(findings, build(form, exact_rows=True), form.name)
    assert findings.checks
    assert not findings.failed
