"""What `draft` may name, what it opens, and what is refused: by name, and before any text is begun."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptfast.checkpoint.random import RandomCheckpoint
from gptfast.config import SamplingConfig
from gptfast.errors import UserError
from gptfast.kernels.ops import Kernels
from gptfast.loading import load_model
from gptfast.runner import Runner
from gptfast.session import Session
from gptfast.speculation.selection import check_vocabulary, list_spellings, open_speculator
from gptfast.tokenizer import open_tokenizer
from tests.reference.checkpoints import write_hf
from tests.reference.families import random_weights
from tests.reference.gguf_files import write_gguf
from tests.reference.sessions import PROMPT, complete, ids_of, load_tiny, random_prompt, tiny_config, write_tiny_model
from tests.reference.tokenizers import train_byte_level, write_tokenizer

pytestmark = pytest.mark.usefixtures("tiny_cache")

PADDING = 64
SAMPLED = SamplingConfig(temperature=0.8, seed=3)
PENALIZED = SamplingConfig(temperature=0.8, repetition_penalty=1.3, seed=3)


def list_lanes(session: Session) -> list[str]:
    assert session.speculator is not None
    return [lane.name for lane in session.speculator.lanes]


def get_draft(session: Session) -> Runner:
    assert session.speculator is not None
    [draft] = session.speculator.list_runners()
    return draft


def count_accepted(session: Session) -> tuple[int, int]:
    """Tokens that were proposed and accepted by the only lane."""
    assert session.speculator is not None
    [statistics] = session.speculator.statistics.values()
    return statistics.proposed, statistics.accepted


# What opens


@pytest.mark.parametrize(
    ("draft", "lanes"),
    [
        ("ngram", ["ngram"]),
        ("layers:1", ["layers:1"]),
        ("int4", ["int4"]),
        ("int8", ["int8"]),
        ("ngram,int4", ["ngram", "int4"]),
        ("ngram,layers:1", ["ngram", "layers:1"]),
    ],
)
def test_a_draft_is_known_by_its_name(draft: str, lanes: list[str], directory: Path) -> None:
    assert list_lanes(load_tiny(directory, draft=draft)) == lanes


def test_a_path_is_a_draft_also_behind_ngram_and_in_the_home_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(directory.parent))
    home = f"~/{directory.name}"
    for draft in (str(directory), home):
        assert list_lanes(load_tiny(directory, draft=draft)) == [draft]
        assert list_lanes(load_tiny(directory, draft=f"ngram,{draft}")) == ["ngram", draft]


@pytest.mark.parametrize("k", [1, 8, 15])
def test_every_round_has_the_k_that_was_asked_for(k: int, directory: Path) -> None:
    session = load_tiny(directory, draft=str(directory), speculate_k=k)
    complete(session, PROMPT, 2 + k)
    assert session.speculator is not None
    [statistics] = session.speculator.statistics.values()
    assert statistics.proposed_counts == (1,) * k


@pytest.mark.parametrize(("draft", "precision"), [("int4", "int4 g32"), ("int8", "int8")])
def test_a_precision_names_the_target_rounded_to_it(draft: str, precision: str, directory: Path) -> None:
    session = load_tiny(directory, draft=draft)
    assert any(held.startswith(precision) for held in get_draft(session).model.list_weight_precisions())
    assert session.weights == "float32"


def test_a_draft_has_the_target_s_cache_dtype_and_is_compiled_if_the_target_is(directory: Path) -> None:
    session = load_tiny(directory, draft="int4", kv_dtype="int8", compile=True)
    assert get_draft(session).kv_dtype == torch.int8
    assert get_draft(session).is_compiled
    assert not get_draft(load_tiny(directory, draft="int4")).is_compiled


@pytest.mark.parametrize("draft", ["ngram", "layers:1"])
def test_without_the_cpu_kernels_a_line_says_that_texts_may_differ(
    draft: str, directory: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    load_tiny(directory, draft=draft)
    assert not caplog.records
    request.getfixturevalue("no_kernels")
    load_tiny(directory)
    assert not caplog.records
    load_tiny(directory, draft=draft)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("without the CPU kernels a verified token may differ from a plain one")


@pytest.mark.parametrize("kernels", ["inductor", "torchao"])
def test_with_products_of_others_a_line_says_that_texts_may_differ(
    kernels: Kernels, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = load_tiny(directory)
    session.runner.model.set_kernels(kernels)
    open_speculator("ngram", session.runner, session.checkpoint, session.tokenizer)
    [record] = caplog.records
    assert record.getMessage().startswith(f"with the kernels {kernels} a verified token may differ")


# What is refused


@pytest.mark.parametrize("draft", ["bogus", "ngram,bogus", "layers:", "layers:x", "layers:-1", "int3", "int4,ngram"])
def test_a_draft_that_nothing_is_known_of_is_refused_by_name(draft: str, directory: Path) -> None:
    name = draft.removeprefix("ngram,")
    with pytest.raises(UserError, match=f"{name} does not exist; give ngram, int4, int8, layers:N or"):
        load_tiny(directory, draft=draft)


@pytest.mark.parametrize("draft", ["", "ngram,", ",", "ngram,ngram"])
def test_a_draft_of_which_a_part_is_missing_or_said_twice_is_refused(draft: str, directory: Path) -> None:
    with pytest.raises(UserError, match="draft"):
        load_tiny(directory, draft=draft)


@pytest.mark.parametrize("k", [-1, 0, 16])
@pytest.mark.parametrize("draft", ["ngram", "layers:1"])
def test_a_k_out_of_range_is_refused_with_the_range(draft: str, k: int, directory: Path) -> None:
    with pytest.raises(UserError, match=f"^{k} tokens .* use 1 to 15, or None for auto"):
        load_tiny(directory, draft=draft, speculate_k=k)


def test_a_k_without_a_draft_is_refused(directory: Path) -> None:
    with pytest.raises(UserError, match="3 tokens are to be speculated but nothing proposes them"):
        load_tiny(directory, speculate_k=3)


@pytest.mark.parametrize("draft", ["ngram", "layers:1"])
def test_several_texts_at_once_are_refused(draft: str, directory: Path) -> None:
    with pytest.raises(UserError, match="one text at a time; use batch size 1"):
        load_tiny(directory, draft=draft, batch_size=2)


@pytest.mark.parametrize("n_layers", [0, 2, 99])
def test_layers_that_the_target_does_not_have_to_spare_are_refused(n_layers: int, directory: Path) -> None:
    with pytest.raises(UserError, match=f"{n_layers} layers .* model of 2; use layers:1 to layers:1"):
        load_tiny(directory, draft=f"layers:{n_layers}")


# Vocabularies


def write_other_tokenizer(directory: Path, change: Callable[[dict[str, int]], None]) -> Path:
    """The tiny model with another vocabulary of the same size."""
    write_tiny_model(directory)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content["model"]["vocab"])
    file.write_text(json.dumps(content), encoding="utf-8")
    return directory


def test_a_draft_with_another_vocabulary_of_the_same_size_is_refused_with_the_first_token(
    directory: Path, tmp_path: Path
) -> None:
    spellings = list_spellings(open_tokenizer(directory))

    def swap(vocabulary: dict[str, int]) -> None:
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    a, b = spellings.index(b"a"), spellings.index(b"b")
    assert a < b
    other = write_other_tokenizer(tmp_path / "other", swap)
    with pytest.raises(UserError) as refusal:
        load_tiny(directory, draft=str(other))
    sentence = str(refusal.value)
    assert f"token {a} is {b'b'!r} and not {b'a'!r}" in sentence
    assert str(other) in sentence
    assert str(directory) in sentence


def test_control_tokens_of_other_names_are_another_vocabulary(directory: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<|im_start|>", "<|begin|>"), encoding="utf-8")
    with pytest.raises(UserError, match=r"token 1 is b'<\|begin\|>' and not b'<\|im_start\|>'"):
        load_tiny(directory, draft=str(tmp_path / "other"))


def write_other_control_tokens(directory: Path, *, control: str, ordinary: str) -> Path:
    """The tiny model, whose tokenizer has one control token more and one less than the usual one."""
    write_tiny_model(directory)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    changed = {control: True, ordinary: False}
    for token in content["added_tokens"]:
        token["special"] = changed.get(token["content"], token["special"])
    file.write_text(json.dumps(content), encoding="utf-8")
    return directory


def test_a_token_that_only_one_side_calls_control_is_the_same_token(directory: Path, tmp_path: Path) -> None:
    other = write_other_control_tokens(tmp_path / "other", control="<think>", ordinary="<|im_start|>")
    ours, theirs = open_tokenizer(directory), open_tokenizer(other)
    assert set(ours.control_tokens) - set(theirs.control_tokens) == {"<|im_start|>"}
    assert set(theirs.control_tokens) - set(ours.control_tokens) == {"<think>"}
    assert list_spellings(ours) == list_spellings(theirs)
    for target, draft in ((directory, other), (other, directory)):
        session = load_tiny(target, draft=str(draft), speculate_k=3)
        assert ids_of(session, PROMPT, 30) == ids_of(load_tiny(target), PROMPT, 30)
        proposed, accepted = count_accepted(session)
        assert accepted == proposed > 0


def test_a_token_of_another_spelling_is_refused_whichever_side_calls_it_control(
    directory: Path, tmp_path: Path
) -> None:
    other = write_other_control_tokens(tmp_path / "other", control="<think>", ordinary="<|im_start|>")
    file = other / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<think>", "<thought>"), encoding="utf-8")
    token_id = open_tokenizer(directory).encode("<think>")[0]
    for target, draft, words in (
        (directory, other, f"token {token_id} is b'<thought>' and not b'<think>'"),
        (other, directory, f"token {token_id} is b'<think>' and not b'<thought>'"),
    ):
        with pytest.raises(UserError, match=words):
            load_tiny(target, draft=str(draft))


def test_a_vocabulary_equals_itself(directory: Path) -> None:
    tokenizer = open_tokenizer(directory)
    check_vocabulary(tokenizer, open_tokenizer(directory), "a", "b")
    spellings = list_spellings(tokenizer)
    assert len(spellings) == tokenizer.vocab_size
    assert spellings[:3] == [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]
    assert b"<think>" in spellings


def pad(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same model with rows for ids that the tokenizer does not have."""
    return {
        name: torch.cat([tensor, torch.zeros(PADDING, tensor.shape[1])])
        if name in ("tok_embeddings.weight", "output.weight")
        else tensor
        for name, tensor in weights.items()
    }


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(tiny_config(), vocab_size=tiny_config().vocab_size + PADDING)
    directory = write_hf(tmp_path_factory.mktemp("padded"), pad(random_weights(tiny_config())), config)
    return write_tokenizer(directory, train_byte_level(), eos_token="<|im_end|>")


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"])
@pytest.mark.parametrize("is_draft_padded", [True, False])
def test_a_padded_vocabulary_is_the_same_vocabulary(
    is_draft_padded: bool, sampling: SamplingConfig, directory: Path, padded: Path
) -> None:
    target, draft = (directory, padded) if is_draft_padded else (padded, directory)
    session = load_tiny(target, draft=str(draft), speculate_k=4)
    assert ids_of(session, PROMPT, 50, sampling=sampling) == ids_of(load_tiny(target), PROMPT, 50, sampling=sampling)
    proposed, accepted = count_accepted(session)
    assert accepted > 0.8 * proposed > 0


