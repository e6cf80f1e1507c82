"""Compare gptfast with its peers on the same GGUF file: tokens/s in alternating runs, and the ratios.

    pip install -e ".[test]" llama-cpp-python openvino-genai
    python scripts/compare_peers.py --threads 2

Every peer gets the same token ids, number of new tokens and threads, chooses greedily and ignores the end of a text.
gptfast and llama.cpp decode from the file's own blocks, transformers expands them to the dtype.
Each runs in a process of its own, which sleeps while another one works: A B C A B C ..., so that a machine whose speed
drifts slows all of them alike. A figure counts only beside the others of its turn. All peers are in memory at once, so
for large models choose few with `--peers`.

Decode counts the new tokens after the first, from the choice of the first to that of the last. Prefill counts the
tokens of a prompt that is new to the peer, from the call to the choice of the first new token. Loading, compiling, one
run of each kind before the others, tokenizing and detokenizing are not counted.

Peers may live in other environments, as their dependencies may not agree with ours:

    python scripts/compare_peers.py --python llama.cpp=~/llama/bin/python --python openvino=~/openvino/bin/python
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from peers.process import KINDS, PeerProcess
from peers.protocol import LoadRequest
from peers.report import OURS, build_peer_fields, format_report
from peers.turns import PeerRecord, Workload, take_turns
from random_gguf import FORMATS, get_random_gguf

from gptfast.checkpoint.base import Checkpoint
from gptfast.cli.generate import DEFAULT_TEXT
from gptfast.cli.main import execute
from gptfast.cli.options import activations_option, weights_option
from gptfast.errors import UserError

DTYPES = ("float32", "bfloat16")


def print_progress(message: str) -> None:
    """One line on standard error."""
    click.echo(message, err=True)


def choose_file(checkpoint: Path | None, preset: str | None, quantization: str) -> Path:
    """The absolute path of the file to compare on, made or fetched if need be."""
    if preset is not None:
        if checkpoint is not None:
            raise UserError(f"both {checkpoint} and random weights for {preset} are asked for; give one")
        return get_random_gguf(preset, quantization).absolute()
    if checkpoint is None:
        from gptfast.download import get_default_model

        return get_default_model().absolute()
    if checkpoint.suffix.lower() != ".gguf":
        raise UserError(f"{checkpoint} is not a .gguf file, which is all that every peer reads; give one")
    return checkpoint.absolute()


def choose_peers(names: str | None) -> list[str]:
    """The peers asked for, all by default, gptfast first of them in any case."""
    asked = list(KINDS) if names is None else [name.strip() for name in names.split(",")]
    for name in asked:
        if name not in KINDS:
            raise UserError(f"{name!r} is not a peer; choose from {', '.join(KINDS)}")
    return [OURS, *(name for name in KINDS if name in asked and name != OURS)]


def parse_interpreters(assignments: Sequence[str]) -> dict[str, str]:
    """The interpreters of peers that have one of their own, from NAME=PATH."""
    interpreters = {}
    for assignment in assignments:
        name, _, path = assignment.partition("=")
        if name not in KINDS:
            raise UserError(f"--python {assignment} names no peer; write NAME=PATH with one of {', '.join(KINDS)}")
        found = shutil.which(os.path.expanduser(path))
        if found is None:
            raise UserError(f"--python {assignment} names no program; give the path of a Python interpreter")
        interpreters[name] = os.path.abspath(found)  # symbolic links stay: an environment is found by them
    return interpreters


def parse_lengths(text: str) -> list[int]:
    """The lengths of prompts, in tokens."""
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--prefill {text} is not a list of numbers; write it as 64,512") from error
    if min(lengths) < 1:
        raise UserError(f"--prefill {text} asks for a prompt without tokens; give 1 or more")
    return list(dict.fromkeys(lengths))


def plan_workloads(
    checkpoint: Checkpoint, prompt: str, new_tokens: int, lengths: Sequence[int], runs: int
) -> tuple[Workload, dict[int, Workload]]:
    """Decoding after `prompt`, and prefill of each length with ordinary tokens; raises UserError if one is too long."""
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer is not None  # a GGUF file without one is refused
    prompt_ids = tokenizer.encode(prompt)
    longest, context = max(len(prompt_ids) + new_tokens, *(n + 1 for n in lengths)), checkpoint.config.max_seq_len
    if longest > context:
        raise UserError(f"{longest} tokens are asked for but the model's context is {context}; ask for fewer")
    control = set(tokenizer.control_tokens.values())
    ordinary = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in control]
    generator = random.Random(0)
    decode = Workload(f"decode, {new_tokens} tokens", [prompt_ids] * (runs + 1), new_tokens)
    return decode, {
        length: Workload(
            f"prefill, {length} tokens",
            [generator.choices(ordinary, k=length) for _ in range(runs + 1)],
            new_tokens=1,
        )
        for length in lengths
    }


def find_longest(workloads: tuple[Workload, dict[int, Workload]]) -> int:
    """Tokens of the longest run, prompt and new ones together."""
    decode, prefills = workloads
    return max(len(workload.prompts[0]) + workload.new_tokens for workload in (decode, *prefills.values()))


def load_peers(processes: Mapping[str, PeerProcess], request: LoadRequest) -> dict[str, PeerRecord]:
    """Load them one after the other, the others in the dtype that gptfast chose; raises UserError if it cannot run."""
    records = {name: PeerRecord() for name in processes}
    for name, process in processes.items():
        print_progress(f"loading {name}")
        records[name].load(name, process, request)
        ours = records[OURS]
        if ours.facts is None:
            raise UserError(
                f"gptfast cannot run {request.checkpoint} ({ours.reason}), so there is nothing to compare; "
                "mend that first"
            )
        request = replace(request, dtype=ours.facts.dtype)
    return records


def compare(
    request: LoadRequest, workloads: tuple[Workload, dict[int, Workload]], commands: Mapping[str, str]
) -> dict[str, Any]:
    """Each peer's part of the report. `commands` are the peers' interpreters, by name."""
    decode, prefills = workloads
    planned = [decode, *prefills.values()]
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(PeerProcess(KINDS[name], python)) for name, python in commands.items()}
        records = load_peers(processes, request)
        for workload in planned:
            take_turns(processes, records, workload, print_progress)
    return {name: build_peer_fields(record, records[OURS], decode, prefills) for name, record in records.items()}


@click.command()
@click.option(
    "--checkpoint", type=click.Path(exists=True, path_type=Path), help="A GGUF file [default: the default model]."
)
@click.option("--random", "preset", metavar="PRESET", help="Random weights in a preset's shapes, as a GGUF file.")
@click.option(
    "--quantization", type=click.Choice(sorted(FORMATS)), default="q4_0", help="Of --random.", show_default=True
)
@click.option("--peers", "names", help=f"Which, separated by commas [default: {','.join(KINDS)}].")
@click.option(
    "--python", "interpreters", multiple=True, metavar="NAME=PATH", help="A peer's interpreter [default: this]."
)
@click.option("--prompt", default=DEFAULT_TEXT, help="Text that decoding goes on from.", show_default=True)
@click.option("--new-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--prefill", "lengths", default="64,512", help="Lengths of prompts, in tokens.", show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=7, help="Counted runs of each.", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Of every peer [default: torch's choice].")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of gptfast and transformers [default: gptfast's choice].")
@weights_option
@activations_option
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def main(
    checkpoint: Path | None,
    preset: str | None,
    quantization: str,
    names: str | None,
    interpreters: Sequence[str],
    prompt: str,
    new_tokens: int,
    lengths: str,
    runs: int,
    threads: int | None,
    dtype: str | None,
    weights: str,
    activations: str | None,
    as_json: bool,
) -> None:
    """Compare tokens/s of gptfast and its peers on the same GGUF file, in alternating runs."""
    import torch

    from gptfast.bench.bandwidth import compare_probes, probe_bandwidth
    from gptfast.bench.environment import describe_environment
    from gptfast.checkpoint import open_checkpoint
    from gptfast.session import set_threads

    if threads is not None:
        set_threads(threads)
    threads = torch.get_num_threads()
    pythons = parse_interpreters(interpreters)
    commands = {name: pythons.get(name, sys.executable) for name in choose_peers(names)}
    prefill_tokens = parse_lengths(lengths)
    path = choose_file(checkpoint, preset, quantization)
    workloads = plan_workloads(open_checkpoint(path), prompt, new_tokens, prefill_tokens, runs)
    cpu = torch.device("cpu")
    before = probe_bandwidth(cpu, time.perf_counter)
    request = LoadRequest(str(path), threads, find_longest(workloads), dtype, weights, activations)
    peers = compare(request, workloads, commands)
    after = probe_bandwidth(cpu, time.perf_counter)
    fields = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": asdict(describe_environment(cpu, threads)),
        "bandwidth": asdict(compare_probes(before, after)),
        "checkpoint": path.name,
        "threads": threads,
        "runs": runs,
        "prompt_tokens": len(workloads[0].prompts[0]),
        "new_tokens": new_tokens,
        "prefill_tokens": prefill_tokens,
        "peers": peers,
    }
    click.echo(format_report(fields))
    if as_json:
        click.echo(json.dumps(fields))


if __name__ == "__main__":
    execute(main, "compare_peers.py")
