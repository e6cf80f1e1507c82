from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gptfast.bench import measure, measurements, summary
from gptfast.bench.environment import describe_environment
from gptfast.bench.export import to_csv, to_json
from gptfast.bench.load import OtherLoad
from gptfast.bench.measure import check_settings, count_slots, run_benchmark
from gptfast.bench.phases import PhaseTimer
from gptfast.bench.results import Bandwidth, BenchmarkResult, Execution, Settings
from gptfast.bench.statistics import Spread
from gptfast.cli.bench_report import format_head
from gptfast.decode import prefill
from gptfast.errors import PromptError, UserError
from gptfast.generation import Stream
from gptfast.kernels.cuda.timing import DirectRuns
from gptfast.memory import get_peak_resident_memory
from gptfast.model import Transformer
from gptfast.runner import Runner
from gptfast.session import Session, load
from tests.reference.sessions import ids_of, load_tiny, random_prompt

SMALL = Settings(
    batch_size=1,
    repeats=3,
    new_tokens=4,
    prompt_lengths=(8, 40),
    depths=(0, 64),
    temperature=0.0,
    top_k=None,
    top_p=1.0,
)


def benchmark(session: Session, *, breaks_down: bool = False, **changes: Any) -> BenchmarkResult:
    settings = replace(SMALL, batch_size=session.runner.batch_size, **changes)
    return run_benchmark(session, settings, PhaseTimer(), breaks_down=breaks_down, say=lambda _: None)


@pytest.fixture(scope="module", autouse=True)
def _small_probe() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gptfast.bench.bandwidth.PROBE_BYTES", {"cpu": 2**20})
        yield


def find_keys(value: object, name: str = "") -> set[str]:
    """The path of every key in nested objects; the items of a list are expected to be alike."""
    if isinstance(value, dict):
        return {name, *(key for inner in value for key in find_keys(value[inner], f"{name}.{inner}"))}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        kinds = {frozenset(find_keys(item, f"{name}[]")) for item in value}
        assert len(kinds) == 1
        return {name, *kinds.pop()}
    return {name}


def to_fields(result: BenchmarkResult) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(to_json(result)))
    return fields


def test_the_json_has_the_same_keys_on_every_path(directory: Any, compiled: Session, eager: Session) -> None:
    runs: dict[str, Callable[[], BenchmarkResult]] = {
        "eager": lambda: benchmark(eager),
        "compiled": lambda: benchmark(compiled),
        "two rows": lambda: benchmark(load_tiny(directory, batch_size=2)),
        "sampling": lambda: benchmark(eager, temperature=0.8, top_k=5, top_p=0.9),
        "random weights": lambda: benchmark(load(preset="smollm2-135m", dtype="bfloat16"), new_tokens=1),
    }
    keys = {name: find_keys(to_fields(run())) for name, run in runs.items()}
    assert all(found == keys["eager"] for found in keys.values())
    assert {".decode[].tokens_per_s.median", ".prefill[].ttft_s.p90", ".bandwidth.drift", ".breakdown"} < keys["eager"]
    broken_down = find_keys(to_fields(benchmark(eager, breaks_down=True)))
    inner = {key for key in broken_down if key.startswith(".breakdown.")}
    assert broken_down - inner == keys["eager"]
    assert inner >= {".breakdown.step_ms", ".breakdown.parts[].ms"}


def test_a_benchmark_tells_what_ran(session: Session) -> None:
    result = benchmark(session)
    assert [entry.prompt_tokens for entry in result.prefill] == [8, 40]
    assert [entry.depth for entry in result.decode] == [0, 64]
    assert all(entry.step.count == entry.token.count == 12 for entry in result.decode)
    assert all(entry.tokens_per_s.runs == entry.end_to_end_tokens_per_s.runs == 3 for entry in result.decode)
    assert result.execution.compiled == session.runner.is_compiled
    assert result.execution.compile_kind == (
        "none" if not session.runner.is_compiled else result.execution.compile_kind
    )
    assert result.execution.recompiles == 0
    assert not result.execution.cuda_graphs
    assert result.execution.kernels == session.kernels == (session.runner.model.kernels or "torch")
    assert result.model.weight_bytes_per_token == session.weight_bytes_per_token
    with torch.device("meta"):
        dense = Transformer(session.runner.model.config)
    assert result.model.parameters == sum(parameter.numel() for parameter in dense.parameters())
    assert (result.model.weights, result.model.activations, result.model.kv_dtype) == ("float32", "fp32", "float32")
    assert result.bandwidth.ceiling_gb_per_s > 0
    assert result.memory.peak_resident_bytes >= (result.memory.resident_bytes or 0) > 0


