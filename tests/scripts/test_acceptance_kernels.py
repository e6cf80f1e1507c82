"""The sections that look at kernels, on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch
from acceptance import device, kernels, table
from acceptance.findings import Findings
from acceptance.precompile import Product
from acceptance.random_weights import BF16, Format, describe_packed, draw_packed
from torch import Tensor

from gptfast.checkpoint.presets import get_preset
from gptfast.kernels.cuda import ops
from gptfast.kernels.cuda.configurations import (
    LOAD_WORDS,
    THREADS,
    Configuration,
    load_configurations,
    read_configuration,
)
from gptfast.kernels.cuda.packing import unpack
from tests.reference.sessions import ROOT, run_process

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, the script itself runs")

CPU = torch.device("cpu")


def test_bandwidth_is_positive_and_the_better_of_both_ways_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from gptfast.bench import bandwidth

    monkeypatch.setitem(bandwidth.PROBE_BYTES, "cpu", 2**20)
    rates = device.measure_bandwidth(CPU, 2**20)
    assert all(rate > 0 for rate in rates.values())
    assert rates["read_gb_per_s"] == max(rates["kernel_gb_per_s"], rates["sum_gb_per_s"])


def test_the_gap_counts_launches_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.measure_gap(CPU, 3, waits=False) > 0
    monkeypatch.setattr(device, "measure_seconds", lambda replay, device: 1.0)  # nothing is launched
    with pytest.raises(AssertionError, match="0 launches of 24"):
        device.measure_gap(CPU, 3, waits=False)


def test_sensors_are_nothing_where_nothing_answers() -> None:
    assert device.query_sensors("no-such-program") == {}
    assert device.query_sensors("true") == {}


FORMATS = list(kernels.FORMATS)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_random_matrices_have_products_near_one_and_are_described_as_they_are(form: Format) -> None:
    weight = draw_packed(form, 64, 256, torch.Generator().manual_seed(0))
    assert weight.shape == (64, 256)
    size = unpack(weight).norm() / 64**0.5
    assert 0.5 < size < (1.5 if not form.has_mins or form.kind == "int4" else 3)
    described = describe_packed(form, 64, 256)
    for name in ("words", "scales", "mins"):
        ours, other = getattr(weight, name), getattr(described, name)
        assert (ours is None) == (other is None)
        assert ours is None or (ours.shape, ours.dtype, other.device.type) == (other.shape, other.dtype, "meta")


@pytest.mark.parametrize(
    "form", [BF16, Format("int8", 32), Format("int4", 64, has_mins=True)], ids=lambda form: form.name
)
def test_kernels_pass_their_checks(form: Format, findings: Findings) -> None:
    kernels.check_format(findings, CPU, form, [(9, 128), (5, 90)], torch.float32, repeats=2)
    assert [check.passed for check in findings.checks] == [True, True]


def test_attention_passes_its_checks(findings: Findings) -> None:
    heads = kernels.Heads(4, 2, 32)
    kernels.check_attention(findings, CPU, heads, torch.int8, torch.float32, (0, 255), repeats=2, tokens=(1, 3))
    assert [check.passed for check in findings.checks] == [True, True], findings.checks


def test_a_wrong_kernel_fails_its_checks(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = iter(torch.randn(1000, generator=torch.Generator().manual_seed(0)).tolist())

    def prepare(x: Tensor, weight: Any, *, exact_rows: bool = False) -> Callable[[], Tensor]:
        return lambda: x @ unpack(weight).T * (1 + 0.01 * next(noise))

    monkeypatch.setattr(kernels, "prepare_product", prepare)
    kernels.check_format(findings, CPU, BF16, [(9, 128)], torch.float32, repeats=2)
    assert [check.passed for check in findings.checks] == [False, False]


def test_a_result_that_is_no_number_fails() -> None:
    weight = draw_packed(BF16, 4, 32, torch.Generator().manual_seed(0))
    error = kernels.measure_error(torch.full((1, 4), torch.nan), torch.ones(1, 32), weight)
    assert not error < 1
    assert kernels.rank(error) > kernels.rank(1e9)


def test_attention_that_is_wrong_fails_its_checks(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attend_by_kernel", lambda q, cache, input_pos: torch.randn(*q.shape[:2], 4 * 8))
    heads = kernels.Heads(4, 2, 8)
    kernels.check_attention(findings, CPU, heads, torch.float32, torch.float32, (0, 9), repeats=2, tokens=(1, 3))
    assert [check.passed for check in findings.checks] == [False, False]


@pytest.mark.parametrize("form", table.FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("shape", table.list_layers(get_preset("llama-3.1-8b")).values())
def test_candidates_keep_the_rule_of_tiles(form: Format, shape: tuple[int, int]) -> None:
    single, several = (Product(form, *shape, rows) for rows in (1, 5))
    for product in (single, several):
        base = table.find_configuration(product, (9, 0))
        candidates = table.list_candidates(product, base)
        assert candidates[0] == base
        assert 4 <= len(candidates) == len(set(candidates)) <= 14
    for candidate in table.list_candidates(single, table.find_configuration(single, (9, 0))):
        assert candidate.block_words % (THREADS * LOAD_WORDS * candidate.warps) == 0


class NoCompiler(Executor):
    """Compiles nothing, successfully but for kernels of 8 rows."""

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result("too large" if arguments[0].configuration.block_rows == 8 else None)
        return future


def test_tuning_writes_the_fastest_configuration(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Configuration(4, 128, 1)
    seconds = {True: 1e-6, False: 2e-6}
    chosen: list[Configuration] = []

    def time_weights(weights: Any, x: Tensor) -> table.Time:
        chosen.append(ops.choose_configuration("int4", 1, 6, 256, 32, None))
        return table.Time(seconds[chosen[-1] == fast], 100)

    monkeypatch.setattr(table, "time_weights", time_weights)
    monkeypatch.setattr(table, "WORKING_SET_BYTES", 1)
    monkeypatch.setattr(table, "ROWS", (1,))
    monkeypatch.setattr(table, "draw_inputs", lambda device, rows, columns: torch.randn(rows, columns))
    monkeypatch.setattr(table, "list_candidates", lambda product, base: [base, fast, Configuration(8, 128, 1)])
    table.tune_all(findings, CPU, [(Format("int4", 32), (6, 256))], NoCompiler(), (9, 0))
    assert chosen == [table.find_configuration(Product(Format("int4", 32), 6, 256, 1), (9, 0)), fast]
    lines = [read_configuration(line) for line in json.loads((findings.out / "configurations.json").read_text())]
    assert len(lines) == 1 + len(load_configurations("sm_90"))
    assert dataclasses.astuple(lines[-1])[:5] == ("int4", False, 6, 256, 32)
    assert lines[-1].configuration == fast
    assert [findings.tables[0].rows[0][i] for i in (4, 6, 7)] == ["2.00", "1.00", "2"]


def test_tuning_keeps_what_is_in_use_where_little_is_gained(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((1e-6, 0.99e-6))
    monkeypatch.setattr(table, "time_weights", lambda weights, x: table.Time(next(times), 100))
    monkeypatch.setattr(table, "draw_inputs", lambda device, rows, columns: torch.randn(rows, columns))
    product = Product(BF16, 4, 256, 1)
    weights = table.make_weights(CPU, BF16, (4, 256), n_bytes=1)
    first, second = Configuration(2, 128, 1), Configuration(4, 128, 1)
    assert table.tune_product(findings, product, weights, [first, second]) == first
    assert not findings.checks


def test_a_configuration_with_another_result_is_not_taken(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((2e-6, 1e-6))
    monkeypatch.setattr(table, "time_weights", lambda weights, x: table.Time(next(times), 100))
    results = iter((torch.ones(1, 4), 1.1 * torch.ones(1, 4)))
    monkeypatch.setattr(table, "prepare_product", lambda x, weight: lambda: next(results))
    weights = table.make_weights(CPU, BF16, (4, 256), n_bytes=1)
    first, second = Configuration(2, 128, 1), Configuration(4, 128, 1)
    assert table.tune_product(findings, Product(BF16, 4, 256, 1), weights, [first, second]) == first
    assert [check.passed for check in findings.checks] == [False]


def test_products_are_timed_over_distinct_matrices() -> None:
    weights = table.make_weights(CPU, Format("int8"), (8, 64), n_bytes=1200)
    assert sum(weight.words.nbytes + weight.scales.nbytes for weight in weights) >= 1200 > 528 * (len(weights) - 1)
    assert len({weight.words.data_ptr() for weight in weights}) == len(weights) == 3
    found = table.time_weights(weights, torch.randn(1, 64))
    assert found.n_bytes == 528
    assert found.gb_per_s == pytest.approx(528 / found.seconds / 1e9)


@pytest.mark.slow
def test_kernels_are_compiled_ahead_as_they_are_launched(tmp_path: Path) -> None:
    """For a GPU that is not there, in a process where Triton compiles."""
    program = """
        from types import SimpleNamespace
        import torch
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from acceptance.precompile import Attention, Product, compile_call
        from acceptance.random_weights import Format
        from gptfast.kernels.cuda import attention, linear

        target = GPUTarget("cuda", 90, 32)
        driver.set_active(SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0))
        errors = [compile_call(Product(Format("int4", 128), 256, 512, rows), (9, 0)) for rows in (1, 5, 17)]
        errors.append(compile_call(Attention(4, 2, 64, 1, torch.int8), (9, 0)))
        kernels = linear.multiply_vector, linear.multiply_rows, linear.expand_rows, attention.attend_chunk
        print(errors, [len(kernel.device_caches[0][0]) for kernel in kernels])
        """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    paths = os.pathsep.join((str(ROOT / "scripts"), str(ROOT)))
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": paths}
    outcome = run_process(tmp_path / "program.py", cwd=tmp_path, **environment)
    assert outcome.stdout.strip() == "[None, None, None, None] [1, 1, 1, 1]", outcome
