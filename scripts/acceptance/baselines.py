"""What is compared with: bfloat16 models whose products are torch's own."""

from __future__ import annotations

import time

import torch

from acceptance.device import find_bandwidth
from acceptance.findings import Findings
from acceptance.model_8b import DEPTHS, FREE_SHARE, describe_decoding, estimate_bytes, time_model
from acceptance.random_weights import BF16, build_model
from acceptance.timing import find_device
from gptfast.checkpoint.presets import get_preset
from gptfast.compilation import has_recorded_cuda_graphs
from gptfast.kernels.cuda.timing import free_memory, open_graphs
from gptfast.memory import get_available_memory

TITLE = "Bfloat16 by torch's own products, one text, greedy"
TREES = "compiled, with torch's own graphs and attention"
CASES = (
    ("llama-3.1-8b", "not compiled, in a graph of ours"),
    ("llama-3.2-1b", TREES),
    ("llama-3.1-8b", "compiled, in a graph of ours"),
)
LEAST_S = {"not compiled, in a graph of ours": 10, TREES: 30, "compiled, in a graph of ours": 40}
"""Seconds without which a case is left out."""


def run(findings: Findings) -> None:
    """Time each while there is time; what is left out is a fact and no failure."""
    device = find_device()
    bandwidth = find_bandwidth(findings, device)
    findings.note(read_gb_per_s=bandwidth)
    for preset, way in CASES:
        config, left_s = get_preset(preset), findings.get_remaining_s()
        needed, free = estimate_bytes(config, BF16), get_available_memory(device)
        if left_s < LEAST_S[way] or (free is not None and needed > FREE_SHARE * free):
            findings.note(**{f"left out, {preset} {way}": f"{left_s:.0f} s left, {needed / 1e9:.0f} GB needed"})
            continue
        start = time.monotonic()
        with torch.no_grad():
            model = build_model(config, "dense", dtype=torch.bfloat16, device=device)
            if way == TREES:
                model.set_kernels(None)
            graphs = None if way == TREES else open_graphs(device)
            # Torch's own attention reads a power of two of slots, and each is another graph.
            depths = DEPTHS[:1] if way == TREES else DEPTHS
            for found in time_model(model, graphs, depths, compiles=not way.startswith("not")):
                findings.add_row(TITLE, {"model": preset} | describe_decoding(found, way, bandwidth))
        if way == TREES:
            findings.check(
                "torch recorded its graphs",
                has_recorded_cuda_graphs(),
                "counters of torch.compile",
                "baselines.log: why CUDA graphs were skipped; the figure counts only with them",
            )
        del model
        free_memory(device)
        findings.note(**{f"{preset} {way}, s": time.monotonic() - start})
