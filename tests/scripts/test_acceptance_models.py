"""The sections that look at models, on tiny ones and a CPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from acceptance import breakdown, decoding, fused, model_1b
from acceptance.findings import MEASURED, Findings
from acceptance.model_1b import SAMPLINGS
from acceptance.random_weights import BF16, build_model
from acceptance.steps import SwitchedGraphs, draw_prompt, make_session
from torch import Tensor

from gptfast import replay
from gptfast.checkpoint.presets import get_preset
from gptfast.config import SamplingConfig
from gptfast.kernels import ops as kernel_ops
from gptfast.kernels.cuda import ops
from gptfast.kernels.cuda.packing import PackedWeight, unpack
from gptfast.kernels.cuda.products import Format
from gptfast.kernels.cuda.timing import DirectRuns
from gptfast.model import Transformer
from gptfast.runner import INITIAL_CAPACITY, Runner
from gptfast.sampling import SamplingTensors
from tests.reference.families import FAMILIES
from tests.reference.graphs import CheckedGraphs

attention = pytest.importorskip("gptfast.kernels.cuda.attention")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, the script itself runs")

CPU = torch.device("cpu")


@pytest.fixture
def _quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and attention by torch, as the interpreter takes seconds for those of a step, and a small cache."""
    assert kernel_ops.has_triton_kernels()

    def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, exact_rows: bool = False) -> Tensor:
        return torch.nn.functional.linear(x, unpack(weight), bias)

    def attend(q: Tensor, k: Tensor, v: Tensor, input_pos: Tensor, **_: Any) -> Tensor:
        visible = torch.arange(k.shape[2]) <= input_pos[:, None]
        heads = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=visible, enable_gqa=True)
        return heads.transpose(1, 2).flatten(2)

    monkeypatch.setattr(ops, "linear", multiply)
    monkeypatch.setattr(attention, "attend", attend)
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
    assert len(findings.checks) == 10


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
def test_a_parameter_that_is_recorded_fails(
    findings: Findings, small: Transformer, graphs: SwitchedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = SamplingTensors.load
    # As if a recording held the values that it was made with, and the host had those of the text.
    monkeypatch.setattr(
        SamplingTensors, "load", lambda self, sampling: load(self, sampling) if graphs.replays else None
    )
    model_1b.check_parameters(findings, "int4", Runner(small, graphs=graphs), graphs, draw_prompt(5, 64), 6)
    assert list_passed(findings) == [False]


@pytest.mark.usefixtures("_quick_steps")
def test_texts_that_grow_in_turns_are_those_alone(
    findings: Findings, small: Transformer, graphs: SwitchedGraphs
) -> None:
    model_1b.check_isolation(findings, small, graphs, 8)
    assert list_passed(findings) == [True]


@pytest.mark.usefixtures("_quick_steps")
def test_sessions_with_the_same_cache_fail(
    findings: Findings, small: Transformer, graphs: SwitchedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_1b, "expand_model", lambda model, form: model)
    with pytest.raises(AssertionError, match="another runner has taken the caches away"):
        model_1b.check_isolation(findings, small, DirectRuns(), 8)
    monkeypatch.setattr(replay, "get_cache_address", lambda model: 0)  # as if no one had noticed
    model_1b.check_isolation(findings, small, DirectRuns(), 8)
    assert list_passed(findings) == [False]
    assert "caches in common: 1" in findings.checks[0].found


def open_small(model: Transformer, depths: Sequence[int]) -> Runner:
    return decoding.open_runner(model, DirectRuns(), depths, compiles=False, block_tokens=2)


@pytest.mark.usefixtures("_quick_steps")
def test_a_token_is_timed_at_every_depth_with_the_bytes_that_it_reads(small: Transformer) -> None:
    ticks = itertools.accumulate([0, 8, 1, 2, 1, 4, 1, 6] * 2)  # the first block, the slowest, does not count
    with torch.no_grad():
        runner = open_small(small, (0, 10))
        found = [decoding.time_decoding(runner, depth, 2, lambda: float(next(ticks))) for depth in (0, 10)]
    assert [each.depth for each in found] == [0, 10]
    assert found[0].blocks_ms == (1000.0, 2000.0, 3000.0)
    assert found[0].ms_per_token == 2000.0
    assert found[0].weight_bytes == small.count_weight_bytes_per_token()
    per_token = 2 * 16 * 4  # keys and values of one head of 16 in float32
    assert [each.kv_bytes for each in found] == [5 * per_token, 15 * per_token]
    row = decoding.describe_decoding(found[0], "int4", 1e-6)
    assert float(row["share"].rstrip("%")) == pytest.approx(
        100 * (found[0].weight_bytes + found[0].kv_bytes) / 2 / 1e3, rel=1e-2
    )


def test_what_a_model_takes_is_estimated_for_the_memory() -> None:
    config = get_preset("llama-3.1-8b")
    assert decoding.estimate_bytes(config, BF16, 16_384) == pytest.approx(16.1e9 + 4.3e9, rel=0.02)
    assert decoding.estimate_bytes(config, Format("int4", 32), 16_384) < 10e9


@pytest.mark.usefixtures("_quick_steps")
def test_steps_that_are_not_replayed_are_not_timed(small: Transformer) -> None:
    runner = Runner(small)
    with pytest.raises(AssertionError, match="not replayed"), torch.no_grad():
        decoding.time_decoding(runner, 0, 2)


@pytest.mark.usefixtures("_quick_steps")
def test_torchs_own_products_are_timed_in_the_same_way() -> None:
    model = build_model(SMALL, "dense", dtype=torch.float32, device=CPU)
    with torch.no_grad():
        found = decoding.time_decoding(open_small(model, (3,)), 3, 2)
    assert found.ms_per_token > 0
    assert found.weight_bytes == 4 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.usefixtures("_quick_steps")
def test_a_case_gives_rows_shares_for_the_goals_and_the_kernels_of_a_step(
    findings: Findings, small: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "BLOCK_TOKENS", 2)
    monkeypatch.setattr(decoding, "BROKEN_DOWN_DEPTH", 7)
    case = decoding.Case(Format("int4", 32), Format("int8"), compiles=False)
    with torch.no_grad():
        decoding.time_case(findings, "tiny", case, small, (0, 7), bandwidth=1.0)
    rows, kernels = findings.tables
    assert rows.title.startswith("tiny shape")
    assert [row[:2] for row in rows.rows] == [
        ["int4 g32, head int8 channel, not compiled", depth] for depth in ("0", "7")
    ]
    measured = findings.facts[MEASURED]
    assert [(line["model"], line["kind"], line["depth"]) for line in measured] == [
        ("tiny", "int4", 0),
        ("tiny", "int4", 7),
    ]
    assert [f"{line['share']:.1%}" for line in measured] == [row[-1] for row in rows.rows]
    assert kernels.title.endswith("at depth 7")
    assert {"between kernels", "whole step"} <= {row[0] for row in kernels.rows}


def test_a_case_without_time_or_memory_is_a_fact(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("nothing may be built")

    monkeypatch.setattr(decoding, "build_model", build)
    monkeypatch.setattr(decoding, "get_available_memory", lambda device: 10**9)
    decoding.time_cases(findings, CPU, "llama-3.1-8b", [decoding.Case(BF16)], (0,), 1.0)
    monkeypatch.setattr(findings, "get_remaining_s", lambda: 3.0)
    decoding.time_cases(findings, CPU, "llama-3.1-8b", [decoding.Case(Format("int8"))], (0,), 1.0)
    assert findings.facts == {"too large, bf16": "16 GB, and 1 are free", "left out, int8 channel": "3 s were left"}


# Kernels of a step


@pytest.mark.usefixtures("_quick_steps")
def test_operators_of_steps_are_counted_by_step(small: Transformer) -> None:
    with torch.no_grad():
        runner = open_small(small, (0,))
        decoding.time_decoding(runner, 0, 2)
        found = {kernel.name: kernel for kernel in breakdown.profile_steps(runner, 0, steps=3)}
    # Of the one layer four, and the output layer.
    assert found["aten::mm"].count + found.get("aten::addmm", found["aten::mm"]).count >= 5
    assert all(kernel.us >= 0 for kernel in found.values())


def make_average(key: str, device: str, count: int, us: float, *, spans: bool = False) -> SimpleNamespace:
    """What torch's profiler says of all launches of a kernel."""
    return SimpleNamespace(
        key=key,
        device_type=SimpleNamespace(name=device),
        count=count,
        self_device_time_total=us,
        self_cpu_time_total=-1.0,
        is_user_annotation=spans,
    )


def test_kernels_of_the_device_are_shared_out_to_steps() -> None:
    averages = [
        make_average("attend", "CUDA", 4, 10.0),
        make_average("multiply", "CUDA", 20, 80.0),
        make_average("Memcpy DtoH (Device -> Pinned)", "CUDA", 2, 7.0),
        make_average("region", "CUDA", 2, 95.0, spans=True),
        make_average("cudaGraphLaunch", "CPU", 2, 0.0),
    ]
    found = breakdown.list_kernels(averages, "CUDA", steps=2)
    assert found == [breakdown.Kernel("multiply", 10, 40.0), breakdown.Kernel("attend", 2, 5.0)]
    rows = breakdown.describe_kernels(found, step_us=50.0)
    assert [(row["kernel"], row["launches"], row["us"], row["share"]) for row in rows] == [
        ("multiply", "10", "40.0", "80.0%"),
        ("attend", "2", "5.0", "10.0%"),
        ("between kernels", "0", "5.0", "10.0%"),
        ("whole step", "12", "50.0", "100.0%"),
    ]
    assert [row["us each"] for row in rows] == ["4.00", "2.50", "", "4.17"]


def test_short_kernels_share_a_row() -> None:
    kernels = [breakdown.Kernel(f"k{i}" + "x" * 90 * (i == 0), 1, 100.0 - i) for i in range(15)]
    rows = breakdown.describe_kernels(kernels, step_us=2000.0)
    assert [row["kernel"] for row in rows[-3:]] == ["3 others", "between kernels", "whole step"]
    assert (rows[-3]["launches"], rows[-3]["us"]) == ("3", f"{88 + 87 + 86:.1f}")
    assert len(rows[0]["kernel"]) == breakdown.LONGEST_NAME


def test_a_profiler_that_sees_nothing_is_a_fact(
    findings: Findings, small: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakdown, "profile_steps", lambda runner, depth: [])
    breakdown.break_down_step(findings, Runner(small), 0, 10.0, "kernels")
    assert not findings.tables
    assert "saw no kernel" in str(findings.facts)


@pytest.mark.slow
def test_a_fused_step_passes_its_checks_and_a_wrong_one_does_not(
    findings: Findings, small: Transformer, graphs: SwitchedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "SAMPLINGS", SAMPLINGS[:1])
    monkeypatch.setattr(fused, "N_FOLLOWING", 3)
    monkeypatch.setattr(fused, "N_VERIFIED", 2)
    sizes: dict[str, Any] = {"lengths": (5,), "repeats": 1, "text_tokens": 2}
    with torch.no_grad():
        fused.check_fused(findings, small, "int4", graphs, **sizes)
        assert list_passed(findings) == [True] * 5
        run = fused.FusedTransformer.run
        monkeypatch.setattr(fused.FusedTransformer, "run", lambda *inputs: 1.1 * run(*inputs))
        fused.check_fused(findings, small, "int4", graphs, **sizes)
    assert list_passed(findings)[5:] == [False, True, True, True, True]
