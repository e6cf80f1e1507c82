"""Checkpoints of every layout behind one function: `open_checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gptfast.errors import CheckpointError
from gptfast.files import read_head

if TYPE_CHECKING:
    from gptfast.checkpoint.base import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face directory, a directory of Meta's or a GGUF file, told apart by what they hold.

    Raises CheckpointError if the path is missing or none of these, or if its metadata asks for what the model
    cannot do.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give the path of a checkpoint directory or a .gguf file")
    if path.is_dir():
        return _open_directory(path)
    from gptfast.checkpoint.gguf import GgufCheckpoint
    from gptfast.checkpoint.gguf_metadata import GGUF_MAGIC

    if read_head(path).startswith(GGUF_MAGIC):
        return GgufCheckpoint(path)
    if path.suffix in (".safetensors", ".pth", ".json", ".index"):
        return _open_directory(path.parent)
    raise CheckpointError(f"{path} is not a GGUF file; give the directory of a checkpoint, or a .gguf file")


def _open_directory(path: Path) -> Checkpoint:
    if (path / "config.json").exists():
        from gptfast.checkpoint.hf import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path)
    if (path / "params.json").exists():
        from gptfast.checkpoint.meta import MetaCheckpoint

        return MetaCheckpoint(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return open_checkpoint(files[0])
    if files:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path} holds several GGUF files; name one of them: {names}")
    raise CheckpointError(
        f"{path} holds neither config.json nor params.json nor a .gguf file; it is not a checkpoint directory"
    )
