"""The sections that look at models, on tiny ones and a CPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from acceptance import model_1b, model_8b
from acceptance.findings import Findings
from acceptance.random_weights import BF16, build_model
from acceptance.steps import SwitchedGraphs, draw_prompt, make_session
from torch import Tensor

from gptfast.checkpoint.presets import get_preset
from gptfast.config import SamplingConfig
from gptfast.kernels import ops as kernel_ops
from gptfast.kernels.cuda import ops
from gptfast.kernels.cuda.packing import PackedWeight, unpack
from gptfast.kernels.cuda.products import Format
from gptfast.kernels.cuda.timing import DirectRuns
from gptfast.model import Transformer
from gptfast.runner import INITIAL_CAPACITY, Runner
from tests.reference.families import FAMILIES
from tests.reference.graphs import CheckedGraphs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, the script itself runs")

CPU = torch.device("cpu")


@pytest.fixture
def _quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by torch, as the interpreter takes seconds for those of a step, and a small cache."""
    assert kernel_ops.has_triton_kernels()

    def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, exact_rows: bool = False) -> Tensor:
        return torch.nn.functional.linear(x, unpack(weight), bias)

    monkeypatch.setattr(ops, "linear", multiply)
    monkeypatch.setitem(INITIAL_CAPACITY, "cpu", 64)


SMALL = dataclasses.replace(
    FAMILIES["llama-tied"], dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=64, vocab_size=64
)
SIZES = model_1b.Sizes(text_tokens=6, short_tokens=8)


@pytest.fixture
def small() -> Transformer:
    return build_model(SMALL, Format("int4", 32), dtype=torch.float32, device=CPU, head=Format("int8"))


@pytest.fixture
def graphs() -> SwitchedGraphs:
    return SwitchedGraphs(CheckedGraphs())


def list_passed(findings: Findings) -> list[bool]:
    return [check.passed for check in findings.checks]


@pytest.mark.usefixtures("_quick_steps")
def test_a_model_passes_its_checks(findings: Findings, small: Transformer, graphs: SwitchedGraphs) -> None:
    with torch.no_grad():
        model_1b.check_model(findings, small, "int4", graphs, SIZES)
    assert all(list_passed(findings)), findings.checks
    assert len(findings.checks) == 9


class ForgetfulGraphs(CheckedGraphs):
    """A replay does nothing the third time."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        replay = super().record(function)
        calls = itertools.count(1)

        def run() -> None:
            if next(calls) != 3:
                replay()

        return run


@pytest.mark.usefixtures("_quick_steps")
def test_a_replay_that_is_not_the_step_fails(findings: Findings, small: Transformer) -> None:
    graphs = SwitchedGraphs(ForgetfulGraphs())
    runner, prompt = Runner(small, graphs=graphs), draw_prompt(5, 64)
    model_1b.check_text(findings, "int4", runner, graphs, prompt, SamplingConfig(temperature=1.0), 8)
    assert list_passed(findings) == [False]


@pytest.mark.usefixtures("_quick_steps")
def test_a_call_that_waits_fails(
    findings: Findings, small: Transformer, graphs: SwitchedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(small, graphs=graphs)

    def extend(*arguments: Any) -> Any:
        raise RuntimeError("called a synchronizing CUDA operation")
        yield

    steps = iter((runner.extend, extend))
    monkeypatch.setattr(runner, "extend", lambda *arguments: next(steps)(*arguments))
    model_1b.check_synchronization(findings, "int4", runner, draw_prompt(5, 64), 8)
    assert list_passed(findings) == [False]
    assert "synchronizing" in findings.checks[0].found


@pytest.mark.usefixtures("_quick_steps")
@pytest.mark.parametrize(("step", "is_flat"), [(0, True), (2**19, False)])
def test_memory_that_grows_fails(
    step: int, is_flat: bool, findings: Findings, small: Transformer, graphs: SwitchedGraphs
) -> None:
    held = itertools.count(5, step)
    session = make_session(Runner(small, graphs=graphs))
    model_1b.check_memory(findings, session, graphs, [20, 3, 7, 9, 1], lambda: next(held))
    assert list_passed(findings) == [is_flat]


@pytest.mark.usefixtures("_quick_steps")
def test_a_speculated_text_is_the_plain_one(findings: Findings, small: Transformer, graphs: SwitchedGraphs) -> None:
    model_1b.check_speculation(findings, small, graphs, SIZES)
    assert list_passed(findings) == [True] * 3, findings.checks


@pytest.mark.usefixtures("_quick_steps")
def test_a_draft_that_is_never_right_fails(
    findings: Findings, small: Transformer, graphs: SwitchedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        model_1b,
        "expand_model",
        lambda draft, form, exact_rows: build_model(SMALL, BF16, dtype=torch.float32, device=CPU, seed=1),
    )
    model_1b.check_speculation(findings, small, graphs, SIZES)
    assert list_passed(findings) == [True, True, False]


@pytest.mark.usefixtures("_quick_steps")
def test_a_token_is_timed_at_every_depth_with_the_bytes_that_it_reads(small: Transformer) -> None:
    ticks = itertools.accumulate([0, 8, 1, 2, 1, 4, 1, 6] * 2)  # the first block, the slowest, does not count
    with torch.no_grad():
        found = model_8b.time_model(
            small, DirectRuns(), (0, 10), compiles=False, block_tokens=2, clock=lambda: float(next(ticks))
        )
    assert [each.depth for each in found] == [0, 10]
    assert found[0].blocks_ms == (1000.0, 2000.0, 3000.0)
    assert found[0].ms_per_token == 2000.0
    assert found[0].weight_bytes == small.count_weight_bytes_per_token()
    per_token = 2 * 16 * 4  # keys and values of one head of 16 in float32
    assert [each.kv_bytes for each in found] == [5 * per_token, 15 * per_token]
    row = model_8b.describe_decoding(found[0], "int4", 1e-6)
    assert float(row["share"].rstrip("%")) == pytest.approx(
        100 * (found[0].weight_bytes + found[0].kv_bytes) / 2 / 1e3, rel=1e-2
    )


def test_what_a_model_takes_is_estimated_for_the_memory() -> None:
    config = get_preset("llama-3.1-8b")
    assert model_8b.estimate_bytes(config, BF16) == pytest.approx(16.1e9 + 4.3e9, rel=0.02)
    assert model_8b.estimate_bytes(config, Format("int4", 32)) < 10e9


@pytest.mark.usefixtures("_quick_steps")
def test_steps_that_are_not_replayed_are_not_timed(small: Transformer) -> None:
    runner = Runner(small)
    with pytest.raises(AssertionError, match="not replayed"), torch.no_grad():
        model_8b.time_decoding(runner, 0, 2)


@pytest.mark.usefixtures("_quick_steps")
def test_torchs_own_products_are_timed_in_the_same_way() -> None:
    model = build_model(SMALL, "dense", dtype=torch.float32, device=CPU)
    with torch.no_grad():
        [found] = model_8b.time_model(model, DirectRuns(), (3,), compiles=False, block_tokens=2)
    assert found.ms_per_token > 0
    assert found.weight_bytes == 4 * sum(parameter.numel() for parameter in model.parameters())
