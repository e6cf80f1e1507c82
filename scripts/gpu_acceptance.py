"""Find out on a machine with an NVIDIA GPU whether the CUDA engine is right there, and how fast.

    python scripts/gpu_acceptance.py --out results
    python scripts/gpu_acceptance.py --out results --resume --budget-s 900

It needs torch 2.11 or later and Triton, but neither a network nor a checkpoint: weights are random, in the shapes of
Llama 3.1 8B and Llama 3.2 1B, and made on the GPU. Nothing is installed, and nothing changed outside --out but
Triton's cache and, in ours, what `--step auto` is on this GPU (fused, if that was found right and faster) and the
configurations that it was found with.

Sections run in this order, each in a process of its own: `device` (what is here, how fast it reads), `kernels` (their
results), `table` (their times, and the best of several configurations), `model_1b` (replayed steps, text, memory, time
of a token), `fused` (the fused step beside the model's own), `model_8b` (time of a token and of its kernels) and
`baselines` (torch, torchao and transformers instead).
--out gets a JSON file and a log of each, report.md, and configurations.json, which may take the place of that GPU's
file in gptfast/kernels/cuda/configurations.

What failed is listed with what to look at, and makes the exit code 1. On a GPU that was never tried, begin with
`--only device --only kernels --only table`.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gptfast.cache import CACHE_VARIABLE
from gptfast.cli.main import execute
from gptfast.errors import UserError

if TYPE_CHECKING:
    from gptfast.kernels.cuda.configurations import StepKind

LEAST_TORCH = (2, 11)
PACKAGES = ("torch", "triton", "numpy")
NAMES = ("device", "kernels", "table", "model_1b", "fused", "model_8b", "baselines")
FAILED = 1


def check_machine() -> None:
    """Raise UserError in one line where nothing could run."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{', '.join(missing)} cannot be imported here; pip install {' '.join(missing)}")
    import torch

    check_torch(torch.__version__)
    if not torch.cuda.is_available():
        build = "a CUDA build of torch and a driver for it" if torch.version.cuda is None else "its driver (nvidia-smi)"
        raise UserError(f"torch {torch.__version__} finds no NVIDIA GPU here; this needs one, and {build}")
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise UserError(f"the GPU is of sm_{capability[0]}{capability[1]}, and the kernels need sm_80 or later")


def check_torch(version: str) -> None:
    """Raise UserError for a version that is too old."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < LEAST_TORCH:
        raise UserError(f"torch is {version}; install {'.'.join(map(str, LEAST_TORCH))} or later")


def keep_step(step: StepKind, cache: str | None, out: Path) -> None:
    """Note in a cache directory, the usual one if None, what `--step auto` is to be on this GPU, and how it was cut."""
    import torch

    from gptfast.kernels.cuda.configurations import read_tuning, set_step

    tuning = read_tuning(out / "configurations.json")
    os.environ.pop(CACHE_VARIABLE, None)
    os.environ |= {} if cache is None else {CACHE_VARIABLE: cache}
    device = torch.device("cuda", torch.cuda.current_device())
    set_step(device, step, () if tuning is None else tuning.products)


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Directory of results.")
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="A section [default: all].")
@click.option("--budget-s", type=click.FloatRange(min=1), default=480, show_default=True, help="Of all sections.")
@click.option("--resume", is_flag=True, help="Leave out what has passed in --out.")
def main(out: Path, only: Sequence[str], budget_s: float, resume: bool) -> int:
    """Check and measure the CUDA engine on this machine's GPU."""
    check_machine()
    own_cache = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str((out / "cache").absolute())
    from acceptance.report import choose_step, format_report, list_failures, read_sections
    from acceptance.schedule import SECTIONS, forget, has_passed, run_sections

    asked = [section for section in SECTIONS if not only or section.name in only]
    due = [section for section in asked if not (resume and has_passed(section, out))]
    for section in due:
        forget(section, out)
    try:
        run_sections(due, out, budget_s, tell=lambda line: click.echo(line, err=True))
    finally:
        found = read_sections([section.name for section in SECTIONS], out)
        (out / "report.md").write_text(format_report(found))
        click.echo(f"the report is {out / 'report.md'}", err=True)
    step = choose_step(found)
    if step is not None:
        keep_step(step, own_cache, out)
        click.echo(f"--step auto is {step} on this GPU from now on", err=True)
    failures = list_failures([fields for fields in found if fields["section"] in {each.name for each in asked}])
    for failure in failures:
        click.echo(failure)
    return FAILED if failures else 0


if __name__ == "__main__":
    execute(main, "gpu_acceptance.py")
