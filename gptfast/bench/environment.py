"""On what a figure was measured: without it no figure means anything."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import gptfast
from gptfast.memory import get_physical_memory

if TYPE_CHECKING:
    import torch

GIT_TIMEOUT_S = 5


@dataclass(frozen=True)
class Environment:
    """The machine and the software.

    Attributes:
        device: `cpu` or `cuda`.
        device_name: the processor's or the GPU's own name.
        cores: of the CPU that this process may use.
        threads: that a CPU step runs on.
        last_level_cache_bytes: of the device, on a CPU all that `cores` reach; None where the system does not tell.
        memory_bytes: of the device; None where the system does not tell.
        system: operating system and its release.
        python, torch, gptfast: versions.
        commit: of the project's checkout; None where it is not one.
        commit_is_clean: whether the checkout's tracked files are those of that commit; None without one.
    """

    device: str
    device_name: str
    cores: int
    threads: int
    last_level_cache_bytes: int | None
    memory_bytes: int | None
    system: str
    python: str
    torch: str
    gptfast: str
    commit: str | None
    commit_is_clean: bool | None


def describe_environment(device: torch.device, threads: int) -> Environment:
    """What a run on `device` with so many CPU threads was measured on."""
    import torch

    cores = list_cores()
    name, cache_bytes, memory_bytes = _describe_device(device, cores)
    commit, commit_is_clean = describe_checkout(Path(gptfast.__file__).parent)
    return Environment(
        device=device.type,
        device_name=name,
        cores=len(cores),
        threads=threads,
        last_level_cache_bytes=cache_bytes,
        memory_bytes=memory_bytes,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        gptfast=gptfast.__version__,
        commit=commit,
        commit_is_clean=commit_is_clean,
    )


def _describe_device(device: torch.device, cores: Sequence[int]) -> tuple[str, int | None, int | None]:
    """Its name, the bytes of its last-level cache and those of its memory."""
    if device.type == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(device)
        return properties.name, properties.L2_cache_size, properties.total_memory
    from gptfast.cpu import describe_cpu

    return parse_cpu_name(describe_cpu()), sum_last_level_caches(cores), get_physical_memory()


def list_cores() -> list[int]:
    """The numbers of the logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def parse_cpu_name(description: str) -> str:
    """The processor's name in the text of `describe_cpu`; an Arm core, which has none, by its part number."""
    if found := re.search(r"^model name\s*:\s*(.+)$", description, re.MULTILINE):
        return found[1].strip()
    if found := re.search(r"^CPU part\s*:\s*(\w+)$", description, re.MULTILINE):
        return f"{platform.machine()}, CPU part {found[1]}"
    return platform.processor() or platform.machine()


def sum_last_level_caches(cores: Sequence[int], root: Path = Path("/")) -> int | None:
    """Bytes of the highest level of cache that these cores reach; None where the system does not tell.

    A cache that several of them share counts once. Processors with one cache per cluster of cores have several, and
    threads on all clusters fill them all. Reads /sys below `root`.
    """
    found: dict[tuple[int, str], int] = {}
    for core in cores:
        for directory in (root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            kind, level, size, shared_by = (
                _read_line(directory / name) for name in ("type", "level", "size", "shared_cpu_list")
            )
            if kind != "Instruction" and level.isdigit() and re.fullmatch(r"\d+K", size):
                found[int(level), shared_by or str(core)] = int(size[:-1]) * 1024
    last_level = max((level for level, _ in found), default=None)
    if last_level is None:
        return None
    return sum(size_bytes for (level, _), size_bytes in found.items() if level == last_level)


def describe_checkout(package: Path) -> tuple[str | None, bool | None]:
    """The commit of the checkout whose top level holds `package`, and whether its tracked files are unchanged.

    Both None where git is missing, too slow, or does not track the package just there: a package that is installed
    somewhere inside another project's checkout is not of that project's commit.
    """
    if _run_git(package, "ls-files", "--full-name", "--error-unmatch", "__init__.py") != f"{package.name}/__init__.py":
        return None, None
    commit = _run_git(package, "rev-parse", "--short=12", "HEAD")
    changes = _run_git(package, "status", "--porcelain", "-uno")
    if commit is None or changes is None:
        return None, None
    return commit, changes == ""


def _run_git(directory: Path, *arguments: str) -> str | None:
    # Within a hook, variables such as GIT_DIR name another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        result = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(directory), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _read_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
