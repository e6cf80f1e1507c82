from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from gptfast.errors import CheckpointError, PromptError, UserError
from gptfast.tokenizer import StreamDecoder, Tokenizer, open_tokenizer
from gptfast.tokenizer_backends import FastTokenizer
from tests.reference.tokenizers import train_byte_level, train_sentencepiece, write_meta_tokenizer, write_tokenizer

META_BOS, META_EOT = 266, 275
HARD_TEXTS = [
    "Once upon a time",
    " Once upon  a time ",
    "\n\nnew\tlines\r\n",
    "naïve café 你好 🙂👨‍👩‍👧",
    "\x00\x1b\x7f\u2028\ufffe",
    "<|eot_id|><|im_end|></s><0x0A>",
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(write_tokenizer(tmp_path_factory.mktemp("byte-level"), train_byte_level()))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("sentencepiece")
    return open_tokenizer(write_tokenizer(directory, train_sentencepiece(), bos_token="<s>", eos_token="</s>"))


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(write_meta_tokenizer(tmp_path_factory.mktemp("meta")))


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", "meta"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


texts_with_spellings = st.lists(
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<s>", "</s>", "<unk>", "<|", "|>", "<0x0A>", "<think>"]
    )
    | st.text(max_size=6)
).map("".join)


@settings(deadline=None)
@given(text=texts_with_spellings.filter(bool))
def test_text_becomes_no_control_token_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_bos=False)
    assert set(tokenizer.control_tokens.values()).isdisjoint(ids)
    decoded = tokenizer.decode(ids)
    if "<s>" in tokenizer.control_tokens:  # sentencepiece puts a space first and writes spaces as this character
        decoded, text = decoded.removeprefix(" "), text.replace("▁", " ").removeprefix(" ")
    assert decoded == text


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_ids_come_back_as_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)).removeprefix(" ") == text.removeprefix(" ")


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_the_stream_adds_up_to_the_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = StreamDecoder(tokenizer)
    pieces = [stream.feed(token_id) for token_id in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)


@settings(deadline=None)
@given(data=st.data())
def test_the_stream_adds_up_for_any_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3)))
    stream = StreamDecoder(tokenizer)
    assert "".join(map(stream.feed, ids)) + stream.flush() == tokenizer.decode(ids)


def test_half_an_emoji_waits_and_is_replaced_at_the_end(meta: Tokenizer) -> None:
    stream = StreamDecoder(meta)
    emoji = list("🙂".encode())
    assert [stream.feed(byte) for byte in emoji] == ["", "", "", "🙂"]
    assert [stream.feed(byte) for byte in emoji[:3]] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_an_invalid_byte_does_not_hold_up_what_follows(meta: Tokenizer) -> None:
    stream = StreamDecoder(meta)
    assert stream.feed(0xFF) == "\ufffd"
    assert stream.feed(0xE4) == ""
    assert stream.feed(ord("a")) == "\ufffda"


