from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# Triton reads this when it is imported: its kernels then run on CPU tensors.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from acceptance.findings import Findings

from gptfast.kernels import ops
from gptfast.session import Session
from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, random_weights
from tests.reference.sessions import load_tiny, tiny_environment, write_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is no GPU, leave out what needs one, all for the same reason."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="torch finds no NVIDIA GPU here"))


@pytest.fixture(scope="session", autouse=True)
def _cpu_kernels() -> None:
    """Have them compiled before a test moves the cache."""
    ops.has_cpu_kernels()


@pytest.fixture(autouse=True)
def _restore_torch_defaults() -> Iterator[None]:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler, where weights are expanded to the run's dtype."""
    monkeypatch.setattr(ops, "has_cpu_kernels", lambda: False)


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    """What a section of scripts/gpu_acceptance.py adds to."""
    return Findings(tmp_path / "section.json", limit_s=1000)


@pytest.fixture(scope="session")
def family_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a family in `FAMILIES`, written once per session."""
    written: dict[str, Path] = {}

    def write(family: str) -> Path:
        if family not in written:
            config = FAMILIES[family]
            directory = tmp_path_factory.mktemp("hf") / family
            written[family] = write_hf(directory, random_weights(config), config)
        return written[family]

    return write


@pytest.fixture(scope="module")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this test run alone; see `tiny_environment`."""
    with tiny_environment(tmp_path_factory):
        yield


@pytest.fixture(scope="module")
def directory(tiny_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def eager(directory: Path) -> Session:
    return load_tiny(directory)


@pytest.fixture(scope="module")
def compiled(directory: Path) -> Session:
    session = load_tiny(directory, compile=True)
    session.runner.warm_up()
    return session


@pytest.fixture(scope="module", params=["eager", "compiled"])
def session(request: pytest.FixtureRequest) -> Session:
    chosen: Session = request.getfixturevalue(request.param)
    return chosen
