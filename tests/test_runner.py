"""The runner: compiled and eager steps give the same logits, on any prompt, without compiling again."""

from __future__ import annotations

import gc
import logging
import random
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptfast import runner as runner_module
from gptfast.compilation import CompilationError, compile_step
from gptfast.errors import PromptError
from gptfast.memory import get_resident_memory
from gptfast.runner import MOST_VERIFIED, PREFILL_CHUNKS, CompileStatistics, Runner, plan_chunks, round_up
from gptfast.session import Session
from tests.reference.families import FAMILIES, random_tokens
from tests.reference.product import load as load_model
from tests.reference.product import run
from tests.reference.sessions import CONTEXT, load_tiny, random_prompt, write_tiny_model

pytestmark = pytest.mark.usefixtures("tiny_cache")

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["eager", "compiled"])
def runner(request: pytest.FixtureRequest) -> Runner:
    session: Session = request.getfixturevalue(request.param)
    return session.runner


def read(runner: Runner, ids: list[int], n_steps: int = 0) -> Tensor:
    """Logits (1 + n_steps, V) after the prompt and after each of the next ids, which follow the prompt in `ids`."""
    prompt = ids[: len(ids) - n_steps]
    rows = [runner.prefill(prompt)[0].clone()]
    for position in range(len(prompt), len(ids)):
        rows.append(runner.decode(torch.tensor([ids[position]]), position)[0].clone())
    return torch.stack(rows)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max() < TOLERANCE


def count_compilations(statistics: CompileStatistics) -> tuple[int, int, int]:
    """All that would move if anything were traced, compiled or loaded."""
    return counters["stats"]["unique_graphs"], statistics.compiled, statistics.loaded


# Plans


@given(st.integers(1, 10_000))
def test_chunks_cover_the_prompt_and_only_the_last_is_padded(length: int) -> None:
    chunks = plan_chunks(length)
    assert set(chunks) <= set(PREFILL_CHUNKS)
    assert sum(chunks[:-1]) < length <= sum(chunks)
    assert sum(chunks) < length + max(PREFILL_CHUNKS)


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_round_up(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


# Logits


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 128, 129, 300, 513])
def test_logits_equal_those_of_one_uncached_pass(length: int, runner: Runner, directory: Path) -> None:
    ids = random_prompt(length + 4, seed=length)
    expected = run(load_model(directory, len(ids)), ids)[length - 1 :]
    assert_near(read(runner, ids, n_steps=4), expected)


def test_prompts_of_any_order_of_lengths_leave_nothing_behind(compiled: Session, directory: Path) -> None:
    for length in (5, 200, 7, 500):
        ids = random_prompt(length + 3, seed=length)
        fresh = Runner(load_model(directory, 1))
        assert_near(read(compiled.runner, ids, n_steps=3), read(fresh, ids, n_steps=3))


@pytest.mark.parametrize("parts", [[60, 40], [1, 99], [32, 32, 36], [99, 1]])
def test_logits_do_not_depend_on_how_the_prompt_is_split(parts: list[int], runner: Runner) -> None:
    ids = random_prompt(100)
    expected = runner.prefill(ids).clone()
    start = 0
    for size in parts:
        logits = runner.prefill(ids[start : start + size], start)
        start += size
    assert_near(logits, expected)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("length", [1, 33, 129, 150, 256, 290])
def test_padding_of_a_window_narrower_than_a_chunk_stays_finite(
    length: int, backend: SDPBackend, family_directory: object
) -> None:
    assert callable(family_directory)
    config = FAMILIES["mistral"]
    assert config.sliding_window is not None
    assert config.sliding_window < max(PREFILL_CHUNKS)
    ids = random_tokens(config, length + 20)
    model = load_model(family_directory("mistral"), 1)
    with sdpa_kernel(backend):
        logits = read(Runner(model), ids, n_steps=20)
    assert all(torch.isfinite(cache.k).all() and torch.isfinite(cache.v).all() for cache in model.list_caches())
    assert_near(logits, run(load_model(family_directory("mistral"), len(ids)), ids)[length - 1 :])


def test_logits_that_are_kept_are_not_overwritten(runner: Runner) -> None:
    ids = random_prompt(40)
    kept = [runner.prefill(ids[:20])]
    copies = [kept[0].clone()]
    for position in range(20, 40):
        kept.append(runner.decode(torch.tensor([ids[position]]), position))
        copies.append(kept[-1].clone())
    kept.append(runner.prefill(ids))
    runner.prefill(random_prompt(300))
    for logits, copy in zip(kept, copies, strict=False):
        assert torch.equal(logits, copy)


