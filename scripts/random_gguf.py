"""Make a GGUF file of random weights in a preset's shapes: to compare speed where no file is at hand.

    python scripts/random_gguf.py llama-3.2-1b --quantization q4_0 --output llama-3.2-1b.gguf

The blocks of the quantized format are drawn as they lie in the file, one tensor at a time, so nothing is quantized and
an 8B model needs no more memory than its largest matrix. Every matrix is of the one format, embeddings and head
included. The vocabulary is as large as the preset's, but beyond the 256 bytes made up of tokens that no text has.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import click
import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType

from gptfast.cache import get_cache_dir, replace_atomically
from gptfast.checkpoint.gguf import CANONICAL_NAMES
from gptfast.checkpoint.presets import get_preset
from gptfast.checkpoint.shapes import list_tensor_shapes
from gptfast.cli.main import execute
from gptfast.config import ModelConfig

FORMATS = {
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0, 16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0, 256),
}
"""ggml's format, its number in a file's metadata, and the levels of a weight. A block starts with its fp16 scale."""
ARCHITECTURES = {"mistral": "llama"}
"""What a GGUF file calls an architecture that has another name here."""
STORED_NAMES = {canonical: stored for stored, canonical in CANONICAL_NAMES.items()}
END_OF_TEXT = "<|endoftext|>"


def get_random_gguf(preset: str, quantization: str) -> Path:
    """The cached file of that preset and format, made if need be; raises CheckpointError for an unknown preset."""
    config = get_preset(preset)
    # A file that other code made, or of other shapes, is not taken for this one.
    identity = zlib.crc32(f"{config}{Path(__file__).read_text()}".encode())
    path = get_cache_dir() / "random" / f"{preset}-{quantization}-{identity:08x}.gguf"
    if not path.exists():
        click.echo(f"making {path}, this once", err=True)
        write_random_gguf(path, config, quantization)
    return path


def write_random_gguf(path: Path, config: ModelConfig, quantization: str) -> None:
    """Write the file, atomically. `quantization` is one of `FORMATS`."""
    block_format, file_type, levels = FORMATS[quantization]
    shapes = list_tensor_shapes(config)
    with replace_atomically(path) as partial:
        writer = GGUFWriter(partial, ARCHITECTURES.get(config.architecture, config.architecture))
        add_metadata(writer, config, file_type)
        add_vocabulary(writer, config.vocab_size)
        factors = compute_rope_factors(config)
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        for name, shape in shapes.items():
            add_shape(writer, name, shape, block_format)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for name, shape in shapes.items():
            writer.write_tensor_data(draw_tensor(name, shape, block_format, levels))
        writer.close()


def add_metadata(writer: GGUFWriter, config: ModelConfig, file_type: LlamaFileType) -> None:
    """Describe the architecture as llama.cpp's converter does."""
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)


def add_vocabulary(writer: GGUFWriter, size: int) -> None:
    """Add a byte-level vocabulary of `size` tokens: the bytes, one merge, unused ones, and one that ends a text."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "th"]
    n_used = len(tokens)
    tokens += [f"<unused{number}>" for number in range(size - n_used - 1)]
    types = [TokenType.NORMAL] * n_used + [TokenType.UNUSED] * (len(tokens) - n_used) + [TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, END_OF_TEXT])
    writer.add_token_types(types)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)


def compute_rope_factors(config: ModelConfig) -> np.ndarray | None:
    """What llama.cpp divides each rotary frequency by: (D/2,) float32; None without Llama 3.1's scaling."""
    import torch

    from gptfast.model import scale_rope_frequencies

    if config.rope_scaling is None:
        return None
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    factors = frequencies / scale_rope_frequencies(frequencies, config.rope_scaling)
    return factors.to(torch.float32).numpy()


def add_shape(writer: GGUFWriter, name: str, shape: tuple[int, ...], block_format: GGMLQuantizationType) -> None:
    """Announce a tensor: a matrix in blocks, a vector in float32."""
    stored = get_stored_name(name)
    if len(shape) == 1:
        writer.add_tensor_info(stored, shape, np.dtype(np.float32), 4 * shape[0])
        return
    row_bytes = count_row_bytes(shape[1], block_format)
    writer.add_tensor_info(stored, (shape[0], row_bytes), np.dtype(np.uint8), shape[0] * row_bytes, block_format)


def draw_tensor(name: str, shape: tuple[int, ...], block_format: GGMLQuantizationType, levels: int) -> np.ndarray:
    """A tensor as the file stores it, a function of its name alone.

    Norms are 1 and biases 0. A matrix is (rows, bytes per row) uint8: every quantized weight is uniform, and one scale
    gives all of them the variance 1 / in_features.
    """
    if len(shape) == 1:
        return np.full(shape, 0 if name.endswith(".bias") else 1, dtype=np.float32)
    rows, columns = shape
    _, block_bytes = gguf.GGML_QUANT_SIZES[block_format]
    row_bytes = count_row_bytes(columns, block_format)
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    blocks = generator.integers(256, size=(rows * row_bytes // block_bytes, block_bytes), dtype=np.uint8)
    deviation = ((levels**2 - 1) / 12) ** 0.5  # of whole numbers that are uniform over so many
    blocks[:, :2] = np.array([columns**-0.5 / deviation], dtype=np.float16).view(np.uint8)
    return blocks.reshape(rows, row_bytes)


def count_row_bytes(columns: int, block_format: GGMLQuantizationType) -> int:
    """Bytes of one row of a matrix."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[block_format]
    assert columns % block_size == 0
    return columns // block_size * block_bytes


def get_stored_name(name: str) -> str:
    """What llama.cpp calls the tensor of that canonical name."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{STORED_NAMES[module]}.{kind}"
    _, number, module = module.split(".", 2)
    return f"blk.{number}.{STORED_NAMES[module]}.{kind}"


@click.command()
@click.argument("preset")
@click.option("--quantization", type=click.Choice(sorted(FORMATS)), default="q4_0", show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The file to write.")
def main(preset: str, quantization: str, output: Path) -> None:
    """Write a GGUF file of random weights in a preset's shapes."""
    write_random_gguf(output, get_preset(preset), quantization)


if __name__ == "__main__":
    execute(main, "random_gguf.py")
