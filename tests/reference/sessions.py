"""A tiny model with a tokenizer and a chat template, and the product run on it: as a library and as a program."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfast.cache import CACHE_VARIABLE, get_cache_dir
from gptfast.config import ModelConfig
from gptfast.generation import GenerationResult, Prompt, generate
from gptfast.session import Session, load
from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, random_weights
from tests.reference.tokenizers import train_byte_level, write_tokenizer

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
"""Of processes: the package is importable from any directory, and output is buffered, as users have it."""
PROMPT = "Once upon a time, there was a little"
CONTEXT = 2304
"""Tokens: more than a cache holds before it has to grow."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tiny_config(context: int = CONTEXT) -> ModelConfig:
    """Two layers, grouped heads, as many ids as the tokenizer has."""
    vocab_size = train_byte_level().get_vocab_size()
    return replace(FAMILIES["llama-8-2"], n_layers=2, vocab_size=vocab_size, max_seq_len=context)


def write_tiny_model(
    directory: Path,
    *,
    context: int = CONTEXT,
    template: str | None = CHATML,
    eos_ids: Sequence[int] = (),
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """A Hugging Face directory whose model writes varied bytes, broken UTF-8 among them, and has no BOS.

    Without `eos_ids` its texts are as long as asked for.
    """
    ends = {"eos_token_id": list(eos_ids) or None}
    # The weights are those of the default context, so that texts do not depend on it.
    weights = random_weights(tiny_config())
    write_hf(directory, weights, tiny_config(context), overrides=ends, generation=generation)
    settings = {"eos_token": "<|im_end|>"} | ({} if template is None else {"chat_template": template})
    return write_tokenizer(directory, train_byte_level(), **settings)


@contextlib.contextmanager
def tiny_environment(factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Within, the cache is a directory of this test run: what one module compiled, the others load.

    One thread, as tiny products are slower on several, and much slower where the cores are busy.
    """
    cache = factory.getbasetemp() / "gptfast-cache"
    share_kernels(cache)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(cache))
        torch.set_num_threads(1)
        yield cache
    torch.set_num_threads(threads)


def share_kernels(cache: Path) -> None:
    """Let a cache of this test run hold the CPU kernels of the user's, which take half a minute to compile."""
    link, kernels = cache / "kernels", get_cache_dir() / "kernels"
    if not link.exists():
        kernels.mkdir(parents=True, exist_ok=True)
        cache.mkdir(parents=True, exist_ok=True)
        link.symlink_to(kernels, target_is_directory=True)


def load_tiny(directory: Path, **settings: Any) -> Session:
    """A session in float32, in which compiled and eager steps agree on every token."""
    return load(directory, **({"dtype": "float32"} | settings))


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids without control tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny_config().vocab_size - 1, (length,), generator=generator).tolist()


def complete(session: Session, prompt: Prompt, max_new_tokens: int, **settings: Any) -> GenerationResult:
    """The first text of `generate`."""
    return generate(session, prompt, max_new_tokens=max_new_tokens, **settings)[0]


def ids_of(session: Session, prompt: Prompt, max_new_tokens: int, **settings: Any) -> tuple[int, ...]:
    """Its tokens."""
    return complete(session, prompt, max_new_tokens, **settings).token_ids


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The object in the last line of standard output."""
        fields: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return fields

    def assert_refused(self, *words: str) -> None:
        """It ended with code 2, nothing on standard output and one line of error, the last, that says these words."""
        assert self.exit_code == 2, self
        assert self.stdout == ""
        *before, last = self.stderr.splitlines()
        assert last.startswith("error: ")
        assert not any("error" in line or "Traceback" in line for line in before), self.stderr
        for word in words:
            assert word in last


class CommandLine:
    """Runs commands in this process the way the installed script does."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._patch = patch
        self._capture = capture

    def __call__(self, *arguments: str | int | Path, stdin: str | bytes = "") -> Outcome:
        """Run `gptfast ARGUMENTS` and read what it printed."""
        from gptfast.cli.main import run

        data = stdin.encode() if isinstance(stdin, str) else stdin
        self._capture.readouterr()
        with self._patch.context() as patch, restored_logger("gptfast"):
            patch.setattr(sys, "argv", ["gptfast", *map(str, arguments)])
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
            with pytest.raises(SystemExit) as ended:
                run()
        captured = self._capture.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else int(code is not None), captured.out, captured.err)


@contextlib.contextmanager
def restored_logger(name: str) -> Iterator[None]:
    """Take back what a command line does to the logger of its own process."""
    logger = logging.getLogger(name)
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def start_process(*arguments: str | int | Path, cwd: str | Path = ROOT, **environment: str) -> subprocess.Popen[str]:
    """Start `python ARGUMENTS` with all three streams piped; see `ENVIRONMENT`."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | ENVIRONMENT | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def run_process(*arguments: str | int | Path, stdin: str = "", cwd: str | Path = ROOT, **environment: str) -> Outcome:
    """Run `python ARGUMENTS` to its end."""
    with start_process(*arguments, cwd=cwd, **environment) as process:
        stdout, stderr = process.communicate(stdin, timeout=300)
    return Outcome(process.returncode, stdout, stderr)
