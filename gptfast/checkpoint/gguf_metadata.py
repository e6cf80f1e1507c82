"""What a GGUF file says about its model, parsed once and kept in the cache in Hugging Face's form.

The `gguf` package takes seconds to walk a vocabulary. Afterwards a start reads `config.json`,
`generation_config.json`, `tokenizer.json`, `tokenizer_config.json` and `tensors.json` from a directory of the
cache that is named after the file's path, size and time of change; and `manifest.json` tells whether they are whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from gptfast.cache import get_cache_dir, get_temporary_dir, is_writable, read_cached
from gptfast.checkpoint import gguf_tokenizer
from gptfast.checkpoint.fields import Fields
from gptfast.errors import CheckpointError

logger = logging.getLogger(__name__)

GGUF_MAGIC = b"GGUF"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"
TENSOR_INDEX = "tensors.json"
"""Where each tensor lies in the file, by the file's own names."""
METADATA_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", TENSOR_INDEX)
MANIFEST = "manifest.json"
"""The hashes of the other files, written last: a directory that does not fit it is made again."""


def open_metadata_directory(path: Path) -> Path:
    """The directory with the file's metadata, made if this is the first time that the file is opened."""
    state = path.stat()
    # What an older version of this code wrote is not read.
    sources = [Path(__file__).read_text(), Path(gguf_tokenizer.__file__).read_text()]
    identity = "\0".join([str(path.resolve()), str(state.st_size), str(state.st_mtime_ns), *sources])
    root = get_cache_dir() / "gguf"
    directory = root / hashlib.sha256(identity.encode()).hexdigest()[:24]
    if is_intact(directory):
        return directory
    if not is_writable(root):
        logger.warning("%s cannot be written, so the vocabulary of %s is parsed again at every start", root, path)
        root = get_temporary_dir()
        directory = root / directory.name
    logger.info("reading the metadata of %s, this once", path)
    with tempfile.TemporaryDirectory(dir=root, prefix=".partial-") as name:
        partial = Path(name)
        write_metadata(path, partial)
        directory.mkdir(parents=True, exist_ok=True)
        for file in sorted(partial.iterdir(), key=lambda file: file.name == MANIFEST):
            file.replace(directory / file.name)
    return directory


def is_intact(directory: Path) -> bool:
    """Whether every file is there and holds what was written."""
    try:
        hashes = json.loads(read_cached(directory / MANIFEST) or b"")
    except ValueError:
        return False
    return bool(hashes == {name: hash_file(directory / name) for name in METADATA_FILES})


def hash_file(path: Path) -> str:
    """The file's sha256 in hexadecimal, that of nothing if it cannot be read."""
    return hashlib.sha256(read_cached(path) or b"").hexdigest()


def write_metadata(path: Path, directory: Path) -> None:
    """Parse the file's header and write the metadata files; raises CheckpointError naming what is wrong."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {
            tensor.name: {
                "type": tensor.tensor_type.name,
                "shape": [int(size) for size in reversed(tensor.shape)],
                "offset": int(tensor.data_offset),
                "bytes": int(tensor.n_bytes),
            }
            for tensor in reader.tensors
        }
        factors = next((tensor.data.tolist() for tensor in reader.tensors if tensor.name == ROPE_FACTORS), None)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or only partly downloaded ({error}); download it again") from error
    contents = {
        "config.json": build_config(fields, set(tensors), factors, str(path)),
        "generation_config.json": build_generation_config(fields),
        TENSOR_INDEX: tensors,
    }
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=1))
    try:
        gguf_tokenizer.build_tokenizer_files(fields, directory)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    hashes = {name: hash_file(directory / name) for name in METADATA_FILES}
    (directory / MANIFEST).write_text(json.dumps(hashes))


def build_config(
    fields: dict[str, Any], names: set[str], rope_factors: list[float] | None, source: str
) -> dict[str, Any]:
    """The file's architecture as a Hugging Face `config.json`."""
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{source} holds a model of architecture {architecture!r}; supported are {', '.join(ARCHITECTURES)}"
        )

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    sizes = Fields(fields, source)
    if fields.get(key("expert_count")):
        raise CheckpointError(f"{source} holds a mixture of {fields[key('expert_count')]} experts; use a dense model")
    heads, dim = sizes.get_size(key("attention.head_count")), sizes.get_size(key("embedding_length"))
    head_dim = sizes.get_size(key("attention.key_length"), max(1, dim // heads))
    if sizes.get_size(key("rope.dimension_count"), head_dim) != head_dim:
        raise CheckpointError(f"{source} rotates only a part of every head, which is not supported; use another model")
    rope: dict[str, Any] = {"rope_theta": sizes.get_positive(key("rope.freq_base"), 10_000.0), "rope_type": "default"}
    if rope_factors is not None:
        rope |= {"rope_type": "factors", "factors": rope_factors}
    elif fields.get(key("rope.scaling.type"), "none") != "none":
        rope |= {"rope_type": fields[key("rope.scaling.type")], "factor": fields.get(key("rope.scaling.factor"))}
    elif fields.get(key("rope.scale_linear"), 1.0) != 1.0:  # how files before 2023-11 spell the linear kind
        rope |= {"rope_type": "linear", "factor": fields[key("rope.scale_linear")]}
    window = fields.get(key("attention.sliding_window"))
    return {
        "model_type": architecture,
        "hidden_size": dim,
        "num_hidden_layers": sizes.get_size(key("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": sizes.get_size(key("attention.head_count_kv"), heads),
        "head_dim": head_dim,
        "intermediate_size": sizes.get_size(key("feed_forward_length")),
        "vocab_size": sizes.get_size(key("vocab_size"), len(fields.get("tokenizer.ggml.tokens", ()))),
        "max_position_embeddings": sizes.get_size(key("context_length")),
        "rms_norm_eps": sizes.get_number(key("attention.layer_norm_rms_epsilon"), 1e-6),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_output.bias" in names,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": None,
    }


def build_generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The file's special ids as a Hugging Face `generation_config.json`."""
    ends = (fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return {
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [token_id for token_id in ends if token_id is not None],
    }