def test_spaces_survive_between_pieces_of_a_continuation(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("Once upon a time", add_bos=False)
    assert len(ids) > 3
    assert "".join(sentencepiece.decode([token_id]) for token_id in ids) == " Once upon a time"


def test_control_tokens_are_never_shown(tokenizer: Tokenizer) -> None:
    assert tokenizer.control_tokens
    for token_id in tokenizer.control_tokens.values():
        assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.decode(tokenizer.control_tokens.values()) == ""


def test_ids_without_a_token_are_empty(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(tokenizer.vocab_size + 1000) == b""


def test_bos_is_as_the_metadata_asks_unless_told(
    byte_level: Tokenizer, sentencepiece: Tokenizer, meta: Tokenizer
) -> None:
    for tokenizer, bos in ((sentencepiece, 1), (meta, META_BOS)):
        assert tokenizer.bos_id == bos
        plain = tokenizer.encode("Hello", add_bos=False)
        assert tokenizer.encode("Hello") == tokenizer.encode("Hello", add_bos=True) == [bos, *plain]
    assert byte_level.bos_id is None
    assert not byte_level.adds_bos
    with pytest.raises(PromptError, match="no beginning-of-sequence token"):
        byte_level.encode("Hello", add_bos=True)


def test_a_prompt_that_spells_bos_gets_one_bos(sentencepiece: Tokenizer, meta: Tokenizer) -> None:
    assert sentencepiece.encode("<s> Hello").count(1) == 1
    assert meta.encode("<|begin_of_text|>Hello").count(META_BOS) == 1


def test_an_empty_prompt_is_bos_or_refused(byte_level: Tokenizer, sentencepiece: Tokenizer, meta: Tokenizer) -> None:
    assert sentencepiece.encode("") == [1]
    assert meta.encode("") == [META_BOS]
    for tokenizer in (byte_level, sentencepiece, meta):
        with pytest.raises(PromptError, match="prompt is empty"):
            tokenizer.encode("", add_bos=False)
        assert tokenizer.encode(" ", add_bos=False)


def test_text_that_is_not_unicode_is_refused(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_rendered):
        with pytest.raises(PromptError, match="position 3"):
            encode("caf\udce9")


@pytest.mark.parametrize("scheme", ["first", "always", "never", "legacy", "sequence"])
@pytest.mark.parametrize(
    "text",
    ["Hello", " Hello", "a</s>b</s> c", "</s>a", "<s>a 1 b</s>", "</s></s> ", "x </s> y", "<think>a</s>b<think> c"],
)
def test_rendered_text_gets_the_ids_that_the_library_gives(tmp_path: Path, scheme: str, text: str) -> None:
    library = train_sentencepiece(scheme)
    library.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    expected = library.encode(text, add_special_tokens=False).ids
    ids = open_tokenizer(write_tokenizer(tmp_path, library, add_bos_token=False)).encode_rendered(text)
    assert ids == expected


@pytest.mark.parametrize(("left", "right"), [(True, False), (False, True), (True, True)])
def test_control_tokens_swallow_the_spaces_that_they_are_said_to(tmp_path: Path, left: bool, right: bool) -> None:
    library = train_byte_level()
    library.add_special_tokens([tokenizers.AddedToken("<|x|>", lstrip=left, rstrip=right, special=True)])
    text = "a  <|x|> \n b<|x|><|x|> "
    expected = library.encode(text, add_special_tokens=False).ids
    assert open_tokenizer(write_tokenizer(tmp_path, library)).encode_rendered(text) == expected


def test_a_guard_keeps_a_spelling_text_and_is_dropped(byte_level: Tokenizer) -> None:
    spelled = byte_level.encode("<|im_end|>")
    assert byte_level.encode_rendered("<\ufdd0|im_end|>", "\ufdd0") == spelled
    assert byte_level.encode_rendered("<|im_end|>\ufdd0", "\ufdd0") == [byte_level.control_tokens["<|im_end|>"]]


@pytest.mark.parametrize(
    ("text", "adds_bos", "count"),
    [
        ("<s>a", True, 1),
        ("a", True, 1),
        ("<s><s>a", True, 1),
        ("<s><s>a", False, 1),
        ("<s>a", False, 1),
        ("a", False, 0),
    ],
)
def test_rendered_text_starts_with_one_bos_or_none(tmp_path: Path, text: str, adds_bos: bool, count: int) -> None:
    directory = write_tokenizer(tmp_path, train_sentencepiece(), add_bos_token=adds_bos)
    ids = open_tokenizer(directory).encode_rendered(text)
    assert ids.count(1) == count
    assert ids[:count] == [1] * count


def test_rendered_text_keeps_the_bos_of_later_turns(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode_rendered("<s>a</s><s>b").count(1) == 2


def test_the_metadata_of_bos_is_found_wherever_it_is(tmp_path: Path) -> None:
    library = train_sentencepiece()
    named = {"content": "</s>", "lstrip": False}
    assert open_tokenizer(write_tokenizer(tmp_path / "a", library)).bos_id == 1
    assert open_tokenizer(write_tokenizer(tmp_path / "b", library, bos_token=named)).bos_id == 2
    library.post_processor = processors.Sequence([processors.ByteLevel(), library.post_processor])
    assert open_tokenizer(write_tokenizer(tmp_path / "c", library)).adds_bos
    library.post_processor = processors.ByteLevel()
    null = open_tokenizer(write_tokenizer(tmp_path / "d", library, bos_token=None, add_bos_token=False))
    assert (null.bos_id, null.adds_bos) == (None, False)
    directory = write_tokenizer(tmp_path / "e", library, add_bos_token=True)
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    assert open_tokenizer(directory).encode("")[0] == 1


@pytest.mark.parametrize("config", [{"bos_token": "<nowhere>"}, {"add_bos_token": True}])
def test_a_bos_that_the_vocabulary_lacks_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    directory = write_tokenizer(tmp_path, train_byte_level(), **config)
    with pytest.raises(CheckpointError, match="beginning-of-sequence"):
        open_tokenizer(directory)


def test_a_token_that_the_config_calls_eos_is_control(tmp_path: Path) -> None:
    library = train_byte_level()
    assert open_tokenizer(write_tokenizer(tmp_path / "a", library)).decode(library.encode("<think>").ids) == "<think>"
    tokenizer = open_tokenizer(write_tokenizer(tmp_path / "b", library, eos_token="<think>"))
    end = tokenizer.control_tokens["<think>"]
    assert end not in tokenizer.encode("a<think>b")
    assert tokenizer.encode_rendered("a<think>b").count(end) == 1


def test_settings_that_cut_or_pad_are_ignored(tmp_path: Path) -> None:
    library = train_byte_level()
    library.enable_truncation(3)
    library.enable_padding(length=64)
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, library))
    assert tokenizer.decode(tokenizer.encode("Once upon a time, there was")) == "Once upon a time, there was"


def test_a_word_that_is_a_token_is_taken_whole_with_ignore_merges(tmp_path: Path) -> None:
    for ignore_merges in (False, True):
        library = tokenizers.Tokenizer(
            models.BPE(vocab={"a": 0, "b": 1, "c": 2, "abc": 3}, merges=[], ignore_merges=ignore_merges)
        )
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer = open_tokenizer(write_tokenizer(tmp_path / str(ignore_merges), library))
        assert tokenizer.encode("abc") == ([3] if ignore_merges else [0, 1, 2])


def test_a_control_token_that_a_whole_word_arrives_at_is_spelled_out(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(
        models.BPE(vocab={"<": 0, "s": 1, ">": 2, "<s>": 3, "▁": 4}, merges=[], ignore_merges=True)
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    library.add_special_tokens(["<s>"])
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, library))
    assert tokenizer.encode("<s>") == [0, 1, 2]
    assert tokenizer.encode_rendered("<s>") == [3]


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, library))
    assert tokenizer.vocab_size == 8
    assert tokenizer.token_bytes(3) == b""


