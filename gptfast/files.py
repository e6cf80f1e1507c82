"""Files of a checkpoint that may not be what their names say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gptfast.errors import CheckpointError

HEAD_BYTES = 256
GIT_LFS_PREFIX = b"version https://git-lfs"
WEB_PAGE_PREFIXES = (b"<!doctype html", b"<html")


def read_head(path: Path) -> bytes:
    """The file's first bytes; raises CheckpointError if it is the stand-in of a file that was not fetched.

    Such are the pointer that git leaves for a large file, and the page that a web site sends instead of one.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(GIT_LFS_PREFIX):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` there")
    if head.lstrip().lower().startswith(WEB_PAGE_PREFIXES):
        raise CheckpointError(f"{path} is a web page, not the file itself; download it again, logged in if need be")
    return head


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise CheckpointError if the file holds something else."""
    read_head(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object; download it again")
    return value
