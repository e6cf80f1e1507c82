"""What a GGUF file says about its model, parsed once and kept in the cache in Hugging Face's form.

The `gguf` package takes seconds to walk a vocabulary. Afterwards a start reads `config.json`,
`generation_config.json`, `tokenizer.json`, `tokenizer_config.json` and `tensors.json` from a directory of the
cache that is named after the file's path, size and time of change.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from gptfast.cache import get_cache_dir, get_temporary_dir, is_writable
from gptfast.checkpoint import gguf_tokenizer
from gptfast.checkpoint.base import refuse_git_lfs_pointer
from gptfast.checkpoint.fields import Fields
from gptfast.errors import CheckpointError

logger = logging.getLogger(__name__)

GGUF_MAGIC = b"GGUF"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"
COMPLETE_MARKER = "tensors.json"
"""The file that is written last: a directory without it was never finished."""


def open_metadata_directory(path: Path) -> Path:
    """The directory with the file's metadata, made if this is the first time that the file is opened."""
    state = path.stat()
    # What an older version of this code wrote is not read.
    sources = [Path(__file__).read_text(), Path(gguf_tokenizer.__file__).read_text()]
    identity = "\0".join([str(path.resolve()), str(state.st_size), str(state.st_mtime_ns), *sources])
    root = get_cache_dir() / "gguf"
    directory = root / hashlib.sha256(identity.encode()).hexdigest()[:24]
    if (directory / COMPLETE_MARKER).exists():
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
        for file in sorted(partial.iterdir(), key=lambda file: file.name == COMPLETE_MARKER):
            file.replace(directory / file.name)
    return directory


def write_metadata(path: Path, directory: Path) -> None:
    """Parse the file's header and write the metadata files; raises CheckpointError naming what is wrong."""
    refuse_git_lfs_pointer(path)
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = [
            {
                "name": tensor.name,
                "type": tensor.tensor_type.name,
                "shape": [int(size) for size in reversed(tensor.shape)],
                "offset": int(tensor.data_offset),
                "bytes": int(tensor.n_bytes),
            }
            for tensor in reader.tensors
        ]
        factors = next((tensor.data.tolist() for tensor in reader.tensors if tensor.name == ROPE_FACTORS), None)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or only partly downloaded ({error}); download it again") from error
    names = {str(tensor["name"]) for tensor in tensors}
    contents = {
        "config.json": build_config(fields, names, factors, str(path)),
        "generation_config.json": build_generation_config(fields),
    }
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=1))
    try:
        gguf_tokenizer.build_tokenizer_files(fields, directory)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    (directory / COMPLETE_MARKER).write_text(json.dumps(tensors))


def build_config(
    fields: dict[str, Any], names: set[str], rope_factors: list[float] | None, source: str
) -> dict[str, Any]:
    """The file's architecture as a Hugging Face `config.json`."""
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{source} holds a model of architecture {architecture!r}; supported are {', '.join(ARCHITECTURES)}"
        )

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{key}", default)

    if get("expert_count"):
        raise CheckpointError(f"{source} holds a mixture of {get('expert_count')} experts; use a dense model")
    sizes = Fields(fields, source)
    heads = sizes.get_size(f"{architecture}.attention.head_count")
    dim = sizes.get_size(f"{architecture}.embedding_length")
    head_dim = sizes.get_size(f"{architecture}.attention.key_length", max(1, dim // heads))
    if get("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{source} rotates only a part of every head, which is not supported; use another model")
    rope: dict[str, Any] = {"rope_theta": get("rope.freq_base", 10_000.0), "rope_type": "default"}
    if rope_factors is not None:
        rope |= {"rope_type": "factors", "factors": rope_factors}
    elif get("rope.scaling.type", "none") != "none":
        rope |= {"rope_type": get("rope.scaling.type"), "factor": get("rope.scaling.factor")}
    return {
        "model_type": architecture,
        "hidden_size": dim,
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length"),
        "vocab_size": get("vocab_size") or len(fields.get("tokenizer.ggml.tokens", ())),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_output.bias" in names,
        "sliding_window": get("attention.sliding_window"),
        "use_sliding_window": get("attention.sliding_window") is not None,
    }


def build_generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The file's special ids as a Hugging Face `generation_config.json`."""
    ends = (fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return {
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [token_id for token_id in ends if token_id is not None],
    }