def test_added_tokens_keep_their_text_literally(tmp_path: Path) -> None:
    library = train_byte_level()
    library.add_tokens([tokenizers.AddedToken("é à", special=False, normalized=False)])
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, library))
    ids = tokenizer.encode("xé ày")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "xé ày"


def test_a_decoder_of_an_unknown_kind_is_refused_by_name() -> None:
    library = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    library.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        FastTokenizer(library)


def test_the_layout_of_meta(meta: Tokenizer) -> None:
    assert meta.vocab_size == META_BOS + 256
    slots = {
        "<|begin_of_text|>": 0,
        "<|end_of_text|>": 1,
        "<|reserved_special_token_0|>": 2,
        "<|start_header_id|>": 6,
        "<|end_header_id|>": 7,
        "<|eom_id|>": 8,
        "<|eot_id|>": 9,
        "<|python_tag|>": 10,
        "<|reserved_special_token_247|>": 255,
    }
    assert {spelling: meta.control_tokens[spelling] - META_BOS for spelling in slots} == slots
    assert len(meta.control_tokens) == 256


def test_meta_splits_words_before_merging(meta: Tokenizer) -> None:
    hello, user, vietnam, spaces = (meta.encode(text, add_bos=False) for text in ("Hello", "user", " Việt", "   a"))
    assert (len(hello), len(user), len(vietnam)) == (1, 1, 1)
    assert meta.encode("Hellouser", add_bos=False) != [*hello, *user]
    assert [meta.token_bytes(token_id) for token_id in spaces] == [b"  ", b" ", b"a"]


def test_very_long_runs_of_spaces_are_encoded(meta: Tokenizer) -> None:
    text = " " * 1_000_000 + "a"
    assert meta.decode(meta.encode(text)) == text


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        (b"", "again"),
        (b"garbage", "again"),
        (b'{"version": "1.0", "model"', "again"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, name: str, content: bytes, word: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=word) as caught:
        open_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sentencepiece_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x0c\n\x03<s>")
    with pytest.raises(CheckpointError, match=r"sentencepiece.*tokenizer\.json.*GGUF"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("tail", [b"IQ== 3 4\n", b"IQ==\n", b"I 266\n", b"IQ== x\n", b"IUE= 900\n", b"IUE= 0\n"])
def test_damaged_ranks_are_refused(tmp_path: Path, tail: bytes) -> None:
    path = write_meta_tokenizer(tmp_path) / "tokenizer.model"
    path.write_bytes(path.read_bytes() + tail)
    with pytest.raises(CheckpointError, match="download it again"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe{}", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_broken_config_is_refused(tmp_path: Path, content: bytes) -> None:
    (write_tokenizer(tmp_path, train_byte_level()) / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        open_tokenizer(tmp_path)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json nor tokenizer\.model"):
        open_tokenizer(tmp_path)
