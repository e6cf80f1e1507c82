"""What processor this is."""

from __future__ import annotations

import platform
from pathlib import Path


def describe_cpu() -> str:
    """The processor's name and features, as code is made for it alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