def test_ids_that_only_the_target_has_a_row_for_do_not_break_the_draft(directory: Path, padded: Path) -> None:
    session = load_tiny(padded, draft=str(directory), speculate_k=4)
    prompt = random_prompt(20)
    prompt[7] = prompt[-1] = tiny_config().vocab_size + PADDING - 1
    assert ids_of(session, prompt, 30) == ids_of(load_tiny(padded), prompt, 30)


# Random weights

SMALL = replace(tiny_config(), vocab_size=300)


@pytest.fixture
def random_target(monkeypatch: pytest.MonkeyPatch) -> tuple[Runner, RandomCheckpoint]:
    monkeypatch.setattr("gptfast.checkpoint.random.get_preset", lambda name: SMALL)
    checkpoint = RandomCheckpoint("small")
    return Runner(load_model(checkpoint)), checkpoint


@pytest.mark.parametrize("draft", ["int4", "int8", "layers:1", "ngram", "ngram,int4"])
def test_random_weights_have_drafts_that_need_no_tokenizer(
    draft: str, random_target: tuple[Runner, RandomCheckpoint]
) -> None:
    target, checkpoint = random_target
    speculator = open_speculator(draft, target, checkpoint, None, k=2)
    assert all(runner.model.config.vocab_size == 300 for runner in speculator.list_runners())
    assert [lane.name for lane in speculator.lanes] == draft.split(",")


