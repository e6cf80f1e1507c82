"""The kernels on a GPU, by the checks of scripts/gpu_acceptance.py: against float32, and bit against bit."""

from __future__ import annotations

import pytest
import torch
from acceptance import kernels
from acceptance.findings import Findings

from gptfast.kernels.cuda.products import Format

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
REPEATS = 20
SHAPES = [*kernels.ODD_SHAPES, (3072, 2048)]


@pytest.mark.parametrize("form", kernels.FORMATS, ids=lambda form: form.name)
def test_products_are_right_and_rows_have_the_same_bits(form: Format, findings: Findings) -> None:
    kernels.check_format(findings, DEVICE, form, SHAPES, torch.bfloat16, REPEATS)
    assert len(findings.checks) == 2
    assert not findings.failed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("heads", kernels.HEADS, ids=str)
def test_attention_is_right_and_tokens_have_the_same_bits(
    heads: kernels.Heads, dtype: torch.dtype, findings: Findings
) -> None:
    query_dtype = torch.float16 if dtype == torch.float16 else torch.bfloat16
    starts = kernels.list_starts(kernels.CHUNK_SLOTS)
    kernels.check_attention(findings, DEVICE, heads, dtype, query_dtype, starts, REPEATS)
    assert len(findings.checks) == 2
    assert not findings.failed


def test_kernels_that_were_launched_spill_nothing(findings: Findings) -> None:
    kernels.check_format(findings, DEVICE, kernels.INT4_G32, SHAPES[-1:], torch.bfloat16, 1)
    kernels.check_attention(findings, DEVICE, kernels.HEADS[0], torch.bfloat16, torch.bfloat16, (0, 300), 2)
    loaded = kernels.list_loaded(DEVICE)
    assert {"multiply_vector", "multiply_rows", "attend_chunk", "combine_chunks"} <= set(loaded)
    kernels.check_resources(findings, loaded)
    assert not findings.failed
