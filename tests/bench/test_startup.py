"""Starts of a process that plays `gptfast generate`, so that every second is known beforehand."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from gptfast.bench import startup
from gptfast.bench.startup import (
    KERNEL_CACHE_VARIABLES,
    Start,
    StartError,
    StartupResult,
    StartupSettings,
    build_command,
    explain_failure,
    get_file_name,
    measure_startup,
    split_start,
    summarize_starts,
    time_start,
)
from gptfast.cache import CACHE_VARIABLE
from gptfast.errors import UserError

REPORT = {
    "import_s": 1.0,
    "load_s": 2.0,
    "compile_s": 3.0,
    "compile_kind": "cached",
    "ttft_s": 0.5,
    "device": "cpu",
    "dtype": "float32",
    "weights": "Q4_1",
    "activations": "int8",
    "kv_dtype": "bfloat16",
    "kernels": "cpp",
    "threads": 2,
}
PLAYER = """
import json, os, sys
cache, log = os.environ["GPTFAST_CACHE"], sys.argv[1]
is_empty = not os.listdir(cache)
open(os.path.join(cache, "step.bin"), "w").close()
variables = [name for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if name in os.environ]
with open(log, "a") as lines:
    print(json.dumps([cache, is_empty, variables]), file=lines)
print("a token")
print(json.dumps(json.loads(sys.argv[2]) | ({"dtype": sys.argv[3]} if is_empty else {})))
"""
"""Notes what it finds in its cache, leaves a file there, and prints its report; an empty cache changes the dtype."""

Runs = Sequence[tuple[str, bool, list[str]]]
Measure = Callable[..., tuple[StartupResult, Runs, list[str]]]


def make_settings(checkpoint: str | None = "model", **changes: object) -> StartupSettings:
    settings: dict[str, object] = {
        "checkpoint": checkpoint,
        "preset": None,
        "device": "auto",
        "dtype": None,
        "weights": "stored",
        "activations": None,
        "kv_dtype": None,
        "kernels": "auto",
        "cuda_graphs": None,
        "step": "auto",
        "pdl": True,
        "threads": None,
        "compile": True,
        "prompt_tokens": 32,
        "cold_starts": 2,
        "warm_starts": 3,
    }
    return StartupSettings(**(settings | changes))  # type: ignore[arg-type]


def play(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def count_from(*times: float) -> Callable[[], float]:
    values: Iterator[float] = iter(times)
    return lambda: next(values)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, in which there is something already."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/earlier.bin").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    for name in KERNEL_CACHE_VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path / "cache"


@pytest.fixture
def measure(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Measures the player: the result, what each of its processes found, and the messages."""
    log = tmp_path / "log"

    def run(settings: StartupSettings, cold_dtype: str = "float32") -> tuple[StartupResult, Runs, list[str]]:
        command = [*play(PLAYER), str(log), json.dumps(REPORT), cold_dtype]
        monkeypatch.setattr(startup, "build_command", lambda _: command)
        messages: list[str] = []
        result = measure_startup(settings, messages.append)
        return result, [json.loads(line) for line in log.read_text().splitlines()], messages

    return run


# One start


def test_the_parts_add_up_to_the_first_token() -> None:
    start = split_start(REPORT, first_token_s=7.25, teardown_s=0.125)
    assert start == Start(
        interpreter_s=0.75,
        import_s=1.0,
        load_s=2.0,
        compile_s=3.0,
        first_step_s=0.5,
        first_token_s=7.25,
        teardown_s=0.125,
    )


def test_a_start_is_timed_to_its_first_output_and_to_its_end() -> None:
    program = f"print('a token'); print('{json.dumps(REPORT)}')"
    start, report = time_start(play(program), os.environ, clock=count_from(100.0, 110.0, 111.5))
    assert (start.first_token_s, start.interpreter_s, start.teardown_s) == (10.0, 3.5, 1.5)
    assert report == REPORT


def test_the_first_byte_counts_and_not_the_first_line() -> None:
    program = f"import time; print('a', end='', flush=True); time.sleep(2); print('\\n{json.dumps(REPORT)}')"
    start, _ = time_start(play(program), os.environ)
    assert start.teardown_s > 0.5


