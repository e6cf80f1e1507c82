"""Compiled steps: kept between processes, made again when what is kept cannot be used, done without if need be."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from gptfast.cache import CACHE_VARIABLE
from gptfast.compilation import INDUCTOR_CACHE_VARIABLE, Step, compute_key, describe_cpu, use_persistent_kernel_cache
from gptfast.decode import decode_one_token, prefill
from gptfast.runner import Runner
from gptfast.session import Session
from tests.reference.sessions import (
    ids_of,
    load_tiny,
    random_prompt,
    run_process,
    tiny_environment,
    write_tiny_model,
)

SHORT = 5  # a prompt of one small chunk: two steps to compile
REPORT = """
import json, sys
import gptfast
from gptfast.cli.main import show_log_lines
show_log_lines()
session = gptfast.load(sys.argv[1], dtype="float32", compile=True, threads=1)
result = gptfast.generate(session, json.loads(sys.argv[2]), max_new_tokens=8)[0]
statistics = session.runner.compile_statistics
steps = {"compiled": statistics.compiled, "loaded": statistics.loaded}
print(json.dumps(steps | {"ids": result.token_ids, "is_compiled": session.runner.is_compiled}))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with tiny_environment(tmp_path_factory) as cache:
        yield cache


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def compiled(directory: Path, cache: Path) -> Session:
    session = load_tiny(directory, compile=True)
    session.runner.warm_up(SHORT)
    return session


@pytest.fixture
def expected(directory: Path, cache: Path) -> Tensor:
    """Logits after a short prompt."""
    return load_tiny(directory).runner.prefill(random_prompt(SHORT))


def list_steps(cache: Path) -> list[Path]:
    return sorted((cache / "steps").glob("*.bin"))


def list_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("gptfast")]


def make_key(runner: Runner, size: int = 1) -> str:
    function = decode_one_token if size == 1 else prefill
    return compute_key(function, runner.model, runner._make_inputs(function, size), separate_kernels=False)


# The key


def test_a_key_is_the_same_for_the_same_model_whatever_its_cache_holds(directory: Path, cache: Path) -> None:
    one, other = load_tiny(directory).runner, load_tiny(directory).runner
    other.reserve(other.context)
    assert make_key(one) == make_key(other)
    assert make_key(one, 32) == make_key(other, 32)


