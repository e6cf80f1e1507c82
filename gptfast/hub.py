"""Other models, from the Hugging Face hub: only the files that can be opened, in the hub's own cache."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gptfast.download import DownloadError, OnMessage, logger

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_HUB_TIMEOUT_S = 15
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def download_from_hub(repo_id: str, file_pattern: str | None = None, on_message: OnMessage = logger.info) -> Path:
    """Fetch the files of `repo_id` that can be opened into the hub's own cache; resumes.

    Takes the safetensors if there are any, else Meta's .pth files, else the only GGUF file; a
    `file_pattern` (shell wildcards) chooses one GGUF file instead. Returns the directory, or the
    GGUF file. Raises DownloadError.
    """
    from huggingface_hub import HfApi, snapshot_download

    with _explain_hub_errors(repo_id):
        info = HfApi().model_info(repo_id, files_metadata=True, timeout=_HUB_TIMEOUT_S)
    names = _choose_hub_files(repo_id, [file.rfilename for file in info.siblings or ()], file_pattern)
    on_message(_describe_hub_files(info, names))
    with _explain_hub_errors(repo_id):
        directory = snapshot_download(repo_id, allow_patterns=[glob.escape(name) for name in names])
    is_gguf = len(names) == 1 and names[0].endswith(".gguf")
    return Path(directory, names[0]) if is_gguf else Path(directory)


def _choose_hub_files(repo_id: str, names: Sequence[str], file_pattern: str | None) -> list[str]:
    """The files to fetch, out of all the repository's `names`."""
    if file_pattern is not None:
        return _choose_gguf(repo_id, fnmatch.filter(names, file_pattern), f"match {file_pattern!r}")
    top_level = [name for name in names if "/" not in name]
    # Mistral publishes the same weights a second time as consolidated*.safetensors.
    weights = [
        name for name in top_level if fnmatch.fnmatch(name, "*.safetensors*") and not name.startswith("consolidated")
    ]
    if weights and "config.json" in top_level:
        extras = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json")
        return weights + _match_any(top_level, (*extras, "added_tokens.json", "chat_template*"))
    if "params.json" in top_level and fnmatch.filter(top_level, "*.pth"):
        return _match_any(top_level, ("params.json", "tokenizer*", "*.pth"))
    return _choose_gguf(repo_id, fnmatch.filter(names, "*.gguf"), "are GGUF")


def _match_any(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def _choose_gguf(repo_id: str, names: Sequence[str], condition: str) -> list[str]:
    whole = [name for name in names if name.endswith(".gguf") and not _SPLIT_GGUF.search(name)]
    if len(whole) == 1:
        return whole
    if whole:
        choice = ", ".join(sorted(whole))
        raise DownloadError(f"{len(whole)} files of {repo_id} {condition}; choose one with --file PATTERN: {choice}")
    if any(_SPLIT_GGUF.search(name) for name in names):
        raise DownloadError(
            f"the GGUF of {repo_id} is split into parts, which are not read; choose another with --file "
            "PATTERN or merge the parts with llama.cpp's gguf-split"
        )
    raise DownloadError(
        f"no files of {repo_id} {condition} or are weights that can be opened (safetensors with a "
        "config.json, Meta's .pth with a params.json, or one GGUF); choose a repository that has them"
    )


def _describe_hub_files(info: ModelInfo, names: Sequence[str]) -> str:
    wanted = set(names)
    size_bytes = sum(file.size or 0 for file in info.siblings or () if file.rfilename in wanted)
    tags = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
    licence = ", ".join(tags) or "not stated"
    count = f"{len(names)} file{'s' if len(names) > 1 else ''}"
    return f"fetching {count} of {info.id}, {size_bytes / 1e6:,.0f} MB (licence: {licence})"


@contextlib.contextmanager
def _explain_hub_errors(repo_id: str) -> Iterator[None]:
    """Turn what the hub's client raises into one sentence with the fix."""
    from huggingface_hub import errors

    # The client's HTTP library changed twice; the base of its own error is that library's root.
    # Its transfer library (hf_xet) reports a lost connection as RuntimeError.
    lost_connection: tuple[type[Exception], ...] = (*errors.HfHubHTTPError.__bases__, OSError, RuntimeError)
    try:
        yield
    except errors.HFValidationError as error:
        raise DownloadError(f"{repo_id!r} is not a hub repo id; write it as owner/name") from error
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{repo_id} is gated; accept its licence on its hub page, then set HF_TOKEN to an access token "
            "of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"{repo_id} is not on the hub, or it is private; check the spelling, or set HF_TOKEN to an "
            "access token that may read it"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise DownloadError(f"{repo_id} is not fetched while HF_HUB_OFFLINE is set; unset it") from error
    except lost_connection as error:
        raise DownloadError(_explain_hub_failure(repo_id, error)) from error


def _explain_hub_failure(repo_id: str, error: Exception) -> str:
    from huggingface_hub import constants

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"the hub refuses {repo_id} (HTTP {status}); set HF_TOKEN to an access token that may read it"
    if status is not None:
        return f"the hub answered HTTP {status} for {repo_id}; try again later, what has arrived is kept"
    if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
        return (
            f"{repo_id} cannot be kept in {constants.HF_HUB_CACHE} ({error.strerror}); make room there and "
            "make it writable, or set HF_HOME to another directory"
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"{repo_id} could not be fetched ({reason}); check the network and run the same command again, "
        "which resumes, or pass --checkpoint PATH of a model on this disk"
    )
