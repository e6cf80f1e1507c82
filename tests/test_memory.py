"""Memory while loading: little more than the weights, whatever they are stored as."""

from __future__ import annotations

import math
import re
import select
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gptfast.config import ModelConfig
from tests.reference.checkpoints import INDEX_NAME, hf_config, hf_name, split_name, write_json
from tests.reference.families import tensor_shapes
from tests.reference.gguf_files import gguf_name, gpt2_vocabulary
from tests.reference.sessions import start_process
from tests.reference.tokenizers import train_byte_level, write_tokenizer

pytestmark = pytest.mark.usefixtures("tiny_cache")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from Linux's /proc"),
]

CONFIG = ModelConfig(
    architecture="llama",
    dim=2048,
    n_layers=6,
    n_heads=32,
    n_kv_heads=8,
    head_dim=64,
    ffn_dim=8192,
    vocab_size=128_256,
    max_seq_len=4096,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    tie_word_embeddings=True,
)
SHAPES = tensor_shapes(CONFIG)
WEIGHT_BYTES = 2 * sum(math.prod(shape) for shape in SHAPES.values())
POLL_S = 0.001
PROGRAM = """
import sys
import gguf, gptfast.session, gptfast.checkpoint.gguf, gptfast.checkpoint.hf, safetensors, tokenizers, torch
torch.ones(2, 2, dtype=torch.bfloat16) @ torch.ones(2, 2, dtype=torch.bfloat16)
print("ready", flush=True)
sys.stdin.readline()
session = gptfast.session.load(sys.argv[1], dtype="bfloat16")
print("loaded", session.weight_bytes_per_token, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Gigabytes, so nothing of it stays."""
    yield tmp_path / "model"
    shutil.rmtree(tmp_path / "model")


def write_big_hf(directory: Path, dtype: torch.dtype) -> Path:
    """A sharded Hugging Face directory of zeros, written without holding more than a layer of it."""
    write_tokenizer(directory, train_byte_level())
    write_json(directory / "config.json", hf_config(CONFIG, dtype=dtype))
    shards: dict[str, list[str]] = {}
    for name in SHAPES:
        shards.setdefault(f"model-{split_name(name)[0]}.safetensors", []).append(name)
    for file, names in shards.items():
        save_file({hf_name(name): torch.zeros(SHAPES[name], dtype=dtype) for name in names}, directory / file)
    weight_map = {hf_name(name): file for file, names in shards.items() for name in names}
    write_json(directory / INDEX_NAME, {"weight_map": weight_map})
    return directory


def write_big_gguf(directory: Path) -> Path:
    """A GGUF file whose matrices are Q8_0 blocks of zeros, written tensor by tensor."""
    directory.mkdir()
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, CONFIG.architecture)
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_context_length(CONFIG.max_seq_len)
    writer.add_embedding_length(CONFIG.dim)
    writer.add_block_count(CONFIG.n_layers)
    writer.add_feed_forward_length(CONFIG.ffn_dim)
    writer.add_head_count(CONFIG.n_heads)
    writer.add_head_count_kv(CONFIG.n_kv_heads)
    writer.add_layer_norm_rms_eps(CONFIG.norm_eps)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    tokens, merges, types = gpt2_vocabulary(400)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    contents = {gguf_name(name): make_zeros(shape) for name, shape in SHAPES.items()}
    for name, (shape, dtype, kind) in contents.items():
        writer.add_tensor_info(name, shape, np.dtype(dtype), math.prod(shape) * np.dtype(dtype).itemsize, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for shape, dtype, _ in contents.values():
        writer.write_tensor_data(np.zeros(shape, dtype))
    writer.close()
    return path


def make_zeros(shape: tuple[int, ...]) -> tuple[tuple[int, ...], type, gguf.GGMLQuantizationType]:
    """Shape and dtype of the stored bytes, and their type: matrices are quantized, vectors are not."""
    if len(shape) == 1:
        return shape, np.float32, gguf.GGMLQuantizationType.F32
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0]
    return (shape[0], shape[1] // block_size * block_bytes), np.uint8, gguf.GGMLQuantizationType.Q8_0


def read_anonymous_bytes(pid: int) -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match
    return int(match[1]) * 1024


def measure_load(path: Path) -> int:
    """The most anonymous memory that loading takes above what the imports hold, in bytes."""
    process = start_process("-c", PROGRAM, path)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        imports = peak = read_anonymous_bytes(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        while not select.select([process.stdout], [], [], POLL_S)[0]:
            peak = max(peak, read_anonymous_bytes(process.pid))
        assert process.stdout.readline().startswith("loaded "), process.communicate()[1]
        process.communicate("\n")
    return peak - imports


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda directory: write_big_hf(directory, torch.bfloat16), id="bf16"),
        pytest.param(lambda directory: write_big_hf(directory, torch.float32), id="fp32"),
        pytest.param(write_big_gguf, id="Q8_0"),
    ],
)
def test_loading_takes_little_more_than_the_weights(write: Callable[[Path], Path], directory: Path) -> None:
    assert WEIGHT_BYTES > 1e9
    path = write(directory)
    for start in ("first", "second"):  # the first start on a GGUF file also reads its vocabulary
        used = measure_load(path)
        print(f"{start} load: {used / 1e6:.0f} MB of {WEIGHT_BYTES / 1e6:.0f} MB of weights")
        assert used < 1.2 * WEIGHT_BYTES
