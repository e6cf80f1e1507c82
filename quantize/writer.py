"""Write a checkpoint directory that is either whole or not there."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from gptfast.checkpoint.hf import INDEX_NAME, SINGLE_NAME
from gptfast.errors import UserError

SHARD_BYTES = 1_000_000_000
"""A shard is held in memory until it is whole; it has more bytes only if a single tensor has."""
PARTIAL_MARK = ".partial-"
"""Between the output's name and a random one, while a directory is not whole."""
SPARE_BYTES = 64 << 20
"""Room for what is written beside the weights: the tokenizer, the index, the config."""


class WriteError(UserError):
    """A checkpoint that cannot be written where it was asked for."""


@contextlib.contextmanager
def write_aside(output: Path) -> Iterator[Path]:
    """Yield a new directory beside `output` that takes its name if the block succeeds, else is removed.

    A killed run leaves the new directory behind under its temporary name, see `list_partials`. Raises WriteError where
    `resolve_output` does, and if a directory that is whole cannot take the name; then it is kept.
    """
    output = resolve_output(output)
    partial = output.parent / f"{output.name}{PARTIAL_MARK}{secrets.token_hex(4)}"
    try:
        partial.mkdir()
        yield partial
        for file in partial.iterdir():
            synchronize(file)
        synchronize(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    try:
        partial.rename(output)
    except OSError as error:
        raise WriteError(
            f"{output} cannot be replaced ({error.strerror}); the checkpoint is whole, it lies in {partial}"
        ) from error
    synchronize(output.parent)


def resolve_output(output: Path) -> Path:
    """Where `output` lies once links are followed.

    Raises WriteError unless a directory can be renamed to that: it must be new, or empty and neither the current
    directory nor a mount point.
    """
    target = Path(os.path.realpath(output))
    if target.is_symlink():
        raise WriteError(f"{output} is a link that leads back to itself; give another --output")
    if not target.exists():
        return target
    if not target.is_dir() or any(target.iterdir()):
        raise WriteError(f"{output} is already there and not empty; give another --output or remove it")
    if target == Path(os.path.realpath(os.curdir)) or os.path.ismount(target):
        raise WriteError(
            f"{output} is the current directory or a mount point, which cannot be replaced; give an --output within it"
        )
    return target


def list_partials(output: Path) -> list[Path]:
    """What runs that were killed, or still go on, have written for the same output."""
    target = Path(os.path.realpath(output))
    return sorted(target.parent.glob(f"{glob.escape(target.name)}{PARTIAL_MARK}*"))


def check_disk_space(output: Path, needed_bytes: int) -> None:
    """Raise WriteError if a checkpoint with so many bytes of weights has no room beside `output`, without links."""
    free_bytes = shutil.disk_usage(output.parent).free
    if free_bytes < needed_bytes + SPARE_BYTES:
        raise WriteError(
            f"{output} needs {(needed_bytes + SPARE_BYTES) / 1e9:.2f} GB and its disk has {free_bytes / 1e9:.2f} GB "
            "free; make room or give an --output on another disk"
        )


def synchronize(path: Path) -> None:
    """Wait until the file or directory is on the disk, so that a crash after the renaming cannot undo it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def assign_shards(sizes: Mapping[str, int]) -> list[list[str]]:
    """Deal tensors with those sizes in bytes out to files, in their order, each file full before the next."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


class ShardWriter:
    """Writes tensors, whose names and sizes in bytes are known beforehand, as safetensors shards with an index.

    They may come in any order: a shard is written and forgotten as soon as it is whole.
    """

    def __init__(self, directory: Path, sizes: Mapping[str, int]) -> None:
        self._directory = directory
        self._sizes = sizes
        shards = assign_shards(sizes)
        count = len(shards)
        files = [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        self._file_names = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        self._missing = {file: set(names) for file, names in zip(files, shards, strict=True)}
        self._waiting: dict[str, dict[str, Tensor]] = {file: {} for file in files}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, which must not change any more; raises WriteError if its shard cannot be written."""
        assert tensor.nbytes == self._sizes[name], name
        file = self._file_names[name]
        self._waiting[file][name] = tensor
        self._missing[file].remove(name)
        if not self._missing[file]:
            self._write_shard(file, self._waiting.pop(file))

    def finish(self) -> None:
        """Write the index if there are several shards."""
        assert not self._waiting, min(name for names in self._missing.values() for name in names)
        if len(self._missing) > 1:
            index = {"metadata": {"total_size": sum(self._sizes.values())}, "weight_map": self._file_names}
            (self._directory / INDEX_NAME).write_text(json.dumps(index, indent=2))

    def _write_shard(self, file: str, tensors: dict[str, Tensor]) -> None:
        import safetensors
        from safetensors.torch import save_file

        path = self._directory / file
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:
            raise WriteError(
                f"{file} cannot be written to {self._directory.parent} ({error}); make room there or give an --output "
                "on another disk"
            ) from error
        # The library makes files that only their owner may read; these are as open as the directory.
        path.chmod(self._directory.stat().st_mode & 0o666)
