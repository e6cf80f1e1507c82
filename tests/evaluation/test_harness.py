"""Tasks of the harness through our model and through the harness's own, transformers: the same answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptfast.config import SamplingConfig
from gptfast.errors import UserError
from gptfast.evaluation.harness import TaskMetric, Tasks, collect_metrics, load_tasks, run_tasks, select_tasks
from gptfast.session import Session
from tests.reference.checkpoints import write_hf
from tests.reference.families import random_weights
from tests.reference.sessions import ids_of, load_tiny, random_prompt, tiny_config, write_tiny_model
from tests.reference.tokenizers import train_sentencepiece, write_tokenizer

lm_eval = pytest.importorskip("lm_eval")
datasets = pytest.importorskip("datasets")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from gptfast.evaluation.adapter import GenerationSettings, SessionModel, parse_settings  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_cache")

CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
fewshot_split: test
metric_list: [{metric: acc}, {metric: acc_norm}]
metadata: {version: 2.0}
"""
ANSWERS = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
TEXTS = """
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}]
"""
QUESTIONS = [
    {"question": "Once upon a time, there was a little", "choices": [" girl", " dog in the park", "."], "answer": 0},
    {"question": "She loved to", "choices": [" play", " you are", "Hello world!"], "answer": 0},
    {"question": "Hello world! How are ", "choices": ["you?", "they", "assistant naïve 你好"], "answer": 1},
    {"question": "You are a", "choices": [" helpful", " user"], "answer": 1},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory of three task files that need no network."""
    directory = tmp_path_factory.mktemp("tasks")
    data = directory / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8")
    for number, content in enumerate((CHOICES, ANSWERS, TEXTS)):
        (directory / f"{number}.yaml").write_text(content.replace("DATA", str(data)), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", directory / "cache")
        yield directory


def select(tasks: Path, *names: str) -> Tasks:
    return select_tasks(TaskManager(include_path=tasks, include_defaults=False), names)


def request(kind: str, *arguments: Any) -> Any:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    """The harness's own model of the same checkpoint."""
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=1)


# Against the harness's own model


PAIRS = [(q["question"], choice) for q in QUESTIONS for choice in q["choices"]]
PAIRS += [("Hello" * 3, " world" * 200), ("", "I'm fine")]


def test_log_likelihoods_are_those_of_the_harness_with_transformers(session: Session, theirs: Any) -> None:
    requests = [request("loglikelihood", *pair) for pair in PAIRS]
    ours, expected = (model.loglikelihood(requests) for model in (SessionModel(session), theirs))
    assert [is_greedy for _, is_greedy in ours] == [is_greedy for _, is_greedy in expected]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in expected], rel=1e-4)


def test_a_greedy_continuation_is_known_as_one(eager: Session) -> None:
    context = random_prompt(20)
    greedy = list(ids_of(eager, context, 6))
    model = SessionModel(eager)
    for change, is_greedy in ((0, True), (1, False)):
        continuation = [*greedy[:-1], greedy[-1] ^ change]
        [(_, answer)] = model._loglikelihood_tokens([(None, context, continuation)])
        assert answer is is_greedy


def test_long_contexts_lose_their_beginning_as_with_the_harness(tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    directory = write_tiny_model(tmp_path / "short", context=64)
    theirs = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=1)
    ours = SessionModel(load_tiny(directory))
    context = "the quick brown fox jumps over lazy dogs " * 6
    pairs = [request("loglikelihood", context, " and more"), request("loglikelihood", context, "fox " * 12)]
    assert [v for v, _ in ours.loglikelihood(pairs)] == pytest.approx([v for v, _ in theirs.loglikelihood(pairs)])
    texts = [request("loglikelihood_rolling", context), request("loglikelihood_rolling", "the")]
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts))
    asked = [request("generate_until", context, {"until": ["\n"], "max_gen_toks": 20})]
    assert ours.generate_until(asked) == theirs.generate_until(asked)


def test_a_model_with_bos_reads_it_as_with_the_harness(tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    library = train_sentencepiece("always")
    config = replace(tiny_config(), vocab_size=library.get_vocab_size())
    directory = write_hf(tmp_path / "model", random_weights(config), config)
    write_tokenizer(directory, library, bos_token="<s>", eos_token="</s>")
    theirs = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=1)
    ours = SessionModel(load_tiny(directory))
    assert ours.tok_encode("Hello world") == theirs.tok_encode("Hello world")
    requests = [request("loglikelihood", *pair) for pair in PAIRS]
    values = [value for value, _ in ours.loglikelihood(requests)]
    assert values == pytest.approx([value for value, _ in theirs.loglikelihood(requests)], rel=1e-4)


@pytest.mark.parametrize("num_fewshot", [0, 1])
def test_tasks_score_as_with_the_harness(num_fewshot: int, session: Session, theirs: Any, tasks: Path) -> None:
    names = ("choices", "answers", "texts") if num_fewshot == 0 else ("choices",)
    ours = run_tasks(session, select(tasks, *names), num_fewshot=num_fewshot)
    manager = TaskManager(include_path=tasks, include_defaults=False)
    results = lm_eval.simple_evaluate(theirs, tasks=[*names], task_manager=manager, num_fewshot=num_fewshot)
    expected = list(collect_metrics(results))
    assert [metric.metric for metric in ours] == [metric.metric for metric in expected]
    assert [metric.value for metric in ours] == pytest.approx([metric.value for metric in expected], rel=1e-4)
    assert [(m.task, m.questions, m.num_fewshot, m.version) for m in ours] == [
        (m.task, m.questions, m.num_fewshot, m.version) for m in expected
    ]