def test_a_key_changes_with_all_that_the_code_depends_on(
    directory: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_tiny(directory).runner
    keys = [make_key(runner), make_key(runner, 32), make_key(runner, 256)]
    keys.append(make_key(load_tiny(directory, dtype="bfloat16").runner))
    keys.append(make_key(load_tiny(directory, batch_size=2).runner))
    keys.append(make_key(load_tiny(directory, batch_size=3).runner))
    keys.append(make_key(load_tiny(write_tiny_model(tmp_path / "other", context=128)).runner))
    torch.set_num_threads(2)
    keys.append(make_key(runner))
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    keys.append(make_key(runner))
    monkeypatch.setattr("gptfast.compilation.describe_cpu", lambda: "another processor")
    keys.append(make_key(runner))
    assert len(set(keys)) == len(keys)


def test_the_processor_is_described() -> None:
    assert len(describe_cpu()) > 5


# What is kept


def test_what_is_compiled_is_kept_and_loaded(compiled: Session, directory: Path, cache: Path, expected: Tensor) -> None:
    assert compiled.runner.is_compiled
    kept = {path.stem for path in list_steps(cache)}
    assert {make_key(compiled.runner), make_key(compiled.runner, 32)} <= kept
    again = load_tiny(directory, compile=True).runner
    again.warm_up(SHORT)
    assert (again.compile_statistics.compiled, again.compile_statistics.loaded) == (0, 2)
    assert torch.allclose(again.prefill(random_prompt(SHORT)), expected, atol=1e-4)


def test_kernels_are_kept_in_the_cache_too(compiled: Session, cache: Path) -> None:
    """Else a restart of the machine clears what the kept steps are made of."""
    inductor = Path(cache_dir())
    assert inductor.name == "inductor"
    assert inductor != Path(default_cache_dir())
    assert any(inductor.rglob("*.so"))


def test_a_second_process_loads_and_compiles_nothing(compiled: Session, directory: Path, cache: Path) -> None:
    outcome = run_process("-c", REPORT, directory, str(random_prompt(SHORT)))
    ids = list(ids_of(load_tiny(directory), random_prompt(SHORT), 8))
    assert outcome.json == {"compiled": 0, "loaded": 2, "ids": ids, "is_compiled": True}
    assert outcome.stderr == ""


# What cannot be used


@pytest.fixture
def own_cache(cache: Path, compiled: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the cache to damage, and a compiler that returns at once what it made before."""
    shutil.copytree(cache / "steps", tmp_path / "cache" / "steps")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    made_before = dict(compiled.runner._steps)

    def build(function: Step, _model: object, inputs: dict[str, Tensor], *_settings: object) -> Step:
        return made_before[function, inputs["tokens"].shape[1]]

    monkeypatch.setattr("gptfast.compilation.build_step", build)
    return tmp_path / "cache"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_text(path: Path) -> None:
    path.write_text("this is no compiled step\n" * 100)


def zero_the_middle(path: Path) -> None:
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] + bytes(256) + data[half + 256 :])


def zero_the_start(path: Path) -> None:
    path.write_bytes(bytes(64) + path.read_bytes()[64:])


def pickle_something_else(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}))


def pickle_of_another_release(path: Path) -> None:
    path.write_bytes(b"cgptfast_of_old\nStep\n.")


@pytest.mark.parametrize(
    "damage",
    [cut, empty, replace_by_text, zero_the_middle, zero_the_start, pickle_something_else, pickle_of_another_release],
)
def test_a_damaged_step_is_made_again_with_a_line(
    damage: Callable[[Path], None],
    own_cache: Path,
    compiled: Session,
    directory: Path,
    expected: Tensor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = own_cache / "steps" / f"{make_key(compiled.runner, 32)}.bin"
    damage(path)
    with caplog.at_level(logging.INFO, "gptfast"):
        runner = load_tiny(directory, compile=True).runner
        runner.warm_up(SHORT)
    assert runner.is_compiled
    assert (runner.compile_statistics.compiled, runner.compile_statistics.loaded) == (1, 1)
    assert any(str(path) in line and "compiled again" in line for line in list_messages(caplog))
    assert torch.allclose(runner.prefill(random_prompt(SHORT)), expected, atol=1e-4)
    again = load_tiny(directory, compile=True).runner
    again.warm_up(SHORT)
    assert again.compile_statistics.loaded == 2


def test_a_step_that_does_not_fit_is_made_again_with_a_line(
    own_cache: Path,
    compiled: Session,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    misfit = SimpleNamespace(guard_check=lambda *_: False)
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda *_: misfit)
    with caplog.at_level(logging.INFO, "gptfast"):
        runner = load_tiny(directory, compile=True).runner
        runner.warm_up(SHORT)
    assert (runner.compile_statistics.compiled, runner.compile_statistics.loaded) == (2, 0)
    path = own_cache / "steps" / f"{make_key(compiled.runner, 32)}.bin"
    assert any(str(path) in line and "does not fit" in line for line in list_messages(caplog))


def test_a_cache_that_cannot_be_written_costs_a_line_and_no_result(
    own_cache: Path,
    directory: Path,
    expected: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Root ignores modes, so the directory is one that cannot exist: it stands under a file."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    monkeypatch.delenv(INDUCTOR_CACHE_VARIABLE, raising=False)
    with caplog.at_level(logging.INFO, "gptfast"):
        runner = load_tiny(directory, compile=True).runner
        logits = runner.prefill(random_prompt(SHORT))
    assert runner.is_compiled
    assert runner.compile_statistics.compiled == 1
    assert torch.allclose(logits, expected, atol=1e-4)
    lines = [line for line in list_messages(caplog) if "cannot be written" in line]
    assert len(lines) == 1
    assert str(tmp_path / "file" / "cache") in lines[0]
    assert not any("later starts load it" in line for line in list_messages(caplog))


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_leaves_nothing_behind(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every start of a container with a read-only home fills its temporary directory."""
    monkeypatch.delenv(INDUCTOR_CACHE_VARIABLE, raising=False)
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    places = {CACHE_VARIABLE: str(tmp_path / "file" / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    outcome = run_process("-c", REPORT, directory, str(random_prompt(SHORT)), **places)
    assert outcome.json["is_compiled"]
    assert [path.name for path in (tmp_path / "tmp").iterdir() if path.name.startswith("gptfast")] == []


# Where kernels go


def test_a_kernel_cache_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(INDUCTOR_CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    use_persistent_kernel_cache()
    assert os.environ[INDUCTOR_CACHE_VARIABLE] == str(tmp_path)


@pytest.mark.parametrize("is_set", [False, True])
def test_the_default_kernel_cache_is_replaced(is_set: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv(INDUCTOR_CACHE_VARIABLE, default_cache_dir())  # as importing the compiler may do
    if not is_set:
        monkeypatch.delenv(INDUCTOR_CACHE_VARIABLE)
    use_persistent_kernel_cache()
    assert os.environ[INDUCTOR_CACHE_VARIABLE] == str(tmp_path / "inductor")


# No compiler


def test_a_machine_without_a_compiler_decodes_eagerly_and_says_so_once(directory: Path, tmp_path: Path) -> None:
    caches = {CACHE_VARIABLE: str(tmp_path / "cache"), INDUCTOR_CACHE_VARIABLE: str(tmp_path / "inductor")}
    outcome = run_process("-c", REPORT, directory, str(random_prompt(SHORT)), CXX="/nonexistent/g++", **caches)
    ids = list(ids_of(load_tiny(directory), random_prompt(SHORT), 8))
    assert outcome.json == {"compiled": 0, "loaded": 0, "ids": ids, "is_compiled": False}
    lines = [line for line in outcome.stderr.splitlines() if "nothing can be compiled" in line]
    assert len(lines) == 1
    assert "eagerly" in lines[0]
    assert "compiler" in lines[0]
    assert "Traceback" not in outcome.stderr
