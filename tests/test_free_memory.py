"""How much memory is free, read from files such as Linux writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptfast.memory import get_available_host_memory


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  16000 kB\nMemFree:  100 kB\nMemAvailable:    8000 kB\n"}


def test_available_memory_without_control_groups(tmp_path: Path) -> None:
    assert get_available_host_memory(write(tmp_path, MEMINFO)) == 8000 * 1024


@pytest.mark.parametrize("group", ["/", "/app/worker", "/not/visible/here"])
def test_available_memory_within_a_control_group(tmp_path: Path, group: str) -> None:
    cgroup = {
        "proc/self/cgroup": f"0::{group}\n",
        "sys/fs/cgroup/memory.max": "5000000\n",
        "sys/fs/cgroup/memory.current": "4000000\n",
        "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 500000\nactive_file 7\n",
        "sys/fs/cgroup/app/worker/memory.max": "max\n",
        "sys/fs/cgroup/app/worker/memory.current": "3000000\n",
    }
    assert get_available_host_memory(write(tmp_path, MEMINFO | cgroup)) == 1_500_000


def test_available_memory_within_a_control_group_of_version_1(tmp_path: Path) -> None:
    cgroup = {
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "2000000\n",
        "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "2500000\n",
    }
    assert get_available_host_memory(write(tmp_path, MEMINFO | cgroup)) == 1_100_000


def test_available_memory_elsewhere_is_the_physical_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf_names", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 2}, raising=False)
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__, raising=False)
    assert get_available_host_memory(tmp_path) == 4_096_000


def test_where_nothing_tells_the_memory_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf_names", {}, raising=False)
    assert get_available_host_memory(tmp_path) is None
