"""Whether others used the machine meanwhile: a busy neighbour ruins steps of many small parallel loops."""

from __future__ import annotations

import os
import time
from pathlib import Path

IDLE_FIELDS = (3, 4)
"""Of the line `cpu` in /proc/stat: idle, and waiting for a disk. Time stolen by the host counts as used."""
GUEST_FIELDS = 8
"""From here on the fields are parts of earlier ones."""


class OtherLoad:
    """Counts what processors were used for, other than this process, from its creation on."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._total_s, self._busy_s = self._read()
        self._own_s = time.process_time()

    def get_share(self) -> float | None:
        """The share of all processors' time that others used; None where the system does not tell."""
        total_s, busy_s = self._read()
        if total_s <= self._total_s:
            return None
        own_s = time.process_time() - self._own_s
        return max(0.0, (busy_s - self._busy_s - own_s) / (total_s - self._total_s))

    def _read(self) -> tuple[float, float]:
        """Seconds of all processors so far, and those of them that were used; 0 where the system does not tell."""
        try:
            line = (self._root / "proc/stat").read_text().split("\n", 1)[0]
        except OSError:
            return 0.0, 0.0
        ticks = [int(field) for field in line.split()[1:]][:GUEST_FIELDS]
        idle = sum(ticks[field] for field in IDLE_FIELDS)
        per_s = os.sysconf("SC_CLK_TCK")
        return sum(ticks) / per_s, (sum(ticks) - idle) / per_s
