"""The vocabularies of GGUF files against the ids that llama.cpp gives (see tests/data/make_llama_cpp_ids.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gptfast.cache import CACHE_VARIABLE
from gptfast.chat import read_chat_template
from gptfast.checkpoint import open_checkpoint
from gptfast.checkpoint.gguf_tokenizer import build_tokenizer_files
from gptfast.download import peek_default_model
from gptfast.errors import CheckpointError
from gptfast.tokenizer import Tokenizer, open_tokenizer

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "llama_cpp_ids.json").read_text(encoding="utf-8"))
TEXTS: list[str] = RECORDED["texts"]
BYTE_LEVEL: dict[str, Any] = RECORDED["byte_level"]["metadata"]
SENTENCEPIECE: dict[str, Any] = RECORDED["sentencepiece"]["metadata"]
BYTE_LEVEL_IDS: dict[str, list[list[int]]] = RECORDED["byte_level"]["ids"]
ALIASES = {
    "gpt-2": ("phi-2", "mpt", "olmo", "trillion", "mellum", "exaone4", "granite-docling"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
    "dbrx": ("smaug-bpe",),
    "qwen2": ("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"),
}


def keys(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def build(directory: Path, metadata: dict[str, Any]) -> Tokenizer:
    build_tokenizer_files(metadata, directory)
    return open_tokenizer(directory)


def encode_all(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, add_bos=False) if text else [] for text in TEXTS]


@pytest.mark.parametrize("kind", BYTE_LEVEL_IDS)
def test_a_byte_level_vocabulary_gives_the_ids_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    tokenizer = build(tmp_path, BYTE_LEVEL | keys(pre=kind))
    assert encode_all(tokenizer) == BYTE_LEVEL_IDS[kind]


def test_no_two_kinds_were_recorded_with_the_same_ids() -> None:
    assert len({json.dumps(ids) for ids in BYTE_LEVEL_IDS.values()}) == len(BYTE_LEVEL_IDS)


@pytest.mark.parametrize(("kind", "alias"), [(kind, alias) for kind, names in ALIASES.items() for alias in names])
def test_a_kind_of_another_name_splits_alike(tmp_path: Path, kind: str, alias: str) -> None:
    build_tokenizer_files(BYTE_LEVEL | keys(pre=kind), tmp_path / "kind")
    build_tokenizer_files(BYTE_LEVEL | keys(pre=alias), tmp_path / "alias")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "alias" / name).read_bytes() == (tmp_path / "kind" / name).read_bytes()


@pytest.mark.parametrize(
    ("prefixed", "name"), [(True, "space first"), (None, "space first"), (False, "no space first")]
)
def test_a_sentencepiece_vocabulary_gives_the_ids_of_llama_cpp(
    tmp_path: Path, prefixed: bool | None, name: str
) -> None:
    metadata = SENTENCEPIECE | ({} if prefixed is None else keys(add_space_prefix=prefixed))
    assert encode_all(build(tmp_path, metadata)) == RECORDED["sentencepiece"]["ids"][name]


def test_the_default_model_gives_the_ids_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = peek_default_model()
    if path is None:
        pytest.skip("the default model is not on this machine; `gptfast download` gets it")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    tokenizer = open_checkpoint(path).load_tokenizer()
    assert tokenizer is not None
    assert encode_all(tokenizer) == RECORDED["default_model"]["ids"]


@pytest.mark.parametrize("metadata", [BYTE_LEVEL | keys(pre="qwen2"), SENTENCEPIECE | keys(add_space_prefix=False)])
def test_decoding_gives_the_text_back(tmp_path: Path, metadata: dict[str, Any]) -> None:
    tokenizer = build(tmp_path, metadata)
    for text, ids in zip(TEXTS, encode_all(tokenizer), strict=True):
        # Sentencepiece writes a space as this character, so it reads the character as a space.
        expected = text if metadata["tokenizer.ggml.model"] == "gpt2" else text.replace("▁", " ")
        assert tokenizer.decode(ids) == expected


def test_a_space_put_first_is_kept_when_decoding(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, SENTENCEPIECE)
    assert tokenizer.decode(tokenizer.encode("Hello", add_bos=False)) == " Hello"


@pytest.mark.parametrize(
    ("metadata", "bos"),
    [
        (BYTE_LEVEL | keys(pre="smollm"), []),
        (BYTE_LEVEL | keys(pre="smollm", add_bos_token=True), [0]),
        (BYTE_LEVEL | keys(pre="llama-bpe"), [0]),
        (BYTE_LEVEL | keys(pre="tekken"), [0]),
        (BYTE_LEVEL | keys(pre="llama-bpe", add_bos_token=False), []),
        (SENTENCEPIECE, [1]),
        (SENTENCEPIECE | keys(add_bos_token=False), []),
        ({key: value for key, value in SENTENCEPIECE.items() if "bos" not in key}, [1]),
    ],
)
def test_bos_comes_first_where_the_file_or_its_kind_wants_it(
    tmp_path: Path, metadata: dict[str, Any], bos: list[int]
) -> None:
    tokenizer = build(tmp_path, metadata)
    assert tokenizer.encode("Hello") == bos + tokenizer.encode("Hello", add_bos=False)
    assert tokenizer.adds_bos == bool(bos)


def test_spelled_control_tokens_are_text_and_user_defined_ones_are_tokens(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, BYTE_LEVEL | keys(pre="smollm"))
    text = "a<|endoftext|>b<think>c"
    ids = tokenizer.encode(text)
    assert tokenizer.control_tokens == {"<|endoftext|>": 0}
    assert 0 not in ids
    assert 1 in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes(0) == b""
    assert tokenizer.token_bytes(1) == b"<think>"


@pytest.mark.parametrize("kind", [1, 4])
@pytest.mark.parametrize("token", ["<|im_end|>", "<turn_over>"])
def test_an_end_of_turn_is_control_whatever_its_type(tmp_path: Path, kind: int, token: str) -> None:
    tokens, types = BYTE_LEVEL["tokenizer.ggml.tokens"], BYTE_LEVEL["tokenizer.ggml.token_type"]
    metadata = BYTE_LEVEL | keys(pre="smollm", tokens=[*tokens, token], token_type=[*types, kind])
    if token == "<turn_over>":
        metadata |= keys(eot_token_id=len(tokens))
    tokenizer = build(tmp_path, metadata)
    assert tokenizer.control_tokens[token] == len(tokens)
    assert len(tokens) not in tokenizer.encode(f"x{token}y")
    assert tokenizer.encode_rendered(f"x{token}").count(len(tokens)) == 1


def test_the_scores_decide_what_is_merged_first(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "ab", "bc", "▁a"]
    for best, expected in (("ab", ["ab", "c"]), ("bc", ["a", "bc"])):
        scores = [0.0 if token == best else -5.0 for token in tokens]
        metadata = keys(
            model="llama", tokens=tokens, token_type=[2, 3, 3, *[1] * 7], scores=scores, add_space_prefix=False
        )
        ids = build(tmp_path, metadata).encode("abc", add_bos=False)
        assert [tokens[i] for i in ids] == expected


def test_merges_never_arrive_at_a_control_or_byte_token(tmp_path: Path) -> None:
    pieces = ["▁", "<", "s", ">", "0", "x", "A", "s>", "0x", "0xA", "A>"]
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", *pieces]
    scores = [0.0] * 4 + [-float(n) for n in range(len(pieces))]
    metadata = keys(model="llama", tokens=tokens, token_type=[2, 3, 3, 6, *[1] * len(pieces)], scores=scores)
    tokenizer = build(tmp_path, metadata)
    assert set(tokenizer.encode("<s> <0x0A>", add_bos=False)).isdisjoint({1, 2, 3})


def test_the_chat_template_is_kept(tmp_path: Path) -> None:
    build_tokenizer_files(BYTE_LEVEL | keys(pre="smollm") | {"tokenizer.chat_template": "{{ bos_token }}!"}, tmp_path)
    template = read_chat_template(tmp_path)
    assert template is not None
    assert template.render([]) == "<|endoftext|>!"


def test_a_file_without_a_kind_is_read_as_default_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert encode_all(build(tmp_path, BYTE_LEVEL)) == BYTE_LEVEL_IDS["default"]
    assert "names no pre-tokenizer" in caplog.text


def without(metadata: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != f"tokenizer.ggml.{name}"}


SMOLLM = BYTE_LEVEL | keys(pre="smollm")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (BYTE_LEVEL | keys(pre="brand-new"), ["'brand-new'", "smollm", "llama-bpe"]),
        (SMOLLM | keys(model="t5"), ["'t5'", "gpt2 and llama"]),
        (without(SMOLLM, "model"), ["no tokenizer"]),
        (without(SMOLLM, "tokens"), ["no tokenizer.ggml.tokens"]),
        (without(SMOLLM, "merges"), ["no tokenizer.ggml.merges"]),
        (without(SENTENCEPIECE, "scores"), ["no tokenizer.ggml.scores"]),
        (SENTENCEPIECE | keys(scores=[0.0]), ["1 scores"]),
        (SMOLLM | keys(token_type=[1]), ["1 token types"]),
        (SMOLLM | keys(merges=["a Q9"]), ["'a Q9'"]),
        (SMOLLM | keys(merges=["ab"]), ["'ab'"]),
        (SMOLLM | keys(tokens=["a"] * len(SMOLLM["tokenizer.ggml.tokens"])), ["spells"]),
        (SMOLLM | keys(add_bos_token=True, bos_token_id=10**6), ["bos_token_id"]),
        (without(SMOLLM, "bos_token_id") | keys(add_bos_token=True), ["bos_token_id"]),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused(
    tmp_path: Path, metadata: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        build_tokenizer_files(metadata, tmp_path)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert list(tmp_path.iterdir()) == []
