from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from gptfast import download, hub
from gptfast.cli.download import command
from gptfast.download import DownloadError, OnMessage


def test_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(on_message: OnMessage) -> Path:
        on_message("fetching toy.gguf (Apache-2.0)")
        return Path("/models/toy.gguf")

    monkeypatch.setattr(download, "get_default_model", fetch)
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 0
    assert result.stdout == "/models/toy.gguf\n"
    assert result.stderr == "fetching toy.gguf (Apache-2.0)\nrun it with: gptfast generate\n"


def test_hub_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(repo_id: str, file_pattern: str | None, on_message: OnMessage) -> Path:
        on_message(f"fetching {repo_id} {file_pattern}")
        return Path("/hub/a model")

    monkeypatch.setattr(hub, "download_from_hub", fetch)
    result = CliRunner().invoke(command, ["owner/name", "--file", "*Q4*"])
    assert result.exit_code == 0
    assert result.stdout == "/hub/a model\n"
    assert "fetching owner/name *Q4*\n" in result.stderr
    assert 'gptfast generate --checkpoint "/hub/a model"\n' in result.stderr


def test_file_without_a_repository_is_refused() -> None:
    result = CliRunner().invoke(command, ["--file", "*Q4*"])
    assert result.exit_code == 2
    assert "REPO_ID" in result.stderr


def test_failure_prints_nothing_on_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(on_message: OnMessage) -> Path:
        raise DownloadError("no network")

    monkeypatch.setattr(download, "get_default_model", fail)
    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, DownloadError)
    assert result.stdout == ""
