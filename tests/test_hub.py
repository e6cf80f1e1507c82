from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from gptfast.download import DownloadError
from gptfast.hub import download_from_hub

HF_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class FakeHub:
    """Stands for the hub's client: lists `files`, records what a download allows."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: tuple[str, ...] = ()
        self.info_error: Exception | None = None
        self.download_error: Exception | None = None
        self.allowed: list[str] = []

    def model_info(self, api: Any, repo_id: str, **options: Any) -> Any:
        if self.info_error is not None:
            raise self.info_error
        siblings = [SimpleNamespace(rfilename=name, size=1_500_000) for name in self.files]
        return SimpleNamespace(id=repo_id, siblings=siblings, tags=["text-generation", "license:llama3.2"])

    def snapshot_download(self, repo_id: str, *, allow_patterns: list[str]) -> str:
        if self.download_error is not None:
            raise self.download_error
        self.allowed = list(huggingface_hub.utils.filter_repo_objects(self.files, allow_patterns=allow_patterns))
        return str(self.directory)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "model_info",
        lambda api, repo_id, **options: fake.model_info(api, repo_id, **options),
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def http_error(kind: Callable[..., Exception], status: int) -> Exception:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"{status} Client Error\nmore lines", response=response)


def test_safetensors_repository(hub: FakeHub, tmp_path: Path) -> None:
    weights = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    wanted = {*HF_FILES, *weights, "model.safetensors.index.json", "chat_template.jinja", "tokenizer.model"}
    unwanted = {
        "README.md",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "params.json",
        "original/consolidated.00.pth",
        "original/tokenizer.model",
        "onnx/model.onnx",
        "model-q4.gguf",
    }
    hub.files = (*sorted(wanted), *unwanted)
    messages: list[str] = []
    assert download_from_hub("owner/name", on_message=messages.append) == tmp_path
    assert set(hub.allowed) == wanted
    assert messages == [f"fetching {len(wanted)} files of owner/name, 14 MB (licence: llama3.2)"]


def test_meta_repository(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = ("params.json", "consolidated.00.pth", "consolidated.01.pth", "tokenizer.model", "LICENSE")
    assert download_from_hub("owner/name") == tmp_path
    assert set(hub.allowed) == set(hub.files) - {"LICENSE"}


def test_only_gguf_file_needs_no_pattern(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = ("README.md", "config.json", "model.gguf")
    assert download_from_hub("owner/name") == tmp_path / "model.gguf"
    assert hub.allowed == ["model.gguf"]


def test_pattern_chooses_one_gguf_file(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = (
        *HF_FILES,
        "model.safetensors",
        "q[4]/m-Q4_0.gguf",
        "q4/m-Q4_0-00001-of-00002.gguf",
        "m-Q8_0.gguf",
    )
    assert download_from_hub("owner/name", "*Q4_0*") == tmp_path / "q[4]/m-Q4_0.gguf"
    assert hub.allowed == ["q[4]/m-Q4_0.gguf"]


def test_several_gguf_files_are_listed(hub: FakeHub) -> None:
    hub.files = ("m-Q4_0.gguf", "m-Q8_0.gguf")
    with pytest.raises(DownloadError, match=r"2 files of owner/name .*--file PATTERN: m-Q4_0.gguf, m-Q8_0.gguf"):
        download_from_hub("owner/name")
    with pytest.raises(DownloadError, match=r"match 'm-\*'"):
        download_from_hub("owner/name", "m-*")


def test_split_gguf_is_refused(hub: FakeHub) -> None:
    hub.files = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    with pytest.raises(DownloadError, match=r"owner/name is split into parts.*gguf-split"):
        download_from_hub("owner/name")


@pytest.mark.parametrize(
    "files",
    [
        ("config.json", "pytorch_model.bin"),
        ("adapter_config.json", "adapter_model.safetensors"),
        ("params.json", "consolidated.safetensors"),
        (),
    ],
)
def test_repository_without_readable_weights(hub: FakeHub, files: tuple[str, ...]) -> None:
    hub.files = files
    with pytest.raises(DownloadError, match=r"owner/name .*safetensors with a config.json"):
        download_from_hub("owner/name")


def test_pattern_that_matches_nothing(hub: FakeHub) -> None:
    hub.files = ("m-Q4_0.gguf",)
    with pytest.raises(DownloadError, match=r"owner/name match '\*Q5\*'"):
        download_from_hub("owner/name", "*Q5*")


def offline_error() -> Exception:
    transport = errors.HfHubHTTPError.__bases__[0]
    error = transport("[Errno -2] Name or service not known")
    assert isinstance(error, Exception)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.GatedRepoError, 403), r"owner/name is gated; accept its licence .*HF_TOKEN"),
        (
            http_error(errors.RepositoryNotFoundError, 404),
            r"owner/name is not on the hub.*spelling.*HF_TOKEN",
        ),
        (http_error(errors.HfHubHTTPError, 401), r"refuses owner/name \(HTTP 401\); set HF_TOKEN"),
        (http_error(errors.HfHubHTTPError, 503), r"HTTP 503 for owner/name; try again later"),
        (errors.OfflineModeIsEnabled("offline"), r"owner/name .*HF_HUB_OFFLINE.*unset"),
        (offline_error(), r"owner/name .*Name or service not known.*same command again.*--checkpoint PATH"),
        (errors.LocalEntryNotFoundError("cut off.\nmore"), r"owner/name could not be fetched \(cut off\)"),
        (RuntimeError("Data processing error"), r"owner/name .*Data processing error.*resumes"),
        (TimeoutError(), r"owner/name could not be fetched \(TimeoutError\)"),
        (OSError(errno.ENOSPC, "No space left on device"), r"owner/name .*No space left on device.*HF_HOME"),
        (PermissionError(errno.EACCES, "Permission denied"), r"owner/name .*Permission denied.*HF_HOME"),
    ],
)
def test_failures_are_one_sentence_with_the_fix(hub: FakeHub, error: Exception, message: str) -> None:
    hub.files = (*HF_FILES, "model.safetensors")
    for attribute in ("info_error", "download_error"):
        hub.info_error = hub.download_error = None
        setattr(hub, attribute, error)
        with pytest.raises(DownloadError, match=message) as caught:
            download_from_hub("owner/name")
        assert "\n" not in str(caught.value)


def test_name_that_is_no_repository_id() -> None:
    with pytest.raises(DownloadError, match=r"'not a//repo' is not a hub repo id; write it as owner/name"):
        download_from_hub("not a//repo")


def test_a_programming_error_is_not_hidden(hub: FakeHub) -> None:
    hub.info_error = TypeError("ours")
    with pytest.raises(TypeError, match="ours"):
        download_from_hub("owner/name")
