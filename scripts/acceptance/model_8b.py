"""A model of the shape of Llama 3.1 8B: the time of a token."""

from __future__ import annotations

from acceptance.decoding import LEFT_OUT, Case, time_cases
from acceptance.device import find_bandwidth
from acceptance.findings import Findings
from acceptance.random_weights import BF16, FP8, INT4_G32, INT4_G128, INT8
from acceptance.timing import find_device

CASES = (
    Case(INT4_G32, INT8, compiles=False),
    Case(INT4_G32, INT8),
    Case(INT4_G32, INT8, fuses=True),
    Case(BF16),
    Case(BF16, fuses=True),
    Case(INT8),
    Case(INT8, fuses=True),
    Case(INT4_G32, INT8, fuses=True, pdl=False),
    Case(FP8),
    Case(INT4_G128, INT8),
)
"""The ones that matter most first, after one that shows what compiling gains."""
DEPTHS = (0, 2048, 16_384)


def run(findings: Findings) -> None:
    """Time every form at every depth."""
    device = find_device()
    bandwidth = find_bandwidth(findings, device)
    findings.note(read_gb_per_s=bandwidth)
    time_cases(findings, device, "llama-3.1-8b", CASES, DEPTHS, bandwidth)
    left_out = [fact for fact in findings.facts if fact.startswith(LEFT_OUT)]
    findings.check(
        "every form was timed",
        not left_out,
        ", ".join(left_out) or "all",
        "model_8b.json; a larger --budget-s with --resume",
    )