# Our side alone


def test_a_blank_context_is_no_context(eager: Session) -> None:
    blank, none = (request("loglikelihood", *pair) for pair in ((" ", "you"), ("", " you")))
    assert SessionModel(eager).loglikelihood([blank]) == SessionModel(eager).loglikelihood([none])


def test_what_requests_share_is_computed_once(eager: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    for name in ("prefill", "verify"):
        method = getattr(eager.runner, name)

        def count(ids: list[int], start: int = 0, method: Any = method) -> Any:
            read.append(len(ids))
            return method(ids, start)

        monkeypatch.setattr(eager.runner, name, count)
    context = "the park " * 40
    requests = [request("loglikelihood", context, choice) for choice in (" a dog", " a girl", " she", " you")]
    together = SessionModel(eager).loglikelihood(requests)
    assert eager.tokenizer is not None
    length = len(eager.tokenizer.encode(context + " a girl"))
    assert sum(read) < 1.5 * length
    eager.cached_ids = []
    alone = []
    for each in requests[::-1]:
        alone += SessionModel(eager).loglikelihood([each])
        eager.cached_ids = []
    assert [value for value, _ in together] == pytest.approx([value for value, _ in alone[::-1]], rel=1e-5)


def test_an_answer_ends_before_the_first_stop_string(eager: Session) -> None:
    asked = {"max_gen_toks": 30}
    [free] = SessionModel(eager).generate_until([request("generate_until", "Once upon", asked)])
    stop = free[len(free) // 2]
    [cut] = SessionModel(eager).generate_until([request("generate_until", "Once upon", asked | {"until": stop})])
    assert cut == free[: free.index(stop)]


def test_sampled_repeats_differ_and_greedy_ones_do_not(eager: Session) -> None:
    sampled = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 20}
    for asked, expected in ((sampled, 3), ({"max_gen_toks": 20}, 1)):
        texts = SessionModel(eager).generate_until([request("generate_until", "Once upon", asked)] * 3)
        assert len(set(texts)) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, GenerationSettings(256, (), SamplingConfig())),
        ({"until": "a", "max_gen_toks": 9}, GenerationSettings(9, ("a",), SamplingConfig())),
        ({"until": ["a", "", "b"], "max_new_tokens": 8}, GenerationSettings(8, ("a", "b"), SamplingConfig())),
        ({"do_sample": False, "temperature": 0.7}, GenerationSettings(256, (), SamplingConfig())),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
            GenerationSettings(256, (), SamplingConfig(temperature=0.7, top_p=0.9)),
        ),
        ({"do_sample": True, "top_k": 4}, GenerationSettings(256, (), SamplingConfig(temperature=1.0, top_k=4))),
    ],
)
def test_generation_settings_mean_what_they_mean_to_the_harness(
    asked: dict[str, Any], expected: GenerationSettings
) -> None:
    assert parse_settings(asked) == expected


def test_settings_that_cannot_be_honoured_are_refused(eager: Session) -> None:
    model = SessionModel(eager)
    for asked, word in (({"num_beams": 4}, "num_beams"), ({"max_gen_toks": 100_000}, "no room")):
        with pytest.raises(UserError, match=word):
            model.generate_until([request("generate_until", "Once", asked)])


def test_a_continuation_that_melts_into_its_context_is_refused(eager: Session) -> None:
    with pytest.raises(UserError, match="at least one token"):
        SessionModel(eager).loglikelihood([request("loglikelihood", "Once upon", "")])


def test_limit_asks_only_the_first_questions(eager: Session, tasks: Path) -> None:
    metrics = run_tasks(eager, select(tasks, "choices"), limit=2)
    assert {metric.questions for metric in metrics} == {2}


def test_errors_that_the_harness_cannot_compute_are_none() -> None:
    figures = {"name": "t", "alias": "t", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": "N/A", " ": ""}
    results = {"results": {"t": figures}, "versions": {"t": 1.0}, "n-shot": {}}
    assert list(collect_metrics(results)) == [TaskMetric("t", "1.0", "acc", "none", 0.5, None, None, 3)]


# Refusals


def test_an_unknown_task_is_refused_by_name(tasks: Path) -> None:
    with pytest.raises(UserError, match=r"no task 'nosuch'.*--include-path"):
        select(tasks, "choices", "nosuch")


def test_a_task_that_is_asked_for_twice_is_refused(tasks: Path) -> None:
    with pytest.raises(UserError, match="choices is asked for twice"):
        select(tasks, "choices", "choices")


def test_data_that_is_not_there_is_one_line(tasks: Path, tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(CHOICES.replace("DATA", str(tmp_path / "missing.jsonl")), encoding="utf-8")
    with pytest.raises(UserError, match=r"task choices cannot be loaded: .*missing\.jsonl") as caught:
        select(tmp_path, "choices")
    assert "\n" not in str(caught.value)


def test_a_task_that_runs_the_models_code_is_refused(tasks: Path, tmp_path: Path) -> None:
    content = ANSWERS.replace("DATA", str(tasks / "questions.jsonl")) + "unsafe_code: true\n"
    (tmp_path / "t.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="answers would run code"):
        select(tmp_path, "answers")


def test_random_weights_are_refused(eager: Session) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        SessionModel(replace(eager, tokenizer=None))


def test_without_the_harness_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r'pip install "gptfast\[lm-eval\]"'):
        load_tasks(["choices"])
