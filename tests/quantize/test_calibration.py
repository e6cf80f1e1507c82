"""The text that GPTQ rounds by, and how it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptfast.errors import UserError
from gptfast.evaluation.text import read_default_text
from gptfast.tokenizer import Tokenizer, open_tokenizer
from quantize.calibration import list_calibration_warnings, make_calibration_ids, read_calibration_text
from tests.reference.tokenizers import train_byte_level, train_sentencepiece, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(write_tokenizer(tmp_path_factory.mktemp("byte-level"), train_byte_level()))


def test_the_default_text_shares_no_paragraph_with_that_of_perplexity() -> None:
    paragraphs = read_calibration_text(None).split("\n\n")
    scored = set(read_default_text().content.split("\n\n"))
    assert len(paragraphs) > 1000
    assert len(set(paragraphs)) == len(paragraphs)
    assert not {paragraph for paragraph in paragraphs if paragraph in scored and len(paragraph) > 40}


def test_a_file_takes_the_place_of_the_default_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("naïve café", encoding="utf-8")
    assert read_calibration_text(path) == "naïve café"


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.txt cannot be read: No such file"):
        read_calibration_text(tmp_path / "missing.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="binary is not UTF-8"):
        read_calibration_text(tmp_path / "binary")


def test_sequences_are_taken_from_all_over_the_text(tokenizer: Tokenizer) -> None:
    text = read_calibration_text(None)
    ids = tokenizer.encode(text)
    chosen = make_calibration_ids(tokenizer, text, sequences=4, length=100)
    assert chosen.shape == (4, 100)
    assert chosen[0].tolist() == ids[:100]
    last = len(ids) // 100 * 100
    assert chosen[-1].tolist() == ids[last - 100 : last]


def test_a_short_text_gives_the_whole_sequences_that_it_has(tokenizer: Tokenizer) -> None:
    text = "Once upon a time, there was a little girl. "
    ids = tokenizer.encode(text)
    assert make_calibration_ids(tokenizer, text).tolist() == [ids]
    assert make_calibration_ids(tokenizer, text, length=len(ids) // 2).flatten().tolist() == ids[: len(ids) // 2 * 2]


def test_few_tokens_are_worth_a_warning_that_counts_them() -> None:
    assert list_calibration_warnings(torch.zeros(8, 512, dtype=torch.int64)) == []
    [warning] = list_calibration_warnings(torch.zeros(7, 512, dtype=torch.int64))
    assert "gives 3584 of the 4096 tokens" in warning


def test_a_text_without_tokens_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="calibration text is empty"):
        make_calibration_ids(tokenizer, "")
    with_bos = write_tokenizer(tmp_path, train_sentencepiece(), bos_token="<s>", eos_token="</s>")
    with pytest.raises(UserError, match="calibration text is empty"):
        make_calibration_ids(open_tokenizer(with_bos), "")
