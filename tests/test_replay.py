"""Recorded steps, on a back end that holds them to the rules of CUDA graphs without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptfast import runner as runner_module
from gptfast.compilation import CompilationError, copy_code, count_traced_graphs
from gptfast.config import SamplingConfig
from gptfast.errors import PromptError
from gptfast.generation import generate, stream
from gptfast.graphs import WARM_UPS
from gptfast.kernels.cuda.timing import DirectRuns
from gptfast.model import Transformer
from gptfast.replay import IN_FLIGHT, KEPT_TOKENS
from gptfast.runner import INITIAL_CAPACITY, MOST_VERIFIED, Runner
from gptfast.sampling import Sampler
from gptfast.session import Session
from tests.reference.graphs import BrokenRule, CheckedGraphs
from tests.reference.sessions import PROMPT, complete, ids_of, load_tiny, random_prompt, write_tiny_model

pytestmark = pytest.mark.usefixtures("tiny_cache")

SAMPLED = SamplingConfig(temperature=0.8, seed=3)
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "greedy with a penalty": SamplingConfig(repetition_penalty=1.3),
    "sampled": SAMPLED,
    "top-k": replace(SAMPLED, top_k=12),
    "top-p": replace(SAMPLED, top_p=0.9),
    "min-p": replace(SAMPLED, min_p=0.05),
    "everything": replace(SAMPLED, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
}


def open_replaying(directory: Path, *, batch_size: int = 1) -> tuple[Session, CheckedGraphs]:
    session = load_tiny(directory, batch_size=batch_size)
    graphs = CheckedGraphs()
    session.runner = Runner(
        session.runner.model, batch_size=batch_size, kv_dtype=session.runner.kv_dtype, graphs=graphs
    )
    return session, graphs


@pytest.fixture
def replaying(directory: Path) -> tuple[Session, CheckedGraphs]:
    return open_replaying(directory)


# Texts


@pytest.mark.parametrize("name", SAMPLINGS)
def test_texts_are_those_of_steps_that_are_not_recorded(
    name: str, replaying: tuple[Session, CheckedGraphs], eager: Session
) -> None:
    session, graphs = replaying
    for length in (1, 40, 7):
        prompt = random_prompt(length, seed=length)
        expected = complete(eager, prompt, 30, sampling=SAMPLINGS[name])
        assert complete(session, prompt, 30, sampling=SAMPLINGS[name]).token_ids == expected.token_ids
    assert (graphs.recorded, graphs.replayed) == (1, 3 * 29)
    assert session.runner.replayed_steps == graphs.replayed


def test_rows_of_a_batch_are_chosen_as_without_recording(directory: Path) -> None:
    expected = generate(
        load_tiny(directory), PROMPT, max_new_tokens=20, sampling=SAMPLINGS["everything"], num_samples=5
    )
    session, _ = open_replaying(directory, batch_size=2)
    results = generate(session, PROMPT, max_new_tokens=20, sampling=SAMPLINGS["everything"], num_samples=5)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]


def test_other_values_of_the_same_kind_record_nothing_again(
    replaying: tuple[Session, CheckedGraphs], eager: Session
) -> None:
    session, graphs = replaying
    texts = set()
    for temperature, top_k, top_p, seed in itertools.product((0.3, 1.5), (3, 1000), (0.7, 0.95), (0, 2**62)):
        sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        texts.add(ids_of(session, PROMPT, 12, sampling=sampling))
        assert ids_of(eager, PROMPT, 12, sampling=sampling) in texts
    assert len(texts) > 8
    assert graphs.recorded == 1


def test_each_kind_of_sampling_is_recorded_once_and_the_logits_of_each_count(
    replaying: tuple[Session, CheckedGraphs],
) -> None:
    session, graphs = replaying
    for sampling in (*SAMPLINGS.values(), *SAMPLINGS.values()):
        complete(session, PROMPT, 4, sampling=sampling)
    assert graphs.recorded == len(SAMPLINGS)
    for _ in range(2):
        session.runner.decode(torch.tensor([5]), 20)
        session.runner.verify(torch.tensor([5, 6]), 20)
        session.runner.verify(torch.tensor([5, 6, 7]), 20)
    # Both sizes that are verified are padded to one.
    assert graphs.recorded == len(SAMPLINGS) + 2


@pytest.mark.parametrize("count", [1, 2, 5, MOST_VERIFIED])
def test_logits_are_those_of_steps_that_are_not_recorded(
    count: int, replaying: tuple[Session, CheckedGraphs], eager: Session
) -> None:
    ids = random_prompt(60)
    logits = []
    for runner in (replaying[0].runner, eager.runner):
        runner.prefill(ids[:30])
        tokens = torch.tensor(ids[30 : 30 + count])
        first = runner.decode(tokens, 30) if count == 1 else runner.verify(tokens, 30)
        following = runner.decode(torch.tensor([9]), 30 + count)
        logits.append(torch.cat([first, following]))  # the first are not overwritten
    assert torch.equal(*logits)


# The ends of texts


def test_the_device_is_asked_for_two_steps_at_once(replaying: tuple[Session, CheckedGraphs]) -> None:
    session, graphs = replaying
    complete(session, PROMPT, 20)
    assert (graphs.most_in_flight, graphs.in_flight) == (IN_FLIGHT, 0)
    assert IN_FLIGHT == 2
    assert KEPT_TOKENS > IN_FLIGHT


@pytest.mark.parametrize("kept", [1, 2, 7])
def test_what_was_computed_beyond_an_end_is_discarded(kept: int, directory: Path, eager: Session) -> None:
    """A text is left, and the next one, which goes on from its cache, is the one of a session that never hurried."""
    session, graphs = open_replaying(directory)
    prompt = random_prompt(20)
    unfinished = stream(session, prompt, max_new_tokens=40, sampling=SAMPLED)
    steps = unfinished.iterate_steps()
    for _ in range(kept):
        next(steps)
    result = unfinished.result
    assert result.token_ids == ids_of(eager, prompt, 40, sampling=SAMPLED)[:kept]
    assert graphs.replayed == (0 if kept == 1 else kept - 1 + IN_FLIGHT - 1)
    assert session.cached_ids == [*prompt, *result.token_ids[:-1]]
    following = [*prompt, *result.token_ids, 5, 6]
    speculated = stream(session, following, max_new_tokens=20, sampling=SAMPLED, reuse_cache=True)
    assert "".join(speculated)
    assert speculated.result.reused_tokens == len(prompt) + kept - 1
    assert speculated.result.token_ids == ids_of(eager, following, 20, sampling=SAMPLED)


def test_an_end_of_sequence_is_the_last_token(tmp_path: Path, directory: Path) -> None:
    free = ids_of(load_tiny(directory), PROMPT, 20)
    end = free[6]
    session, graphs = open_replaying(write_tiny_model(tmp_path / "ends", eos_ids=[end]))
    result = complete(session, PROMPT, 20)
    assert result.token_ids == free[: free.index(end) + 1]
    assert result.finish_reason == "eos"
    assert graphs.replayed <= len(result.token_ids) - 1 + IN_FLIGHT - 1


@pytest.mark.parametrize("new_tokens", [0, 1, 2, 3])
def test_no_step_is_asked_for_beyond_the_text(new_tokens: int, replaying: tuple[Session, CheckedGraphs]) -> None:
    session, graphs = replaying
    assert len(complete(session, PROMPT, new_tokens).token_ids) == new_tokens
    assert graphs.replayed == max(0, new_tokens - 1)


def test_a_text_may_fill_the_context_and_no_more(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "short", context=64)
    session, _ = open_replaying(directory)
    prompt = random_prompt(40)
    assert ids_of(session, prompt, 24) == ids_of(load_tiny(directory), prompt, 24)
    with pytest.raises(PromptError, match="context is 64"):
        complete(session, prompt, 25)


def test_a_step_that_no_one_asked_for_stays_within_the_cache(replaying: tuple[Session, CheckedGraphs]) -> None:
    session, _ = replaying
    complete(session, PROMPT, 3)
    state, replay = session.runner._recorded.get_extender(SamplingConfig().kind)  # type: ignore[union-attr]
    state.input_pos.copy_(state.last_pos - 1)
    for _ in range(3):
        replay()
        assert state.input_pos <= state.last_pos
    assert int(state.last_pos) == session.runner.model.list_caches()[0].k.shape[2] - 1


# Memory


def test_a_cache_that_grew_has_steps_of_its_own(
    directory: Path, eager: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INITIAL_CAPACITY, "cpu", 64)
    session, graphs = open_replaying(directory)
    assert ids_of(session, PROMPT, 10) == ids_of(eager, PROMPT, 10)
    prompt = random_prompt(90)
    assert ids_of(session, prompt, 30) == ids_of(eager, prompt, 30)
    assert graphs.recorded == 2
    assert ids_of(session, PROMPT, 10) == ids_of(eager, PROMPT, 10)
    assert graphs.recorded == 2


def list_addresses(graphs: CheckedGraphs, model: Transformer) -> set[int]:
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    return {address for log in graphs.logs for _, addresses in log for address in addresses} - weights


def test_two_sessions_share_no_buffer(directory: Path) -> None:
    (first, its), (second, others) = open_replaying(directory), open_replaying(directory)
    for session in (first, second):
        complete(session, PROMPT, 5, sampling=SAMPLINGS["everything"])
        session.runner.decode(torch.tensor([5]), 20)
    one, other = list_addresses(its, first.runner.model), list_addresses(others, second.runner.model)
    assert one
    assert other
    assert not one & other


# The rules themselves


def make_step(body: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    state = torch.zeros(4)
    return lambda: (body(state), None)[1]


KEPT: list[torch.Tensor] = []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda state: state.sum().item(), "to the host"),
        (lambda state: state[state > 0], "to the host"),
        (lambda state: KEPT.append(state + 1), "leaves 1 tensors behind"),
    ],
    ids=["item", "a mask", "a tensor that is kept"],
)
def test_a_step_that_breaks_a_rule_fails(body: Callable[[torch.Tensor], object], words: str) -> None:
    with pytest.raises(BrokenRule, match=words):
        CheckedGraphs().record(make_step(body))
    KEPT.clear()


def test_a_replay_on_another_tensor_fails() -> None:
    holder = [torch.zeros(4)]
    replay = CheckedGraphs().record(lambda: (holder[0].add_(1), None)[1])
    replay()
    before, holder[0] = holder[0], torch.zeros(4)
    with pytest.raises(BrokenRule, match="differs from the recording"):
        replay()
    runs = WARM_UPS + 2  # with the one that stands for the recording
    assert before.tolist() == [runs] * 4


def test_the_sampler_of_a_text_is_not_brought_up_to_date(replaying: tuple[Session, CheckedGraphs]) -> None:
    session, _ = replaying
    sampling = SAMPLINGS["greedy with a penalty"]
    sampler = Sampler(sampling, [3], session.runner.vocab_size)
    logits = session.runner.prefill([3, 4])
    tokens = sampler.choose(logits, 2)
    assert sampler.seen is not None
    before = sampler.seen.clone()
    assert len(list(session.runner.extend(sampler, tokens, 2, 5))) == 5
    assert torch.equal(sampler.seen, before)


def test_caches_that_another_runner_took_away_are_noticed(directory: Path) -> None:
    session, _ = open_replaying(directory)
    complete(session, PROMPT, 3)
    Runner(session.runner.model)
    with pytest.raises(AssertionError, match="another runner has taken the caches away"):
        complete(session, PROMPT, 3)


@pytest.mark.usefixtures("_traced_alone")
def test_any_number_of_kinds_and_cache_lengths_is_compiled(directory: Path) -> None:
    """To torch.compile, a function is to be compiled 8 times at most."""
    session = load_tiny(directory)
    # Without the checks, which see into what is compiled.
    session.runner = Runner(session.runner.model, kv_dtype=session.runner.kv_dtype, compile=True, graphs=DirectRuns())
    assert session.runner._recorded is not None
    before = count_traced_graphs()
    kinds = itertools.product((False, True), repeat=4)
    for has_penalty, has_top_k, has_top_p, has_min_p in itertools.islice(kinds, 9):
        sampling = SamplingConfig(
            temperature=1.0,
            top_k=5 if has_top_k else None,
            top_p=0.9 if has_top_p else 1.0,
            min_p=0.1 if has_min_p else 0.0,
            repetition_penalty=1.1 if has_penalty else 1.0,
        )
        session.runner._recorded.get_extender(sampling.kind)
    assert count_traced_graphs() - before == 9


@pytest.fixture
def _traced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are recorded are traced and then run by torch's own operators."""

    def compile_eagerly(step: Callable[..., None]) -> Callable[..., None]:
        compiled: Callable[..., None] = torch.compile(copy_code(step), fullgraph=True, dynamic=False, backend="eager")
        return compiled

    monkeypatch.setattr(runner_module, "compile_for_recording", compile_eagerly)


def test_steps_that_cannot_be_compiled_are_recorded_as_they_are(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(step: Callable[..., None]) -> Callable[..., None]:
        def compiled(*inputs: object) -> None:
            raise CompilationError("no compiler")

        return compiled

    monkeypatch.setattr(runner_module, "compile_for_recording", fail)
    session = load_tiny(directory)
    session.runner = Runner(
        session.runner.model, kv_dtype=session.runner.kv_dtype, compile=True, graphs=CheckedGraphs()
    )
    list(session.runner.extend(Sampler(SamplingConfig(), [3], session.runner.vocab_size), torch.tensor([5]), 0, 4))
    assert "no compiler" in caplog.text
