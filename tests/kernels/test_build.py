from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from gptfast.cpu import describe_cpu
from gptfast.kernels import build, ops
from gptfast.quantization import QuantizedWeight
from tests.kernels.test_linear import ALL_KINDS, EXACT, make_inputs, measure_error, multiply
from tests.reference.attention import attend, make_cache
from tests.reference.quantized_weights import draw_quantized
from tests.reference.sessions import Outcome, start_process

MACHINES = {
    "avx512": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"),
    "avxvnni": ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "any": (),
}
SOURCE = "int compiled() { return 1; }\n"
LOAD = """
import logging, pathlib, sys
from gptfast.kernels import build
logging.basicConfig(level=logging.INFO, format="%(message)s")
build.SOURCE_DIR = pathlib.Path(sys.argv[1])
print(build.load_library())
"""
ASK = "from gptfast.kernels.ops import has_cpu_kernels; print(has_cpu_kernels())"
SAYS_THAT_IT_COMPILES = "compiling the CPU kernels"
NO_COMPILER = {
    "missing-compiler": "there is no C++ compiler missing-compiler",
    "/bin/false": "/bin/false does not say its version",
    " ": "CXX is empty",
    '"g++': "CXX cannot be read (No closing quotation)",
}
"""What CXX may hold, and what is said then."""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Code that is compiled in no time."""
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "probe.cpp").write_text(SOURCE)
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def start_loading(sources: Path, cache: Path, **environment: str) -> subprocess.Popen[str]:
    return start_process("-c", LOAD, sources, GPTFAST_CACHE=str(cache), **environment)


def finish(process: subprocess.Popen[str]) -> Outcome:
    with process:
        stdout, stderr = process.communicate(timeout=120)
    return Outcome(process.returncode, stdout, stderr)


def write_program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def list_libraries(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.so"))


def test_processes_that_start_together_build_once(sources: Path, cache: Path) -> None:
    outcomes = [finish(process) for process in [start_loading(sources, cache) for _ in range(3)]]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0]
    assert sum(SAYS_THAT_IT_COMPILES in outcome.stderr for outcome in outcomes) == 1
    [library] = list_libraries(cache)
    assert {outcome.stdout for outcome in outcomes} == {f"{library}\n"}


def test_a_change_in_a_source_is_built_anew_and_nothing_else_is(sources: Path, cache: Path) -> None:
    finish(start_loading(sources, cache))
    again = finish(start_loading(sources, cache))
    assert SAYS_THAT_IT_COMPILES not in again.stderr
    (sources / "probe.cpp").write_text(SOURCE + "int added() { return 2; }\n")
    changed = finish(start_loading(sources, cache))
    assert SAYS_THAT_IT_COMPILES in changed.stderr
    assert len(list_libraries(cache)) == 2


def test_a_killed_build_leaves_nothing_that_loads_and_the_next_one_succeeds(
    sources: Path, cache: Path, tmp_path: Path
) -> None:
    with killed_while_compiling(sources, cache, tmp_path):
        assert list_libraries(cache) == []
    outcome = finish(start_loading(sources, cache))
    assert outcome.exit_code == 0, outcome
    assert len(list_libraries(cache)) == 1


@contextlib.contextmanager
def killed_while_compiling(sources: Path, cache: Path, directory: Path) -> Iterator[None]:
    """A process that builds with a compiler that takes for ever is killed with it, once it compiles."""
    started = directory / "started"
    script = f'case " $* " in *" -c "*) touch {started}; sleep 600;; esac\nexec g++ "$@"'
    compiler = write_program(directory / "slow-g++", script)
    process = subprocess.Popen(
        [sys.executable, "-c", LOAD, sources],
        env=os.environ | {"GPTFAST_CACHE": str(cache), "CXX": str(compiler)},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not started.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    yield


def test_code_that_does_not_compile_is_told_in_one_line(sources: Path, cache: Path) -> None:
    (sources / "probe.cpp").write_text("int broken() { return nothing; }\n")
    outcome = finish(start_loading(sources, cache))
    last = outcome.stderr.splitlines()[-1]
    assert "BuildError" in last
    assert "nothing" in last
    assert list_libraries(cache) == []


def test_a_damaged_library_is_named(sources: Path, cache: Path) -> None:
    finish(start_loading(sources, cache))
    [library] = list_libraries(cache)
    library.write_bytes(b"not a library")
    last = finish(start_loading(sources, cache)).stderr.splitlines()[-1]
    assert "BuildError" in last
    assert f"{library} cannot be loaded" in last


def test_a_cache_that_cannot_be_written_costs_a_build_at_every_start(sources: Path, tmp_path: Path) -> None:
    obstacle = tmp_path / "file"
    obstacle.write_text("")
    outcome = finish(start_loading(sources, obstacle / "cache"))
    assert outcome.exit_code == 0, outcome
    assert f"{obstacle / 'cache' / 'kernels'} cannot be written, so the next start must too" in outcome.stderr
    assert not Path(outcome.stdout.strip()).exists()  # it was temporary


@pytest.mark.parametrize(("compiler", "says"), NO_COMPILER.items())
def test_without_a_compiler_there_are_no_kernels_and_one_line_says_so(cache: Path, compiler: str, says: str) -> None:
    check_that_there_are_no_kernels(cache, says, CXX=compiler)


def test_without_a_path_there_is_no_compiler(cache: Path) -> None:
    check_that_there_are_no_kernels(cache, "there is no C++ compiler g++", PATH="", CXX="g++")


def test_a_compiler_that_breaks_while_it_builds_is_told_in_one_line(cache: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    script = f"[ ! -e {asked} ] && touch {asked} && echo 1.0"
    compiler = write_program(tmp_path / "short-lived", script)
    check_that_there_are_no_kernels(cache, "cannot be compiled", CXX=str(compiler))


def check_that_there_are_no_kernels(cache: Path, says: str, **environment: str) -> None:
    outcome = finish(start_process("-c", ASK, GPTFAST_CACHE=str(cache), **environment))
    assert (outcome.exit_code, outcome.stdout) == (0, "False\n")
    [line] = outcome.stderr.splitlines()
    assert says in line


def test_without_a_compiler_what_was_built_before_will_do(sources: Path, cache: Path) -> None:
    built = finish(start_loading(sources, cache))
    outcomes = [finish(process) for process in [start_loading(sources, cache, CXX=name) for name in NO_COMPILER]]
    for outcome in outcomes:
        assert outcome == Outcome(0, built.stdout, "")


def test_the_compiler_behind_a_launcher_is_used_and_a_new_version_of_it_is_noticed(
    sources: Path, cache: Path, tmp_path: Path
) -> None:
    launcher = write_program(tmp_path / "launcher", 'exec "$@"')
    compiler, used = tmp_path / "compiler", tmp_path / "used"
    for version in ("13.1", "13.2"):
        write_program(compiler, f'[ "$1" = --version ] && exec echo {version}\ntouch {used}\nexec g++ "$@"')
        outcome = finish(start_loading(sources, cache, CXX=f"{launcher} {compiler}"))
        assert outcome.exit_code == 0, outcome
        assert len(outcome.stderr.splitlines()) == 1  # that it compiles, and no warning
    assert used.exists()
    assert len(list_libraries(cache)) == 2


@pytest.mark.parametrize(
    "reason",
    [
        "probe.cpp:1:5: internal compiler error: Segmentation fault",
        "/tmp/probe.s:7: Error: no such instruction",
        "/usr/bin/ld: cannot find -lgomp",
        "cc1plus: out of memory allocating 65536 bytes",
    ],
)
def test_of_what_a_compiler_writes_the_line_with_the_reason_is_told(
    reason: str, sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = ("", "") if reason.startswith("cc1plus") else ("In file included from a.h", "g++: error: exit 1")
    script = f'case " $* " in *" -c "*) printf "{before}\n{reason}\n{after}\n" >&2; exit 1;; esac\nexec g++ "$@"'
    monkeypatch.setenv("CXX", str(write_program(tmp_path / "broken-g++", script)))
    monkeypatch.setenv("GPTFAST_CACHE", str(cache))
    monkeypatch.setattr(build, "SOURCE_DIR", sources)
    with pytest.raises(build.BuildError, match=f"compiled: {re.escape(reason)}$"):
        build.load_library("probe")


@pytest.mark.parametrize("machine", MACHINES)
def test_every_kind_of_machine_has_its_code(machine: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the optimizer, which takes a minute and is not what is tested."""
    flags = MACHINES[machine]
    if not can_run(flags):
        check_that_it_compiles(flags)
        pytest.skip(f"{machine} code: compiled, not run here")
    if machine == next(name for name, others in MACHINES.items() if can_run(others)):
        pytest.skip("this is the machine's own code, which all other tests run")
    monkeypatch.setattr(build, "FLAGS", ("-std=c++20", "-O0", "-fopenmp"))
    monkeypatch.setenv("GPTFAST_CACHE", str(cache))
    check_that_it_computes(f"plain_{machine}", flags, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_every_kind_of_machine_has_its_optimized_code(
    machine: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_run(MACHINES[machine]):
        pytest.skip(f"this machine does not run {machine} code")
    monkeypatch.setenv("GPTFAST_CACHE", str(cache))
    check_that_it_computes(f"optimized_{machine}", MACHINES[machine], monkeypatch)


def can_run(flags: Sequence[str]) -> bool:
    features = describe_cpu().replace("avx512_vnni", "avx512vnni").replace("avx_vnni", "avxvnni").split()
    return all(flag.removeprefix("-m") in features for flag in flags)


def check_that_it_compiles(flags: Sequence[str]) -> None:
    from torch.utils.cpp_extension import include_paths

    includes = [part for path in include_paths() for part in ("-isystem", path)]
    for source in build.list_sources("*.cpp"):
        command = [*build.find_compiler(), "-std=c++20", "-DGPTFAST_LIBRARY=other", *flags, *includes]
        subprocess.run([*command, "-c", source, "-o", os.devnull], check=True)


def check_that_it_computes(name: str, flags: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of each kind of weights, and attention over each kind of cache, against float64."""
    build.load_library(name, flags)
    monkeypatch.setattr(torch.ops, "gptfast", getattr(torch.ops, name))
    others = [make_inputs(65, 90), draw_quantized(40, 96, 8, 32), draw_quantized(33, 90, 4, None)]
    for weight in [*ALL_KINDS, *others]:
        check_products(weight)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for dim in (20, 64):
            q, cache, input_pos = torch.randn(1, 3, 6, dim), make_cache(dtype, 1, 2, 140, dim), torch.arange(126, 129)
            actual = ops.attention(q, cache.k, cache.v, input_pos, k_scales=cache.k_scales, v_scales=cache.v_scales)
            torch.testing.assert_close(actual.double(), attend(q, cache, input_pos), atol=1e-5, rtol=1e-5)


def check_products(weight: torch.Tensor | QuantizedWeight) -> None:
    """One row, a part of a tile, a whole one, and more than are multiplied without expanding the matrix."""
    dense = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
    for rows in (1, 3, 8, 40):
        # Multiples of 1/127 of the largest are not changed by rounding to int8.
        x = torch.randint(-127, 128, (rows, weight.shape[1])).float() / 64
        x[:, ::32] = 127 / 64
        for rounds_inputs in (False, True):
            error = measure_error(multiply(x, weight, rounds_inputs=rounds_inputs), x, dense)
            assert error < EXACT, (rows, rounds_inputs)
