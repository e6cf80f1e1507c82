"""How a peer is asked for runs: JSON lines over the standard streams of a process of its own.

Only the standard library is imported here, as a peer's environment may hold nothing else of ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Protocol


@dataclass(frozen=True)
class LoadRequest:
    """What a peer has to load.

    Attributes:
        checkpoint: the absolute path of a GGUF file.
        threads: that every step runs on.
        context: tokens that the longest run takes, prompt and new ones together.
        dtype: of weights and activations, where the peer leaves a choice; None for its own.
        weights, activations: as `gptfast.load` takes them; the others decode from what is theirs.
    """

    checkpoint: str
    threads: int
    context: int
    dtype: str | None
    weights: str
    activations: str | None


@dataclass(frozen=True)
class PeerFacts:
    """What was loaded: the peer's version, its settings in words, and the dtype where there was a choice."""

    version: str
    settings: str
    dtype: str | None = None


@dataclass(frozen=True)
class Run:
    """One greedy text, and what it took.

    Attributes:
        token_ids: the new tokens; none of them ends the text.
        prefill_s: seconds from the prompt to the choice of the first token.
        decode_s: seconds from there to the choice of the last one, detokenization left out.
        own_prefill_s, own_decode_s: the same by the peer's own clock, if it has one.
    """

    token_ids: list[int]
    prefill_s: float
    decode_s: float
    own_prefill_s: float | None = None
    own_decode_s: float | None = None


class Peer(Protocol):
    """A model loaded by one of the contestants."""

    facts: PeerFacts

    def generate(self, prompt_ids: Sequence[int], new_tokens: int) -> Run:
        """Read the prompt into an empty cache and extend it greedily by so many tokens."""


def serve(package: str, load: Callable[[LoadRequest], Peer]) -> None:
    """Load once, then answer one request for a run after the other until the other side hangs up.

    If `package` is not installed, the answer says so. Any other error ends the process, whose last words on
    standard error are then the reason.
    """
    requests, replies = _take_standard_streams()
    try:
        peer = load(LoadRequest(**json.loads(requests.readline())))
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        _write_line(replies, {"missing": package})
        return
    _write_line(replies, asdict(peer.facts))
    for line in requests:
        request = json.loads(line)
        _write_line(replies, asdict(peer.generate(request["prompt_ids"], request["new_tokens"])))


def _take_standard_streams() -> tuple[IO[str], IO[str]]:
    """Private copies of standard input and output; what a library prints goes to standard error from now on."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def _write_line(stream: IO[str], reply: dict[str, Any]) -> None:
    print(json.dumps(reply), file=stream, flush=True)
