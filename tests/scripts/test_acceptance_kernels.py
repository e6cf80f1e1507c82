"""The sections that look at kernels, on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from acceptance import device, kernels, table
from acceptance.findings import Findings
from acceptance.random_weights import BF16, INT4_G32
from torch import Tensor

from gptfast.cache import CACHE_VARIABLE
from gptfast.kernels.cuda import tuning
from gptfast.kernels.cuda.configurations import Gpu, forget_files, load_shipped, open_tuning
from gptfast.kernels.cuda.packing import unpack
from gptfast.kernels.cuda.products import Format, Product, draw_packed
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


def load(*spills: int) -> list[SimpleNamespace]:
    """Programs as Triton holds them."""
    return [SimpleNamespace(n_regs=64 + n, n_spills=n, metadata=SimpleNamespace(shared=100 - n)) for n in spills]


@pytest.mark.parametrize(
    ("loaded", "passed"),
    [({"a": load(0, 0), "b": load(0)}, True), ({"a": load(0, 2), "b": load(0)}, False), ({}, False)],
    ids=["none", "one", "nothing loaded"],
)
def test_a_kernel_that_spills_fails(loaded: dict[str, list[SimpleNamespace]], passed: bool, findings: Findings) -> None:
    kernels.check_resources(findings, loaded)
    assert [check.passed for check in findings.checks] == [passed]
    if loaded:
        spilled = max(program.n_spills for program in loaded["a"])
        assert findings.tables[0].rows == [
            ["a", "2", str(64 + spilled), str(spilled), "100"],
            ["b", "1", "64", "0", "100"],
        ]


class NoCompiler(Executor):
    """Compiles nothing, successfully."""

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(None)
        return future


GPU = Gpu("NVIDIA test", (9, 0))


@pytest.fixture
def _no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache without a file of the GPU, little to read, and two candidates."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    list_candidates = tuning.list_candidates
    monkeypatch.setattr(tuning, "WORKING_SET_BYTES", 1)
    monkeypatch.setattr(tuning, "list_candidates", lambda product, in_use: list_candidates(product, in_use)[:2])
    forget_files()
    yield
    forget_files()


@pytest.mark.usefixtures("_no_files")
def test_tuned_products_make_a_table_and_a_file_with_all_that_was_known(findings: Findings) -> None:
    seconds = iter((2e-6, 1e-6))
    product = Product(INT4_G32, 6, 256, 1)
    table.tune_all(
        findings, CPU, GPU, [product], NoCompiler(), dtype=torch.float32, timer=lambda work, device: next(seconds)
    )
    found = open_tuning(findings.out / "configurations.json", GPU)
    shipped = load_shipped("sm_90")
    assert shipped is not None
    assert (found.gpu, found.step, found.products[:-1]) == (GPU.name, "compiled", shipped.products)
    assert found.products[-1].key == product.key
    first, second = tuning.list_candidates(product, product.find_configuration(None))
    assert found.products[-1].configuration == second
    [tuned] = findings.tables
    assert tuned.rows[0][:7] == ["int4 g32", "6 x 256", "1", first.describe(), "2.00", second.describe(), "1.00"]
    assert not findings.checks
    assert "untuned" not in findings.facts


@pytest.mark.usefixtures("_no_files")
def test_a_configuration_with_another_result_fails_a_check(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SAME", 0.0)
    table.tune_all(findings, CPU, GPU, [Product(BF16, 6, 256, 1)], NoCompiler(), dtype=torch.float32)
    assert {check.passed for check in findings.checks} == {False}
    assert not findings.tables


@pytest.mark.usefixtures("_no_files")
def test_what_there_is_no_time_to_tune_is_counted(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "section.json", limit_s=table.RESERVE_S)
    table.tune_all(findings, CPU, GPU, [Product(BF16, 6, 256, rows) for rows in (1, 5)], NoCompiler())
    assert findings.facts["untuned"] == 2
    assert not (tmp_path / "configurations.json").exists()


@pytest.mark.slow
def test_kernels_are_compiled_ahead_as_they_are_launched(tmp_path: Path) -> None:
    """For a GPU that is not there, in a process where Triton compiles."""
    program = """
        from types import SimpleNamespace
        import torch
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from acceptance.precompile import Attention
        from gptfast.kernels.cuda import attention, linear
        from gptfast.kernels.cuda.configurations import Gpu
        from gptfast.kernels.cuda.precompilation import compile_call
        from gptfast.kernels.cuda.products import Format, Product

        target = GPUTarget("cuda", 90, 32)
        driver.set_active(SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0))
        gpu = Gpu("H200", (9, 0))
        errors = [compile_call(Product(Format("int4", 128), 256, 512, rows), gpu) for rows in (1, 5, 17)]
        errors.append(compile_call(Attention(4, 2, 64, 1, torch.int8), gpu))
        kernels = linear.multiply_vector, linear.multiply_rows, linear.expand_rows, attention.attend_chunk
        print(errors, [len(kernel.device_caches[0][0]) for kernel in kernels])
        """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    paths = os.pathsep.join((str(ROOT / "scripts"), str(ROOT)))
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": paths}
    outcome = run_process(tmp_path / "program.py", cwd=tmp_path, **environment)
    assert outcome.stdout.strip() == "[None, None, None, None] [1, 1, 1, 1]", outcome