def test_many_error_lines_do_not_block_a_start() -> None:
    program = f"import sys; sys.stderr.write('warning ' * 100_000); print('{json.dumps(REPORT)}')"
    assert time_start(play(program), os.environ)[1] == REPORT


def test_a_worker_that_holds_the_output_open_is_neither_waited_for_nor_left() -> None:
    worker = "import subprocess, sys; w = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    program = f"{worker}; import json; print(json.dumps({REPORT} | {{'worker': w.pid}}), flush=True)"
    began = time.perf_counter()
    _, report = time_start(play(program), os.environ)
    assert time.perf_counter() - began < 30
    assert_ends(report["worker"])


def assert_ends(pid: int) -> None:
    """The process is gone, or dead and waiting for somebody to ask for its exit code, soon."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            stat = Path(f"/proc/{pid}/stat")
            if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is alive")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; print('loading', file=sys.stderr); sys.exit('error: the model is broken; mend it')", "the model"),
        ("raise RuntimeError('a fault')", "RuntimeError: a fault"),
        ("import sys; print('a token'); sys.exit(3)", "ended with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(program: str, message: str) -> None:
    with pytest.raises(StartError, match=message) as caught:
        time_start(play(program), os.environ)
    assert "\n" not in str(caught.value)


def test_the_childs_error_is_ours_without_its_prefix() -> None:
    assert explain_failure(2, "compiling\nerror: no such model; name one\n\n") == "no such model; name one"


def test_ctrl_c_ends_the_started_process(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt_once_it_runs() -> None:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_once_it_runs, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        time_start(play(program), os.environ)
    assert_ends(int(pid_file.read_text()))


# The command


def test_what_is_asked_for_reaches_the_started_process() -> None:
    precision = {"dtype": "bfloat16", "weights": "int4", "activations": "fp32", "kv_dtype": "int8"}
    command = build_command(
        make_settings("m.gguf", device="cpu", threads=3, prompt_tokens=7, step="fused", pdl=False, **precision)
    )
    assert command[:4] == [sys.executable, "-m", "gptfast", "generate"]
    text = " ".join(command)
    for option in ("--checkpoint m.gguf", "--device cpu", "--dtype bfloat16", "--threads 3", "--prompt 7", "--compile"):
        assert option in text
    assert "--weights int4 --activations fp32 --kv-dtype int8 --kernels auto" in text
    assert "--step fused" in text
    assert "--no-pdl" in command
    assert "--random" not in text


def test_what_is_not_asked_for_is_left_to_its_default() -> None:
    command = build_command(make_settings(None, preset="llama-3.2-1b", compile=False))
    assert "--random llama-3.2-1b" in " ".join(command)
    assert not {"--no-pdl", "--checkpoint", "--dtype", "--activations", "--kv-dtype", "--threads", "--compile"} & set(
        command
    )


# All starts


def test_the_user_s_cache_serves_the_warm_starts_and_empty_ones_the_cold(measure: Measure, cache: Path) -> None:
    result, runs, messages = measure(make_settings())
    assert [is_empty for _, is_empty, _ in runs] == [False, True, True, False, False, False]
    assert len(messages) == len(runs)
    used = [directory for directory, _, _ in runs]
    assert set(used[:1] + used[3:]) == {str(cache)}
    assert len({str(cache), *used}) == 3
    assert not any(Path(directory).exists() for directory in used[1:3])
    assert result.cold is not None
    assert (result.cold.first_token_s.runs, result.warm.first_token_s.runs) == (2, 3)


def test_a_cold_start_does_not_see_the_compilers_own_caches(
    measure: Measure,
) -> None:
    _, runs, _ = measure(make_settings(cold_starts=1, warm_starts=1))
    assert [variables for _, _, variables in runs] == [list(KERNEL_CACHE_VARIABLES), [], list(KERNEL_CACHE_VARIABLES)]


def test_without_cold_starts_there_are_none(measure: Measure) -> None:
    result, runs, _ = measure(make_settings(cold_starts=0, warm_starts=1))
    assert result.cold is None
    assert len(runs) == 2


def test_the_result_says_what_ran(measure: Measure) -> None:
    result, _, _ = measure(make_settings("some/where/model.gguf", cold_starts=1, warm_starts=1))
    assert (result.model, result.dtype) == ("model.gguf", "float32")
    assert (result.weights, result.activations, result.kv_dtype) == ("Q4_1", "int8", "bfloat16")
    assert (result.environment.device, result.environment.threads) == ("cpu", 2)
    preset, _, _ = measure(make_settings(None, preset="llama-3.2-1b", cold_starts=0, warm_starts=1))
    assert preset.model == "llama-3.2-1b"


def test_a_cold_start_in_another_dtype_is_noted(
    measure: Measure,
) -> None:
    same, _, _ = measure(make_settings(cold_starts=1, warm_starts=1))
    other, _, _ = measure(make_settings(cold_starts=1, warm_starts=1), cold_dtype="bfloat16")
    assert other.dtype == "float32"
    assert set(other.notes) - set(same.notes) == {startup.DTYPE_NOTE}


def test_a_warm_start_that_compiled_is_noted() -> None:
    cached, cold, eager = ({"dtype": "float32", "compile_kind": kind} for kind in ("cached", "cold", "none"))
    compiled = make_settings()
    assert startup.write_notes(compiled, [cold], [cached, cached]) == startup.NOTES
    for warm in ([cold, cold], [cached, cold], [eager, cached]):
        assert startup.write_notes(compiled, [cold], warm) == (*startup.NOTES, startup.UNCACHED_NOTE)
    assert startup.write_notes(make_settings(compile=False), [eager], [eager]) == startup.NOTES


def test_the_default_model_is_fetched_once_and_named_to_the_starts(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def keep(settings: StartupSettings) -> list[str]:
        commands.append(build_command(settings))
        return [*play(PLAYER), str(tmp_path / "log"), json.dumps(REPORT), "float32"]

    monkeypatch.setattr(startup, "get_default_model", lambda on_message: cache / "models/default.gguf")
    monkeypatch.setattr(startup, "build_command", keep)
    result = measure_startup(make_settings(None, cold_starts=1, warm_starts=1), lambda _: None)
    assert [command[command.index("--checkpoint") + 1] for command in commands] == [str(cache / "models/default.gguf")]
    assert result.model == "default.gguf"


def test_a_cache_that_cannot_be_written_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(cache / "earlier.bin"))
    with pytest.raises(UserError, match=rf"earlier\.bin.*{CACHE_VARIABLE}"):
        measure_startup(make_settings(), lambda _: None)


def test_an_empty_cache_is_removed_when_its_start_fails(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(StartError):
        startup.time_cold_start(play("import os; open(os.environ['GPTFAST_CACHE'] + '/half', 'w'); raise OSError"))
    assert list((tmp_path / "temporary").iterdir()) == []


# Figures


def test_every_part_is_summarized_over_all_starts() -> None:
    starts = [split_start(REPORT | {"load_s": load_s}, 10.0 + load_s, load_s / 10) for load_s in (2.0, 4.0, 9.0)]
    summary = summarize_starts(starts)
    assert (summary.load_s.median, summary.first_token_s.median, summary.teardown_s.median) == (4.0, 14.0, 0.4)
    assert summary.load_s.p10 == pytest.approx(2.4)
    assert summary.load_s.p90 == pytest.approx(8.0)
    assert summary.import_s.runs == 3


def test_a_single_start_is_its_own_median() -> None:
    summary = summarize_starts([split_start(REPORT, 7.0, 1.0)])
    assert (summary.first_token_s.runs, summary.first_token_s.median) == (1, 7.0)
    assert summary.first_token_s.p10 == summary.first_token_s.p90 == 7.0


def test_a_checkpoint_given_as_this_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some-model").mkdir()
    monkeypatch.chdir(tmp_path / "some-model")
    assert get_file_name(".") == "some-model"
    assert get_file_name("../some-model/weights.gguf") == "weights.gguf"
