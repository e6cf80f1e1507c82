"""What a benchmark says about its machine and its commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import gptfast
from gptfast.bench import environment
from gptfast.bench.environment import (
    describe_checkout,
    describe_environment,
    list_cores,
    parse_cpu_name,
    sum_last_level_caches,
)
from gptfast.memory import get_physical_memory

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def write_cache(root: Path, core: int, index: int, *, level: int, size: str, shared_by: str, kind: str) -> None:
    directory = root / f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
    directory.mkdir(parents=True)
    facts = {"level": str(level), "size": size, "shared_cpu_list": shared_by, "type": kind}
    for name, text in facts.items():
        (directory / name).write_text(text + "\n")


@pytest.fixture
def clusters(tmp_path: Path) -> Path:
    """Four cores, two on each 32 MiB cache."""
    for core in range(4):
        write_cache(tmp_path, core, 0, level=1, size="48K", shared_by=str(core), kind="Data")
        write_cache(tmp_path, core, 1, level=1, size="32K", shared_by=str(core), kind="Instruction")
        write_cache(tmp_path, core, 2, level=2, size="1024K", shared_by=str(core), kind="Unified")
        write_cache(tmp_path, core, 3, level=3, size="32768K", shared_by="0-1" if core < 2 else "2-3", kind="Unified")
    return tmp_path


def run_git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one commit with a package at its top level and another one, in site-packages, that it tracks."""
    for directory in (tmp_path / "gptfast", tmp_path / "env/site-packages/gptfast"):
        directory.mkdir(parents=True)
        (directory / "__init__.py").write_text("")
    run_git(tmp_path, "init", "--quiet")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_the_environment_of_a_cpu_run_is_this_machines_own() -> None:
    found = describe_environment(torch.device("cpu"), threads=3)
    assert (found.device, found.threads) == ("cpu", 3)
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.device_name
    assert found.system.startswith(platform.system())
    assert found.torch == torch.__version__
    assert found.gptfast == gptfast.__version__
    assert (found.commit is None) == (found.commit_is_clean is None)


@pytest.mark.gpu
def test_the_environment_of_a_gpu_run_is_the_gpus() -> None:
    found = describe_environment(torch.device("cuda"), threads=1)
    assert found.device_name == torch.cuda.get_device_name()
    assert found.memory_bytes == torch.cuda.mem_get_info()[1]
    assert found.last_level_cache_bytes


def test_only_the_cores_that_the_process_may_use_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 2}, raising=False)
    assert list_cores() == [2, 5]
    monkeypatch.delattr(os, "sched_getaffinity")
    assert list_cores() == list(range(os.cpu_count() or 1))


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="compared with Linux's /proc")
def test_memory_is_all_of_the_machines() -> None:
    kilobytes = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    assert get_physical_memory() == int(kilobytes) * 1024


@pytest.mark.parametrize(
    ("description", "name"),
    [
        ("model name\t: AMD EPYC 9654 96-Core Processor\nflags\t\t: fpu vme", "AMD EPYC 9654 96-Core Processor"),
        ("Features\t: fp asimd\nCPU part\t: 0xd4f", f"{platform.machine()}, CPU part 0xd4f"),
        ("unknown", platform.processor() or platform.machine()),
    ],
)
def test_a_processor_is_named_as_well_as_the_system_can(description: str, name: str) -> None:
    assert parse_cpu_name(description) == name


def test_a_cache_that_cores_share_counts_once(clusters: Path) -> None:
    assert sum_last_level_caches([0, 1], clusters) == 32 * 2**20


def test_the_caches_of_all_clusters_in_use_are_added(clusters: Path) -> None:
    assert sum_last_level_caches([0, 1, 2, 3], clusters) == 64 * 2**20
    assert sum_last_level_caches([1, 2], clusters) == 64 * 2**20


def test_cores_without_the_highest_level_add_nothing(clusters: Path) -> None:
    write_cache(clusters, 4, 0, level=2, size="2048K", shared_by="4", kind="Unified")
    assert sum_last_level_caches([0, 4], clusters) == 32 * 2**20


def test_a_machine_that_hides_its_caches_has_none(tmp_path: Path) -> None:
    assert sum_last_level_caches([0, 1], tmp_path) is None
    write_cache(tmp_path, 0, 0, level=3, size="", shared_by="0", kind="Unified")
    assert sum_last_level_caches([0, 1], tmp_path) is None


@needs_git
def test_a_checkout_tells_its_commit_and_whether_files_changed(checkout: Path) -> None:
    commit, is_clean = describe_checkout(checkout / "gptfast")
    assert commit is not None
    assert len(commit) == 12
    assert is_clean
    (checkout / "gptfast/untracked.py").write_text("")
    assert describe_checkout(checkout / "gptfast") == (commit, True)
    (checkout / "gptfast/__init__.py").write_text("changed = True")
    assert describe_checkout(checkout / "gptfast") == (commit, False)


@needs_git
def test_a_package_installed_inside_another_checkout_has_no_commit(checkout: Path) -> None:
    assert describe_checkout(checkout / "env/site-packages/gptfast") == (None, None)
    run_git(checkout, "rm", "--cached", "--quiet", "-r", "env")
    assert describe_checkout(checkout / "env/site-packages/gptfast") == (None, None)


@needs_git
def test_a_package_that_the_repository_around_it_does_not_track_has_no_commit(checkout: Path) -> None:
    run_git(checkout, "rm", "--cached", "--quiet", "-r", "gptfast")
    assert describe_checkout(checkout / "gptfast") == (None, None)


def test_a_package_outside_any_repository_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(Path(gptfast.__file__).parents[1] / ".git"))
    assert describe_checkout(tmp_path) == (None, None)


@needs_git
def test_the_repository_of_a_hook_does_not_stand_in_for_the_packages(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = describe_checkout(checkout / "gptfast")
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("other") / ".git"))
    assert describe_checkout(checkout / "gptfast") == expected


@needs_git
def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert describe_checkout(checkout / "gptfast") == (None, None)


@needs_git
def test_a_git_that_hangs_is_not_waited_for(checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "bin/git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(environment, "GIT_TIMEOUT_S", 0.1)
    assert describe_checkout(checkout / "gptfast") == (None, None)
