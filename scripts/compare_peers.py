"""Decode the same prompt with gptfast and its peers in alternating runs, and print the ratios.

    pip install -e ".[test]"
    python scripts/compare_peers.py --dtype float32

Everything runs in one process on the same weights, the same token ids and the same threads: A B A B ..., so that a
machine whose speed drifts slows both down alike. A figure counts only beside the other one of its pair.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch

import gptfast
from gptfast.download import get_default_model
from gptfast.session import DTYPES

PROMPT_IDS = [504, 1463, 282, 260, 4469, 7057, 5634, 351]
"""`The history of the Roman Empire begins with` in the default model's vocabulary."""

Decode = Callable[[], float]
"""One run; its decode tokens/s."""


def prepare_gptfast(path: Path, dtype: str, new_tokens: int) -> Decode:
    """Compiled gptfast, warmed up."""
    session = gptfast.load(path, dtype=dtype, device="cpu", compile=True)

    def decode() -> float:
        [result] = gptfast.generate(session, PROMPT_IDS, max_new_tokens=new_tokens)
        return result.decode_tokens_per_s

    decode()
    return decode


def prepare_transformers(path: Path, dtype: str, new_tokens: int) -> Decode:
    """Transformers' eager `generate` with its default cache, warmed up."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):  # type: ignore[misc]
        """Notes when each token came; the first call brings the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=DTYPES[dtype]).eval()
    ids = torch.tensor([PROMPT_IDS])

    def decode() -> float:
        clock = Clock()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            streamer=clock,
            pad_token_id=0,
        )
        return (new_tokens - 1) / (clock.times[-1] - clock.times[1])

    decode()
    return decode


@click.command()
@click.option(
    "--checkpoint", type=click.Path(exists=True, path_type=Path), help="A GGUF file [default: the default model]."
)
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), default="float32", show_default=True)
@click.option("--new-tokens", default=64, show_default=True)
@click.option("--pairs", default=7, show_default=True)
@click.option("--threads", type=int)
def main(checkpoint: Path | None, dtype: str, new_tokens: int, pairs: int, threads: int | None) -> None:
    """Compare decode tokens/s with transformers' eager generate."""
    if threads is not None:
        torch.set_num_threads(threads)
    path = get_default_model() if checkpoint is None else checkpoint
    ours = prepare_gptfast(path, dtype, new_tokens)
    theirs = prepare_transformers(path, dtype, new_tokens)
    runs = [(ours(), theirs()) for _ in range(pairs)]
    ratios = sorted(a / b for a, b in runs)
    click.echo(f"{path.name}, {dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    click.echo(f"{pairs} alternating pairs of {new_tokens} tokens; medians (least to most)")
    for name, rates in zip(("gptfast --compile", "transformers eager"), zip(*runs, strict=True), strict=True):
        click.echo(f"{name:20} {statistics.median(rates):6.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f})")
    click.echo(f"{'ratio':20} {statistics.median(ratios):6.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
