"""Plots, read back out of their SVG and PNG files."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gptfast.bench.environment import Environment
from gptfast.bench.plot import check_plot_path, compute_limits, draw, label_limit
from gptfast.bench.results import (
    Bandwidth,
    BenchmarkResult,
    Breakdown,
    DecodeResult,
    Execution,
    Memory,
    ModelFacts,
    Phases,
    Settings,
    StepPart,
)
from gptfast.bench.statistics import Latency, Spread
from gptfast.errors import UserError
from tests.reference.sessions import run_process

CEILING_GB_PER_S = 40.0
WEIGHT_BYTES = 270_000_000
KV_BYTES_PER_TOKEN = 23_040

DrawTexts = Callable[[BenchmarkResult], list[str]]


def make_spread(median: float) -> Spread:
    return Spread(5, median, 0.96 * median, 1.02 * median)


def make_decode(depth: int, share: float) -> DecodeResult:
    bytes_per_step = WEIGHT_BYTES + depth * KV_BYTES_PER_TOKEN
    floor_ms = bytes_per_step / CEILING_GB_PER_S / 1e6
    step_ms = floor_ms / share
    return DecodeResult(
        depth=depth,
        tokens_per_s=make_spread(1e3 / step_ms),
        step=Latency(320, step_ms, 1.1 * step_ms, 1.5 * step_ms),
        end_to_end_tokens_per_s=make_spread(0.93e3 / step_ms),
        token=Latency(320, 1.05 * step_ms, 1.2 * step_ms, 1.6 * step_ms),
        kv_bytes_per_step=depth * KV_BYTES_PER_TOKEN,
        bytes_per_step=bytes_per_step,
        floor_ms=floor_ms,
        gb_per_s=share * CEILING_GB_PER_S,
        share=share,
    )


def make_breakdown() -> Breakdown:
    parts = (
        StepPart("feed-forward weights", 4.31, 159_000_000),
        StepPart("attention weights", 1.62, 53_000_000),
        StepPart("head", 1.44, 57_000_000),
        StepPart("attention", 0.96, 11_800_000),
        StepPart("pointwise", 0.41, 0),
        StepPart("sampling", 0.08, 0),
        StepPart("host overhead", 0.33, 0),
        StepPart("unaccounted", -0.12, 0),
    )
    return Breakdown(512, sum(part.ms for part in parts), parts)


def make_result(depths: Sequence[int] = (0, 512, 2048, 8192), **changes: Any) -> BenchmarkResult:
    result = BenchmarkResult(
        date="2026-11-30T17:58:26+00:00",
        environment=Environment(
            device="cpu",
            device_name="AMD EPYC 9654 96-Core Processor",
            cores=2,
            threads=2,
            last_level_cache_bytes=32 * 2**20,
            memory_bytes=25 * 10**9,
            system="Linux 6.1",
            python="3.11.7",
            torch="2.13.0+cpu",
            gptfast="0.1.0",
            commit="eaa98802dd9f",
            commit_is_clean=False,
        ),
        model=ModelFacts(
            name="SmolLM2-135M-Instruct.Q4_1.gguf",
            random_weights=False,
            parameters=134_515_008,
            dtype="bfloat16",
            weights="bfloat16",
            activations="fp32",
            kv_dtype="bfloat16",
            weight_bytes_per_token=WEIGHT_BYTES,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        ),
        settings=Settings(
            batch_size=1,
            repeats=5,
            new_tokens=64,
            prompt_lengths=(64,),
            depths=tuple(depths),
            temperature=0.0,
            top_k=None,
            top_p=1.0,
        ),
        execution=Execution(
            compiled=True,
            compile_kind="cached",
            kernels="cpp",
            step="compiled",
            cuda_graphs=False,
            recompiles=0,
            other_load=0.0,
        ),
        phases=Phases(**dict.fromkeys((field.name for field in dataclasses.fields(Phases)), 1.0)),
        bandwidth=Bandwidth(512 * 2**20, make_spread(38.0), make_spread(CEILING_GB_PER_S), CEILING_GB_PER_S, 0.05),
        prefill=(),
        decode=tuple(make_decode(depth, 0.75 - depth / 50_000) for depth in depths),
        breakdown=make_breakdown(),
        memory=Memory(None, 10**9, None),
        notes=(),
    )
    return dataclasses.replace(result, **changes)


def read_texts(path: Path) -> list[str]:
    """Every text in an SVG, in which text stays text."""
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())]


@pytest.fixture
def draw_texts(tmp_path: Path) -> DrawTexts:
    def run(result: BenchmarkResult) -> list[str]:
        draw(result, tmp_path / "plot.svg")
        return read_texts(tmp_path / "plot.svg")

    return run


# The picture


def test_the_title_says_what_was_measured_on_what_and_when(draw_texts: DrawTexts) -> None:
    texts = " ".join(draw_texts(make_result()))
    for fact in (
        "SmolLM2-135M-Instruct.Q4_1.gguf, bfloat16, batch size 1",
        "AMD EPYC 9654 96-Core Processor, 2 threads",
        "torch 2.13.0+cpu",
        "commit eaa98802dd9f with changes",
        "2026-11-30 17:58 UTC",
    ):
        assert fact in texts


def test_a_gpu_has_no_threads_and_a_package_no_commit(draw_texts: DrawTexts) -> None:
    result = make_result()
    gpu = dataclasses.replace(
        result.environment, device="cuda", device_name="NVIDIA H200", commit=None, commit_is_clean=None
    )
    texts = " ".join(draw_texts(dataclasses.replace(result, environment=gpu)))
    assert "NVIDIA H200" in texts
    assert "threads" not in texts
    assert "commit" not in texts


def test_every_part_of_a_step_has_a_bar_with_its_time_and_share(draw_texts: DrawTexts) -> None:
    texts = draw_texts(make_result())
    breakdown = make_breakdown()
    for part in breakdown.parts:
        assert part.name in texts
    assert "4.31 ms, 48 %" in texts
    assert "-0.12 ms, -1 %" in texts
    assert f"A step at depth 512: {breakdown.step_ms:.2f} ms, floor 7.02 ms" in texts


def test_without_a_breakdown_only_the_speed_is_drawn(draw_texts: DrawTexts) -> None:
    texts = draw_texts(make_result(breakdown=None))
    assert "tokens in the cache" in texts
    assert not any(text.startswith("A step") for text in texts)


def test_the_limit_names_its_bandwidth_and_what_was_reached() -> None:
    assert label_limit(make_result((0, 10_000))) == "limit at 40.0 GB/s (steps reach 55 % to 75 %)"
    assert label_limit(make_result((0,))) == "limit at 40.0 GB/s (steps reach 75 %)"


def test_the_limit_is_what_the_floor_allows_at_every_depth() -> None:
    result = make_result((2048, 0, 512))
    depths, limits = compute_limits(result)
    assert (depths[0], depths[-1]) == (0, 2048)
    for depth, limit in zip(depths, limits, strict=True):
        bytes_per_step = WEIGHT_BYTES + depth * KV_BYTES_PER_TOKEN
        assert limit == pytest.approx(CEILING_GB_PER_S * 1e9 / bytes_per_step)


def test_a_batch_multiplies_the_limit() -> None:
    result = make_result()
    batch = dataclasses.replace(result, settings=dataclasses.replace(result.settings, batch_size=4))
    _, limits = compute_limits(result)
    assert compute_limits(batch)[1] == pytest.approx([4 * limit for limit in limits])


def test_a_single_depth_has_a_limit_that_can_be_seen() -> None:
    depths, limits = compute_limits(make_result((512,)))
    assert depths[0] < 512 < depths[-1]
    assert len(set(limits)) == 1


@pytest.mark.parametrize("depths", [(0,), (512,), (0, 512, 2048), (2048, 0)])
def test_any_depths_can_be_drawn(depths: Sequence[int], tmp_path: Path) -> None:
    draw(make_result(depths), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "start"), [("a.PNG", b"\x89PNG"), ("a.b.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_the_suffix_tells_the_format(name: str, start: bytes, tmp_path: Path) -> None:
    draw(make_result(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_plot_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    path.write_text("old")
    with pytest.raises(ValueError, match="isoformat"):
        draw(make_result(date="yesterday"), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_settings_of_matplotlib_are_left_as_they_were(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"axes.facecolor": "black"}):
        draw(make_result(), tmp_path / "plot.svg")
        assert matplotlib.rcParams["axes.facecolor"] == "black"
    assert "#000000" not in re.findall(r"fill: (#\w+)", (tmp_path / "plot.svg").read_text())
    assert dict(matplotlib.rcParams) == before


def test_drawing_needs_no_pyplot_and_importing_no_matplotlib(tmp_path: Path) -> None:
    program = """
