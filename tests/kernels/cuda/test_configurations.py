"""What a product is cut into, by rule and by the files of a GPU."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfast.cache import CACHE_VARIABLE, read_cached
from gptfast.kernels.cuda import configurations
from gptfast.kernels.cuda.configurations import (
    LOAD_WORDS,
    THREADS,
    Configuration,
    Gpu,
    TunedConfiguration,
    Tuning,
    choose_configuration,
    count_columns,
    count_words,
    find_fault,
    find_step,
    forget_files,
    get_tuning_path,
    load_shipped,
    open_tuning,
    set_step,
    write_tuning,
)
from gptfast.kernels.cuda.packing import WEIGHTS_PER_WORD, Kind

LINE = TunedConfiguration("int4", False, 512, 4096, 128, Configuration(2, 256, 2), 4.0)
OTHER_LINE = TunedConfiguration("int4", True, 512, 4096, 128, Configuration(32, 16, 4, 3, 2))
GPU = Gpu("NVIDIA T4 (test)", (7, 5))
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Directories of files that hold nothing, and one GPU."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(configurations, "DIRECTORY", tmp_path / "shipped")
    monkeypatch.setattr(configurations, "identify_gpu", lambda device: GPU)
    forget_files()
    yield
    forget_files()


def ship(*lines: TunedConfiguration, **fields: Any) -> None:
    write_tuning(configurations.DIRECTORY / "sm_75.json", Tuning(products=lines, **fields))


def keep(*lines: TunedConfiguration, **fields: Any) -> Path:
    path = get_tuning_path(GPU.name)
    write_tuning(path, Tuning(**{"gpu": GPU.name, "products": lines} | fields))
    return path


def choose(rows: int = 1, gpu: Gpu | None = GPU, **options: bool) -> Configuration:
    return choose_configuration("int4", rows, 512, 4096, 128, gpu, **options)


def test_a_line_holds_for_its_product_and_gpu_alone() -> None:
    ship(LINE)
    rule, several = choose(gpu=None), choose(2, gpu=None)
    assert choose() == LINE.configuration != rule
    assert choose(gpu=GPU._replace(capability=(7, 4))) == rule
    other_groups = choose_configuration("int4", 1, 512, 4096, 64, GPU)
    assert other_groups == choose_configuration("int4", 1, 512, 4096, 64)
    assert choose(2) == several
    assert choose(exact_rows=True) == several


def test_the_gpus_own_file_comes_before_its_architectures_and_that_before_the_rule() -> None:
    rule = choose(2)
    ship(dataclasses.replace(LINE, configuration=Configuration(8, 512, 4)), OTHER_LINE)
    assert choose(2) == OTHER_LINE.configuration != rule
    keep(LINE)
    assert choose() == LINE.configuration
    assert choose(2) == OTHER_LINE.configuration  # of which the GPU's own file says nothing
    assert choose(gpu=GPU._replace(name="another")) == Configuration(8, 512, 4)


def test_files_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(LINE)
    read: list[Path] = []

    def note(path: Path) -> bytes | None:
        read.append(path)
        return read_cached(path)

    monkeypatch.setattr(configurations, "read_cached", note)
    for rows in (1, 1, 2, 5):
        choose(rows)
    assert find_step(CUDA) == "compiled"
    assert read == [get_tuning_path(GPU.name), configurations.DIRECTORY / "sm_75.json"]


def test_a_gpus_file_is_named_after_it(tmp_path: Path) -> None:
    assert get_tuning_path("NVIDIA H200") == tmp_path / "cache" / "cuda" / "nvidia-h200.json"
    assert get_tuning_path("../NVIDIA H100 80GB HBM3/").name == "nvidia-h100-80gb-hbm3.json"


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    tuning = Tuning("a", "3.6", "2.11", "2026-12-01T00:00:00+00:00", "fused", (LINE, OTHER_LINE))
    path = tmp_path / "new" / "file.json"
    write_tuning(path, tuning)
    assert open_tuning(path, Gpu("a", (9, 0))) == tuning
    fields = json.loads(path.read_text())
    assert list(fields) == ["gpu", "triton", "torch", "date", "step", "products"]
    assert sum('"kind"' in line for line in path.read_text().splitlines()) == 2


def test_a_line_takes_the_place_of_that_of_its_product() -> None:
    changed = dataclasses.replace(LINE, configuration=Configuration(8, 512, 4))
    assert Tuning(products=(LINE, OTHER_LINE)).replace_line(changed).products == (changed, OTHER_LINE)
    assert Tuning(products=(LINE,)).replace_line(OTHER_LINE).products == (LINE, OTHER_LINE)


GOOD = dataclasses.asdict(Tuning(gpu=GPU.name, products=(LINE,)))
DAMAGE = {
    "not JSON": '{"gpu": "NVIDIA',
    "not UTF-8": b"\xff",
    "the list of old": [dataclasses.asdict(LINE)],
    "another GPU's": GOOD | {"gpu": "another"},
    "an architecture's": GOOD | {"gpu": None},
    "without products": {"gpu": GPU.name},
    "an unknown field": GOOD | {"kernel": 1},
    "an unknown step": GOOD | {"step": "quick"},
    "a line that is none": GOOD | {"products": [3]},
    "no configuration": GOOD | {"products": [{"kind": "int4"}]},
    "a size that is none": GOOD | {"products": [dataclasses.asdict(LINE) | {"out_features": "512"}]},
    "an unknown kind": GOOD | {"products": [dataclasses.asdict(LINE) | {"kind": "int3"}]},
    "no power of two": GOOD
    | {"products": [dataclasses.asdict(dataclasses.replace(LINE, configuration=Configuration(3, 256, 2)))]},
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_is_damaged_or_anothers_is_one_warning_and_the_next_holds(
    content: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rule = choose(2)
    ship(LINE)
    path = keep()
    data = content if isinstance(content, bytes) else (content if isinstance(content, str) else json.dumps(content))
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    forget_files()
    with caplog.at_level(logging.WARNING, "gptfast"):
        assert [choose(), choose(2)] == [LINE.configuration, rule]
        assert find_step(CUDA) == "compiled"
        assert open_tuning(path, GPU) == Tuning(gpu=GPU.name)
    [message] = caplog.messages
    assert message.startswith(f"{path} is left aside (")
    assert "gptfast tune" in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_is_as_none() -> None:
    get_tuning_path(GPU.name).mkdir(parents=True)
    assert choose() == choose(gpu=None)


def test_the_step_is_compiled_until_a_file_says_else_and_setting_it_keeps_configurations() -> None:
    assert find_step(CUDA) == "compiled"
    path = keep(LINE, OTHER_LINE, date="2026-12-01T00:00:00+00:00")
    set_step(CUDA, "fused")
    assert find_step(CUDA) == "fused"
    found = open_tuning(path, GPU)
    assert found.products == (LINE, OTHER_LINE)
    assert found.torch == torch.__version__
    changed = dataclasses.replace(LINE, configuration=Configuration(4, 256, 2))
    set_step(CUDA, "compiled", [changed])
    assert find_step(CUDA) == "compiled"
    assert open_tuning(path, GPU).products == (changed, OTHER_LINE)


def test_the_step_is_kept_where_nothing_was_tuned() -> None:
    set_step(CUDA, "fused")
    assert find_step(CUDA) == "fused"
    assert choose() == choose(gpu=None)


def test_a_new_file_begins_with_the_step_that_is_taken(tmp_path: Path) -> None:
    ship(LINE, step="fused")
    assert find_step(CUDA) == "fused"
    assert open_tuning(tmp_path / "none.json", GPU) == Tuning(gpu=GPU.name, step="fused")


def test_what_is_shipped_is_complete_and_claims_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configurations, "DIRECTORY", Path(configurations.__file__).parent / "configurations")
    forget_files()
    tuning = load_shipped("sm_90")
    assert tuning is not None
    assert dataclasses.replace(tuning, products=()) == Tuning()
    assert len({line.key for line in tuning.products}) == len(tuning.products) > 100
    assert all(line.max_instructions_per_weight for line in tuning.products)


@pytest.mark.parametrize(
    ("several_rows", "configuration", "word"),
    [
        (False, Configuration(4, 1024, 4), None),
        (False, Configuration(4, 256, 4), "256"),
        (False, Configuration(0, 1024, 4), "block_rows"),
        (False, Configuration(4, 1024, -4), "warps"),
        (False, Configuration(4, 8192, 16), "warps"),
        (False, Configuration(4, 1024, 4, stages=2), "stage"),
        (False, Configuration(4, 1024, 4, splits=2), "split"),
        (True, Configuration(16, 16, 4, 4, 4), None),
        (True, Configuration(8, 16, 4, 4, 4), "8 rows"),
        (True, Configuration(16, 8, 4, 4, 4), "8 words"),
        (True, Configuration(16, 16, 2, 4, 4), "4 parts"),
        (True, Configuration(16, 256, 4, 4, 4), "multiple of 256"),
        (True, Configuration(16, 16, 4, 0, 4), "stages"),
        (True, Configuration(16, 16, 4, 99, 4), "stages"),
    ],
)
def test_what_no_kernel_can_be_cut_into_is_said(
    several_rows: bool, configuration: Configuration, word: str | None
) -> None:
    fault = find_fault("int4", several_rows, 4096, configuration)
    assert fault is None if word is None else word in str(fault)


@pytest.mark.parametrize("kind", WEIGHTS_PER_WORD)
@pytest.mark.parametrize("in_features", [32, 90, 288, 576, 1536, 2048, 3072, 4096, 8192, 11_008, 14_336, 28_672])
@pytest.mark.parametrize("out_features", [1, 2048, 32_001])
def test_all_warps_lie_along_a_row(kind: Kind, out_features: int, in_features: int) -> None:
    chosen = choose_configuration(kind, 1, out_features, in_features)
    assert find_fault(kind, False, in_features, chosen) is None
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
    assert find_fault(kind, True, in_features, chosen) is None
    assert chosen.splits >= splits
    assert chosen.splits == 1 or count_columns(kind, in_features) % (chosen.splits * chosen.block_words) == 0
    assert chosen.warps >= chosen.splits
    assert chosen.block_words * WEIGHTS_PER_WORD[kind] >= 64
