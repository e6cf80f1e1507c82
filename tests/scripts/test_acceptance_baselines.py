"""What is compared with, on tiny models and a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from acceptance import baselines
from acceptance.baselines import Baseline
from acceptance.decoding import Decoding
from acceptance.findings import Findings
from acceptance.random_weights import build_model

from gptfast.config import ModelConfig
from tests.reference.families import FAMILIES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, the script itself runs")

CPU = torch.device("cpu")
CONFIG = replace(
    FAMILIES["llama-tied"], dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=64, vocab_size=64
)
UNTIED = replace(CONFIG, tie_word_embeddings=False)
FOUND = Decoding(0, 2.0, (1.0, 2.0, 3.0), 10**9, 10**6)


def run(findings: Findings, measure: Callable[..., Any], **settings: Any) -> None:
    baseline = Baseline("torch alone", "tiny", measure, least_s=10, **settings)
    baselines.run_baseline(findings, baseline, CONFIG, CPU, bandwidth=1000.0)


def test_a_baseline_gives_rows_with_its_share(findings: Findings) -> None:
    run(findings, lambda config, device: [FOUND, FOUND])
    [table] = findings.tables
    assert [row[:2] for row in table.rows] == [["tiny", "torch alone"]] * 2
    assert table.rows[0][-1] == "50.0%"
    assert not findings.failed


def fail(config: ModelConfig, device: torch.device) -> list[Decoding]:
    raise TypeError("unknown argument\nand more")


def test_what_fails_in_torch_is_a_failed_check(findings: Findings) -> None:
    run(findings, fail)
    assert [check.found for check in findings.failed] == ["TypeError: unknown argument"]


def test_what_fails_in_another_package_is_a_fact(findings: Findings) -> None:
    run(findings, fail, package="json")
    assert not findings.failed
    assert findings.facts == {"failed, tiny, torch alone": "TypeError: unknown argument"}


def test_a_package_that_is_not_installed_and_a_time_that_is_not_left_are_facts(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(findings, fail, package="no_such_package")
    assert findings.facts == {"left out, tiny, torch alone": "no_such_package is not installed"}
    monkeypatch.setattr(findings, "get_remaining_s", lambda: 12.0)
    run(findings, fail)
    assert findings.facts == {"left out, tiny, torch alone": "9 s were left"}


def test_a_model_that_does_not_fit_is_a_fact(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "get_available_memory", lambda device: 1000)
    run(findings, fail)
    assert "GB needed" in str(findings.facts)


def test_a_baseline_that_takes_too_long_is_ended_whatever_catches_exceptions(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "MOST_S", 0.2)

    def measure(config: ModelConfig, device: torch.device) -> list[Decoding]:
        try:
            time.sleep(30)
        except Exception:
            time.sleep(30)
        return [FOUND]

    start = time.monotonic()
    run(findings, measure)
    assert time.monotonic() - start < 10
    assert "ended after" in str(findings.facts)
    assert not findings.tables
    time.sleep(0.3)  # no alarm comes late


def test_figures_without_recorded_graphs_are_marked(findings: Findings) -> None:
    run(findings, lambda config, device: [FOUND], uses_torchs_graphs=True, package="json")
    assert not findings.failed
    run(findings, lambda config, device: [FOUND], uses_torchs_graphs=True)
    assert len(findings.failed) == 1
    assert [row[1] for row in findings.tables[0].rows] == ["torch alone, CUDA graphs skipped"] * 2


@pytest.fixture
def _traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are traced as for torch's compiler, which then makes nothing of them: that would take a while."""
    trace = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda function, *, mode, fullgraph: trace(function, fullgraph=fullgraph))


@pytest.mark.slow
@pytest.mark.usefixtures("_traced")
def test_blocks_of_a_compiled_step_are_timed_and_fill_the_cache() -> None:
    model = build_model(CONFIG, "dense", dtype=torch.float32, device=CPU)
    ticks = iter(range(100))
    with torch.no_grad():
        found = baselines.time_compiled(model, "reduce-overhead", block_tokens=2, clock=lambda: float(next(ticks)))
    assert found.blocks_ms == (500.0, 500.0, 500.0)
    assert found.weight_bytes == model.count_weight_bytes_per_token()
    assert found.kv_bytes == 5 * 2 * 16 * 4
    # It has read as many tokens as there are slots.
    assert all(bool((cache.k != 0).any(dim=-1).all()) for cache in model.list_caches())


@pytest.mark.usefixtures("_traced")
def test_torchao_reads_fewer_bytes_of_all_linear_layers_and_is_traced() -> None:
    pytest.importorskip("torchao")
    model = build_model(UNTIED, "dense", dtype=torch.bfloat16, device=CPU)
    dense = baselines.count_read_bytes(model, UNTIED, "tok_embeddings.weight")
    rows = 64 + 32 + 128 + 32 + 64  # wqkv, wo, w13, w2 and the output layer
    baselines.quantize_by_torchao(model, "int8")
    found = baselines.count_read_bytes(model, UNTIED, "tok_embeddings.weight")
    assert dense / 2 + 2 * rows < found < dense / 2 + 8 * rows
    with torch.no_grad(), baselines.without_regions():
        assert baselines.time_compiled(model, "default", block_tokens=1).weight_bytes == found


@pytest.mark.slow
def test_transformers_decodes_a_model_of_the_same_size() -> None:
    pytest.importorskip("transformers")
    for config in (CONFIG, UNTIED):
        [found] = baselines.time_transformers(config, CPU, block_tokens=3, dtype=torch.float32)
        ours = build_model(config, "dense", dtype=torch.float32, device=CPU).count_weight_bytes_per_token()
        # Of an embedding that is not the output layer, we count the row that is read.
        assert found.weight_bytes == ours - (0 if config.tie_word_embeddings else 4 * config.dim)
        assert len(found.blocks_ms) == baselines.BLOCKS
        assert found.ms_per_token > 0


def test_every_baseline_has_a_preset_and_a_time_within_the_guard() -> None:
    from gptfast.checkpoint.presets import get_preset

    for baseline in baselines.BASELINES:
        assert get_preset(baseline.preset).dim > 0
        assert baseline.least_s < baselines.MOST_S
    assert len({(baseline.preset, baseline.name) for baseline in baselines.BASELINES}) == len(baselines.BASELINES)
