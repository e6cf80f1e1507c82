"""What the GPU itself is measured by."""

from __future__ import annotations

import pytest
import torch
from acceptance import device

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def test_memory_is_read_as_fast_as_it_is_copied() -> None:
    rates = device.measure_bandwidth(DEVICE, 2**30)
    assert rates["read_gb_per_s"] > 0.8 * rates["copy_gb_per_s"] > 0


@pytest.mark.parametrize("waits", [False, True], ids=["plain", "dependent"])
def test_every_kernel_of_a_graph_runs(waits: bool) -> None:
    """Dependent launches among them: `measure_gap` counts."""
    if waits and torch.cuda.get_device_capability(DEVICE) < (9, 0):
        pytest.skip("dependent launches need sm_90 or later")
    assert 0 < device.measure_gap(DEVICE, 100, waits=waits) < 1e-3
