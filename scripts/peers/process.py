"""A peer in a process of its own, so that no peer's threads, or versions of packages, meet another's."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from peers.protocol import LoadRequest, PeerFacts, Run

SCRIPTS = Path(__file__).parents[1]
LAST_WORDS_BYTES = 4096
GOODBYE_S = 3


class PeerMissingError(Exception):
    """The interpreter lacks the peer's package."""


class PeerFailedError(Exception):
    """The peer's process ended, or said something else than an answer."""


@dataclass(frozen=True)
class PeerKind:
    """A contestant: the command line of its worker and what installs it."""

    worker: tuple[str, ...]
    install: str


KINDS = {
    "gptfast": PeerKind(("gptfast_worker",), "pip install -e ."),
    "llama.cpp": PeerKind(("llama_cpp_worker",), "pip install llama-cpp-python"),
    "transformers": PeerKind(("transformers_worker",), "pip install transformers accelerate"),
    "transformers-compiled": PeerKind(("transformers_worker", "compiled"), "pip install transformers accelerate"),
    "openvino": PeerKind(("openvino_worker",), "pip install openvino-genai"),
}


class PeerProcess:
    """A running worker; it sleeps in a read while it is not asked for anything."""

    def __init__(self, kind: PeerKind, python: str) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        module, *arguments = kind.worker
        self._process = subprocess.Popen(
            [python, "-m", f"peers.{module}", *arguments],
            cwd=SCRIPTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            encoding="utf-8",
        )

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(GOODBYE_S)  # a worker that is not at work ends by itself, and tidies up
        except subprocess.TimeoutExpired:
            self._process.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()
        self._stderr.close()

    def load(self, request: LoadRequest) -> PeerFacts:
        """Load the checkpoint; raises PeerMissingError or PeerFailedError."""
        reply = self._ask(asdict(request))
        if "missing" in reply:
            raise PeerMissingError
        return PeerFacts(**reply)

    def generate(self, prompt_ids: Sequence[int], new_tokens: int) -> Run:
        """One run; raises PeerFailedError."""
        return Run(**self._ask({"prompt_ids": list(prompt_ids), "new_tokens": new_tokens}))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFailedError(self._describe_end())
        try:
            reply: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError as error:
            raise PeerFailedError(f"it answered {line.strip()!r}, which is not JSON") from error
        return reply

    def _describe_end(self) -> str:
        """How the process ended, and the last line that it left on standard error."""
        code = self._process.wait()
        end = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        self._stderr.seek(max(0, self._stderr.seek(0, 2) - LAST_WORDS_BYTES))
        lines = self._stderr.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return f"{words[-1]} ({end})" if words else end