def test_on_a_gpu_the_head_names_the_kernels(eager: Session) -> None:
    result = benchmark(eager)
    on_gpu = replace(
        result,
        environment=replace(result.environment, device="cuda"),
        execution=replace(result.execution, kernels="torchao"),
    )
    assert format_head(on_gpu).splitlines()[0].endswith("eager, torchao kernels")
    assert "kernels" not in format_head(result)


def test_phases_add_up_to_the_wall_clock(eager: Session) -> None:
    phases = benchmark(eager).phases
    parts = {name: value for name, value in vars(phases).items() if name not in ("wall_s", "other_s")}
    assert sum(parts.values()) + phases.other_s == pytest.approx(phases.wall_s)
    assert phases.other_s >= 0
    assert min(parts["probe_s"], parts["warm_up_s"], parts["prefill_s"], parts["decode_s"], parts["end_to_end_s"]) > 0


def test_runs_take_turns(eager: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for kind in (measure.PrefillRuns, measure.DecodeRuns):

        def note(runs: Any, *arguments: Any, run: Callable[..., None] = kind.run) -> None:
            order.append(
                f"depth {runs.depth}" if isinstance(runs, measure.DecodeRuns) else f"prompt {len(runs.prompt)}"
            )
            run(runs, *arguments)

        monkeypatch.setattr(kind, "run", note)
    benchmark(eager)
    assert order == ["prompt 8", "prompt 40", "depth 0", "depth 64"] * 3


def test_a_benchmark_leaves_no_text_behind(eager: Session) -> None:
    prompt = random_prompt(30)
    before = ids_of(eager, prompt, 8)
    benchmark(eager)
    assert eager.cached_ids == []
    again = Stream(eager, prompt, max_new_tokens=8, reuse_cache=True)
    list(again)
    assert again.result.token_ids == before


def test_compilations_during_the_runs_are_seen(compiled: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    run = measure.PrefillRuns.run

    def lose_a_step(runs: Any, session: Session, *arguments: Any) -> None:
        session.runner._steps.pop((prefill, 32))
        run(runs, session, *arguments)

    monkeypatch.setattr(measure.PrefillRuns, "run", lose_a_step)
    result = benchmark(compiled, prompt_lengths=(8,))
    assert result.execution.recompiles == 3
    assert any("3 compilations happened during the runs" in note for note in result.notes)


def test_everything_is_ready_before_the_runs(compiled: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are made, caches large enough and filled, and every measurement has run once."""
    events: list[str] = []
    for kind in (measure.PrefillRuns, measure.DecodeRuns):
        for method in ("warm_up", "run"):
            monkeypatch.setattr(kind, method, recording(getattr(kind, method), method, events))
    filled: list[int] = []
    fill = measure.fill_caches
    monkeypatch.setattr(measure, "fill_caches", lambda session, length: (filled.append(length), fill(session, length)))
    grown: list[int] = []
    reserve = compiled.runner.reserve
    monkeypatch.setattr(compiled.runner, "reserve", lambda length: (grown.append(length), reserve(length)))
    result = benchmark(compiled, depths=(0, 100))
    assert events == ["warm_up"] * 4 + ["run"] * 12
    assert filled == [100 + 4 + 1]
    assert grown[0] == max(grown) == 100 + 4 + 1
    assert result.execution.recompiles == 0


def recording(method: Callable[..., None], name: str, events: list[str]) -> Callable[..., None]:
    def record(*arguments: Any) -> None:
        events.append(name)
        method(*arguments)

    return record


def test_end_to_end_runs_sample_as_asked(eager: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[float] = set()
    stream = measurements.Stream

    def note_sampling(*arguments: Any, **settings: Any) -> Any:
        seen.add(settings["sampling"].temperature)
        return stream(*arguments, **settings)

    monkeypatch.setattr(measurements, "Stream", note_sampling)
    benchmark(eager, temperature=0.7)
    assert seen == {0.7}


def test_the_peak_is_without_the_probe(eager: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptfast.bench.bandwidth.PROBE_BYTES", {"cpu": 2**30})
    before = get_peak_resident_memory()
    result = benchmark(eager)
    assert result.memory.peak_resident_bytes < before + 2**29


def test_the_load_of_others_is_seen(tmp_path: Path) -> None:
    stat = tmp_path / "proc/stat"
    stat.parent.mkdir()
    stat.write_text("cpu  100 0 100 800 0 0 0 0 50 0\ncpu0 1 1 1 1\n")
    load_of_others = OtherLoad(tmp_path)
    stat.write_text("cpu  100200 0 100 100800 0 0 0 0 50 0\n")
    share = load_of_others.get_share()
    assert share == pytest.approx(100_100 / 200_100, rel=0.01)
    assert OtherLoad(tmp_path / "nowhere").get_share() is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repeats": 1}, "repeats is 1; at least 3"),
        ({"new_tokens": 0}, "new-tokens is 0"),
        ({"prompt_lengths": (5, 0)}, "a prompt of 0 tokens"),
        ({"depths": (-3,)}, "depth -3"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 2.0}, "top-p is 2.0"),
    ],
)
def test_settings_that_measure_nothing_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_settings(replace(SMALL, **changes))


def test_the_cache_holds_what_is_asked_for_and_no_more() -> None:
    assert count_slots(SMALL, 1000, breaks_down=False) == 64 + 5
    assert count_slots(SMALL, 1000, breaks_down=True) == 64 + 5
    assert count_slots(replace(SMALL, depths=(64,)), 1000, breaks_down=True) == 64 + 16
    assert count_slots(replace(SMALL, depths=(0,), prompt_lengths=(1,)), 1000, breaks_down=False) == 1 + 5
    assert count_slots(replace(SMALL, prompt_lengths=(500,)), 1000, breaks_down=False) == 501
    assert count_slots(replace(SMALL, depths=(995,)), 1000, breaks_down=False) == 1000
    with pytest.raises(PromptError, match="5 tokens after a depth of 996 do not fit the model's context of 1000"):
        count_slots(replace(SMALL, depths=(996,)), 1000, breaks_down=False)
    with pytest.raises(PromptError, match="a prompt of 1000 tokens"):
        count_slots(replace(SMALL, prompt_lengths=(1000,)), 1000, breaks_down=False)


def note(eager: Session, *, cache_bytes: int | None = 0, drift: float = 0.0, **execution: Any) -> str:
    environment = replace(describe_environment(eager.runner.device, 1), last_level_cache_bytes=cache_bytes)
    bandwidth = Bandwidth(1, Spread(1, 1, 1, 1), Spread(1, 1, 1, 1), 1.0, drift)
    facts: dict[str, Any] = {
        "compiled": True,
        "compile_kind": "cached",
        "kernels": "cpp",
        "step": "compiled",
        "cuda_graphs": False,
        "recompiles": 0,
    }
    facts["other_load"] = 0.0
    decode = [replace(benchmark(eager).decode[0], bytes_per_step=1000)]
    return "\n".join(summary.write_notes(eager, environment, Execution(**facts | execution), bandwidth, decode))


def test_notes_say_what_a_reader_must_know(eager: Session) -> None:
    assert note(eager) == ""
    assert note(eager, cache_bytes=None) == ""
    assert note(eager, drift=0.149) == ""
    assert "drifted by 16%" in note(eager, drift=0.16)
    assert "up to 30% of a step's bytes fit into the last-level cache" in note(eager, cache_bytes=300)
    assert "up to 100% of a step's bytes" in note(eager, cache_bytes=3000)
    assert "1 compilations" in note(eager, recompiles=1)
    assert note(eager, other_load=0.04) == note(eager, other_load=None) == ""
    assert "used 30% of the processors" in note(eager, other_load=0.3)


def test_csv_has_a_row_per_measurement_with_all_that_tells_it_apart(eager: Session) -> None:
    result = benchmark(eager)
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    assert [(row["phase"], row["prompt_tokens"] or row["depth"]) for row in rows] == [
        ("prefill", "8"),
        ("prefill", "40"),
        ("decode", "0"),
        ("decode", "64"),
    ]
    assert float(rows[3]["tokens_per_s_median"]) == result.decode[1].tokens_per_s.median
    assert float(rows[3]["step_p99_ms"]) == result.decode[1].step.p99_ms
    assert rows[0]["share"] == ""
    assert {row["environment_torch"] for row in rows} == {result.environment.torch}
    assert {row["model_dtype"] for row in rows} == {"float32"}


def test_steps_that_were_to_be_replayed_and_were_not_are_no_benchmark(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load_tiny(directory)
    session.runner = Runner(session.runner.model, kv_dtype=session.runner.kv_dtype, graphs=DirectRuns())
    assert benchmark(session).execution.cuda_graphs
    monkeypatch.setattr(Runner, "replayed_steps", 0)
    with pytest.raises(UserError, match="launched by the host instead"):
        benchmark(session)


def test_a_fused_step_is_not_taken_apart(eager: Session) -> None:
    runner = SimpleNamespace(device=eager.runner.device, batch_size=1, fused=object())
    with pytest.raises(UserError, match="use --step compiled to take one apart"):
        benchmark(replace(eager, runner=runner), breaks_down=True)
