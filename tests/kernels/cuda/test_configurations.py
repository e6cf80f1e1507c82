"""What a product is cut into, by rule and by a GPU's file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptfast.kernels.cuda import configurations
from gptfast.kernels.cuda.configurations import (
    LOAD_WORDS,
    THREADS,
    Configuration,
    TunedConfiguration,
    choose_configuration,
    count_words,
    load_configurations,
    write_configurations,
)
from gptfast.kernels.cuda.packing import WEIGHTS_PER_WORD, Kind

LINE = TunedConfiguration("int4", False, 512, 4096, 128, Configuration(2, 256, 2), 4.0)


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU with a file of one line."""
    write_configurations(tmp_path / "sm_75.json", [LINE])
    monkeypatch.setattr(configurations, "DIRECTORY", tmp_path)
    yield
    load_configurations.cache_clear()
    choose_configuration.cache_clear()


def test_the_line_of_a_gpu_holds_for_its_product_alone(tuned: None) -> None:
    rule = choose_configuration("int4", 1, 512, 4096, 128)
    assert choose_configuration("int4", 1, 512, 4096, 128, (7, 5)) == LINE.configuration != rule
    assert choose_configuration("int4", 1, 512, 4096, 128, (7, 4)) == rule
    assert choose_configuration("int4", 1, 512, 4096, 64, (7, 5)) == choose_configuration("int4", 1, 512, 4096, 64)
    several = choose_configuration("int4", 2, 512, 4096, 128)
    assert choose_configuration("int4", 2, 512, 4096, 128, (7, 5)) == several
    assert choose_configuration("int4", 1, 512, 4096, 128, (7, 5), exact_rows=True) == several


def test_a_file_comes_back_as_it_was_written() -> None:
    path = configurations.DIRECTORY / "sm_90.json"
    lines = load_configurations("sm_90")
    assert len(lines) == path.read_text().count('"kind"') > 100
    for key, line in lines.items():
        assert key == tuple(dataclasses.astuple(line)[:5])


@pytest.mark.parametrize("kind", WEIGHTS_PER_WORD)
@pytest.mark.parametrize("in_features", [32, 90, 288, 576, 1536, 2048, 3072, 4096, 8192, 11_008, 14_336, 28_672])
@pytest.mark.parametrize("out_features", [1, 2048, 32_001])
def test_all_warps_lie_along_a_row(kind: Kind, out_features: int, in_features: int) -> None:
    chosen = choose_configuration(kind, 1, out_features, in_features)
    loads, rest = divmod(chosen.block_words, THREADS * LOAD_WORDS * chosen.warps)
    assert rest == 0
    assert 1 <= loads <= 4
    words = count_words(kind, in_features)
    blocks = -(-words // chosen.block_words)
    assert blocks * chosen.block_words < words + max(words // 3, chosen.block_words)
    assert chosen.block_rows in (2, 4, 8)


@pytest.mark.parametrize("kind", WEIGHTS_PER_WORD)
@pytest.mark.parametrize(("in_features", "splits"), [(2048, 4), (4096, 4), (14_336, 4), (11_008, 2), (288, 1)])
@pytest.mark.parametrize("out_features", [4096, 28_672])
def test_warps_share_a_row_where_blocks_divide_it(kind: Kind, out_features: int, in_features: int, splits: int) -> None:
    chosen = choose_configuration(kind, 2, out_features, in_features)
    assert chosen.splits >= splits
    words = in_features if kind in ("bf16", "fp16") else count_words(kind, in_features)
    assert chosen.splits == 1 or words % (chosen.splits * chosen.block_words) == 0
    assert chosen.warps >= chosen.splits
    assert chosen.block_words * WEIGHTS_PER_WORD[kind] >= 64