def test_rows_of_a_batch_read_the_same_prompt(directory: Path) -> None:
    batch, single = load_tiny(directory, batch_size=3).runner, load_tiny(directory).runner
    ids = random_prompt(50)
    expected = single.prefill(ids)
    logits = batch.prefill(ids)
    assert logits.shape == (3, expected.shape[1])
    assert_near(logits, expected.expand(3, -1))
    logits = batch.decode(torch.tensor([7, 8, 9]), 50)
    for row, token in enumerate((7, 8, 9)):
        assert_near(logits[row], single.decode(torch.tensor([token]), 50)[0])


# Room


def test_the_cache_grows_and_keeps_what_it_holds(directory: Path) -> None:
    runner = load_tiny(directory).runner
    ids = random_prompt(41)
    runner.prefill(ids[:40])
    assert runner.capacity == 2048
    runner.reserve(2049)
    assert runner.capacity == CONTEXT
    grown = runner.decode(torch.tensor(ids[40:]), 40)
    assert_near(grown, runner.prefill(ids))


def test_the_cache_does_not_shrink(directory: Path) -> None:
    runner = load_tiny(directory).runner
    runner.reserve(2100)
    capacity = runner.capacity
    runner.reserve(5)
    assert runner.capacity == capacity


def test_no_more_is_reserved_than_the_context(tmp_path: Path) -> None:
    runner = load_tiny(write_tiny_model(tmp_path / "short", context=96)).runner
    assert runner.capacity == 96


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_last_slot_is_usable_and_the_next_is_refused_with_the_numbers(is_compiled: bool, directory: Path) -> None:
    runner = load_tiny(directory, compile=is_compiled).runner
    ids = random_prompt(CONTEXT, seed=3)
    assert_near(read(runner, ids, n_steps=2), run(load_model(directory, CONTEXT), ids, [768] * 3)[-3:])
    with pytest.raises(PromptError, match=f"{CONTEXT + 1} tokens .* {CONTEXT}"):
        runner.decode(torch.tensor([5]), CONTEXT)
    with pytest.raises(PromptError, match="shorten"):
        runner.prefill([*ids, 5])
    assert_near(read(runner, ids[:50], n_steps=2), run(load_model(directory, 50), ids[:50])[-3:])


# Compiling


def test_warm_up_makes_the_steps_of_one_prompt_or_of_all(directory: Path) -> None:
    runner = load_tiny(directory, compile=True).runner
    runner.warm_up(5)
    assert runner.compile_statistics.compiled + runner.compile_statistics.loaded == 2
    runner.warm_up()
    assert runner.compile_statistics.compiled + runner.compile_statistics.loaded == 3
    before = count_compilations(runner.compile_statistics)
    runner.warm_up()
    assert count_compilations(runner.compile_statistics) == before
    assert runner.compile_statistics.seconds > 0


def test_what_was_not_warmed_up_is_made_when_needed(directory: Path, eager: Session) -> None:
    runner = load_tiny(directory, compile=True).runner
    ids = random_prompt(40)
    assert_near(read(runner, ids, n_steps=2), read(eager.runner, ids, n_steps=2))
    assert runner.compile_statistics.loaded == 2
    assert runner.is_compiled


def test_a_prompt_loads_what_a_warm_up_compiled(directory: Path) -> None:
    first, second = (load_tiny(directory, compile=True).runner for _ in range(2))
    with torch.enable_grad():  # as in a program that knows nothing of grad modes
        first.warm_up(5)
        second.prefill(random_prompt(5))
    assert second.compile_statistics.compiled == 0
    assert second.compile_statistics.loaded == 1


def test_no_prompt_compiles_anything_after_the_warm_up(compiled: Session) -> None:
    lengths = random.Random(0).choices(range(1, 700), k=40)
    before = count_compilations(compiled.runner.compile_statistics)
    for length in lengths:
        read(compiled.runner, random_prompt(length + 2, seed=length), n_steps=2)
    assert count_compilations(compiled.runner.compile_statistics) == before


def test_compiled_steps_go_on_in_a_cache_that_has_grown(directory: Path, eager: Session) -> None:
    runner = load_tiny(directory, compile=True).runner
    runner.warm_up()
    ids = random_prompt(60)
    runner.prefill(ids[:50])
    before = count_compilations(runner.compile_statistics)
    runner.reserve(CONTEXT)
    assert runner.capacity == CONTEXT
    for position in range(50, 60):
        logits = runner.decode(torch.tensor([ids[position]]), position)
    assert_near(logits, eager.runner.prefill(ids))
    assert_near(runner.prefill(ids), eager.runner.prefill(ids))
    assert count_compilations(runner.compile_statistics) == before


