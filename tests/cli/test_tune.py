"""`gptfast tune`: refused where there is no GPU, and run as if there were one, by a timer that makes up times."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptfast.cache import CACHE_VARIABLE
from gptfast.cli.generate import INTERRUPTED
from gptfast.kernels.cuda import configurations, ops, precompilation, tuning
from gptfast.kernels.cuda.configurations import Gpu, forget_files, open_tuning
from gptfast.kernels.cuda.packing import Kind, PackedWeight, unpack
from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, random_weights
from tests.reference.sessions import CommandLine

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, it is tuned itself")

GPU = Gpu("NVIDIA T4 (test)", (9, 0))
MATRICES = 5


@pytest.fixture(scope="module")
def directory(tiny_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(FAMILIES["llama-8-2"], n_layers=2, vocab_size=96)
    return write_hf(tmp_path_factory.mktemp("tuned"), random_weights(config), config)


class NoCompiler(Executor):
    """Compiles nothing, successfully."""

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(None)
        return future


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a GPU that is pretended, whose kernels have two candidates, and are torch's, as the interpreter's
    take seconds.
    """
    list_candidates = tuning.list_candidates

    def multiply(x: Tensor, words: Tensor, scales: Tensor, mins: None, bias: None, kind: Kind) -> Tensor:
        return x @ unpack(PackedWeight(kind, words, x.shape[1], scales)).T

    def prepare(x: Tensor, weight: PackedWeight, **options: Any) -> Callable[[], Tensor]:
        return lambda: x @ unpack(weight).T * 1.001

    monkeypatch.setattr(ops, "multiply_matrix", multiply)
    monkeypatch.setattr(tuning, "prepare_product", prepare)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(tuning, "choose_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(configurations, "identify_gpu", lambda device: GPU)
    monkeypatch.setattr(precompilation, "open_pool", NoCompiler)
    monkeypatch.setattr(tuning, "WORKING_SET_BYTES", 1)
    monkeypatch.setattr(tuning, "list_candidates", lambda product, in_use: list_candidates(product, in_use)[:2])
    forget_files()
    yield tmp_path / "cuda" / "nvidia-t4-test.json"
    forget_files()


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], float]], None]:
    """Have the n-th time be what a function says."""

    def set_timer(tell: Callable[[int], float]) -> None:
        calls = itertools.count()
        timed = functools.partial(
            tuning.tune_products, dtype=torch.float32, timer=lambda work, device: tell(next(calls))
        )
        monkeypatch.setattr(tuning, "tune_products", timed)

    return set_timer


@pytest.mark.parametrize("arguments", [(), ("--random", "llama-3.2-1b"), ("--output", "file.json", "--json")])
def test_without_a_gpu_it_is_refused_in_a_line(arguments: tuple[str, ...], cli: CommandLine) -> None:
    cli("tune", *arguments).assert_refused("no CUDA GPU")


def test_what_no_matrix_can_be_held_in_is_refused(cli: CommandLine) -> None:
    cli("tune", "--weights", "int3").assert_refused("weights 'int3'")


def test_every_product_is_tuned_and_kept(
    path: Path, pretend: Callable[[Callable[[int], float]], None], directory: Path, cli: CommandLine
) -> None:
    pretend(lambda call: (2e-6, 1e-6)[call % 2])
    outcome = cli("tune", "--checkpoint", directory, "--weights", "int4", "--json")
    assert outcome.exit_code == 0, outcome
    kept = open_tuning(path, GPU)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert len(kept.products) == 2 * MATRICES
    assert {line.kind for line in kept.products} == {"int4", "int8"}
    assert f"{2 * MATRICES} of {2 * MATRICES}: " in outcome.stderr.splitlines()[-1]
    lines = outcome.stdout.splitlines()
    assert lines[0] == GPU.name
    assert sum(line.startswith(("int4 g32 ", "int8 channel ")) for line in lines) == 2 * MATRICES
    assert f"kept in {path}" in lines
    fields = outcome.json
    assert (fields["device_name"], fields["path"], fields["untuned"]) == (GPU.name, str(path), 0)
    for product, line in zip(fields["products"], kept.products, strict=True):
        assert product["out_features"] == line.out_features
        assert (product["in_use"]["us"], product["best"]["us"]) == (2.0, 1.0)
        assert product["best"]["block_rows"] == line.configuration.block_rows
        assert (product["tried"], product["wrong"]) == (2, [])


def test_an_interruption_keeps_and_prints_what_was_found(
    path: Path, pretend: Callable[[Callable[[int], float]], None], directory: Path, cli: CommandLine, tmp_path: Path
) -> None:
    def tell(call: int) -> float:
        if call == 3:
            raise KeyboardInterrupt
        return 1e-6

    pretend(tell)
    output = tmp_path / "new" / "gpu.json"
    outcome = cli("tune", "--checkpoint", directory, "--weights", "int4", "--output", output, "--json")
    assert outcome.exit_code == INTERRUPTED
    assert len(open_tuning(output, GPU).products) == 1
    assert not path.exists()
    assert f"{2 * MATRICES - 1} of {2 * MATRICES} products were not tuned: interrupted" in outcome.stderr
    assert f"kept in {output}" in outcome.stdout
    assert len(outcome.json["products"]) == 1


def test_what_the_budget_leaves_out_is_told(
    path: Path, directory: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "tune_products", lambda *arguments, **options: iter(()))
    outcome = cli("tune", "--checkpoint", directory, "--weights", "int4", "--budget-s", "1")
    assert outcome.exit_code == 0
    assert outcome.stdout == ""
    assert outcome.stderr.splitlines()[-1].startswith(f"{2 * MATRICES} of {2 * MATRICES} products were not tuned: 1 s")


def test_a_wrong_configuration_is_named(
    path: Path,
    pretend: Callable[[Callable[[int], float]], None],
    directory: Path,
    cli: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "SAME", 0.0)
    pretend(lambda call: 1e-6)
    outcome = cli("tune", "--checkpoint", directory, "--weights", "int4", "--json")
    assert outcome.exit_code == 0
    assert outcome.stdout.count("note: int4 g32, 96 x 64, 1 row: the result at ") == 2
    assert outcome.json["products"][0]["best"]["us"] is None
    assert len(outcome.json["products"][0]["wrong"]) == 2
    assert "kept in" not in outcome.stdout
    assert not path.exists()


def test_a_model_without_a_matrix_for_the_kernels_is_refused(path: Path, directory: Path, cli: CommandLine) -> None:
    outcome = cli("tune", "--checkpoint", directory, "--weights", "fp32")
    assert outcome.exit_code == 2
    assert "no matrix of" in outcome.stderr.splitlines()[-1]


def test_a_file_that_cannot_be_made_is_refused_at_once(path: Path, tmp_path: Path, cli: CommandLine) -> None:
    (tmp_path / "file").touch()
    cli("tune", "--output", tmp_path / "file" / "gpu.json").assert_refused("--output")