import sys
import gptfast.bench.plot
print("matplotlib" in sys.modules)
from tests.bench.test_plot import Path, make_result
gptfast.bench.plot.draw(make_result(), Path(sys.argv[1]))
print("matplotlib.pyplot" in sys.modules)
"""
    outcome = run_process("-c", program, tmp_path / "plot.png")
    assert outcome.stdout.split() == ["False", "False"], outcome.stderr


# The path


@pytest.mark.parametrize("name", ["plot.png", "plot.SVG", "plot.pdf"])
def test_a_path_that_can_be_written_is_left_alone(name: str, tmp_path: Path) -> None:
    check_plot_path(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["plot", "plot.jpeg", "plot.png.txt", ".png"])
def test_an_unknown_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(".png, .svg, .pdf")):
        check_plot_path(tmp_path / name)


def test_a_directory_that_is_missing_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        check_plot_path(tmp_path / "nowhere/plot.png")
    assert not (tmp_path / "nowhere").exists()


def test_a_directory_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plot.png").mkdir()
    with pytest.raises(UserError, match="is a directory"):
        check_plot_path(tmp_path / "plot.png")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a directory that not even root can write to is Linux's")
def test_a_directory_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(UserError, match="/proc is not writable"):
        check_plot_path(Path("/proc/plot.png"))


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r'pip install "gptfast\[plot\]"'):
        check_plot_path(tmp_path / "plot.png")
