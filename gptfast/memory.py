"""How much memory is free, on this machine or its GPU, and how much this process holds."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def get_available_memory(device: torch.device) -> int | None:
    """Bytes that new allocations can take on the device; None where the system does not tell."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return free
    return get_available_host_memory()


def get_peak_memory(device: torch.device) -> int:
    """The most bytes held so far: of the GPU on CUDA, else resident."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return get_peak_resident_memory()


def reset_peak_memory(device: torch.device) -> None:
    """Let the peaks begin anew with what is held now; a system that cannot do that for a process keeps its own."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5)


def get_peak_resident_memory(root: Path = Path("/")) -> int:
    """The most bytes that were resident in this process, since it began or `reset_peak_memory` was called."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", _read_text(root / "proc/self/status"), re.MULTILINE)
    if found:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def get_resident_memory(root: Path = Path("/")) -> int | None:
    """Bytes resident in this process now; None where the system does not tell. Reads /proc below `root`."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", _read_text(root / "proc/self/status"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def get_available_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that new allocations can take on this machine, within the limits of the control group.

    Where the system does not tell what is free, all of its physical memory, and None if it tells neither. Reads
    /proc and /sys below `root`.
    """
    free_bytes = _read_meminfo(root / "proc/meminfo")
    if free_bytes is not None:
        return min([free_bytes, *_read_cgroup_rooms(root)])
    return get_physical_memory()


def get_physical_memory() -> int | None:
    """Bytes of memory in this machine, used or not; None where the system does not tell."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _read_meminfo(path: Path) -> int | None:
    """`MemAvailable` of Linux: free memory, and caches that can be dropped at once."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read_text(path), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _read_cgroup_rooms(root: Path) -> list[int]:
    """What each limited control group around this process has left, both versions of the interface."""
    mount = root / "sys/fs/cgroup"
    rooms: list[int] = []
    for _, controllers, inner in re.findall(r"^(\d+):(.*):(/.*)$", _read_text(root / "proc/self/cgroup"), re.M):
        if controllers == "":
            top, names = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = (
                mount / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        group = top / inner.lstrip("/")
        # A container sees its own group as the root of the mount, whatever path the kernel names.
        for directory in {top, group, *(parent for parent in group.parents if parent.is_relative_to(top))}:
            rooms += _read_cgroup_room(directory, *names)
    return rooms


def _read_cgroup_room(directory: Path, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
    limit, usage = _read_text(directory / limit_name).strip(), _read_text(directory / usage_name).strip()
    if not (limit.isdigit() and usage.isdigit()):  # no such group, or its limit is "max"
        return []
    cache = re.search(rf"^{cache_name} (\d+)$", _read_text(directory / "memory.stat"), re.MULTILINE)
    droppable = int(cache[1]) if cache else 0
    return [max(0, int(limit) - int(usage) + droppable)]


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