def test_the_counters_would_move(compiled: Session) -> None:
    """What the test above relies on: a new graph, and a step that is made again, both count."""
    before = count_compilations(compiled.runner.compile_statistics)

    def double(x: Tensor) -> Tensor:
        return x * 2

    torch.compile(double, backend="eager")(torch.ones(3))
    assert count_compilations(compiled.runner.compile_statistics)[0] == before[0] + 1
    steps = dict(compiled.runner._steps)
    compiled.runner._steps.clear()
    read(compiled.runner, random_prompt(20), n_steps=1)
    assert count_compilations(compiled.runner.compile_statistics)[2] == before[2] + 2
    compiled.runner._steps.update(steps)


def test_two_sessions_have_separate_caches(directory: Path, compiled: Session, eager: Session) -> None:
    other = load_tiny(directory, compile=True)
    other.runner.warm_up()
    assert other.runner.compile_statistics.compiled == 0
    first, second = random_prompt(60, seed=1), random_prompt(60, seed=2)
    compiled.runner.prefill(first[:50])
    other.runner.prefill(second[:50])
    for position in range(50, 60):
        of_first = compiled.runner.decode(torch.tensor([first[position]]), position)
        of_second = other.runner.decode(torch.tensor([second[position]]), position)
    assert_near(of_first, eager.runner.prefill(first))
    assert_near(of_second, eager.runner.prefill(second))


