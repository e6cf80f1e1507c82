"""Memory of a conversion: anonymous memory, as the mapped source can be dropped at any time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gptfast.config import ModelConfig
from quantize.hf_config import make_hf_config
from tests.reference.checkpoints import hf_name, write_json
from tests.reference.families import FAMILIES, tensor_shapes
from tests.reference.gguf_files import write_gguf
from tests.reference.sessions import run_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SCRIPT = """
import json, re, sys, threading, time
from pathlib import Path
import torch
from gptfast.checkpoint import open_checkpoint
from gptfast.quantization import FLOAT8, WeightScheme
from quantize import writer
from quantize.convert import Settings, convert
from quantize.plan import list_default_rules, make_plan

def read_anonymous_bytes():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def run(source, output):
    scheme = {"fp8": FLOAT8, "int8": WeightScheme(8, None)}.get(mode, WeightScheme(4, 32))
    checkpoint = open_checkpoint(Path(source))
    plan = make_plan(checkpoint, scheme, list_default_rules(scheme))
    token_ids = torch.arange(256)[None] if mode == "int4-gptq" else None
    convert(checkpoint, Path(output), plan, Settings(mode, scheme, token_ids), lambda name: None)

torch.set_num_threads(1)
small, source, output, shard_bytes, mode = sys.argv[1:]
writer.SHARD_BYTES = int(shard_bytes)
run(small, output + "-small")  # imports what is imported late
before = peak = read_anonymous_bytes()
done = threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, read_anonymous_bytes())
        time.sleep(0.005)

watcher = threading.Thread(target=watch)
watcher.start()
run(source, output)
done.set()
watcher.join()
print(json.dumps({"above_imports_bytes": peak - before}))
"""


ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""What is freed goes back to the system at once, as matrices of a real model's size do."""

WriteSource = Callable[[Path, ModelConfig], Path]


def write_model(directory: Path, config: ModelConfig) -> Path:
    """A bfloat16 checkpoint of many small random numbers that repeat, so that it is made quickly."""
    directory.mkdir()
    numbers = torch.randn(1 << 16).bfloat16()
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        size = math.prod(shape)
        tensors[hf_name(name)] = numbers.repeat(size // len(numbers) + 1)[:size].clone().view(shape)
    save_file(tensors, directory / "model.safetensors")
    write_json(directory / "config.json", make_hf_config(config))
    return directory


def write_blocks(directory: Path, config: ModelConfig) -> Path:
    """The default model's kinds of blocks, of small random numbers that repeat."""
    path = directory.with_suffix(".gguf")
    numbers = torch.randn(1 << 16)
    weights = {
        name: numbers.repeat(math.prod(shape) // len(numbers) + 1)[: math.prod(shape)].view(shape)
        for name, shape in tensor_shapes(config).items()
    }
    types = dict.fromkeys(weights, "Q4_1") | {"tok_embeddings.weight": "Q8_0"}
    write_gguf(path, weights, config, types=types)
    return path


def measure(
    tmp_path: Path,
    config: ModelConfig,
    shard_bytes: int,
    mode: str = "int4",
    write: WriteSource = write_model,
) -> int:
    small = write(tmp_path / "small", FAMILIES["llama-tied"])
    source = write(tmp_path / "in", config)
    outcome = run_process("-c", SCRIPT, small, source, tmp_path / "out", shard_bytes, mode, **ALLOCATION)
    assert outcome.exit_code == 0, outcome.stderr
    above: int = outcome.json["above_imports_bytes"]
    return above


def test_memory_stays_below_two_of_the_largest_tensor_and_a_shard(tmp_path: Path) -> None:
    config = replace(FAMILIES["llama-tied"], dim=1024, head_dim=128, ffn_dim=2048, n_layers=3, vocab_size=32_768)
    largest_bytes, shard_bytes = 2 * config.vocab_size * config.dim, 20_000_000
    bound = 2 * largest_bytes + shard_bytes
    assert measure(tmp_path, config, shard_bytes) < bound


@pytest.mark.parametrize("mode", ["int4", "int4-hqq", "int8", "fp8"])
def test_blocks_that_have_to_be_expanded_take_no_more(mode: str, tmp_path: Path) -> None:
    config = replace(FAMILIES["llama-tied"], dim=512, head_dim=64, ffn_dim=1024, n_layers=2, vocab_size=32_768)
    largest_bytes, shard_bytes = 2 * config.vocab_size * config.dim, 10_000_000
    assert measure(tmp_path, config, shard_bytes, mode, write_blocks) < 2 * largest_bytes + shard_bytes


def test_gptq_takes_one_block_and_the_statistics_of_one_layer_more(tmp_path: Path) -> None:
    config = replace(FAMILIES["llama-tied"], dim=768, head_dim=96, ffn_dim=1536, n_layers=3, vocab_size=4096)
    largest_bytes, shard_bytes = 2 * config.vocab_size * config.dim, 5_000_000
    shapes = tensor_shapes(config)
    block_bytes = 4 * sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers.0."))
    statistics_bytes = 40 * config.ffn_dim**2
    bound = 2 * largest_bytes + shard_bytes + block_bytes + statistics_bytes
    assert measure(tmp_path, config, shard_bytes, "int4-gptq") < bound


@pytest.mark.slow
def test_memory_stays_bounded_with_the_head_of_llama_3(tmp_path: Path) -> None:
    config = replace(
        FAMILIES["llama-tied"], dim=2048, head_dim=128, n_heads=16, ffn_dim=8192, n_layers=4, vocab_size=128_256
    )
    largest_bytes, shard_bytes = 2 * config.vocab_size * config.dim, 250_000_000
    assert measure(tmp_path, config, shard_bytes) < 2 * largest_bytes + shard_bytes
