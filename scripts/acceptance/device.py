"""What the machine is, how fast its memory is read and copied, and what a kernel costs that does nothing."""

from __future__ import annotations

import platform
import shutil
import subprocess

import torch

from acceptance.findings import Findings, read_json
from acceptance.timing import find_device, get_clock
from gptfast.bench.bandwidth import probe_bandwidth
from gptfast.kernels.cuda.timing import REPEATS, free_memory, measure_seconds, measure_work, open_graphs

READ_BYTES = 4 * 2**30
LAUNCHES = 1000
BANDWIDTH_REPEATS = 20
SENSORS = {
    "driver": "driver_version",
    "power_cap_w": "power.limit",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
}
QUERY_TIMEOUT_S = 10


def run(findings: Findings) -> None:
    """Measure the GPU."""
    device = find_device()
    findings.note(**describe_device(device))
    findings.note(before=query_sensors())
    rates = measure_bandwidth(device, READ_BYTES)
    findings.note(**rates)
    findings.check(
        "memory is read as fast as it is copied",
        rates["read_gb_per_s"] >= 0.9 * rates["copy_gb_per_s"],
        f"read {rates['read_gb_per_s']:.0f} GB/s, copied {rates['copy_gb_per_s']:.0f} GB/s",
        "`before` and `after` in device.json: another process, a power cap or low clocks",
    )
    findings.note(launch_gap_us=1e6 * measure_gap(device, LAUNCHES, waits=False))
    if torch.cuda.get_device_capability(device) >= (9, 0):
        findings.note(launch_gap_with_pdl_us=1e6 * measure_gap(device, LAUNCHES, waits=True))
    findings.note(after=query_sensors())
    findings.add_row("What the device does at best", {name: f"{value:.6g}" for name, value in list_figures(findings)})


def list_figures(findings: Findings) -> list[tuple[str, float]]:
    """The facts that are measured figures."""
    return [(name, value) for name, value in findings.facts.items() if name.endswith(("_gb_per_s", "_us"))]


def describe_device(device: torch.device) -> dict[str, str | int]:
    """Names, versions and sizes."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "name": properties.name,
        "capability": f"sm_{major}{minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def query_sensors(program: str = "nvidia-smi") -> dict[str, str]:
    """Clocks, power and driver as nvidia-smi says them; nothing where it does not run."""
    if shutil.which(program) is None:
        return {}
    command = [program, f"--query-gpu={','.join(SENSORS.values())}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in result.stdout.strip().split(",")]
    return dict(zip(SENSORS, values, strict=True)) if len(values) == len(SENSORS) else {}


def measure_bandwidth(device: torch.device, n_bytes: int) -> dict[str, float]:
    """GB/s of our own reading kernel, of torch's sum and of a copy, which reads and writes.

    `read_gb_per_s` is what shares are of: the faster of the two ways to read.
    """
    kernel, copy = measure_kernel_and_copy(device, n_bytes)
    free_memory(device)
    total = probe_bandwidth(device, get_clock(device)).gb_per_s.median
    free_memory(device)
    return {
        "read_gb_per_s": max(kernel, total),
        "kernel_gb_per_s": kernel,
        "sum_gb_per_s": total,
        "copy_gb_per_s": copy,
    }


def measure_kernel_and_copy(device: torch.device, n_bytes: int) -> tuple[float, float]:
    """GB/s of reading so many bytes by our own kernel, and of copying one half of them to the other."""
    from acceptance.probes import BLOCK, read_block

    values = torch.zeros(n_bytes // 4 // BLOCK * BLOCK, dtype=torch.int32, device=device)
    sums = torch.empty(values.numel() // BLOCK, dtype=torch.int32, device=device)
    first, second = values.chunk(2)

    def read() -> None:
        read_block[(sums.numel(),)](sums, values, block=BLOCK, num_warps=4)

    def copy() -> None:
        second.copy_(first)

    read_s, copy_s = (measure_work(work, device, BANDWIDTH_REPEATS) for work in (read, copy))
    return values.nbytes / read_s / 1e9, (first.nbytes + second.nbytes) / copy_s / 1e9


def measure_gap(device: torch.device, launches: int, *, waits: bool) -> float:
    """Seconds that each of many kernels takes in a graph that do nothing; with `waits`, by dependent launch.

    Raises AssertionError if one did not run.
    """
    from acceptance.probes import add_one

    counter = torch.zeros(1, dtype=torch.int32, device=device)
    options = {"launch_pdl": True} if waits else {}

    def work() -> None:
        for _ in range(launches):
            add_one[(1,)](counter, waits=waits, num_warps=1, **options)

    replay = open_graphs(device).record(work)
    counter.zero_()
    seconds = measure_seconds(replay, device)
    counted = int(counter.item())
    assert counted == launches * (REPEATS + 1), f"{counted} launches of {launches * (REPEATS + 1)} counted"
    return seconds / launches


def find_bandwidth(findings: Findings, device: torch.device) -> float:
    """GB/s that shares are of: those of this run's section `device`, or measured now."""
    found = read_json(findings.out / "device.json").get("facts", {}).get("read_gb_per_s")
    return float(found) if found else measure_bandwidth(device, READ_BYTES)["read_gb_per_s"]