@pytest.mark.parametrize("compilable", [0, 1])
def test_a_machine_that_cannot_compile_runs_eagerly_and_says_so(
    compilable: int,
    directory: Path,
    eager: Session,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = 0

    def fail_after(*arguments: object, **settings: object) -> object:
        nonlocal calls
        calls += 1
        if calls > compilable:
            raise CompilationError("no compiler")
        return compile_step(*arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(runner_module, "compile_step", fail_after)
    runner = load_tiny(directory, compile=True).runner
    ids = random_prompt(40)
    with caplog.at_level(logging.WARNING, "gptfast"):
        logits = read(runner, ids, n_steps=3)
    assert_near(logits, read(eager.runner, ids, n_steps=3))
    assert not runner.is_compiled
    assert calls == compilable + 1
    assert [record.getMessage() for record in caplog.records] == [
        "nothing can be compiled here, so steps run eagerly, which is slower: no compiler"
    ]


@pytest.mark.slow
def test_memory_and_compilations_stay_flat_over_200_prompts(compiled: Session) -> None:
    generator = random.Random(0)
    before = count_compilations(compiled.runner.compile_statistics)
    for number in range(200):
        read(compiled.runner, random_prompt(generator.randint(1, 2000), seed=number)[:2000], n_steps=0)
        if number == 50:
            gc.collect()
            warm = get_resident_memory()
    gc.collect()
    assert count_compilations(compiled.runner.compile_statistics) == before
    assert get_resident_memory() < warm + 20e6


# Logits after every token


@pytest.mark.parametrize("length", [1, 32, 33, 300])
def test_verify_gives_the_logits_after_every_token(length: int, runner: Runner, directory: Path) -> None:
    ids = random_prompt(length, seed=length)
    assert_near(runner.score(ids), run(load_model(directory, length), ids))


def test_verify_goes_on_where_prefill_ended_and_decode_where_verify_ended(runner: Runner, directory: Path) -> None:
    ids = random_prompt(120)
    expected = run(load_model(directory, len(ids)), ids)
    runner.prefill(ids[:70])
    assert_near(runner.score(ids[70:110], 70), expected[70:110])
    assert_near(runner.decode(torch.tensor([ids[110]]), 110)[0], expected[110])


def test_verify_takes_back_what_it_read_before(runner: Runner, directory: Path) -> None:
    ids = random_prompt(60)
    runner.score([*ids[:40], 7, 8, 9, 10, 11])
    assert_near(runner.score(ids[40:], 40), run(load_model(directory, len(ids)), ids)[40:])


def test_rows_of_a_batch_read_the_tokens_that_verify_reads(directory: Path) -> None:
    batch, single = load_tiny(directory, batch_size=3).runner, load_tiny(directory).runner
    ids = random_prompt(40)
    assert_near(batch.score(ids), single.score(ids))
    logits = batch.decode(torch.tensor([7, 8, 9]), 40)
    for row, token in enumerate((7, 8, 9)):
        assert_near(logits[row], single.decode(torch.tensor([token]), 40)[0])


def test_verify_refuses_what_does_not_fit_the_context(eager: Session) -> None:
    with pytest.raises(PromptError, match=f"{CONTEXT + 1} tokens .* {CONTEXT}"):
        eager.runner.score([5, 6], CONTEXT - 1)


def test_verify_is_compiled_when_it_is_first_called_and_then_no_more(directory: Path) -> None:
    runner = load_tiny(directory, compile=True).runner
    runner.warm_up()
    made = runner.compile_statistics.compiled + runner.compile_statistics.loaded
    assert made == 3
    runner.score(random_prompt(300))
    assert runner.compile_statistics.compiled + runner.compile_statistics.loaded == made + 2
    before = count_compilations(runner.compile_statistics)
    for length in (1, 31, 200, 700):
        runner.score(random_prompt(length))
    assert count_compilations(runner.compile_statistics) == before


# Tokens that a draft proposes


PRECISIONS = [
    (weights, activations, kv_dtype)
    for weights, activations in (("fp32", "fp32"), ("bf16", "fp32"), ("int4", "fp32"), ("int4", "int8"))
    for kv_dtype in ("fp32", "bf16", "int8")
]
QUICK_TO_COMPILE = {("fp32", "fp32", "fp32"), ("bf16", "fp32", "bf16"), ("int4", "int8", "int8")}
"""Each of the values once, but not every three of them: a step costs seconds to compile."""
EXACT_CASES = [
    pytest.param(
        *precisions,
        is_compiled,
        marks=[pytest.mark.slow] if is_compiled and precisions not in QUICK_TO_COMPILE else [],
    )
    for precisions in PRECISIONS
    for is_compiled in (False, True)
]


@pytest.mark.parametrize(("weights", "activations", "kv_dtype", "is_compiled"), EXACT_CASES)
def test_the_rows_of_verify_are_those_of_decode_to_the_bit(
    weights: str, activations: str, kv_dtype: str, is_compiled: bool, directory: Path
) -> None:
    settings = {"weights": weights, "activations": activations, "kv_dtype": kv_dtype, "compile": is_compiled}
    runner = load_tiny(directory, **settings).runner
    ids = random_prompt(200, seed=4)
    for start in (1, 27, 120):  # the second crosses the slots that attention reads at once
        runner.prefill(ids[:start])
        expected = [runner.decode(torch.tensor([ids[i]]), i)[0].clone() for i in range(start, start + 20)]
        for size in range(2, MOST_VERIFIED + 1):
            runner.verify(torch.tensor(random_prompt(MOST_VERIFIED, seed=size)), start)  # as if all were rejected
            rows = runner.verify(torch.tensor(ids[start : start + size]), start)
            assert rows.shape == (size, expected[0].shape[0])
            for row, alone in zip(rows, expected, strict=False):
                assert torch.equal(row, alone), (start, size)
            # The cache holds what it would after decoding, too.
            after = start + size
            assert torch.equal(runner.decode(torch.tensor([ids[after]]), after)[0], expected[size])


def test_tokens_that_are_verified_make_room_for_themselves(directory: Path) -> None:
    runner = load_tiny(directory).runner
    ids = random_prompt(2060)
    runner.prefill(ids[:2044])
    assert runner.capacity == 2048
    rows = runner.verify(torch.tensor(ids[2044:]), 2044)
    assert runner.capacity == CONTEXT
    assert_near(rows[-1:], runner.prefill(ids))


def test_no_token_behind_the_context_is_verified(eager: Session) -> None:
    eager.runner.verify(torch.tensor([5, 6]), CONTEXT - 2)
    with pytest.raises(PromptError, match=f"{CONTEXT + 1} tokens .* {CONTEXT}"):
        eager.runner.verify(torch.tensor([5, 6]), CONTEXT - 1)


def test_one_compiled_step_verifies_any_number_of_tokens(directory: Path) -> None:
    runner = load_tiny(directory, compile=True).runner
    runner.warm_up(5)
    made = runner.compile_statistics.compiled + runner.compile_statistics.loaded
    runner.warm_up(5, verifies=True)
    assert runner.compile_statistics.compiled + runner.compile_statistics.loaded == made + 1
    before = count_compilations(runner.compile_statistics)
    runner.prefill(random_prompt(5))
    for size in (16, 2, 9, 3, 15):
        assert runner.verify(torch.tensor(random_prompt(size)), 5).shape[0] == size
    assert count_compilations(runner.compile_statistics) == before
