"""Small models on a GPU, by the checks of scripts/gpu_acceptance.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from acceptance import breakdown, decoding, model_1b
from acceptance.findings import Findings
from acceptance.random_weights import BF16, FP8, INT4_G32, INT4_G128, INT8, build_model
from acceptance.steps import SwitchedGraphs

from gptfast.kernels.cuda.products import Format
from gptfast.kernels.cuda.timing import open_graphs
from gptfast.model import Transformer
from tests.reference.families import FAMILIES

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
CONFIG = replace(FAMILIES["llama-tied"], dim=512, n_heads=8, n_kv_heads=2, head_dim=64, ffn_dim=1024, vocab_size=2000)
SIZES = model_1b.Sizes(text_tokens=64, short_tokens=24, prompts=60, longest_prompt=400)
FORMS = [BF16, FP8, INT8, INT4_G32, INT4_G128, Format("int4", 32, has_mins=True)]


def build(form: Format) -> Transformer:
    return build_model(CONFIG, form, dtype=torch.bfloat16, device=DEVICE, head=INT8 if form.kind == "int4" else None)


@pytest.fixture
def graphs() -> SwitchedGraphs:
    return SwitchedGraphs(open_graphs(DEVICE))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_recorded_steps_are_right(form: Format, findings: Findings, graphs: SwitchedGraphs) -> None:
    """Bits of replays, logits of torch, texts, seeds, parameters, ends, and nothing that waits."""
    with torch.no_grad():
        model_1b.check_model(findings, build(form), form.name, graphs, SIZES)
    assert findings.checks
    assert not findings.failed


@pytest.mark.parametrize("form", [BF16, INT4_G32], ids=lambda form: form.name)
def test_compiled_steps_are_right(form: Format, findings: Findings, graphs: SwitchedGraphs) -> None:
    with torch.no_grad():
        model_1b.check_model(findings, build(form), form.name, graphs, SIZES, compile=True)
    assert findings.checks
    assert not findings.failed


def test_two_sessions_share_no_buffer(findings: Findings, graphs: SwitchedGraphs) -> None:
    with torch.no_grad():
        model_1b.check_isolation(findings, build(INT4_G32), graphs, 32)
    assert findings.checks
    assert not findings.failed


def test_memory_stays_flat(findings: Findings) -> None:
    model_1b.check_memory_of(findings, build(INT4_G32), SIZES)
    assert findings.checks
    assert not findings.failed


def test_a_speculated_text_is_the_plain_one(findings: Findings, graphs: SwitchedGraphs) -> None:
    with torch.no_grad():
        model_1b.check_speculation(findings, build(INT4_G32), graphs, SIZES)
    assert findings.checks
    assert not findings.failed


def test_the_profiler_sees_every_kernel_of_a_step() -> None:
    with torch.no_grad():
        runner = decoding.open_runner(build(INT8), open_graphs(DEVICE), (0,), compiles=False)
        assert decoding.time_decoding(runner, 0).ms_per_token > 0
        kernels = breakdown.profile_steps(runner, 0)
    # Two products of a layer's four, at least, are our own kernel.
    assert sum(kernel.count for kernel in kernels if "multiply_vector" in kernel.name) >= 2 * CONFIG.n_layers
    assert all(kernel.us > 0 for kernel in kernels)
