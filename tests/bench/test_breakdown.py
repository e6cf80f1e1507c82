from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._ops import OpOverload

from gptfast import loading
from gptfast.bench.breakdown import (
    HOST,
    SAMPLING,
    STEPS_PER_ROUND,
    UNACCOUNTED,
    StepTimes,
    measure_breakdown,
    summarize_times,
    time_kernels,
    time_whole_steps,
)
from gptfast.bench.kernels import ATTENTION, POINTWISE, KernelTimer, list_products
from gptfast.checkpoint import open_checkpoint
from gptfast.config import SamplingConfig
from gptfast.kernels import ops
from gptfast.loading import load_model
from gptfast.runner import Runner
from gptfast.session import Session
from tests.reference.clock import FakeClock

PRODUCTS = {"attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2", "output"}
DEPTH = 100


def test_every_part_of_a_step_has_its_time(session: Session) -> None:
    """Eager and compiled: each product, attention, what lies between them, sampling, and the host where it can be."""
    breakdown = measure_breakdown(session.runner, DEPTH, SamplingConfig(), time.perf_counter)
    parts = {part.name: part for part in breakdown.parts}
    last = [SAMPLING, HOST, UNACCOUNTED] if session.runner.is_compiled else [SAMPLING, UNACCOUNTED]
    assert set(parts) == PRODUCTS | {ATTENTION, POINTWISE, *last}
    assert [part.name for part in breakdown.parts][-len(last) :] == last
    assert all(parts[name].ms > 0 for name in PRODUCTS | {ATTENTION, POINTWISE, SAMPLING})
    assert sum(part.ms for part in breakdown.parts) == pytest.approx(breakdown.step_ms)


def test_medians_are_of_the_steps_after_the_warm_up(eager: Session) -> None:
    times = StepTimes()
    time_whole_steps(eager.runner, DEPTH, SamplingConfig(), FakeClock(tick=1.0), times)
    assert times.whole == [2.0] * STEPS_PER_ROUND
    assert times.sampling == [1.0] * STEPS_PER_ROUND
    assert len(time_kernels(eager.runner, DEPTH, FakeClock(tick=1.0))) == STEPS_PER_ROUND


def test_what_the_measurements_do_not_agree_on_is_a_row(eager: Session) -> None:
    times = StepTimes(whole=[0.010, 0.012], sampling=[0.001, 0.001], host=[0.002, 0.002])
    times.parts |= {"output": [0.004, 0.004], ATTENTION: [0.005, 0.005]}
    breakdown = summarize_times(times, eager.runner, DEPTH)
    assert [(part.name, round(part.ms, 6)) for part in breakdown.parts] == [
        (ATTENTION, 5.0),
        ("output", 4.0),
        (SAMPLING, 1.0),
        (HOST, 2.0),
        (UNACCOUNTED, -1.0),
    ]
    times.host = []
    without_host = summarize_times(times, eager.runner, DEPTH)
    assert [(part.name, round(part.ms, 6)) for part in without_host.parts][-2:] == [(SAMPLING, 1.0), (UNACCOUNTED, 1.0)]


def test_a_tied_head_is_the_output(family_directory: Callable[[str], Path]) -> None:
    runner = Runner(load_model(open_checkpoint(family_directory("qwen2"))))
    assert runner.model.output is None
    parts = list_parts(runner)
    assert parts.count("output") == 1  # and not the row that is looked up
    assert parts.count("attention.wqkv") == runner.model.config.n_layers


def test_the_bytes_of_the_parts_are_those_of_a_token(eager: Session) -> None:
    breakdown = measure_breakdown(eager.runner, DEPTH, SamplingConfig(), time.perf_counter)
    config = eager.runner.model.config
    read = {part.name: part.bytes_read for part in breakdown.parts}
    header = 64  # bytes of each packed matrix
    assert read["feed_forward.w13"] == config.n_layers * (2 * config.ffn_dim * config.dim * 4 + header)
    padded = 16 * math.ceil(config.vocab_size / 16)
    assert read["output"] == padded * config.dim * 4 + header
    assert read[ATTENTION] == pytest.approx(DEPTH * config.get_kv_bytes_per_token(4), rel=0.3)
    norms = (2 * config.n_layers + 1) * config.dim * 4
    row = eager.runner.model.tok_embeddings.weight.nbytes // config.vocab_size
    assert sum(read[name] for name in PRODUCTS) + norms + row == eager.weight_bytes_per_token


def test_a_step_is_as_it_was_after_it_was_taken_apart(compiled: Session) -> None:
    tokens = torch.tensor([5])
    before = compiled.runner.decode(tokens, DEPTH)
    step, call_operator = dict(compiled.runner._steps), OpOverload.__call__
    measure_breakdown(compiled.runner, DEPTH + 1, SamplingConfig(), time.perf_counter)
    assert compiled.runner._steps == step
    assert OpOverload.__call__ is call_operator
    assert torch.equal(compiled.runner.decode(tokens, DEPTH), before)


def test_separate_kernels_compute_the_same_step(compiled: Session) -> None:
    tokens = torch.tensor([7])
    usual = compiled.runner.decode(tokens, DEPTH)
    with compiled.runner.separate_kernels():
        assert torch.allclose(compiled.runner.decode(tokens, DEPTH), usual, atol=1e-5)


def list_parts(runner: Runner) -> list[str]:
    timer = KernelTimer(runner.model, is_compiled=runner.is_compiled)
    with timer.active():
        for position in (DEPTH, DEPTH + 1, DEPTH + 2):
            runner.decode(torch.tensor([5]), position)
            calls = timer.take_calls()
    assert all(call.seconds > 0 for call in calls)
    return [call.part for call in calls]


def test_each_layer_calls_each_product_once(session: Session) -> None:
    with session.runner.separate_kernels():
        parts = list_parts(session.runner)
    n_layers = session.runner.model.config.n_layers
    assert {name: parts.count(name) for name in PRODUCTS - {"output"}} == dict.fromkeys(PRODUCTS - {"output"}, n_layers)
    assert parts.count(ATTENTION) == n_layers
    assert "output" in parts


def test_matrices_that_a_layer_holds_apart_are_one_part(eager: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where wq, wk and wv are not stored alike, `wqkv` is a product with each."""
    monkeypatch.setattr(loading, "join_alike", list)
    runner = Runner(load_model(eager.checkpoint))
    n_layers = runner.model.config.n_layers
    products = [part for part, _ in list_products(runner.model)]
    assert (products.count("attention.wqkv"), products.count("feed_forward.w13")) == (3 * n_layers, 2 * n_layers)
    assert set(products) == PRODUCTS
    assert list_parts(runner).count("attention.wqkv") == 3 * n_layers


@pytest.mark.parametrize("is_compiled", [False, True])
def test_without_the_kernels_the_parts_are_the_same(
    is_compiled: bool, eager: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "has_cpu_kernels", lambda: False)
    runner = Runner(load_model(eager.checkpoint), compile=is_compiled)
    breakdown = measure_breakdown(runner, DEPTH, SamplingConfig(), time.perf_counter)
    assert {part.name for part in breakdown.parts} >= PRODUCTS | {ATTENTION, POINTWISE}


def test_products_are_all_the_matrices_that_a_step_multiplies_with(eager: Session) -> None:
    products = list_products(eager.runner.model)
    assert {name for name, _ in products} == PRODUCTS
    assert len(products) == 4 * eager.runner.model.config.n_layers + 1
