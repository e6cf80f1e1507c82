"""The choice among configurations, with a timer that says what a GPU might."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfast.cache import CACHE_VARIABLE
from gptfast.checkpoint.presets import get_preset
from gptfast.kernels.cuda import ops, tuning
from gptfast.kernels.cuda.configurations import (
    Configuration,
    Gpu,
    TunedConfiguration,
    Tuning,
    choose_configuration,
    find_fault,
    forget_files,
    get_tuning_path,
    load_shipped,
    open_tuning,
)
from gptfast.kernels.cuda.packing import WEIGHTS_PER_WORD, Kind
from gptfast.kernels.cuda.products import Format, Product
from gptfast.kernels.cuda.tuning import (
    Time,
    Timer,
    TunedProduct,
    draw_inputs,
    list_candidates,
    list_layers,
    make_line,
    make_weights,
    time_weights,
    tune_product,
    tune_products,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, it is tuned itself")
pytest.importorskip("triton")

CPU = torch.device("cpu")
GPU = Gpu("NVIDIA test", (9, 0))
FIRST, SECOND, THIRD = Configuration(2, 128, 1), Configuration(4, 128, 1), Configuration(8, 128, 1)
PRODUCT = Product(Format("bf16"), 6, 256, 1)
PRODUCTS = [Product(form, 6, 256, rows) for form in (Format("int4", 32), Format("bf16")) for rows in (1, 5)]


@pytest.fixture(autouse=True)
def _little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache without files, one matrix of each, and two candidates."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(tuning, "WORKING_SET_BYTES", 1)
    monkeypatch.setattr(tuning, "list_candidates", lambda product, in_use: list_candidates(product, in_use)[:2])
    forget_files()
    yield
    forget_files()


def say(*seconds: float) -> Timer:
    """A timer of these times, one after another, and of 1 s then."""
    times = itertools.chain(seconds, itertools.repeat(1.0))
    return lambda work, device: next(times)


class FakePool(Executor):
    """Says what compiling came to without doing it; a configuration that is too slow is never done."""

    def __init__(self, broken: Iterable[Configuration] = (), slow: Callable[[Product], bool] = lambda _: False) -> None:
        self.broken, self.slow = broken, slow

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if not self.slow(arguments[0]):
            future.set_result("it is too large" if arguments[0].configuration in self.broken else None)
        return future


def tune(
    timer: Timer, candidates: Iterable[Configuration] = (FIRST, SECOND), in_use: Configuration = FIRST
) -> TunedProduct:
    weights, x = make_weights(CPU, PRODUCT.form, PRODUCT.shape, 1), draw_inputs(CPU, 1, 256, torch.float32)
    return tune_product(PRODUCT, in_use, list(candidates), weights, x, timer=timer)


def tune_into(
    path: Path, timer: Timer, *, pool: Executor | None = None, remaining_s: Iterable[float] = ()
) -> Iterator[TunedProduct]:
    left = itertools.chain(remaining_s, itertools.repeat(1.0))
    return tune_products(
        PRODUCTS,
        CPU,
        GPU,
        FakePool() if pool is None else pool,
        path,
        open_tuning(path, GPU),
        get_remaining_s=lambda: next(left),
        dtype=torch.float32,
        timer=timer,
    )


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", WEIGHTS_PER_WORD)
@pytest.mark.parametrize("shape", [*list_layers(get_preset("llama-3.1-8b")).values(), (576, 576), (49_152, 90)])
def test_candidates_are_what_kernels_can_be_cut_into_and_the_one_in_use_is_the_first(
    kind: Kind, shape: tuple[int, int], rows: int
) -> None:
    product = Product(Format(kind, 128 if kind == "int4" and shape[1] % 128 == 0 else None), *shape, rows)
    in_use = product.find_configuration(GPU)
    candidates = list_candidates(product, in_use)
    assert candidates[0] == in_use
    assert 3 <= len(candidates) == len(set(candidates)) <= 14
    assert [find_fault(kind, rows > 1, shape[1], each) for each in candidates] == [None] * len(candidates)


def test_what_is_in_use_is_tried_first_whatever_it_is() -> None:
    odd = Configuration(1, 2048, 8)
    assert list_candidates(Product(Format("int4", 32), 4096, 4096, 1), odd)[0] == odd


def test_the_fastest_is_chosen() -> None:
    found = tune(say(3e-6, 1e-6, 2e-6), [FIRST, SECOND, THIRD])
    assert found.best == SECOND
    assert {each: time.seconds for each, time in found.times.items()} == {FIRST: 3e-6, SECOND: 1e-6, THIRD: 2e-6}
    assert found.times[SECOND].gb_per_s == pytest.approx(6 * 256 * 2 / 1e-6 / 1e9)


@pytest.mark.parametrize(("seconds", "best"), [(0.99e-6, FIRST), (0.97e-6, SECOND)])
def test_what_is_in_use_stays_unless_enough_is_gained(seconds: float, best: Configuration) -> None:
    assert tune(say(1e-6, seconds)).best == best


def test_what_is_in_use_is_left_where_it_cannot_be_launched() -> None:
    found = tune(say(2e-6, 1.99e-6), [SECOND, THIRD], in_use=FIRST)
    assert found.best == THIRD


def test_without_a_time_what_is_in_use_stays() -> None:
    assert TunedProduct(PRODUCT, FIRST).best == FIRST
    assert TunedProduct(PRODUCT, FIRST, {FIRST: Time(1.0, 1), SECOND: Time(0.5, 1)}).best == SECOND


def test_a_wrong_result_is_refused_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = tuning.prepare_product
    factors = {SECOND: 1.01, THIRD: float("nan")}

    def prepare_wrongly(x: Any, weight: Any, **options: Any) -> Any:
        factor = factors.get(options["configuration"], 1)
        return lambda: prepare(x, weight, **options)() * factor

    monkeypatch.setattr(tuning, "prepare_product", prepare_wrongly)
    found = tune(say(1e-6, 1e-9), [FIRST, SECOND, THIRD])
    assert found.best == FIRST
    assert list(found.times) == [FIRST]
    assert list(found.differences) == [SECOND, THIRD]
    assert found.differences[SECOND] == pytest.approx(0.01, rel=1e-3)


def test_what_the_gpu_has_no_room_for_is_left_out() -> None:
    from triton.runtime.errors import OutOfResources

    def measure(work: Callable[[], None], device: torch.device) -> float:
        if next(calls) == 0:
            raise OutOfResources(300_000, 200_000, "shared memory")
        return 1e-6

    calls = itertools.count()
    found = tune(measure)
    assert list(found.times) == [SECOND] == [found.best]
    assert not found.differences


def test_products_are_timed_over_distinct_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights(CPU, Format("int8"), (2, 64), n_bytes=300)
    assert sum(weight.words.nbytes + weight.scales.nbytes for weight in weights) >= 300 > 132 * (len(weights) - 1)
    assert len({weight.words.data_ptr() for weight in weights}) == len(weights) == 3
    found = time_weights(weights, torch.randn(1, 64))
    assert found.n_bytes == 132
    assert found.gb_per_s == pytest.approx(132 / found.seconds / 1e9)
    monkeypatch.setattr(tuning, "MOST_MATRICES", 2)
    assert len(make_weights(CPU, Format("int8"), (2, 64), n_bytes=300)) == 2


def test_a_candidate_is_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, int]] = []
    list_constants = ops.list_constants

    def note(*arguments: Any) -> dict[str, Any]:
        constants = list_constants(*arguments)
        launched.append((constants["block_rows"], constants["block_words"]))
        return constants

    def run(work: Callable[[], None], device: torch.device) -> float:
        launched.clear()
        work()
        timed.append(set(launched))
        return 1.0

    timed: list[set[tuple[int, int]]] = []
    monkeypatch.setattr(ops, "list_constants", note)
    tune(run)
    assert timed == [{(2, 128)}, {(4, 128)}]


def test_every_product_is_kept_as_soon_as_it_is_found(tmp_path: Path) -> None:
    path = tmp_path / "out" / "gpu.json"
    generator = tune_into(path, say(2e-6, 1e-6))
    found = next(generator)
    assert found.product == PRODUCTS[0]
    kept = open_tuning(path, GPU)
    assert [line.key for line in kept.products] == [PRODUCTS[0].key]
    assert kept.products[0].configuration == found.best != found.in_use
    assert (kept.gpu, kept.step, kept.torch) == (GPU.name, "compiled", torch.__version__)
    assert kept.date is not None
    assert kept.triton is not None
    rest = list(generator)
    assert [each.product for each in rest] == PRODUCTS[1:]
    assert [line.key for line in open_tuning(path, GPU).products] == [product.key for product in PRODUCTS]


def test_what_was_found_is_what_later_products_run_with() -> None:
    def choose() -> Configuration:
        return choose_configuration("int4", 1, 6, 256, 32, GPU)

    before = choose()
    found = next(tune_into(get_tuning_path(GPU.name), say(2e-6, 1e-6)))
    assert choose() == found.best != before


def test_a_second_run_adds_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    other = TunedConfiguration("int8", False, 512, 4096, 0, Configuration(2, 1024, 4))
    tuning.write_tuning(path, Tuning(gpu=GPU.name, step="fused", products=(other,)))
    next(tune_into(path, say()))
    kept = open_tuning(path, GPU)
    assert kept.step == "fused"
    assert [line.key for line in kept.products] == [other.key, PRODUCTS[0].key]


def test_an_interruption_keeps_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"

    def measure(work: Callable[[], None], device: torch.device) -> float:
        if next(calls) == 3:  # the second candidate of the second product
            raise KeyboardInterrupt
        return 1e-6

    calls = itertools.count()
    generator = tune_into(path, measure)
    assert next(generator).product == PRODUCTS[0]
    with pytest.raises(KeyboardInterrupt):
        next(generator)
    assert [line.key for line in open_tuning(path, GPU).products] == [PRODUCTS[0].key]
    assert [each.name for each in tmp_path.iterdir()] == ["gpu.json"]


def test_no_product_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    found = list(tune_into(tmp_path / "gpu.json", say(), remaining_s=[9, 9, 0.5, 0.5, -1, -1]))
    assert [each.product for each in found] == PRODUCTS[:2]
    assert not list(tune_into(tmp_path / "none.json", say(), remaining_s=[0, 0]))
    assert not (tmp_path / "none.json").exists()


def test_it_waits_for_the_compiler_no_longer_than_there_is_time(tmp_path: Path) -> None:
    pool = FakePool(slow=lambda product: product.rows > 1)
    found = list(tune_into(tmp_path / "gpu.json", say(), pool=pool, remaining_s=[9, 9, 0.01]))
    assert [each.product for each in found] == PRODUCTS[:1]


def test_what_does_not_compile_is_not_launched(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    in_use = PRODUCTS[0].find_configuration(GPU)
    found = next(tune_into(path, say(5.0), pool=FakePool(broken=[in_use])))
    assert found.in_use == in_use not in found.times
    assert found.best != in_use
    none = FakePool(broken=[*found.times, in_use])
    found = next(tune_into(tmp_path / "none.json", say(), pool=none))
    assert not found.times
    assert not (tmp_path / "none.json").exists()


def test_a_line_keeps_its_bound_and_a_new_one_has_the_loosest_of_its_kind() -> None:
    shipped = load_shipped("sm_90")
    assert shipped is not None
    lines = {line.key: line for line in shipped.products}
    known = Product(Format("int4", 128), 6144, 4096, 1)
    assert make_line(known, FIRST, lines).max_instructions_per_weight == lines[known.key].max_instructions_per_weight
    bounds = [line.max_instructions_per_weight for line in shipped.products if line.key[:2] == ("int4", False)]
    assert make_line(PRODUCTS[0], FIRST, lines).max_instructions_per_weight == max(filter(None, bounds))
    unknown = Product(Format("fp16"), 6144, 4096, 1)
    assert make_line(unknown, FIRST, lines).max_instructions_per_weight is None