def test_random_weights_cannot_be_compared_with_a_checkpoint(
    random_target: tuple[Runner, RandomCheckpoint], directory: Path
) -> None:
    target, checkpoint = random_target
    with pytest.raises(UserError, match=f"vocabulary of the draft {directory} .* use int4, int8 or layers:N"):
        open_speculator(str(directory), target, checkpoint, None)


# Files that are small already


@pytest.fixture(scope="module")
def write_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def write(qtype: str) -> Path:
        path = tmp_path_factory.mktemp("gguf") / f"{qtype}.gguf"
        write_gguf(path, random_weights(tiny_config()), tiny_config(), types=qtype)
        return path

    return write


@pytest.mark.parametrize("draft", ["int4", "int8"])
@pytest.mark.parametrize("weights", ["stored", "bf16"])
def test_a_4_bit_file_is_its_own_draft_and_not_rounded_again(
    weights: str, draft: str, write_file: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gptfast"):
        session = load_tiny(write_file("Q4_1"), weights=weights, draft=draft)
    assert get_draft(session).model.list_weight_precisions() == ["Q4_1"]
    assert "rounded" not in caplog.text


def test_a_file_of_more_bits_is_rounded_and_that_is_said(
    write_file: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gptfast"):
        session = load_tiny(write_file("Q8_0"), draft="int4")
    assert any(precision.startswith("int4") for precision in get_draft(session).model.list_weight_precisions())
    assert "rounded a second time, to int4" in caplog.text
