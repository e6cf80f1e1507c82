from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, random_weights


@pytest.fixture(autouse=True)
def _restore_torch_defaults() -> Iterator[None]:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


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
